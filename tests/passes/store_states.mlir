!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!h = tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
!state = !adaptc.state<{dtype = "f32", kind = "rows", parts = [["k", 4, 8], ["v", 4, 8]], window = 2 : i64}>

// RUN: store_states
// OPTIONS: dtype="bf16" page_size=16 key_block=32 max_context=100
// TOLERANCE: 0.05
// CHECK: "adaptc.state_slot"
// CHECK-SAME: dtype = "bf16", key_block = 32 : i64, kind = "rows", max_pages = 7 : i64, page_size = 16 : i64
// CHECK: "adaptc.get"() {symbol = "kv"}
// CHECK-SAME: max_pages = 7
module attributes {adaptc.stage = "sharded"} {
  "adaptc.state_slot"() {sym_name = "kv", type = !state} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %kv = "adaptc.get"() {symbol = "kv"} : () -> !state
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %a = "adaptc.attention"(%h, %h, %h, %positions, %requests, %kv) {scaling = 0.5 : f64, window = 2 : i64} : (!h, !h, !h, !ids, !ids, !state) -> !h
    %y = "adaptc.reshape"(%a) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: store_states
// OPTIONS: dtype="int8" page_size=16 key_block=32 max_context=100
// TOLERANCE: 0.05
// CHECK: "adaptc.state_slot"
// CHECK-SAME: dtype = "i8", key_block = 32 : i64, kind = "rows", max_pages = 7 : i64, page_size = 16 : i64
// CHECK-SAME: scale = "f32"
// CHECK: "adaptc.get"() {symbol = "kv"}
// CHECK-SAME: max_pages = 7
module attributes {adaptc.stage = "sharded"} {
  "adaptc.state_slot"() {sym_name = "kv", type = !state} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %kv = "adaptc.get"() {symbol = "kv"} : () -> !state
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %a = "adaptc.attention"(%h, %h, %h, %positions, %requests, %kv) {scaling = 0.5 : f64, window = 2 : i64} : (!h, !h, !h, !ids, !ids, !state) -> !h
    %y = "adaptc.reshape"(%a) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: store_states
// OPTIONS: dtype="bf16" page_size=16 key_block=32 max_context=100
// CHECK: "adaptc.state_slot"
// CHECK-SAME: dtype = "f32", key_block = 32 : i64, kind = "fixed", max_pages = 2 : i64, page_size = 16 : i64
module attributes {adaptc.stage = "sharded"} {
  "adaptc.state_slot"() {sym_name = "window", type = !adaptc.state<{dtype = "f32", kind = "fixed", parts = [["window", 1, 32]], window = 0 : i64}>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "taps", tensor = "taps", type = tensor<32x2xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %window = "adaptc.get"() {symbol = "window"} : () -> !adaptc.state<{dtype = "f32", kind = "fixed", parts = [["window", 1, 32]], window = 0 : i64}>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %taps = "adaptc.get"() {symbol = "taps"} : () -> tensor<32x2xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %y = "adaptc.convolve"(%x, %taps, %positions, %requests, %window) : (!x, tensor<32x2xf32>, !ids, !ids, !adaptc.state<{dtype = "f32", kind = "fixed", parts = [["window", 1, 32]], window = 0 : i64}>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: store_states
// OPTIONS: dtype="i8"
// ERROR: unknown cache dtype 'i8'; valid values are: f32, f16, bf16, int8
module attributes {adaptc.stage = "sharded"} {
  "adaptc.state_slot"() {sym_name = "kv", type = !state} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %kv = "adaptc.get"() {symbol = "kv"} : () -> !state
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %a = "adaptc.attention"(%h, %h, %h, %positions, %requests, %kv) {scaling = 0.5 : f64, window = 2 : i64} : (!h, !h, !h, !ids, !ids, !state) -> !h
    %y = "adaptc.reshape"(%a) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: store_states
// OPTIONS: page_size=0
// ERROR: page_size is 0; it must be at least 1.
module attributes {adaptc.stage = "sharded"} {
  "adaptc.state_slot"() {sym_name = "kv", type = !state} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %kv = "adaptc.get"() {symbol = "kv"} : () -> !state
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %a = "adaptc.attention"(%h, %h, %h, %positions, %requests, %kv) {scaling = 0.5 : f64, window = 2 : i64} : (!h, !h, !h, !ids, !ids, !state) -> !h
    %y = "adaptc.reshape"(%a) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
