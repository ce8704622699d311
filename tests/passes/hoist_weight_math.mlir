!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>

// RUN: hoist_weight_math
// The file's - 1 and the model's + 1 meet in @step and cancel; a weight without - 1 keeps the sum, out of the body.
// CHECK: func.func private @body
// CHECK-NEXT: "adaptc.mul"(%arg0, %arg2)
// CHECK: func.func @step
// CHECK: call @body(%3, %5, %0)
// CHECK: %8 = "adaptc.add"(%1, %7)
// CHECK: call @body(%6, %1, %8)
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "v", tensor = "v", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "u", tensor = "u", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func private @body(%x: !x, %w: tensor<32xf32>) -> !x {
    %one = "adaptc.constant"() {dtype = "f32", shape = [], value = 1.0 : f64} : () -> tensor<f32>
    %w1 = "adaptc.add"(%w, %one) : (tensor<32xf32>, tensor<f32>) -> tensor<32xf32>
    %y = "adaptc.mul"(%x, %w1) : (!x, tensor<32xf32>) -> !x
    return %y : !x
  }
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %v = "adaptc.get"() {symbol = "v"} : () -> tensor<32xf32>
    %u = "adaptc.get"() {symbol = "u"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %m = "adaptc.constant"() {dtype = "f32", shape = [], value = -1.0 : f64} : () -> tensor<f32>
    %v1 = "adaptc.add"(%v, %m) : (tensor<32xf32>, tensor<f32>) -> tensor<32xf32>
    %a = func.call @body(%x, %v1) : (!x, tensor<32xf32>) -> !x
    %y = func.call @body(%a, %u) : (!x, tensor<32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: hoist_weight_math
// DECLINE: (x - 1) + 1 on activations would change rounding.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %m = "adaptc.constant"() {dtype = "f32", shape = [], value = -1.0 : f64} : () -> tensor<f32>
    %o = "adaptc.constant"() {dtype = "f32", shape = [], value = 1.0 : f64} : () -> tensor<f32>
    %a = "adaptc.add"(%x, %m) : (!x, tensor<f32>) -> !x
    %y = "adaptc.add"(%a, %o) : (!x, tensor<f32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
