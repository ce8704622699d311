!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!n = tensor<?x8xf32, #adaptc.dims<["T", "_"]>>

// RUN: store_weights
// Each as its file has it; the body that gets another format is a clone, and the module says so.
// CHECK: adaptc.clones = ["@body_2 is a copy of @body for 1 call (layers.1): argument 1 is q8_0 instead of q4_0."]
// CHECK: sym_name = "w0"
// CHECK-SAME: codes = "u4"
// CHECK: sym_name = "n", tensor = "n", type = tensor<32xf32>}
// CHECK: sym_name = "emb"
// CHECK-SAME: codes = "f16"
// CHECK: func.func private @body(
// CHECK-SAME: codes = "u4"
// CHECK: func.func private @body_2(
// CHECK-SAME: codes = "i8"
// CHECK: call @body(
// CHECK: call @body_2(
// CHECK: call @body(
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {stored = "q4_0", sym_name = "w0", tensor = "w0", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "q8_0", sym_name = "w1", tensor = "w1", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "q4_0", sym_name = "w2", tensor = "w2", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "n", tensor = "n", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f16", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func private @body(%x: !x, %w: tensor<32x32xf32>, %n: tensor<32xf32>) -> !x {
    %h = "adaptc.rms_norm"(%x, %n) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %y = "adaptc.linear"(%h, %w) : (!x, tensor<32x32xf32>) -> !x
    return %y : !x
  }
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w0 = "adaptc.get"() {symbol = "w0"} : () -> tensor<32x32xf32>
    %w1 = "adaptc.get"() {symbol = "w1"} : () -> tensor<32x32xf32>
    %w2 = "adaptc.get"() {symbol = "w2"} : () -> tensor<32x32xf32>
    %n = "adaptc.get"() {symbol = "n"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %a = func.call @body(%x, %w0, %n) {source = "layers.0"} : (!x, tensor<32x32xf32>, tensor<32xf32>) -> !x
    %b = func.call @body(%a, %w1, %n) {source = "layers.1"} : (!x, tensor<32x32xf32>, tensor<32xf32>) -> !x
    %y = func.call @body(%b, %w2, %n) {source = "layers.2"} : (!x, tensor<32x32xf32>, tensor<32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: store_weights
// OPTIONS: weights="int4"
// What can't be cut into groups stays float, with the reason.
// CHECK: adaptc.format_notes = ["weight 'narrow' is stored as f32: its 8 columns don't divide into blocks of 32, as q4_1 needs."]
// CHECK: sym_name = "w"
// CHECK-SAME: codes = "u4"
// CHECK: sym_name = "narrow"
// CHECK-SAME: codes = "f32"
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<8x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "narrow", tensor = "narrow", type = tensor<32x8xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<8x32xf32>
    %narrow = "adaptc.get"() {symbol = "narrow"} : () -> tensor<32x8xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %a = "adaptc.linear"(%x, %w) : (!x, tensor<8x32xf32>) -> !n
    %y = "adaptc.linear"(%a, %narrow) : (!n, tensor<32x8xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: store_weights
// What the file keeps transposed in groups can't stay so: a group would run down a column.
// CHECK: adaptc.format_notes = ["weight 'w' is stored as f32: its columns are the file's rows, along which the groups of q8_0 lie."]
// CHECK: sym_name = "w", tensor = "w"
// CHECK-SAME: codes = "f32"
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {rows = ["transpose", 0], stored = "q8_0", sym_name = "w", tensor = "w", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32x32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %y = "adaptc.linear"(%x, %w) : (!x, tensor<32x32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: store_weights
// OPTIONS: weights="int3"
// ERROR: unknown weight format 'int3'; valid values are: auto, f32, bf16, int8, int4
module attributes {adaptc.stage = "sharded"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %y = "adaptc.exp"(%x) : (!x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
