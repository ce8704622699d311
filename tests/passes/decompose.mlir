!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!one = tensor<?x1xf32, #adaptc.dims<["T", "_"]>>

// RUN: decompose
// LACKS: add_rms_norm rms_norm
// What an operator became may be lacking too: both go, down to arithmetic.
// CHECK: adaptc.decomposed = {add_rms_norm = ["add", "rms_norm"], rms_norm = ["add", "constant", "mul", "reduce", "rsqrt"]}
// CHECK: "adaptc.rsqrt"
// CHECK-NOT: "adaptc.add_rms_norm"
// CHECK-NOT: "adaptc.rms_norm"
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.exp"(%x) : (!x) -> !x
    %n:2 = "adaptc.add_rms_norm"(%e, %x, %w) {eps = 1.0e-05 : f64} : (!x, !x, tensor<32xf32>) -> (!x, !x)
    %y = "adaptc.mul"(%n#0, %n#1) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: decompose
// LACKS: rms_norm
// Two of one input share what they are made of.
// COUNT 1: "adaptc.rsqrt"
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "v", tensor = "v", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %v = "adaptc.get"() {symbol = "v"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %a = "adaptc.rms_norm"(%x, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %b = "adaptc.rms_norm"(%x, %v) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %y = "adaptc.mul"(%a, %b) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: decompose
// LACKS: rope linear
// DECLINE: the backend has all that is here.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %y = "adaptc.rms_norm"(%x, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: decompose
// LACKS: exp rms_norm gather_rows
// ERROR: no kernel and the operator table no decomposition for:
//   exp(f32['T', 32]) in module <root> (in @step)
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %w = "adaptc.get"() {symbol = "w"} : () -> tensor<32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.exp"(%x) : (!x) -> !x
    %y = "adaptc.rms_norm"(%e, %w) {eps = 1.0e-05 : f64} : (!x, tensor<32xf32>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
