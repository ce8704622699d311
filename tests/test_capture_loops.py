"""Loops over chosen experts: what a body does differently for each expert is computed so, and what only a run knows is
refused."""

from __future__ import annotations

import pytest
import torch
from test_capture import close, logits, tokens_of, weights
from test_capture_errors import error, llama
from torch.nn import functional as F

from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import capture_module

torch.set_num_threads(1)

COUNT, CHOSEN = 3, 2


class Loop(torch.nn.Module):
    """Experts by ``body``(self, expert, tokens' rows, tokens) → what each choice's expert gives."""

    def __init__(self, body, count=COUNT, chosen=CHOSEN, more_than=0, **how):
        super().__init__()
        self.body, self.count, self.chosen, self.more_than, self.how = body, count, chosen, more_than, how
        self.router = torch.nn.Linear(32, count, bias=False)
        self.up = torch.nn.Parameter(torch.empty(count, 8, 32))
        self.down = torch.nn.Parameter(torch.empty(count, 32, 8))
        self.experts = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        x = x.reshape(-1, 32)
        shares, chosen = self.router(x).softmax(-1).topk(self.chosen, -1)
        self.result = torch.zeros_like(x)
        mask = F.one_hot(chosen, self.count).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), self.more_than).nonzero():
            slot, token = torch.where(mask[expert[0]])
            rows = self.body(self, expert[0], x[token], token)
            rows = rows * shares[token, slot, None] if self.how.get("weighted", True) else rows
            self.result.index_add_(0, token, rows, alpha=self.how.get("alpha", 1))
        return self.result.view(1, -1, 32)


def own(m, expert, x, *_):
    return F.linear(F.silu(F.linear(x, m.up[expert])), m.down[expert])


def neighbours(m, expert, x, *_):
    """Another expert's second matrix, the first one's first, and a share by the number."""
    return F.linear(F.linear(x, m.up[0]), m.down[(int(expert) + 1) % m.count]) / (2 + expert)


EXACT = {
    "modules of their own": Loop(lambda m, expert, x, _: m.experts[expert](x)),
    "neighbours": Loop(neighbours),
    "without shares": Loop(lambda m, expert, x, _: x if expert > 1 else own(m, expert, x), weighted=False),
    **{f"first {n}": Loop(lambda m, expert, x, _: own(m, expert, x) if expert < m.how["first"] else x, first=n)
       for n in (1, 2)},
}
"""The last two have one code, and treat other experts alike."""


class Sum(torch.nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def forward(self, x):
        return sum(part(x) for part in self.parts)


def test_a_body_may_depend_on_the_experts_number():
    module = llama(None)
    module.lm_head = torch.nn.Sequential(Sum(*EXACT.values()), module.lm_head[-1])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    program = capture_module(module, module.config)
    close(Reference(program, weights(module)).score(tokens_of(9), 2), logits(module, tokens_of(9)))


@pytest.mark.parametrize("loop, words", [
    (Loop(lambda m, expert, x, token: own(m, expert, x) / token.numel()), "how many tokens chose one"),
    (Loop(lambda m, expert, x, token: own(m, expert, x + m.result[token])), "their order matters"),
    (Loop(own, alpha=2), "adds 2 times"),
    (Loop(own, more_than=1), "by values that only a run has"),
], ids=["count", "results of others", "several times", "experts that several tokens chose"])  # fmt: skip
def test_what_only_a_run_knows_is_refused(loop, words):
    module = llama(None)
    module.lm_head[0] = loop
    message = error(module)
    assert words in message and "lm_head.0" in message and "test_capture_loops.py" in message, message
