!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>
!h = tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
!xt = tensor<32x?xf32, #adaptc.dims<["_", "T"]>>

// RUN: sink_sampled_rows
// The gather passes the projection, the norm and the addition, and stops at the embedding's ids.
// CHECK: "adaptc.gather_rows"(%arg0, %arg3)
// CHECK: "adaptc.embedding"
// CHECK: "adaptc.rms_norm"
// CHECK-SAME: #adaptc.dims<["S", "_"]>
// CHECK: "adaptc.linear"
// CHECK-SAME: #adaptc.dims<["S", "_"]>
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "wa", tensor = "wa", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %wa = "adaptc.get"() {symbol = "wa"} : () -> tensor<32x32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %s = "adaptc.add"(%x, %x) : (!x, !x) -> !x
    %n = "adaptc.rms_norm"(%s, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %y = "adaptc.linear"(%n, %wa) : (!x, tensor<32x32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: sink_sampled_rows
// A reshape's target shape is restated; a scalar needs no gather.
// CHECK: shape = ["S", 4, 8]
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %two = "adaptc.constant"() {dtype = "f32", shape = [], value = 2.0 : f64} : () -> tensor<f32>
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %h2 = "adaptc.mul"(%h, %two) : (!h, tensor<f32>) -> !h
    %y = "adaptc.reshape"(%h2) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: sink_sampled_rows
// DECLINE: tokens that aren't on axis 0.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %t = "adaptc.transpose"(%x) {perm = [1, 0]} : (!x) -> !xt
    %e = "adaptc.exp"(%t) : (!xt) -> !xt
    %y = "adaptc.transpose"(%e) {perm = [1, 0]} : (!xt) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
