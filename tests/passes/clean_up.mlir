!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>

// RUN: clean_up
// What has no effect goes, equal operators merge, constants fold.
// CHECK: "adaptc.mul"(%1, %1)
// CHECK-NEXT: "adaptc.exp"
// COUNT 1: "adaptc.exp"
// CHECK-NOT: adaptc.pow
// CHECK-NOT: adaptc.cast
// CHECK-NOT: adaptc.tanh
// CHECK-NOT: adaptc.reshape
// CHECK: value = 6.000000e+00
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %two = "adaptc.constant"() {dtype = "f32", shape = [], value = 2.0 : f64} : () -> tensor<f32>
    %three = "adaptc.constant"() {dtype = "f32", shape = [], value = 3.0 : f64} : () -> tensor<f32>
    %zero = "adaptc.constant"() {dtype = "f32", shape = [], value = 0.0 : f64} : () -> tensor<f32>
    %one = "adaptc.constant"() {dtype = "f32", shape = [], value = 1.0 : f64} : () -> tensor<f32>
    %p = "adaptc.pow"(%x, %two) : (!x, tensor<f32>) -> !x
    %p1 = "adaptc.add"(%p, %zero) : (!x, tensor<f32>) -> !x
    %p2 = "adaptc.mul"(%one, %p1) : (tensor<f32>, !x) -> !x
    %p3 = "adaptc.cast"(%p2) {dtype = "f32"} : (!x) -> !x
    %p4 = "adaptc.reshape"(%p3) {shape = [1, "T", 32]} : (!x) -> !x1
    %p5 = "adaptc.reshape"(%p4) {shape = ["T", 32]} : (!x1) -> !x
    %e1 = "adaptc.exp"(%p5) : (!x) -> !x
    %e2 = "adaptc.exp"(%p5) : (!x) -> !x
    %dead = "adaptc.tanh"(%x) : (!x) -> !x
    %s = "adaptc.add"(%e1, %e2) : (!x, !x) -> !x
    %six = "adaptc.mul"(%two, %three) : (tensor<f32>, tensor<f32>) -> tensor<f32>
    %y = "adaptc.mul"(%s, %six) : (!x, tensor<f32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: clean_up
// x·σ(x) is silu; a broadcast that an elementwise operator does by itself goes.
// CHECK: "adaptc.silu"
// CHECK: "adaptc.add"(%3, %0)
// CHECK-NOT: adaptc.broadcast
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %g = "adaptc.sigmoid"(%x) : (!x) -> !x
    %s = "adaptc.mul"(%g, %x) : (!x, !x) -> !x
    %wide = "adaptc.broadcast"(%w) {dims = [1], shape = [1, 32]} : (tensor<32xf32>) -> tensor<1x32xf32>
    %y = "adaptc.add"(%s, %wide) : (!x, tensor<1x32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: clean_up
// DECLINE: neither a multiplication by 1 that widens its operand nor x·σ(z) is an identity.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %ones = "adaptc.constant"() {dtype = "f32", shape = [1, 32], value = 1.0 : f64} : () -> tensor<1x32xf32>
    %m = "adaptc.reduce"(%x) {axes = [1], keepdims = true, kind = "mean"} : (!x) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %wide = "adaptc.mul"(%m, %ones) : (tensor<?x1xf32, #adaptc.dims<["T", "_"]>>, tensor<1x32xf32>) -> !x
    %g = "adaptc.sigmoid"(%wide) : (!x) -> !x
    %y = "adaptc.mul"(%x, %g) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: clean_up
// A concat doesn't need operands without elements; one that is left alone is what the concat was.
// CHECK-NOT: adaptc.concat
// CHECK-NOT: adaptc.slice
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.exp"(%x) : (!x) -> !x
    %none = "adaptc.slice"(%x) {limits = [-1, 32], starts = [0, 32], strides = [1, 1]} : (!x) -> tensor<?x0xf32, #adaptc.dims<["T", "_"]>>
    %y = "adaptc.concat"(%e, %none) {axis = 1 : i64} : (!x, tensor<?x0xf32, #adaptc.dims<["T", "_"]>>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
