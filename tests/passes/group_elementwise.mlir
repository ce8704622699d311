!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>

// RUN: group_elementwise
// One group for the chain, its scalar inside; the value with two readers inside is made once.
// COUNT 1: "adaptc.group"
// COUNT 1: "adaptc.exp"
// CHECK: "adaptc.group"(%2)
// CHECK: "adaptc.constant"
// CHECK: "adaptc.yield"
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %two = "adaptc.constant"() {dtype = "f32", shape = [], value = 2.0 : f64} : () -> tensor<f32>
    %e = "adaptc.exp"(%x) : (!x) -> !x
    %a = "adaptc.mul"(%e, %two) : (!x, tensor<f32>) -> !x
    %b = "adaptc.tanh"(%a) : (!x) -> !x
    %c = "adaptc.add"(%b, %e) : (!x, !x) -> !x
    %y = "adaptc.linear"(%c, %w) : (!x, tensor<32x32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: group_elementwise
// Siblings that read one tensor become one group with two results; a row statistic isn't redone for each column.
// CHECK: "adaptc.reciprocal"
// CHECK: :2 = "adaptc.group"
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %m = "adaptc.reduce"(%x) {axes = [1], keepdims = true, kind = "max"} : (!x) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %r = "adaptc.reciprocal"(%m) : (tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %c = "adaptc.cos"(%x) : (!x) -> !x
    %c1 = "adaptc.mul"(%c, %r) : (!x, tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> !x
    %s = "adaptc.sin"(%x) : (!x) -> !x
    %s1 = "adaptc.mul"(%s, %r) : (!x, tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> !x
    %l = "adaptc.linear"(%c1, %w) : (!x, tensor<32x32xf32>) -> !x
    %k = "adaptc.linear"(%s1, %w) : (!x, tensor<32x32xf32>) -> !x
    %y = "adaptc.add"(%l, %k) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: group_elementwise
// DECLINE: one operator is no group.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %y = "adaptc.exp"(%x) : (!x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
