!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>

// RUN: drop_unit_dims
// CHECK: func.func private @body(%arg0: tensor<?x32xf32, #adaptc.dims<["T", "_"]>>, %arg1: tensor<32xf32>) -> tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
// CHECK-NEXT: "adaptc.reshape"(%arg0) {shape = [1, "T", 32]}
// CHECK: "adaptc.reshape"(%3) {shape = ["T", 32]}
// CHECK: call @body(%4, %0) : (tensor<?x32xf32
// CHECK-NEXT: "adaptc.reshape"(%5) {shape = [1, "T", 32]}
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func private @body(%x: !x1, %w: tensor<32xf32>) -> !x1 {
    %y = "adaptc.mul"(%x, %w) : (!x1, tensor<32xf32>) -> !x1
    return %y : !x1
  }
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %wide = "adaptc.reshape"(%x) {shape = [1, "T", 32]} : (!x) -> !x1
    %r = func.call @body(%wide, %w) : (!x1, tensor<32xf32>) -> !x1
    %y = "adaptc.reshape"(%r) {shape = ["T", 32]} : (!x1) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: drop_unit_dims
// DECLINE: tokens come first already, and a weight's own leading 1 is no token dimension.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<1x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func private @body(%x: !x, %w: tensor<1x32xf32>) -> !x {
    %y = "adaptc.mul"(%x, %w) : (!x, tensor<1x32xf32>) -> !x
    return %y : !x
  }
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<1x32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %y = func.call @body(%x, %w) : (!x, tensor<1x32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
