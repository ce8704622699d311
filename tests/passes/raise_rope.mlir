!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>
!h = tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
!hh = tensor<?x4x4xf32, #adaptc.dims<["T", "_", "_"]>>
!c = tensor<?x1x8xf32, #adaptc.dims<["T", "_", "_"]>>
!p = tensor<?x1x1xi32, #adaptc.dims<["T", "_", "_"]>>
!c4 = tensor<?x1x4xf32, #adaptc.dims<["T", "_", "_"]>>
!c2 = tensor<?x1x2xf32, #adaptc.dims<["T", "_", "_"]>>
!quarter = tensor<?x4x2xf32, #adaptc.dims<["T", "_", "_"]>>
!pairs = tensor<?x4x4x2xf32, #adaptc.dims<["T", "_", "_", "_"]>>
!pair1 = tensor<?x4x4x1xf32, #adaptc.dims<["T", "_", "_", "_"]>>
!f = tensor<1x4x?x8xf32, #adaptc.dims<["_", "_", "T", "_"]>>
!fh = tensor<1x4x?x4xf32, #adaptc.dims<["_", "_", "T", "_"]>>
!fp = tensor<1x4x?x4x2xf32, #adaptc.dims<["_", "_", "T", "_", "_"]>>
!f1 = tensor<1x4x?x4x1xf32, #adaptc.dims<["_", "_", "T", "_", "_"]>>
!cf = tensor<1x1x?x8xf32, #adaptc.dims<["_", "_", "T", "_"]>>
!pf = tensor<?x1x1xf32, #adaptc.dims<["T", "_", "_"]>>

// RUN: raise_rope
// CHECK: "adaptc.rope"
// CHECK-NOT: adaptc.concat
// CHECK-NOT: adaptc.slice
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [8], value = [1.0, 0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 0.125]} : () -> tensor<8xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<8xf32>) -> !c
    %cos = "adaptc.cos"(%angle) : (!c) -> !c
    %sin = "adaptc.sin"(%angle) : (!c) -> !c
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %a = "adaptc.slice"(%h) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h) -> !hh
    %b = "adaptc.slice"(%h) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %na = "adaptc.neg"(%a) : (!hh) -> !hh
    %turned = "adaptc.concat"(%na, %b) {axis = 2 : i64} : (!hh, !hh) -> !h
    %l = "adaptc.mul"(%cos, %h) : (!c, !h) -> !h
    %r = "adaptc.mul"(%turned, %sin) : (!h, !c) -> !h
    %rot = "adaptc.add"(%r, %l) : (!h, !h) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// DECLINE: the first half is negated, not the second: another rotation.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [8], value = [1.0, 0.5, 0.25, 0.125, 1.0, 0.5, 0.25, 0.125]} : () -> tensor<8xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<8xf32>) -> !c
    %cos = "adaptc.cos"(%angle) : (!c) -> !c
    %sin = "adaptc.sin"(%angle) : (!c) -> !c
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %a = "adaptc.slice"(%h) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %b = "adaptc.slice"(%h) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h) -> !hh
    %na = "adaptc.neg"(%a) : (!hh) -> !hh
    %turned = "adaptc.concat"(%na, %b) {axis = 2 : i64} : (!hh, !hh) -> !h
    %l = "adaptc.mul"(%cos, %h) : (!c, !h) -> !h
    %r = "adaptc.mul"(%turned, %sin) : (!h, !c) -> !h
    %rot = "adaptc.add"(%r, %l) : (!h, !h) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// Neighbours are pairs, heads come before tokens, and the tables stand behind a unit axis: still one rope.
// CHECK: "adaptc.rope"
// CHECK-SAME: interleaved = true, turned = 0
// CHECK-NOT: adaptc.concat
// CHECK-NOT: adaptc.slice
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [8], value = [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]} : () -> tensor<8xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<8xf32>) -> !c
    %cos = "adaptc.cos"(%angle) : (!c) -> !c
    %sin = "adaptc.sin"(%angle) : (!c) -> !c
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %h4 = "adaptc.reshape"(%h) {shape = [1, "T", 4, 8]} : (!h) -> tensor<1x?x4x8xf32, #adaptc.dims<["_", "T", "_", "_"]>>
    %g = "adaptc.transpose"(%h4) {perm = [0, 2, 1, 3]} : (tensor<1x?x4x8xf32, #adaptc.dims<["_", "T", "_", "_"]>>) -> !f
    %odd = "adaptc.slice"(%g) {limits = [1, 4, -1, 8], starts = [0, 0, 0, 1], strides = [1, 1, 1, 2]} : (!f) -> !fh
    %even = "adaptc.slice"(%g) {limits = [1, 4, -1, 8], starts = [0, 0, 0, 0], strides = [1, 1, 1, 2]} : (!f) -> !fh
    %minus = "adaptc.neg"(%odd) : (!fh) -> !fh
    %a = "adaptc.reshape"(%minus) {shape = [1, 4, "T", 4, 1]} : (!fh) -> !f1
    %b = "adaptc.reshape"(%even) {shape = [1, 4, "T", 4, 1]} : (!fh) -> !f1
    %both = "adaptc.concat"(%a, %b) {axis = 4 : i64} : (!f1, !f1) -> !fp
    %turned = "adaptc.reshape"(%both) {shape = [1, 4, "T", 8]} : (!fp) -> !f
    %cosf = "adaptc.reshape"(%cos) {shape = [1, 1, "T", 8]} : (!c) -> !cf
    %sinf = "adaptc.reshape"(%sin) {shape = [1, 1, "T", 8]} : (!c) -> !cf
    %l = "adaptc.mul"(%g, %cosf) : (!f, !cf) -> !f
    %r = "adaptc.mul"(%turned, %sinf) : (!f, !cf) -> !f
    %sum = "adaptc.add"(%l, %r) : (!f, !f) -> !f
    %back = "adaptc.transpose"(%sum) {perm = [0, 2, 1, 3]} : (!f) -> tensor<1x?x4x8xf32, #adaptc.dims<["_", "T", "_", "_"]>>
    %y = "adaptc.reshape"(%back) {shape = ["T", 32]} : (tensor<1x?x4x8xf32, #adaptc.dims<["_", "T", "_", "_"]>>) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// Products of the pairs of halves, with a table entry for each pair.
// CHECK: "adaptc.rope"
// CHECK-SAME: interleaved = false
// CHECK-SAME: tensor<?x4xf32
// CHECK-NOT: adaptc.concat
// CHECK-NOT: adaptc.slice
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [4], value = [1.0, 0.5, 0.25, 0.125]} : () -> tensor<4xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<4xf32>) -> !c4
    %cos = "adaptc.cos"(%angle) : (!c4) -> !c4
    %sin = "adaptc.sin"(%angle) : (!c4) -> !c4
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %a = "adaptc.slice"(%h) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %b = "adaptc.slice"(%h) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h) -> !hh
    %ac = "adaptc.mul"(%a, %cos) : (!hh, !c4) -> !hh
    %bs = "adaptc.mul"(%sin, %b) : (!c4, !hh) -> !hh
    %bc = "adaptc.mul"(%b, %cos) : (!hh, !c4) -> !hh
    %as = "adaptc.mul"(%a, %sin) : (!hh, !c4) -> !hh
    %first = "adaptc.sub"(%ac, %bs) : (!hh, !hh) -> !hh
    %second = "adaptc.add"(%bc, %as) : (!hh, !hh) -> !hh
    %rot = "adaptc.concat"(%first, %second) {axis = 2 : i64} : (!hh, !hh) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// Products of neighbours, as complex numbers multiply.
// CHECK: "adaptc.rope"
// CHECK-SAME: interleaved = true
// CHECK-NOT: adaptc.concat
// CHECK-NOT: adaptc.slice
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [4], value = [1.0, 0.5, 0.25, 0.125]} : () -> tensor<4xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<4xf32>) -> !c4
    %cos = "adaptc.cos"(%angle) : (!c4) -> !c4
    %sin = "adaptc.sin"(%angle) : (!c4) -> !c4
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %pairs = "adaptc.reshape"(%h) {shape = ["T", 4, 4, 2]} : (!h) -> !pairs
    %a = "adaptc.slice"(%pairs) {limits = [-1, 4, 4, 1], starts = [0, 0, 0, 0], strides = [1, 1, 1, 1]} : (!pairs) -> !pair1
    %b = "adaptc.slice"(%pairs) {limits = [-1, 4, 4, 2], starts = [0, 0, 0, 1], strides = [1, 1, 1, 1]} : (!pairs) -> !pair1
    %cosp = "adaptc.reshape"(%cos) {shape = ["T", 1, 4, 1]} : (!c4) -> tensor<?x1x4x1xf32, #adaptc.dims<["T", "_", "_", "_"]>>
    %sinp = "adaptc.reshape"(%sin) {shape = ["T", 1, 4, 1]} : (!c4) -> tensor<?x1x4x1xf32, #adaptc.dims<["T", "_", "_", "_"]>>
    %ac = "adaptc.mul"(%a, %cosp) : (!pair1, tensor<?x1x4x1xf32, #adaptc.dims<["T", "_", "_", "_"]>>) -> !pair1
    %bs = "adaptc.mul"(%b, %sinp) : (!pair1, tensor<?x1x4x1xf32, #adaptc.dims<["T", "_", "_", "_"]>>) -> !pair1
    %as = "adaptc.mul"(%a, %sinp) : (!pair1, tensor<?x1x4x1xf32, #adaptc.dims<["T", "_", "_", "_"]>>) -> !pair1
    %bc = "adaptc.mul"(%b, %cosp) : (!pair1, tensor<?x1x4x1xf32, #adaptc.dims<["T", "_", "_", "_"]>>) -> !pair1
    %first = "adaptc.sub"(%ac, %bs) : (!pair1, !pair1) -> !pair1
    %second = "adaptc.add"(%as, %bc) : (!pair1, !pair1) -> !pair1
    %both = "adaptc.concat"(%first, %second) {axis = 3 : i64} : (!pair1, !pair1) -> !pairs
    %y = "adaptc.reshape"(%both) {shape = ["T", 32]} : (!pairs) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// The first half of a head turns, the rest stays: one rope of the whole head.
// COUNT 1: "adaptc.rope"
// CHECK: turned = 4
// CHECK-NOT: adaptc.concat
// CHECK-NOT: adaptc.slice
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [4], value = [1.0, 0.5, 1.0, 0.5]} : () -> tensor<4xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<4xf32>) -> !c4
    %cos = "adaptc.cos"(%angle) : (!c4) -> !c4
    %sin = "adaptc.sin"(%angle) : (!c4) -> !c4
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %part = "adaptc.slice"(%h) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %rest = "adaptc.slice"(%h) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h) -> !hh
    %a = "adaptc.slice"(%part) {limits = [-1, 4, 4], starts = [0, 0, 2], strides = [1, 1, 1]} : (!hh) -> !quarter
    %b = "adaptc.slice"(%part) {limits = [-1, 4, 2], starts = [0, 0, 0], strides = [1, 1, 1]} : (!hh) -> !quarter
    %na = "adaptc.neg"(%a) : (!quarter) -> !quarter
    %turned = "adaptc.concat"(%na, %b) {axis = 2 : i64} : (!quarter, !quarter) -> !hh
    %l = "adaptc.mul"(%part, %cos) : (!hh, !c4) -> !hh
    %r = "adaptc.mul"(%turned, %sin) : (!hh, !c4) -> !hh
    %some = "adaptc.add"(%l, %r) : (!hh, !hh) -> !hh
    %rot = "adaptc.concat"(%some, %rest) {axis = 2 : i64} : (!hh, !hh) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// The tables are made of one entry a pair, which is what rope reads.
// CHECK: "adaptc.rope"
// CHECK-SAME: tensor<?x4xf32
// CHECK-NOT: adaptc.concat
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [4], value = [1.0, 0.5, 0.25, 0.125]} : () -> tensor<4xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<4xf32>) -> !c4
    %cos = "adaptc.cos"(%angle) : (!c4) -> !c4
    %sin = "adaptc.sin"(%angle) : (!c4) -> !c4
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %cc = "adaptc.concat"(%cos, %cos) {axis = 2 : i64} : (!c4, !c4) -> !c
    %ss = "adaptc.concat"(%sin, %sin) {axis = 2 : i64} : (!c4, !c4) -> !c
    %a = "adaptc.slice"(%h) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h) -> !hh
    %b = "adaptc.slice"(%h) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %na = "adaptc.neg"(%a) : (!hh) -> !hh
    %turned = "adaptc.concat"(%na, %b) {axis = 2 : i64} : (!hh, !hh) -> !h
    %l = "adaptc.mul"(%h, %cc) : (!h, !c) -> !h
    %r = "adaptc.mul"(%turned, %ss) : (!h, !c) -> !h
    %rot = "adaptc.add"(%l, %r) : (!h, !h) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// DECLINE: the tables differ between heads.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %cos = "adaptc.cos"(%h) : (!h) -> !h
    %sin = "adaptc.sin"(%h) : (!h) -> !h
    %a = "adaptc.slice"(%h) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h) -> !hh
    %b = "adaptc.slice"(%h) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %na = "adaptc.neg"(%a) : (!hh) -> !hh
    %turned = "adaptc.concat"(%na, %b) {axis = 2 : i64} : (!hh, !hh) -> !h
    %l = "adaptc.mul"(%h, %cos) : (!h, !h) -> !h
    %r = "adaptc.mul"(%turned, %sin) : (!h, !h) -> !h
    %rot = "adaptc.add"(%l, %r) : (!h, !h) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// DECLINE: both products of the second half have the cosine: no rotation.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [4], value = [1.0, 0.5, 0.25, 0.125]} : () -> tensor<4xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<4xf32>) -> !c4
    %cos = "adaptc.cos"(%angle) : (!c4) -> !c4
    %sin = "adaptc.sin"(%angle) : (!c4) -> !c4
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %a = "adaptc.slice"(%h) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %b = "adaptc.slice"(%h) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h) -> !hh
    %ac = "adaptc.mul"(%a, %cos) : (!hh, !c4) -> !hh
    %bs = "adaptc.mul"(%b, %sin) : (!hh, !c4) -> !hh
    %bc = "adaptc.mul"(%b, %cos) : (!hh, !c4) -> !hh
    %first = "adaptc.sub"(%ac, %bs) : (!hh, !hh) -> !hh
    %second = "adaptc.add"(%bc, %ac) : (!hh, !hh) -> !hh
    %rot = "adaptc.concat"(%first, %second) {axis = 2 : i64} : (!hh, !hh) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// A part turns, but what follows it isn't the rest of the same head: that stays a concat.
// CHECK: "adaptc.rope"
// CHECK-SAME: turned = 0
// CHECK: "adaptc.concat"
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [4], value = [1.0, 0.5, 0.25, 0.125]} : () -> tensor<4xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<4xf32>) -> !c4
    %cos = "adaptc.cos"(%angle) : (!c4) -> !c4
    %sin = "adaptc.sin"(%angle) : (!c4) -> !c4
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %part = "adaptc.slice"(%h) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %a = "adaptc.slice"(%part) {limits = [-1, 4, 4], starts = [0, 0, 2], strides = [1, 1, 1]} : (!hh) -> !quarter
    %b = "adaptc.slice"(%part) {limits = [-1, 4, 2], starts = [0, 0, 0], strides = [1, 1, 1]} : (!hh) -> !quarter
    %na = "adaptc.neg"(%a) : (!quarter) -> !quarter
    %turned = "adaptc.concat"(%na, %b) {axis = 2 : i64} : (!quarter, !quarter) -> !hh
    %l = "adaptc.mul"(%part, %cos) : (!hh, !c4) -> !hh
    %r = "adaptc.mul"(%turned, %sin) : (!hh, !c4) -> !hh
    %some = "adaptc.add"(%l, %r) : (!hh, !hh) -> !hh
    %rot = "adaptc.concat"(%some, %part) {axis = 2 : i64} : (!hh, !hh) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// DECLINE: what is turned is another tensor's.
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [8], value = [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]} : () -> tensor<8xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<8xf32>) -> !c
    %cos = "adaptc.cos"(%angle) : (!c) -> !c
    %sin = "adaptc.sin"(%angle) : (!c) -> !c
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %z = "adaptc.tanh"(%h) : (!h) -> !h
    %a = "adaptc.slice"(%z) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h) -> !hh
    %b = "adaptc.slice"(%z) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %na = "adaptc.neg"(%a) : (!hh) -> !hh
    %turned = "adaptc.concat"(%na, %b) {axis = 2 : i64} : (!hh, !hh) -> !h
    %l = "adaptc.mul"(%h, %cos) : (!h, !c) -> !h
    %r = "adaptc.mul"(%turned, %sin) : (!h, !c) -> !h
    %rot = "adaptc.add"(%l, %r) : (!h, !h) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}

// -----

// RUN: raise_rope
// Pairs of two tensors: a rope of both, put together.
// CHECK: "adaptc.concat"
// CHECK: "adaptc.rope"
module attributes {adaptc.stage = "captured"} {
  "adaptc.weight"() {stored = "f32", sym_name = "emb", tensor = "emb", type = tensor<8x32xf32>} : () -> ()
  func.func @step(%tokens: !ids, %positions: !ids, %requests: !ids, %sampled: !rows) -> !out {
    %emb = "adaptc.get"() {symbol = "emb"} : () -> tensor<8x32xf32>
    %x = "adaptc.embedding"(%tokens, %emb) : (!ids, tensor<8x32xf32>) -> !x
    %p = "adaptc.reshape"(%positions) {shape = ["T", 1, 1]} : (!ids) -> !p
    %pf = "adaptc.cast"(%p) {dtype = "f32"} : (!p) -> !pf
    %freq = "adaptc.constant"() {dtype = "f32", shape = [4], value = [1.0, 0.5, 0.25, 0.125]} : () -> tensor<4xf32>
    %angle = "adaptc.mul"(%pf, %freq) : (!pf, tensor<4xf32>) -> !c4
    %cos = "adaptc.cos"(%angle) : (!c4) -> !c4
    %sin = "adaptc.sin"(%angle) : (!c4) -> !c4
    %h = "adaptc.reshape"(%x) {shape = ["T", 4, 8]} : (!x) -> !h
    %z = "adaptc.tanh"(%h) : (!h) -> !h
    %a = "adaptc.slice"(%h) {limits = [-1, 4, 4], starts = [0, 0, 0], strides = [1, 1, 1]} : (!h) -> !hh
    %b = "adaptc.slice"(%z) {limits = [-1, 4, 8], starts = [0, 0, 4], strides = [1, 1, 1]} : (!h) -> !hh
    %ac = "adaptc.mul"(%a, %cos) : (!hh, !c4) -> !hh
    %bs = "adaptc.mul"(%sin, %b) : (!c4, !hh) -> !hh
    %bc = "adaptc.mul"(%b, %cos) : (!hh, !c4) -> !hh
    %as = "adaptc.mul"(%a, %sin) : (!hh, !c4) -> !hh
    %first = "adaptc.sub"(%ac, %bs) : (!hh, !hh) -> !hh
    %second = "adaptc.add"(%bc, %as) : (!hh, !hh) -> !hh
    %rot = "adaptc.concat"(%first, %second) {axis = 2 : i64} : (!hh, !hh) -> !h
    %y = "adaptc.reshape"(%rot) {shape = ["T", 32]} : (!h) -> !x
    %end = "adaptc.gather_rows"(%y, %sampled) : (!x, !rows) -> !out
    return %end : !out
  }
}
