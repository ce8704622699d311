!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>

// RUN: fuse_add_norm
// CHECK: %4:2 = "adaptc.add_rms_norm"(%3, %2, %0) {eps
// CHECK: "adaptc.add"(
// CHECK-NOT: adaptc.rms_norm
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.exp"(%x) : (!x) -> !x
    %s = "adaptc.add"(%x, %e) : (!x, !x) -> !x
    %t = "adaptc.tanh"(%s) : (!x) -> !x
    %n = "adaptc.rms_norm"(%s, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %y = "adaptc.add"(%n, %t) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: fuse_add_norm
// DECLINE: the weight is computed after the sum was used.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.exp"(%x) : (!x) -> !x
    %s = "adaptc.add"(%x, %e) : (!x, !x) -> !x
    %t = "adaptc.tanh"(%s) : (!x) -> !x
    %w1 = "adaptc.exp"(%w) : (tensor<32xf32>) -> tensor<32xf32>
    %n = "adaptc.rms_norm"(%s, %w1) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %y = "adaptc.add"(%n, %t) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: fuse_add_norm
// A layer norm with a bias.
// CHECK: "adaptc.add_layer_norm"(%4, %3, %0, %1) {eps
// CHECK-NOT: "adaptc.layer_norm"
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "b", tensor = "b", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %b = "adaptc.get"() {symbol = "b"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.exp"(%x) : (!x) -> !x
    %s = "adaptc.add"(%x, %e) : (!x, !x) -> !x
    %n = "adaptc.layer_norm"(%s, %w, %b) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>, tensor<32xf32>) -> !x
    %y = "adaptc.add"(%n, %s) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: fuse_add_norm
// DECLINE: the bias is known only after the sum, and the sum is needed before it.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "b", tensor = "b", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %b = "adaptc.get"() {symbol = "b"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.exp"(%x) : (!x) -> !x
    %s = "adaptc.add"(%x, %e) : (!x, !x) -> !x
    %t = "adaptc.tanh"(%s) : (!x) -> !x
    %late = "adaptc.neg"(%b) : (tensor<32xf32>) -> tensor<32xf32>
    %n = "adaptc.layer_norm"(%s, %w, %late) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>, tensor<32xf32>) -> !x
    %y = "adaptc.add"(%n, %t) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
