"""The token-locality gate: outside stateful operators, no token of a step may depend on another one.

Dimensions have names, so this is decided by looking: wherever an operand has the token dimension, the operator must
keep it, in one place, by its row's factor rule or ``axes`` column. Contracting, reducing, cutting, joining or
re-viewing it away are the ways to mix tokens; pairs of tokens would need two token dimensions. What passes is
equivariant under permuting tokens, and gives a token the same result whatever else is in the step.
"""

from __future__ import annotations

import re
from typing import Any

from adaptc.capture.problems import Problems
from adaptc.capture.trace import TOKENS
from adaptc.errors import LocalityError
from adaptc.ir import dialect
from adaptc.ir.build import attrs_of, short_name
from adaptc.ir.module import ROLES, Program, source_of
from adaptc.ops.axes import axis_map
from adaptc.ops.table import row
from adaptc.protocol import TensorSpec

_LOCATION = re.compile(r'loc\("([^"]+)":(\d+):\d+\)')


def check_locality(program: Program, problems: Problems) -> None:
    """Adds a LocalityError for each operator that mixes tokens, naming its module and, fresh from a trace, its source
    line."""
    mixed: set[Any] = set()
    sampled = program.step.entry_block.arguments[ROLES.index("sampled")]
    for _, op in program.operators():
        if any(operand == sampled for operand in op.operation.operands):
            continue  # picks the rows that @step's caller asks for; authors' code never sees them
        problem = _problem(op)
        follows = mixed.intersection(op.operation.operands)  # from what has been told already
        if problem:
            mixed.update(op.operation.results)
        if problem and not follows:
            problems.add(LocalityError(
                f"{short_name(op)} in {_place(op)} mixes tokens: {problem}. Serving in steps needs every token's "
                "result to depend on other tokens through attention's state alone."
            ))


def _problem(op: Any) -> str:
    name = short_name(op)
    operator = row(name)
    operands = [dialect.to_spec(v.type) for v in op.operation.operands]
    results = [dialect.to_spec(v.type) for v in op.operation.results]
    for spec in results:
        if spec.shape.count(TOKENS) > 1:
            return f"its result {spec.shape} has an element for every pair of tokens"
    for index, result in enumerate(results):
        mapped = axis_map(operator, operator.complete(attrs_of(op)), operands, results, index)
        for number, (spec, axes) in enumerate(zip(operands, mapped)):
            if not isinstance(spec, TensorSpec) or TOKENS not in spec.shape:
                continue
            place = axes[spec.shape.index(TOKENS)]
            if place is None or result.shape[place] != TOKENS:
                return f"operand {number} {spec.shape} loses its token dimension in the result {result.shape}"
    return ""


def _place(op: Any) -> str:
    line = _LOCATION.fullmatch(str(op.operation.location))
    return f"module {source_of(op) or '<root>'}" + (f" ({line[1]}:{line[2]})" if line else "")
