!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>

// RUN: fuse_gated_linear
// CHECK: "adaptc.gated_linear"(%3, %0, %1) {act = "gelu_tanh"}
// CHECK-NOT: "adaptc.linear"
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "gate", tensor = "gate", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "up", tensor = "up", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %gate = "adaptc.get"() {symbol = "gate"} : () -> tensor<32x32xf32>
    %up = "adaptc.get"() {symbol = "up"} : () -> tensor<32x32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %g = "adaptc.linear"(%x, %gate) : (!x, tensor<32x32xf32>) -> !x
    %u = "adaptc.linear"(%x, %up) : (!x, tensor<32x32xf32>) -> !x
    %a = "adaptc.gelu_tanh"(%g) : (!x) -> !x
    %y = "adaptc.mul"(%u, %a) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: fuse_gated_linear
// DECLINE: the gate is used elsewhere too.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "gate", tensor = "gate", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "up", tensor = "up", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %gate = "adaptc.get"() {symbol = "gate"} : () -> tensor<32x32xf32>
    %up = "adaptc.get"() {symbol = "up"} : () -> tensor<32x32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %g = "adaptc.linear"(%x, %gate) : (!x, tensor<32x32xf32>) -> !x
    %u = "adaptc.linear"(%x, %up) : (!x, tensor<32x32xf32>) -> !x
    %a = "adaptc.silu"(%g) : (!x) -> !x
    %m = "adaptc.mul"(%a, %u) : (!x, !x) -> !x
    %y = "adaptc.add"(%m, %g) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: fuse_gated_linear
// DECLINE: gate and up have different inputs.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "gate", tensor = "gate", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "up", tensor = "up", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %gate = "adaptc.get"() {symbol = "gate"} : () -> tensor<32x32xf32>
    %up = "adaptc.get"() {symbol = "up"} : () -> tensor<32x32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %z = "adaptc.tanh"(%x) : (!x) -> !x
    %g = "adaptc.linear"(%x, %gate) : (!x, tensor<32x32xf32>) -> !x
    %u = "adaptc.linear"(%z, %up) : (!x, tensor<32x32xf32>) -> !x
    %a = "adaptc.silu"(%g) : (!x) -> !x
    %y = "adaptc.mul"(%a, %u) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: fuse_gated_linear
// Each weight is followed by its bias.
// CHECK: "adaptc.gated_linear"(%4, %0, %1, %2) {act = "gelu"
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "gate", tensor = "gate", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "b", tensor = "b", type = tensor<32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "up", tensor = "up", type = tensor<32x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %gate = "adaptc.get"() {symbol = "gate"} : () -> tensor<32x32xf32>
    %b = "adaptc.get"() {symbol = "b"} : () -> tensor<32xf32>
    %up = "adaptc.get"() {symbol = "up"} : () -> tensor<32x32xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %g = "adaptc.linear"(%x, %gate, %b) : (!x, tensor<32x32xf32>, tensor<32xf32>) -> !x
    %u = "adaptc.linear"(%x, %up) : (!x, tensor<32x32xf32>) -> !x
    %a = "adaptc.gelu"(%g) : (!x) -> !x
    %y = "adaptc.mul"(%a, %u) : (!x, !x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
