!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x16xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x16xf32, #adaptc.dims<["T", "_"]>>
!c = tensor<?x8xf32, #adaptc.dims<["T", "_"]>>
!p = tensor<?x4xf32, #adaptc.dims<["T", "_"]>>
!kv = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!h4 = tensor<?x4x4xf32, #adaptc.dims<["T", "_", "_"]>>
!h8 = tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
!q = tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
!m = tensor<4x?x8xf32, #adaptc.dims<["_", "T", "_"]>>
!m4 = tensor<4x?x4xf32, #adaptc.dims<["_", "T", "_"]>>
!one = tensor<1x?x4xf32, #adaptc.dims<["_", "T", "_"]>>
!w = tensor<32x8xf32>
!w16 = tensor<16x8xf32>
!e = tensor<8x16xf32>
!kept = !adaptc.state<{dtype = "f32", kind = "rows", parts = [["k", 4, 8], ["v", 4, 4]], window = 0 : i64}>

// RUN: absorb_latent
// The layout of DeepSeek's weights: of each head, rows for the key's own columns and then for the value; both bodies' states.
// COUNT 2: parts = [["latent", 1, 12]], window = 0 : i64}>} : () -> ()
// CHECK: "adaptc.head_linear"
// CHECK-SAME: {rows = 4 : i64, start = 0 : i64, step = 8 : i64, transposed = true}
// CHECK: "adaptc.latent_attention"
// CHECK-SAME: value_width = 8 : i64
// CHECK: "adaptc.head_linear"
// CHECK-SAME: {rows = 4 : i64, start = 4 : i64, step = 8 : i64, transposed = false}
// CHECK-NOT: "adaptc.linear"
// CHECK-NOT: "k", 4, 8
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = !w} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "w2", tensor = "w2", type = !w} : () -> ()
  "adaptc.state_slot"() {source = "a", sym_name = "a.kv", type = !kept} : () -> ()
  "adaptc.state_slot"() {source = "b", sym_name = "b.kv", type = !kept} : () -> ()
  func.func private @layer(%x: !x, %positions: !ids, %requests: !ids, %w: !w, %kept: !kept) -> !x {
    %qq = "adaptc.concat"(%x, %x) {axis = 1 : i64} : (!x, !x) -> !kv
    %q = "adaptc.reshape"(%qq) {shape = ["T", 4, 8]} : (!kv) -> !q
    %c = "adaptc.slice"(%x) {limits = [-1, 8], starts = [0, 0], strides = [1, 1]} : (!x) -> !c
    %p = "adaptc.slice"(%x) {limits = [-1, 14], starts = [0, 10], strides = [1, 1]} : (!x) -> !p
    %kv = "adaptc.linear"(%c, %w) {source = "kv_b"} : (!c, !w) -> !kv
    %heads = "adaptc.reshape"(%kv) {shape = ["T", 4, 8]} : (!kv) -> !h8
    %n = "adaptc.slice"(%heads) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h8) -> !h4
    %v = "adaptc.slice"(%heads) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h8) -> !h4
    %one = "adaptc.reshape"(%p) {shape = [1, "T", 4]} : (!p) -> !one
    %all = "adaptc.broadcast"(%one) {dims = [0, 1, 2], shape = [4, "T", 4]} : (!one) -> !m4
    %s = "adaptc.transpose"(%all) {perm = [1, 0, 2]} : (!m4) -> !h4
    %k = "adaptc.concat"(%n, %s) {axis = 2 : i64} : (!h4, !h4) -> !h8
    %a = "adaptc.attention"(%q, %k, %v, %positions, %requests, %kept) {scaling = 0.5, window = 0 : i64} : (!q, !h8, !h4, !ids, !ids, !kept) -> !h4
    %y = "adaptc.reshape"(%a) {shape = ["T", 16]} : (!h4) -> !x
    return %y : !x
  }
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %s1 = "adaptc.get"() {symbol = "a.kv"} : () -> !kept
    %s2 = "adaptc.get"() {symbol = "b.kv"} : () -> !kept
    %w = "adaptc.get"() {symbol = "w"} : () -> !w
    %w2 = "adaptc.get"() {symbol = "w2"} : () -> !w
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %h = func.call @layer(%x, %positions, %requests, %w, %s1) : (!x, !ids, !ids, !w, !kept) -> !x
    %y = func.call @layer(%h, %positions, %requests, %w2, %s2) : (!x, !ids, !ids, !w, !kept) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: absorb_latent
// A matrix each for keys and values, and the shared columns before the others.
// CHECK: "adaptc.head_linear"
// CHECK-SAME: {rows = 4 : i64, start = 0 : i64, step = 4 : i64, transposed = true}
// CHECK: "adaptc.latent_attention"
// CHECK: "adaptc.head_linear"
// CHECK-SAME: {rows = 4 : i64, start = 0 : i64, step = 4 : i64, transposed = false}
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "wk", tensor = "wk", type = !w16} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "wv", tensor = "wv", type = !w16} : () -> ()
  "adaptc.state_slot"() {source = "attn", sym_name = "attn.kv", type = !kept} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %kept = "adaptc.get"() {symbol = "attn.kv"} : () -> !kept
    %wk = "adaptc.get"() {symbol = "wk"} : () -> !w16
    %wv = "adaptc.get"() {symbol = "wv"} : () -> !w16
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %qq = "adaptc.concat"(%x, %x) {axis = 1 : i64} : (!x, !x) -> !kv
    %q = "adaptc.reshape"(%qq) {shape = ["T", 4, 8]} : (!kv) -> !q
    %c = "adaptc.slice"(%x) {limits = [-1, 8], starts = [0, 0], strides = [1, 1]} : (!x) -> !c
    %p = "adaptc.slice"(%x) {limits = [-1, 14], starts = [0, 10], strides = [1, 1]} : (!x) -> !p
    %kk = "adaptc.linear"(%c, %wk) : (!c, !w16) -> !x
    %vv = "adaptc.linear"(%c, %wv) : (!c, !w16) -> !x
    %n = "adaptc.reshape"(%kk) {shape = ["T", 4, 4]} : (!x) -> !h4
    %v = "adaptc.reshape"(%vv) {shape = ["T", 4, 4]} : (!x) -> !h4
    %one = "adaptc.reshape"(%p) {shape = [1, "T", 4]} : (!p) -> !one
    %all = "adaptc.broadcast"(%one) {dims = [0, 1, 2], shape = [4, "T", 4]} : (!one) -> !m4
    %s = "adaptc.transpose"(%all) {perm = [1, 0, 2]} : (!m4) -> !h4
    %k = "adaptc.concat"(%s, %n) {axis = 2 : i64} : (!h4, !h4) -> !h8
    %a = "adaptc.attention"(%q, %k, %v, %positions, %requests, %kept) {scaling = 0.5, window = 0 : i64} : (!q, !h8, !h4, !ids, !ids, !kept) -> !h4
    %y = "adaptc.reshape"(%a) {shape = ["T", 16]} : (!h4) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: absorb_latent
// CHECK: keeps keys and values of all heads: the other columns of its keys differ by head
// DECLINE: each head has columns of its own where heads would share them.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = !w} : () -> ()
  "adaptc.state_slot"() {source = "attn", sym_name = "attn.kv", type = !kept} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %kept = "adaptc.get"() {symbol = "attn.kv"} : () -> !kept
    %w = "adaptc.get"() {symbol = "w"} : () -> !w
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %qq = "adaptc.concat"(%x, %x) {axis = 1 : i64} : (!x, !x) -> !kv
    %q = "adaptc.reshape"(%qq) {shape = ["T", 4, 8]} : (!kv) -> !q
    %c = "adaptc.slice"(%x) {limits = [-1, 8], starts = [0, 0], strides = [1, 1]} : (!x) -> !c
    %kv = "adaptc.linear"(%c, %w) {source = "kv_b"} : (!c, !w) -> !kv
    %heads = "adaptc.reshape"(%kv) {shape = ["T", 4, 8]} : (!kv) -> !h8
    %n = "adaptc.slice"(%heads) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h8) -> !h4
    %v = "adaptc.slice"(%heads) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h8) -> !h4
    %s = "adaptc.reshape"(%x) {shape = ["T", 4, 4]} : (!x) -> !h4
    %k = "adaptc.concat"(%n, %s) {axis = 2 : i64} : (!h4, !h4) -> !h8
    %a = "adaptc.attention"(%q, %k, %v, %positions, %requests, %kept) {scaling = 0.5, window = 0 : i64} : (!q, !h8, !h4, !ids, !ids, !kept) -> !h4
    %y = "adaptc.reshape"(%a) {shape = ["T", 16]} : (!h4) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: absorb_latent
// CHECK: something else is done to its keys
// DECLINE: keys are divided by their own length after they are made.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = !w} : () -> ()
  "adaptc.state_slot"() {source = "attn", sym_name = "attn.kv", type = !kept} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %kept = "adaptc.get"() {symbol = "attn.kv"} : () -> !kept
    %w = "adaptc.get"() {symbol = "w"} : () -> !w
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %qq = "adaptc.concat"(%x, %x) {axis = 1 : i64} : (!x, !x) -> !kv
    %q = "adaptc.reshape"(%qq) {shape = ["T", 4, 8]} : (!kv) -> !q
    %c = "adaptc.slice"(%x) {limits = [-1, 8], starts = [0, 0], strides = [1, 1]} : (!x) -> !c
    %p = "adaptc.slice"(%x) {limits = [-1, 14], starts = [0, 10], strides = [1, 1]} : (!x) -> !p
    %kv = "adaptc.linear"(%c, %w) {source = "kv_b"} : (!c, !w) -> !kv
    %heads = "adaptc.reshape"(%kv) {shape = ["T", 4, 8]} : (!kv) -> !h8
    %n = "adaptc.slice"(%heads) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h8) -> !h4
    %v = "adaptc.slice"(%heads) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h8) -> !h4
    %one = "adaptc.reshape"(%p) {shape = [1, "T", 4]} : (!p) -> !one
    %all = "adaptc.broadcast"(%one) {dims = [0, 1, 2], shape = [4, "T", 4]} : (!one) -> !m4
    %s = "adaptc.transpose"(%all) {perm = [1, 0, 2]} : (!m4) -> !h4
    %ones = "adaptc.constant"() {dtype = "f32", shape = [8], value = 1.0} : () -> tensor<8xf32>
    %raw = "adaptc.concat"(%n, %s) {axis = 2 : i64} : (!h4, !h4) -> !h8
    %k = "adaptc.rms_norm"(%raw, %ones) {eps = 1.0e-5} : (!h8, tensor<8xf32>) -> !h8
    %a = "adaptc.attention"(%q, %k, %v, %positions, %requests, %kept) {scaling = 0.5, window = 0 : i64} : (!q, !h8, !h4, !ids, !ids, !kept) -> !h4
    %y = "adaptc.reshape"(%a) {shape = ["T", 16]} : (!h4) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: absorb_latent
// CHECK: with window it isn't done over latent rows
// DECLINE: a window.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "w", tensor = "w", type = !w} : () -> ()
  "adaptc.state_slot"() {source = "attn", sym_name = "attn.kv", type = !adaptc.state<{dtype = "f32", kind = "rows", parts = [["k", 4, 8], ["v", 4, 4]], window = 2 : i64}>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %kept = "adaptc.get"() {symbol = "attn.kv"} : () -> !adaptc.state<{dtype = "f32", kind = "rows", parts = [["k", 4, 8], ["v", 4, 4]], window = 2 : i64}>
    %w = "adaptc.get"() {symbol = "w"} : () -> !w
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %qq = "adaptc.concat"(%x, %x) {axis = 1 : i64} : (!x, !x) -> !kv
    %q = "adaptc.reshape"(%qq) {shape = ["T", 4, 8]} : (!kv) -> !q
    %c = "adaptc.slice"(%x) {limits = [-1, 8], starts = [0, 0], strides = [1, 1]} : (!x) -> !c
    %p = "adaptc.slice"(%x) {limits = [-1, 14], starts = [0, 10], strides = [1, 1]} : (!x) -> !p
    %kv = "adaptc.linear"(%c, %w) {source = "kv_b"} : (!c, !w) -> !kv
    %heads = "adaptc.reshape"(%kv) {shape = ["T", 4, 8]} : (!kv) -> !h8
    %n = "adaptc.slice"(%heads) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h8) -> !h4
    %v = "adaptc.slice"(%heads) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h8) -> !h4
    %one = "adaptc.reshape"(%p) {shape = [1, "T", 4]} : (!p) -> !one
    %all = "adaptc.broadcast"(%one) {dims = [0, 1, 2], shape = [4, "T", 4]} : (!one) -> !m4
    %s = "adaptc.transpose"(%all) {perm = [1, 0, 2]} : (!m4) -> !h4
    %k = "adaptc.concat"(%n, %s) {axis = 2 : i64} : (!h4, !h4) -> !h8
    %a = "adaptc.attention"(%q, %k, %v, %positions, %requests, %kept) {scaling = 0.5, window = 2 : i64} : (!q, !h8, !h4, !ids, !ids, !adaptc.state<{dtype = "f32", kind = "rows", parts = [["k", 4, 8], ["v", 4, 4]], window = 2 : i64}>) -> !h4
    %y = "adaptc.reshape"(%a) {shape = ["T", 16]} : (!h4) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: absorb_latent
// CHECK-NOT: format_notes
// DECLINE: keys and values of the hidden state itself, which is as wide as they: ordinary attention without positions.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = !e} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "wk", tensor = "wk", type = tensor<32x16xf32>} : () -> ()
  "adaptc.weight"() {stored = "f32", sym_name = "wv", tensor = "wv", type = tensor<16x16xf32>} : () -> ()
  "adaptc.state_slot"() {source = "attn", sym_name = "attn.kv", type = !kept} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %kept = "adaptc.get"() {symbol = "attn.kv"} : () -> !kept
    %wk = "adaptc.get"() {symbol = "wk"} : () -> tensor<32x16xf32>
    %wv = "adaptc.get"() {symbol = "wv"} : () -> tensor<16x16xf32>
    %emb = "adaptc.get"() {symbol = "emb"} : () -> !e
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, !e) -> !x
    %qq = "adaptc.concat"(%x, %x) {axis = 1 : i64} : (!x, !x) -> !kv
    %q = "adaptc.reshape"(%qq) {shape = ["T", 4, 8]} : (!kv) -> !q
    %kk = "adaptc.linear"(%x, %wk) : (!x, tensor<32x16xf32>) -> !kv
    %k = "adaptc.reshape"(%kk) {shape = ["T", 4, 8]} : (!kv) -> !h8
    %vv = "adaptc.linear"(%x, %wv) : (!x, tensor<16x16xf32>) -> !x
    %v = "adaptc.reshape"(%vv) {shape = ["T", 4, 4]} : (!x) -> !h4
    %a = "adaptc.attention"(%q, %k, %v, %positions, %requests, %kept) {scaling = 0.5, window = 0 : i64} : (!q, !h8, !h4, !ids, !ids, !kept) -> !h4
    %y = "adaptc.reshape"(%a) {shape = ["T", 16]} : (!h4) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
