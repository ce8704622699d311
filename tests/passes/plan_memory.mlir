!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!h = tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>

// RUN: plan_memory
// OPTIONS: max_step_tokens=16 max_sampled=4 max_requests=2
// A value's place is free again after its last use, a view has its operand's, and scratch meets neither.
// CHECK: adaptc.arena_bytes = 4288
// CHECK-SAME: adaptc.max_symbols = {R = 2 : i64, S = 4 : i64, T = 16 : i64}
// CHECK: "adaptc.embedding"
// CHECK-SAME: buffers = ["arg0", "symbol:emb", "arena+0"]
// CHECK: "adaptc.exp"
// CHECK-SAME: buffers = ["arena+0", "arena+2048", "arena+4096"]
// CHECK: "adaptc.reshape"
// CHECK-SAME: buffers = ["arena+2048", "arena+2048"]
// CHECK: "adaptc.tanh"
// CHECK-SAME: buffers = ["arena+2048", "arena+0"]
// CHECK: "adaptc.gather_rows"
// CHECK-SAME: buffers = ["arena+0", "arg3", "result0"]
module attributes {adaptc.stage = "laid_out"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) {kernels = [], scratch = []} : (!ids, tensor<8x32xf32>) -> !x
    %e = "adaptc.exp"(%x) {kernels = [], scratch = [["f32", ["T", 3]]]} : (!x) -> !x
    %h = "adaptc.reshape"(%e) {kernels = [], scratch = [], shape = ["T", 4, 8]} : (!x) -> !h
    %t = "adaptc.tanh"(%h) {kernels = [], scratch = []} : (!h) -> !h
    %y = "adaptc.reshape"(%t) {kernels = [], scratch = [], shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) {kernels = [], scratch = []} : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: plan_memory
// OPTIONS: max_step_tokens=16 max_sampled=4 max_requests=2
// A body's frame stands in the arena while its call runs.
// CHECK: func.func private @body
// CHECK: buffers = ["arg0", "frame+0"]
// CHECK: buffers = ["frame+0", "result0"]
// CHECK: func.func @step
// CHECK: call @body
// CHECK-SAME: buffers = ["arena+0", "arena+2048"], frame = 4096
module attributes {adaptc.stage = "laid_out"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func private @body(%x: !x) -> !x {
    %e = "adaptc.exp"(%x) {kernels = [], scratch = []} : (!x) -> !x
    %t = "adaptc.tanh"(%e) {kernels = [], scratch = []} : (!x) -> !x
    return %t : !x
  }
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) {kernels = [], scratch = []} : (!ids, tensor<8x32xf32>) -> !x
    %y = func.call @body(%x) : (!x) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) {kernels = [], scratch = []} : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: plan_memory
// OPTIONS: max_step_tokens=0
// ERROR: the most T can be is 0; it must be at least 1
module attributes {adaptc.stage = "laid_out"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) {kernels = [], scratch = []} : (!ids, tensor<8x32xf32>) -> !x
    %end = "adaptc.gather_rows"(%x, %sampled) {kernels = [], scratch = []} : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: plan_memory
// ERROR: plan_memory requires 'selected', but adaptc.gather_rows has no kernels
module attributes {adaptc.stage = "laid_out"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) {kernels = [], scratch = []} : (!ids, tensor<8x32xf32>) -> !x
    %end = "adaptc.gather_rows"(%x, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
