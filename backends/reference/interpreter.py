"""The reference backend: runs a program of any stage by the operator table's meanings. Slow, right, the oracle.

It shares no code with any other backend, and needs neither plan nor kernels.
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np

from adaptc.ir import dialect
from adaptc.ir.build import attrs_of, short_name
from adaptc.ir.module import ROLES, Program, callee, joined, source_of
from adaptc.ops.mixing import oracle_state
from adaptc.ops.table import row

Observer = Callable[[str, str, tuple], None]
"""Called with (module path, operator name, result arrays) for every operator, in program order."""


class Reference:
    """One program with its weights and the states of the requests it has seen.

    weights   name → the parameter's float32 values, as the program's stage defines them
    """

    def __init__(self, program: Program, weights: Callable[[str], np.ndarray]):
        self.program = program
        self.weights = weights
        self.states = {name: oracle_state(slot.spec) for name, slot in program.states().items()}
        self.functions = program.functions()

    def step(self, tokens, positions, requests, sampled, observe: Observer | None = None, lengths=None) -> np.ndarray:
        """Logits f32[S, V] of the rows ``sampled``; rows are appended to the states at ``positions``.

        ``requests`` numbers each token's request; a number means the same request, and the same cache, in every step.
        ``lengths`` are the tokens that each request, by its number, may come to have; needed if the program asks.
        """
        inputs = dict(zip(ROLES, (tokens, positions, requests, sampled, lengths)))
        arguments = [np.asarray(inputs[role], np.int32) for role in self.program.roles]
        return self._run(self.program.step, arguments, "", observe)[0]

    def score(self, tokens, chunk: int | None = None, request: int = 0, observe: Observer | None = None) -> np.ndarray:
        """Logits f32[T, V] of one whole sequence, prefilled in pieces of ``chunk`` tokens."""
        chunk = chunk or len(tokens)
        pieces = []
        for start in range(0, len(tokens), chunk):
            piece = tokens[start : start + chunk]
            rows = np.arange(len(piece))
            lengths = np.full(request + 1, len(tokens))
            pieces.append(self.step(piece, start + rows, np.full(len(piece), request), rows, observe, lengths))
        return np.concatenate(pieces)

    def operator(self, op, source: str, operands: list) -> tuple:
        """One operator's results. Verification looks at them here, or goes on with others in their place."""
        operator = row(short_name(op))
        return operator.meaning(operator.complete(attrs_of(op)), *operands)

    def called(self, source: str, results: list) -> list:
        """The results of a call of a body, for which the same holds."""
        return results

    def _run(self, function, arguments: list, path: str, observe: Observer | None) -> list:
        block = function.entry_block
        values: dict[Any, Any] = dict(zip(block.arguments, arguments))
        for op in block.operations:
            operation = op.operation
            operands = [values[v] for v in operation.operands]
            source = joined(path, source_of(op))
            if operation.name == "func.return":
                return operands
            if operation.name == "func.call":
                results = self.called(source, self._run(self.functions[callee(op)], operands, source, observe))
            elif operation.name == "adaptc.get":
                results = [self._symbol(dialect.attrs(op)["symbol"])]
            else:
                results = self.operator(op, source, operands)
                if observe:
                    observe(source, short_name(op), tuple(results))
            values.update(zip(operation.results, results))
        raise AssertionError(f"@{function.name.value} has no return")

    def _symbol(self, name: str):
        return self.states[name] if name in self.states else self.weights(name)
