"""How it gets into programs: the operator that the authors' code calls becomes the row's."""

from __future__ import annotations

PROTOCOL = 1

RULES = {
    "cosine.l2_norm": lambda w, x, temperature, eps: w.b.head_l2_norm(w.value(x), w.value(temperature), eps=eps),
}
