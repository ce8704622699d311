!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>

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
// DECLINE: the normalised tensor without its weight is used as well.
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
