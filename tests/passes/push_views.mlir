!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>
!h = tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
!h1 = tensor<1x?x4x8xf32, #adaptc.dims<["_", "T", "_", "_"]>>
!ht = tensor<1x4x?x8xf32, #adaptc.dims<["_", "_", "T", "_"]>>
!hh = tensor<1x4x?x4xf32, #adaptc.dims<["_", "_", "T", "_"]>>
!m1 = tensor<1x4x?x1xf32, #adaptc.dims<["_", "_", "T", "_"]>>

// RUN: push_views
// Through arithmetic, reductions, slices and concatenations, with a weight that broadcasts: no transpose is left.
// CHECK-NOT: adaptc.transpose
// CHECK: "adaptc.reshape"(%2) {shape = ["T", 4, 8]}
// CHECK: "adaptc.reduce"(%3) {axes = [2], keepdims = true, kind = "mean"}
// CHECK: "adaptc.slice"(%5) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]}
// CHECK: "adaptc.concat"
// CHECK-SAME: axis = 2
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<8xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<8xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %a = "adaptc.reshape"(%x) {shape = [1, "T", 4, 8]} : (!x) -> !h1
    %b = "adaptc.transpose"(%a) {perm = [0, 2, 1, 3]} : (!h1) -> !ht
    %m = "adaptc.reduce"(%b) {axes = [3], keepdims = true, kind = "mean"} : (!ht) -> !m1
    %c = "adaptc.sub"(%b, %m) : (!ht, !m1) -> !ht
    %lo = "adaptc.slice"(%c) {limits = [1, 4, -1, 4], starts = [0, 0, 0, 0], strides = [1, 1, 1, 1]} : (!ht) -> !hh
    %hi = "adaptc.slice"(%c) {limits = [1, 4, -1, 8], starts = [0, 0, 0, 4], strides = [1, 1, 1, 1]} : (!ht) -> !hh
    %n = "adaptc.neg"(%hi) : (!hh) -> !hh
    %j = "adaptc.concat"(%n, %lo) {axis = 3 : i64} : (!hh, !hh) -> !ht
    %w1 = "adaptc.mul"(%j, %w) : (!ht, tensor<8xf32>) -> !ht
    %t = "adaptc.transpose"(%w1) {perm = [0, 2, 1, 3]} : (!ht) -> !h1
    %t3 = "adaptc.reshape"(%t) {shape = ["T", 4, 8]} : (!h1) -> !h
    %g = "adaptc.gather_rows"(%t3, %requests) : (!h, !ids) -> !h
    %y = "adaptc.reshape"(%g) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: push_views
// DECLINE: the operand that broadcasts over heads can't follow a reshape that merges heads and width.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<8xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<8xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %a = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %e = "adaptc.exp"(%a) : (!h) -> !h
    %m = "adaptc.mul"(%e, %w) : (!h, tensor<8xf32>) -> !h
    %y = "adaptc.reshape"(%m) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: push_views
// A norm lets a view pass that keeps the normalised axis.
// CHECK: "adaptc.rms_norm"(%2, %0) {eps = 1.000000e-05 : f64}
// CHECK-NOT: adaptc.reshape
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %wide = "adaptc.reshape"(%x) {shape = [1, "T", 32]} : (!x) -> !x1
    %n = "adaptc.rms_norm"(%wide, %w) {eps = 1.0e-05 : f64} : (!x1, tensor<32xf32>) -> !x1
    %y = "adaptc.reshape"(%n) {shape = ["T", 32]} : (!x1) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: push_views
// DECLINE: a view that splits the normalised axis doesn't pass the norm.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %n = "adaptc.rms_norm"(%x, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %h = "adaptc.reshape"(%n) {shape = ["T", 4, 8]} : (!x) -> !h
    %g = "adaptc.gather_rows"(%h, %requests) : (!h, !ids) -> !h
    %y = "adaptc.reshape"(%g) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
