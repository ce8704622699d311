!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!one = tensor<?x1xf32, #adaptc.dims<["T", "_"]>>

// RUN: raise_layer_norm
// With the bias that is added to it.
// CHECK: "adaptc.layer_norm"(%3, %0, %1) {eps
// CHECK-NOT: adaptc.rms_norm
// CHECK-NOT: adaptc.reduce
// CHECK-NOT: adaptc.add
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "b", tensor = "b", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %b = "adaptc.get"() {symbol = "b"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %m = "adaptc.reduce"(%x) {axes = [1], keepdims = true, kind = "mean"} : (!x) -> !one
    %c = "adaptc.sub"(%x, %m) : (!x, !one) -> !x
    %n = "adaptc.rms_norm"(%c, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %y = "adaptc.add"(%b, %n) : (tensor<32xf32>, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_layer_norm
// Without one; what is added to it is no bias.
// CHECK: "adaptc.layer_norm"(%2, %0) {eps
// CHECK: "adaptc.add"
// CHECK-NOT: adaptc.rms_norm
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %m = "adaptc.reduce"(%x) {axes = [1], keepdims = true, kind = "mean"} : (!x) -> !one
    %c = "adaptc.sub"(%x, %m) : (!x, !one) -> !x
    %n = "adaptc.rms_norm"(%c, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %y = "adaptc.add"(%x, %n) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_layer_norm
// DECLINE: another tensor's mean is taken off.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.tanh"(%x) : (!x) -> !x
    %m = "adaptc.reduce"(%e) {axes = [1], keepdims = true, kind = "mean"} : (!x) -> !one
    %c = "adaptc.sub"(%x, %m) : (!x, !one) -> !x
    %y = "adaptc.rms_norm"(%c, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_layer_norm
// DECLINE: what is taken off is no mean.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.tanh"(%x) : (!x) -> !x
    %c = "adaptc.sub"(%x, %e) : (!x, !x) -> !x
    %y = "adaptc.rms_norm"(%c, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_layer_norm
// DECLINE: the normalised tensor is used without the bias as well.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "b", tensor = "b", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %b = "adaptc.get"() {symbol = "b"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %n = "adaptc.layer_norm"(%x, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %a = "adaptc.add"(%n, %b) : (!x, tensor<32xf32>) -> !x
    %y = "adaptc.mul"(%a, %n) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
