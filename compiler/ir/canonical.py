"""A program's text without what it is called: for telling whether two programs are the same up to names."""

from __future__ import annotations

import re

from adaptc.ir import dialect
from adaptc.ir.module import Program

_NAMES = ("sym_name", "symbol")
_PLACES = ("tensor", "source")


def canonical_text(program: Program) -> str:
    """``program`` printed with weights and states numbered in the order in which @step reads them, and without the
    names of files' tensors and of the authors' modules. Equal texts are equal programs up to those names."""
    copy = program.copy()
    order = [op.operation.attributes["symbol"].value for op in copy.step.entry_block.operations
             if op.operation.name == "adaptc.get"]
    number = {name: f"s{i}" for i, name in enumerate(dict.fromkeys(order))}
    declared = sorted((op for kind in ("weight", "state_slot") for op in copy.declared(kind)),
                      key=lambda op: order.index(op.operation.attributes["sym_name"].value))
    with copy.editing():
        for op in declared:
            op.operation.move_before(copy.step.operation)
        for op in (*declared, *(op for f in copy.functions().values() for op in f.entry_block.operations)):
            attributes = op.operation.attributes
            for key in _PLACES:
                if key in attributes:
                    del attributes[key]
            for key in _NAMES:
                if key in attributes:
                    attributes[key] = dialect.to_attr(number[attributes[key].value])
    # MLIR numbers what it prints; nothing else of the text depends on names
    return re.sub(r"[ \t]+$", "", copy.text(), flags=re.MULTILINE)
