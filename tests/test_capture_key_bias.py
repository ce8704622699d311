"""A mask of the largest numbers of keys, taken apart: columns of queries and keys, and rows that are read."""

from __future__ import annotations

import pytest
import torch

from adaptc.capture import hooks
from adaptc.capture.key_bias import KeyBias
from adaptc.errors import CaptureError

HEADS, KEY_HEADS, TOKENS, WIDTH, KEPT = 6, 3, 13, 8, 4


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    hooks.operators()


def bias():
    torch.manual_seed(0)
    return KeyBias(torch.randn(1, KEY_HEADS, TOKENS), torch.zeros(1, 1, TOKENS, TOKENS), KEPT,
                   (1, KEY_HEADS, TOKENS, TOKENS))


def repeated(mask):
    """For query heads, as transformers' ``repeat_kv`` does it."""
    one, heads, rows, columns = mask.shape
    return mask[:, :, None, :, :].expand(one, heads, 2, rows, columns).reshape(one, heads * 2, rows, columns)


def test_it_is_softmax_over_the_largest_with_their_numbers_added():
    mask, (q, k, v) = bias(), (torch.randn(1, heads, TOKENS, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    future = ~torch.ones(TOKENS, TOKENS).tril().bool()
    wide = lambda x: x.repeat_interleave(2, 1)  # noqa: E731

    def of_groups(query, key, value, seen, rows):
        """[1,H,T,D] by the rows [1,T,Hkv,K] that each key head reads."""
        assert seen is mask.mask and query.shape[-1] % 8 == 0
        chosen = (rows[..., None] == torch.arange(TOKENS)).any(-2).transpose(1, 2)
        return (wide(key) @ query.transpose(-1, -2) * 0.3).transpose(-1, -2).masked_fill(~wide(chosen), -torch.inf)

    numbers = mask.numbers[:, :, None].expand(-1, -1, TOKENS, -1).masked_fill(future, -torch.inf)
    kept = torch.zeros_like(numbers).scatter(-1, numbers.topk(KEPT).indices, 1).bool() & ~future
    wanted = (q @ wide(k).transpose(-1, -2) * 0.3 + wide(numbers)).masked_fill(~wide(kept), -torch.inf)
    got = repeated(mask).attend(of_groups, q, k, v, 0.3)
    torch.testing.assert_close(got.softmax(-1) @ wide(v), wanted.softmax(-1) @ wide(v), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("use, said", [
    (lambda mask: mask[:, 0], "indexed by"), (lambda mask: mask.reshape(-1), "reshaped"),
    (lambda mask: torch.exp(mask), "given to exp"),
    (lambda mask: mask.attend(None, torch.zeros(1, 4, TOKENS, 8), torch.zeros(1, 2, TOKENS, 8), None, 1.0), "2 of keys")])
def test_another_use_is_refused_by_name(use, said):
    with pytest.raises(CaptureError, match=said):
        use(bias())
