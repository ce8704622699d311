!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>

// RUN: merge_linears
// Different widths merge, and different formats.
// CHECK: :3 = "adaptc.linears"
// CHECK-NOT: "adaptc.linear"(
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "wa", tensor = "wa", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "wb", tensor = "wb", type = tensor<32x32xf32, #adaptc.packed<{codes = "bf16", group = [1, 0], min_sign = 1 : i64, minimum = [], scale = [], superblock = 0 : i64, zero = 0 : i64}>>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "wc", tensor = "wc", type = tensor<1x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %wa = "adaptc.get"() {symbol = "wa"} : () -> tensor<32x32xf32>
    %wb = "adaptc.get"() {symbol = "wb"} : () -> tensor<32x32xf32, #adaptc.packed<{codes = "bf16", group = [1, 0], min_sign = 1 : i64, minimum = [], scale = [], superblock = 0 : i64, zero = 0 : i64}>>
    %wc = "adaptc.get"() {symbol = "wc"} : () -> tensor<1x32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %a = "adaptc.linear"(%x, %wa) : (!x, tensor<32x32xf32>) -> !x
    %b = "adaptc.linear"(%x, %wb) : (!x, tensor<32x32xf32, #adaptc.packed<{codes = "bf16", group = [1, 0], min_sign = 1 : i64, minimum = [], scale = [], superblock = 0 : i64, zero = 0 : i64}>>) -> !x
    %c = "adaptc.linear"(%x, %wc) : (!x, tensor<1x32xf32>) -> tensor<?x1xf32, #adaptc.dims<["T", "_"]>>
    %ab = "adaptc.mul"(%a, %b) : (!x, !x) -> !x
    %y = "adaptc.mul"(%ab, %c) : (!x, tensor<?x1xf32, #adaptc.dims<["T", "_"]>>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: merge_linears
// With biases or without; one has another input.
// CHECK: :2 = "adaptc.linears"(%4, %0, %1, %2)
// CHECK: "adaptc.linear"(%5, %0)
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "wa", tensor = "wa", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "wb", tensor = "wb", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "bias", tensor = "bias", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %wa = "adaptc.get"() {symbol = "wa"} : () -> tensor<32x32xf32>
    %wb = "adaptc.get"() {symbol = "wb"} : () -> tensor<32x32xf32>
    %bias = "adaptc.get"() {symbol = "bias"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.exp"(%x) : (!x) -> !x
    %a = "adaptc.linear"(%x, %wa) : (!x, tensor<32x32xf32>) -> !x
    %b = "adaptc.linear"(%x, %wb, %bias) : (!x, tensor<32x32xf32>, tensor<32xf32>) -> !x
    %c = "adaptc.linear"(%e, %wa) : (!x, tensor<32x32xf32>) -> !x
    %ab = "adaptc.add"(%a, %b) : (!x, !x) -> !x
    %y = "adaptc.add"(%ab, %c) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: merge_linears
// DECLINE: the second's bias isn't known yet where the first stands.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "b", tensor = "b", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32x32xf32>
    %b = "adaptc.get"() {symbol = "b"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %a = "adaptc.linear"(%x, %w) : (!x, tensor<32x32xf32>) -> !x
    %late = "adaptc.neg"(%b) : (tensor<32xf32>) -> tensor<32xf32>
    %c = "adaptc.linear"(%x, %w, %late) : (!x, tensor<32x32xf32>, tensor<32xf32>) -> !x
    %y = "adaptc.mul"(%a, %c) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
