!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>

// RUN: trim_signatures
// CHECK: func.func private @body(%arg0: tensor<?x32xf32, #adaptc.dims<["T", "_"]>>, %arg1: tensor<32xf32>) -> tensor<?x32xf32
// CHECK-NOT: adaptc.exp
// CHECK: call @body(%2, %0)
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func private @body(%x: !x, %w: tensor<32xf32>, %same: !x, %unused: !ids) -> (!x, !x1, !x, !x) {
    %wide = "adaptc.reshape"(%x) {shape = [1, "T", 32]} : (!x) -> !x1
    %y = "adaptc.mul"(%x, %w) : (!x, tensor<32xf32>) -> !x
    %z = "adaptc.add"(%y, %same) : (!x, !x) -> !x
    %e = "adaptc.exp"(%z) : (!x) -> !x
    return %z, %wide, %z, %e : !x, !x1, !x, !x
  }
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %r:4 = func.call @body(%x, %w, %x, %tokens) : (!x, tensor<32xf32>, !x, !ids) -> (!x, !x1, !x, !x)
    %back = "adaptc.reshape"(%r#1) {shape = ["T", 32]} : (!x1) -> !x
    %a = "adaptc.add"(%r#0, %r#2) : (!x, !x) -> !x
    %y = "adaptc.add"(%a, %back) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: trim_signatures
// DECLINE: two arguments are one value at one call, but not at the other.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func private @body(%a: !x, %b: !x) -> !x {
    %y = "adaptc.mul"(%a, %b) : (!x, !x) -> !x
    return %y : !x
  }
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %u = func.call @body(%x, %x) : (!x, !x) -> !x
    %y = func.call @body(%x, %u) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
