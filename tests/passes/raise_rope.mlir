!ids = tensor<?xi32, #adaptc.dims<["T"]>>
!rows = tensor<?xi32, #adaptc.dims<["S"]>>
!out = tensor<?x32xf32, #adaptc.dims<["S", "_"]>>
!x = tensor<?x32xf32, #adaptc.dims<["T", "_"]>>
!x1 = tensor<1x?x32xf32, #adaptc.dims<["_", "T", "_"]>>
!h = tensor<?x4x8xf32, #adaptc.dims<["T", "_", "_"]>>
!hh = tensor<?x4x4xf32, #adaptc.dims<["T", "_", "_"]>>
!c = tensor<?x1x8xf32, #adaptc.dims<["T", "_", "_"]>>
!p = tensor<?x1x1xi32, #adaptc.dims<["T", "_", "_"]>>
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
