"""Writes into memory as operators that make new tensors: the graph gives what the module gives, without a new trace."""

import pytest
import torch

from adaptc.capture.functional import functional, writes


def scales_in_place(x, y):
    z = x * 2
    z.div_(y)
    return z + 1


def fills_a_slice(x, y):
    z = torch.zeros_like(x)
    z[:, 1:3] = y[:, :2]
    z[:, 3:] = 7
    return z


def writes_a_view_twice(x, y):
    """The second write goes into a view that was made before the first: both reach the whole."""
    z = x * 2
    row = z[0]
    row[::2] = y[1, ::2]
    row[1::3] = y[2, 1::3]
    return z, row, z[0] + z[1]


def chooses(x, y):
    mask = torch.zeros_like(x)
    mask.scatter_(1, x.topk(2, dim=1).indices, 1)
    return mask * y


def of_another_type(x, y):
    counts = (x > 0).to(torch.int64)
    counts.add_(1)
    z = y.to(torch.float64)
    z.mul_(x)
    return counts, z


KEPT = [scales_in_place, fills_a_slice, writes_a_view_twice, chooses]


def through_a_view(x, y):
    z = x * 2
    columns = z.t()
    z.mul_(y)
    return columns + 1


def into_a_transposed_view(x, y):
    z = x * 2
    z.t()[0] = y[:, 0]
    return z


def changes_what_it_is_given(x, y):
    x[0] = y[0]
    return x + 1


def narrower(x, y):
    z = (x * 2).half()
    z.add_(y)
    return z


TORCHS = [of_another_type, through_a_view, into_a_transposed_view, changes_what_it_is_given, narrower]


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x, y):
        return self.function(x, y)


@pytest.mark.parametrize("function", [*KEPT, *TORCHS])
def test_writes_are_as_if_they_were_done(function, monkeypatch):
    torch.manual_seed(0)
    given = torch.randn(4, 5), torch.randn(4, 5)
    exported = torch.export.export(Module(function), given, strict=False)
    traced, anew = [], torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions",
                        lambda self, table: traced.append(table) or anew(self, table))
    assert any(map(writes, exported.graph.nodes))
    made = functional(exported)
    assert not any(map(writes, made.graph.nodes)) and bool(traced) == (function in TORCHS)
    wanted = function(*(x.clone() for x in given))
    found = made.module(check_guards=False)(*(x.clone() for x in given))
    for one, other in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(wanted)):
        assert one.dtype == other.dtype and torch.equal(one, other)
