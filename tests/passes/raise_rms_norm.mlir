!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>
!one = tensor<?x1xf32, #adaptc.dims<["T", "_"]>>

// RUN: raise_rms_norm
// CHECK: "adaptc.rms_norm"(%2, %0) {eps = 1.000000e-05 : f64}
// CHECK-NOT: adaptc.rsqrt
// CHECK-NOT: adaptc.reduce
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %epsn = "adaptc.constant"() {dtype = "f32", shape = [], value = 1.000000e-05 : f64} : () -> tensor<f32>
    %sqn = "adaptc.mul"(%x, %x) : (!x, !x) -> !x
    %meann = "adaptc.reduce"(%sqn) {axes = [1], keepdims = true, kind = "mean"} : (!x) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %ven = "adaptc.add"(%epsn, %meann) : (tensor<f32>, tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %rsn = "adaptc.rsqrt"(%ven) : (tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %xn = "adaptc.mul"(%rsn, %x) : (tensor<?x1xf32, #adaptc.dims<["T", "_"]>>, !x) -> !x
    %y = "adaptc.mul"(%w, %xn) : (tensor<32xf32>, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rms_norm
// DECLINE: the square is of another tensor than the one that is scaled.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %other = "adaptc.exp"(%x) : (!x) -> !x
    %epsn = "adaptc.constant"() {dtype = "f32", shape = [], value = 1.000000e-05 : f64} : () -> tensor<f32>
    %sqn = "adaptc.mul"(%other, %other) : (!x, !x) -> !x
    %meann = "adaptc.reduce"(%sqn) {axes = [1], keepdims = true, kind = "mean"} : (!x) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %ven = "adaptc.add"(%epsn, %meann) : (tensor<f32>, tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %rsn = "adaptc.rsqrt"(%ven) : (tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %xn = "adaptc.mul"(%rsn, %x) : (tensor<?x1xf32, #adaptc.dims<["T", "_"]>>, !x) -> !x
    %y = "adaptc.mul"(%w, %xn) : (tensor<32xf32>, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rms_norm
// The normalised tensor is used without its weight as well: a norm with ones.
// COUNT 1: "adaptc.rms_norm"
// CHECK: value = 1.0
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %epsn = "adaptc.constant"() {dtype = "f32", shape = [], value = 1.000000e-05 : f64} : () -> tensor<f32>
    %sqn = "adaptc.mul"(%x, %x) : (!x, !x) -> !x
    %meann = "adaptc.reduce"(%sqn) {axes = [1], keepdims = true, kind = "mean"} : (!x) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %ven = "adaptc.add"(%epsn, %meann) : (tensor<f32>, tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %rsn = "adaptc.rsqrt"(%ven) : (tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %xn = "adaptc.mul"(%rsn, %x) : (tensor<?x1xf32, #adaptc.dims<["T", "_"]>>, !x) -> !x
    %a = "adaptc.mul"(%w, %xn) : (tensor<32xf32>, !x) -> !x
    %y = "adaptc.add"(%a, %xn) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rms_norm
// Divided by the root, and nothing to scale by: a norm with ones.
// CHECK: "adaptc.constant"() {dtype = "f32", shape = [32], value = 1.0
// CHECK: "adaptc.rms_norm"
// CHECK-NOT: adaptc.reduce
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %epsy = "adaptc.constant"() {dtype = "f32", shape = [], value = 1.000000e-05 : f64} : () -> tensor<f32>
    %sqy = "adaptc.mul"(%x, %x) : (!x, !x) -> !x
    %meany = "adaptc.reduce"(%sqy) {axes = [1], keepdims = true, kind = "mean"} : (!x) -> !one
    %vey = "adaptc.add"(%meany, %epsy) : (!one, tensor<f32>) -> !one
    %rsy = "adaptc.sqrt"(%vey) : (!one) -> !one
    %y = "adaptc.div"(%x, %rsy) : (!x, !one) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rms_norm
// DECLINE: the root is divided by the tensor, not the tensor by the root.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %epsy = "adaptc.constant"() {dtype = "f32", shape = [], value = 1.000000e-05 : f64} : () -> tensor<f32>
    %sqy = "adaptc.mul"(%x, %x) : (!x, !x) -> !x
    %meany = "adaptc.reduce"(%sqy) {axes = [1], keepdims = true, kind = "mean"} : (!x) -> !one
    %vey = "adaptc.add"(%meany, %epsy) : (!one, tensor<f32>) -> !one
    %rsy = "adaptc.sqrt"(%vey) : (!one) -> !one
    %y = "adaptc.div"(%rsy, %x) : (!one, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
