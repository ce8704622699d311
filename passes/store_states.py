"""Decides how states are kept: dtype and paging."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from adaptc.errors import OptionError, one_of
from adaptc.ir import dialect
from adaptc.ir.functions import retype
from adaptc.ir.module import Program
from adaptc.options import KEPT
from adaptc.plan import SLOT_ENTRIES, page_rows, page_tokens


@dataclass(frozen=True)
class StoreStates:
    """Every state's contract gets rows a page and a key block; one of rows the rows' dtype (``options.KEPT``) and the
    pages that a request of ``max_context`` tokens has; one of fixed size stays float32 and has a slot to read and one to
    write."""

    dtype: str = "bf16"
    page_size: int = 16
    key_block: int = 32
    max_context: int = 2048
    name: ClassVar[str] = "store_states"
    requires: ClassVar[tuple[str, ...]] = ("sharded",)
    ensures: ClassVar[tuple[str, ...]] = ("paged",)

    def run(self, program: Program) -> None:
        if self.dtype not in KEPT:
            raise one_of("cache dtype", self.dtype, KEPT)
        dtype, scale = KEPT[self.dtype]
        for option in ("page_size", "key_block", "max_context"):
            if getattr(self, option) < 1:
                raise OptionError(f"{option} is {getattr(self, option)}; it must be at least 1.")
        kept = {
            "rows": lambda rate: {"dtype": dtype, "scale": scale, "page_size": page_rows(self.page_size, rate),
                                  "max_pages": -(-self.max_context // page_tokens(self.page_size, rate))},
            "fixed": lambda rate: {"page_size": self.page_size, "max_pages": SLOT_ENTRIES},
        }
        with program.editing():
            specs = {name: slot.spec for name, slot in program.states().items()}
            types = {name: dialect.to_type(replace(spec, key_block=self.key_block, **kept[spec.kind](spec.rate)))
                     for name, spec in specs.items()}
        retype(program, types)
