!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x16xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!y = tensor<?x16xf32, #adaptc.dims<["T", "_"]>>

// RUN: bind_transposes
// The file's [K, N] is read as [N, K]; the weight that nobody reads any more is gone.
// CHECK: rows = ["transpose", 0], stored = "f32", sym_name = "w.T", tensor = "w", type = tensor<16x32xf32>
// CHECK: %1 = "adaptc.get"() {symbol = "w.T"} : () -> tensor<16x32xf32>
// CHECK: "adaptc.linear"(%2, %1)
// CHECK-NOT: sym_name = "w",
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32x16xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32x16xf32>
    %t = "adaptc.transpose"(%w) {perm = [1, 0]} : (tensor<32x16xf32>) -> tensor<16x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %y = "adaptc.linear"(%x, %t) : (!x, tensor<16x32xf32>) -> !y
    %end = "adaptc.gather_rows"(%y, %sampled) : (!y, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: bind_transposes
// What the file has transposed already is read as it is: packed formats stay packed.
// CHECK: adaptc.weight"() {stored = "q8_0", sym_name = "w.T", tensor = "w", type = tensor<32x32xf32>}
// CHECK: "adaptc.get"() {symbol = "w.T"} : () -> tensor<32x32xf32>
!same = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!last = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  "adaptc.weight"() {rows = ["transpose", 0], stored = "q8_0", sym_name = "w", tensor = "w", type = tensor<32x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !last {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32x32xf32>
    %t = "adaptc.transpose"(%w) {perm = [1, 0]} : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !same
    %y = "adaptc.linear"(%x, %t) : (!same, tensor<32x32xf32>) -> !same
    %end = "adaptc.gather_rows"(%y, %sampled) : (!same, !rows) -> !last
    return %end : !last
  }
}

// -----

// RUN: bind_transposes
// DECLINE: weights read by another rule are transposed where they are.
!same = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!last = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  "adaptc.weight"() {rows = ["rope_halves", 2], stored = "f32", sym_name = "w", tensor = "w", type = tensor<32x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !last {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32x32xf32>
    %t = "adaptc.transpose"(%w) {perm = [1, 0]} : (tensor<32x32xf32>) -> tensor<32x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !same
    %y = "adaptc.linear"(%x, %t) : (!same, tensor<32x32xf32>) -> !same
    %end = "adaptc.gather_rows"(%y, %sampled) : (!same, !rows) -> !last
    return %end : !last
  }
}

// -----

// RUN: bind_transposes
// DECLINE: activations are transposed where they are.
!z = tensor<?x4x4xf32, #adaptc.dims<["T", "_", "_"]>>
!flat = tensor<?x16xf32, #adaptc.dims<["T", "_"]>>
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x16xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x16xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x16xf32>) -> !flat
    %a = "adaptc.reshape"(%x) {shape = ["T", 4, 4]} : (!flat) -> !z
    %b = "adaptc.transpose"(%a) {perm = [0, 2, 1]} : (!z) -> !z
    %c = "adaptc.reshape"(%b) {shape = ["T", 16]} : (!z) -> !flat
    %end = "adaptc.gather_rows"(%c, %sampled) : (!flat, !rows) -> !out
    return %end : !out
  }
}
