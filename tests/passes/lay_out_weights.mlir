!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!q8 = tensor<32x32xf32, #adaptc.packed<{codes = "i8", group = [1, 32], min_sign = 1 : i64, minimum = [], scale = ["f16"], superblock = 32 : i64, zero = 0 : i64}>>
!q4 = tensor<32x32xf32, #adaptc.packed<{codes = "u4", group = [1, 32], min_sign = 1 : i64, minimum = [], scale = ["f16"], superblock = 32 : i64, zero = 8 : i64}>>
!f32 = tensor<32x32xf32, #adaptc.packed<{codes = "f32", group = [1, 0], min_sign = 1 : i64, minimum = [], scale = [], superblock = 0 : i64, zero = 0 : i64}>>
!e = tensor<8x32xf32, #adaptc.packed<{codes = "f32", group = [1, 0], min_sign = 1 : i64, minimum = [], scale = [], superblock = 0 : i64, zero = 0 : i64}>>

// RUN: lay_out_weights
// OPTIONS: tile="cpu"
// CHECK: sym_name = "a"
// CHECK-SAME: tile = "cpu"
// CHECK: sym_name = "n", tensor = "n", type = tensor<32xf32>}
// CHECK: "adaptc.linear"
// CHECK-SAME: tile = "cpu"
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {stored = "f32", sym_name = "a", tensor = "a", type = !q8} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "n", tensor = "n", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %a = "adaptc.get"() {symbol = "a"} : () -> !q8
    %n = "adaptc.get"() {symbol = "n"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %h = "adaptc.rms_norm"(%x, %n) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %y = "adaptc.linear"(%h, %a) : (!x, !q8) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: lay_out_weights
// OPTIONS: tile="cpu"
// ERROR: lay_out_weights requires 'stored', but weight 'emb' has no storage format
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %end = "adaptc.gather_rows"(%x, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
