"""Tiny modules of a test's own code as captured programs, compared with what they compute themselves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import hooks
from adaptc.capture.problems import Problems
from adaptc.capture.trace import trace
from adaptc.capture.walk import Stored, walk
from adaptc.ir.build import short_name

VOCABULARY, HIDDEN = 30, 8


class Around(torch.nn.Module):
    """``code(module, x [1, T, HIDDEN], ids)`` between an embedding and a head; ``parts`` are the module's own."""

    def __init__(self, code, **parts):
        super().__init__()
        self.code = code
        self.embed = torch.nn.Embedding(VOCABULARY, HIDDEN)
        self.head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, input_ids, use_cache=False):
        return SimpleNamespace(logits=self.head(self.code(self, self.embed(input_ids), input_ids)))


def program_of(module, raised=lambda exported: exported):
    """Its program, whose logits are its own."""
    hooks.operators()
    problems, parameters = Problems(), dict(module.named_parameters())
    program = walk(raised(trace(module)), {name: Stored(name, name) for name in parameters}, {}, problems)
    problems.check()
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 9).tolist()
    with torch.no_grad():
        expected = module(torch.tensor([tokens])).logits[0].numpy()
    found = Reference(program, lambda name: parameters[name].detach().numpy()).score(tokens)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    return program


def operators_of(program) -> list[str]:
    return [short_name(op) for _, op in program.operators()]
