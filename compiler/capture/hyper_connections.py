"""Hyper-connections whose mixing is doubly stochastic (DeepSeek-V4, https://arxiv.org/abs/2512.24880), restated with one
operator for what makes it so: as authors write it, tens of divisions by sums follow one another.

Recognised by their parts (``PARTS``); the restatement is used where it gives what the module's forward gives (``scans``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

PARTS = "hc_mult hc_sinkhorn_iters hc_eps input_norm fn base scale"
"""What such connections are made of."""

STREAMS, WIDTH, ITERATIONS = 4, 6, 5
"""Sizes of an example."""


def hyper_connection(self, hidden_streams):
    """hidden_streams [1,T,N,D] → how a layer's output is spread [1,T,N], how the streams are mixed [1,T,N,N], and the layer's
    input [1,T,D]."""
    count = self.hc_mult
    sizes = [count, count, count * count]
    weights = F.linear(self.input_norm(hidden_streams.flatten(2).float()), self.fn.float())
    parts = zip(weights.split(sizes, -1), self.scale.unbind(0), self.base.split(sizes))
    pre, post, mixed = (weight * scale + base for weight, scale, base in parts)
    pre, post = torch.sigmoid(pre) + self.hc_eps, 2 * torch.sigmoid(post)
    mixed = torch.softmax(mixed.unflatten(-1, (count, count)), -1) + self.hc_eps
    mixed = torch.ops.adaptc.sinkhorn(mixed, self.hc_sinkhorn_iters, self.hc_eps)
    return post, mixed, (pre.unsqueeze(-1) * hidden_streams).sum(2).to(hidden_streams.dtype)


def example(module: Any, tokens: int) -> tuple[tuple, dict[str, Any]]:
    """A module of the same class with few, small streams, and what its forward is given."""
    one = type(module).__new__(type(module))
    torch.nn.Module.__init__(one)
    one.hc_mult, one.hc_sinkhorn_iters, one.hc_eps = STREAMS, ITERATIONS, 1e-3
    rows = STREAMS * (2 + STREAMS)
    for name, shape in (("fn", (rows, STREAMS * WIDTH)), ("base", (rows,)), ("scale", (3,))):
        setattr(one, name, torch.nn.Parameter(torch.randn(shape), requires_grad=False))
    object.__setattr__(one, "input_norm", lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))
    return (one, torch.randn(1, tokens, STREAMS, WIDTH)), {}


def compared(args: tuple, result: Any) -> torch.Tensor:
    """All results."""
    return torch.cat([part.flatten() for part in result])
