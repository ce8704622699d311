!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!q8 = tensor<32x32xf32, #adaptc.packed<{codes = "i8", group = [1, 32], min_sign = 1 : i64, minimum = [], scale = ["f16"], superblock = 32 : i64, zero = 0 : i64}>>
!q4 = tensor<32x32xf32, #adaptc.packed<{codes = "u4", group = [1, 32], min_sign = 1 : i64, minimum = [], scale = ["f16"], superblock = 32 : i64, zero = 8 : i64}>>
!f32 = tensor<32x32xf32, #adaptc.packed<{codes = "f32", group = [1, 0], min_sign = 1 : i64, minimum = [], scale = [], superblock = 0 : i64, zero = 0 : i64}>>
!e = tensor<8x32xf32, #adaptc.packed<{codes = "f32", group = [1, 0], min_sign = 1 : i64, minimum = [], scale = [], superblock = 0 : i64, zero = 0 : i64}>>

// RUN: quantize_activations
// OPTIONS: activations="int8"
// TOLERANCE: 1.0
// One quantize for all that read x; the merged map is parted where its weights are floats.
// COUNT 1: "adaptc.quantize"
// CHECK: "adaptc.quantize"(%4) {group = 32 : i64}
// CHECK: "adaptc.linears"(%5#0, %5#1, %5#2, %0, %1)
// CHECK: "adaptc.linear"(%4, %2)
// CHECK: "adaptc.gated_linear"(%5#0, %5#1, %5#2, %0, %1)
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {stored = "f32", sym_name = "a", tensor = "a", type = !q8} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "b", tensor = "b", type = !q4} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "c", tensor = "c", type = !f32} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %a = "adaptc.get"() {symbol = "a"} : () -> !q8
    %b = "adaptc.get"() {symbol = "b"} : () -> !q4
    %c = "adaptc.get"() {symbol = "c"} : () -> !f32
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %r:3 = "adaptc.linears"(%x, %a, %c, %b) : (!x, !q8, !f32, !q4) -> (!x, !x, !x)
    %g = "adaptc.gated_linear"(%x, %a, %b) {act = "silu"} : (!x, !q8, !q4) -> !x
    %s = "adaptc.add"(%r#0, %r#1) : (!x, !x) -> !x
    %t = "adaptc.add"(%s, %r#2) : (!x, !x) -> !x
    %y = "adaptc.add"(%t, %g) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: quantize_activations
// OPTIONS: activations="int8"
// DECLINE: gate and up of different kinds stay in float arithmetic, and so do float weights.
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {stored = "f32", sym_name = "a", tensor = "a", type = !q8} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "c", tensor = "c", type = !f32} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %a = "adaptc.get"() {symbol = "a"} : () -> !q8
    %c = "adaptc.get"() {symbol = "c"} : () -> !f32
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %l = "adaptc.linear"(%x, %c) : (!x, !f32) -> !x
    %y = "adaptc.gated_linear"(%l, %a, %c) {act = "silu"} : (!x, !q8, !f32) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: quantize_activations
// DECLINE: float activations are the default.
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {stored = "f32", sym_name = "a", tensor = "a", type = !q8} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %a = "adaptc.get"() {symbol = "a"} : () -> !q8
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %y = "adaptc.linear"(%x, %a) : (!x, !q8) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: quantize_activations
// OPTIONS: activations="int8"
// TOLERANCE: 1.0
// Biases stay with their weights when maps are parted, and the report hears of it.
// CHECK: adaptc.format_notes = ["the merged maps of module <root> in @step are parted: their weights are stored as q8_0, f32
// CHECK: "adaptc.linear"(%6#0, %6#1, %6#2, %0, %1)
// CHECK: "adaptc.linear"(%5, %2, %3)
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {stored = "f32", sym_name = "a", tensor = "a", type = !q8} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "n", tensor = "n", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "c", tensor = "c", type = !f32} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "m", tensor = "m", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %a = "adaptc.get"() {symbol = "a"} : () -> !q8
    %n = "adaptc.get"() {symbol = "n"} : () -> tensor<32xf32>
    %c = "adaptc.get"() {symbol = "c"} : () -> !f32
    %m = "adaptc.get"() {symbol = "m"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %r:2 = "adaptc.linears"(%x, %a, %n, %c, %m) : (!x, !q8, tensor<32xf32>, !f32, tensor<32xf32>) -> (!x, !x)
    %y = "adaptc.add"(%r#0, %r#1) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
