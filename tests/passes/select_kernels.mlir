!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!one = tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
!e = tensor<8x32xf32, #adaptc.packed<{codes = "f32", group = [1, 0], min_sign = 1 : i64, minimum = [], scale = [], superblock = 0 : i64, zero = 0 : i64}>>

// RUN: select_kernels
// Every operator but those that alias their operand; scratch is the kernels'.
// CHECK: "adaptc.embedding"
// CHECK-SAME: args = ["operand:0", "operand:1", "result:0", "scratch:0"]
// CHECK-SAME: family = "embedding"
// CHECK: "adaptc.reshape"
// CHECK-SAME: kernels = [], scratch = []
// CHECK: "adaptc.exp"
// CHECK-SAME: scratch = [["f32", ["T", 3]]]
module attributes {adaptc.stage = "laid_out"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %r = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
    %e = "adaptc.exp"(%r) : (tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>) -> tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
    %y = "adaptc.reshape"(%e) {shape = ["T", 32]} : (tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: select_kernels
// LACKS: exp
// ERROR: backend 'fake' has no kernel for exp in module <root>
module attributes {adaptc.stage = "laid_out"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %y = "adaptc.exp"(%x) : (!x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: select_kernels
// ERROR: select_kernels requires 'stored', but weight 'emb' has no storage format
module attributes {adaptc.stage = "laid_out"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %y = "adaptc.exp"(%x) : (!x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
