"""Recurrences: each restatement gives what the authors' own torch code gives, at decays and steps of time that models
have, within chunks, across their bounds and for lengths that no chunk divides. Code that only has the name stays."""

from __future__ import annotations

import functools
from unittest import mock

import numpy as np
import pytest
import torch

from adaptc.capture import block_index, hooks, pooled_index, recurrence
from adaptc.capture.scans import CHUNK, SCANS
from adaptc.errors import CaptureError
from adaptc.ops.mixing import FixedState
from adaptc.ops.table import row
from adaptc.protocol import StateSpec

torch.set_num_threads(1)

LENGTHS = (1, 5, CHUNK, 2 * CHUNK, 2 * CHUNK + 5)


@pytest.fixture(scope="module", autouse=True)
def operators() -> None:
    hooks.operators()


def mlstm(file):
    return functools.partial(
        file.wrap_chunkwise_arbitrary_sequence_length, eps=1e-6,
        mlstm_chunkwise_kernel=file.mlstm_chunkwise_native_autograd,
        mlstm_sequence_kernel=file.mlstm_recurrent_sequence_native, mlstm_step_kernel=file.mlstm_recurrent_step_native)


AUTHORS = {
    "chunk_gated_delta_rule": ("qwen3_5", lambda file: file.torch_chunk_gated_delta_rule),
    "chunk_kda": ("kimi_linear", lambda file: file.chunk_kimi_delta_attention),
    "selective_scan_fn": ("mamba", lambda file: file.mamba_selective_scan),
    "mamba_chunk_scan_combined": ("mamba2", lambda file: file.mamba2_chunk_scan),
    "rwkv_linear_attention": ("rwkv", lambda file: file.rwkv_linear_attention),
    "wrap_chunkwise_arbitrary_sequence_length": ("xlstm", mlstm),
    "_rnn_scan": ("recurrent_gemma", lambda file: file.RecurrentGemmaRglru._rnn_scan),
    "decay_factors": ("minimax", lambda file: file.MiniMaxLightningAttention.forward),
    block_index.PARTS: ("minimax_m3_vl", lambda file: file.MiniMaxM3VLIndexer.forward),
    pooled_index.PARTS: ("qwen4_exp", lambda file: file.Qwen4ExpTextQSAIndexer.forward),
    "prepare_dynamic_mask": ("doge", lambda file: file.DogeAttention.prepare_dynamic_mask),
}
"""Name → the file of transformers that has it, and the authors' function."""

OWNERS = {"decay_factors": "MiniMaxLightningAttention", block_index.PARTS: "MiniMaxM3VLIndexer",
          pooled_index.PARTS: "Qwen4ExpTextQSAIndexer"}
"""Name → the class whose forward it is, where an example is made of one."""


def file_of(name):
    family = AUTHORS[name][0]
    return __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["x"])


@pytest.mark.parametrize("t", LENGTHS)
@pytest.mark.parametrize("name", SCANS)
def test_a_restatement_gives_what_the_authors_code_gives(name, t):
    file = file_of(name)
    kind = OWNERS.get(name) and getattr(file, OWNERS[name])
    owner = kind and kind.__new__(kind)
    torch.manual_seed(t)
    args, keywords = SCANS[name].example(owner, t)
    with torch.no_grad():
        wanted, got = (f(*args, **keywords) for f in (AUTHORS[name][1](file), SCANS[name].restated))
    wanted, got = (SCANS[name].compared(args, x) for x in (wanted, got))
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    assert torch.isfinite(wanted).all() and wanted.abs().max() > 1e-3
    np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=2e-5, atol=2e-5 * float(wanted.abs().max()))


def small(**keys):
    from transformers import RwkvConfig, RwkvForCausalLM

    with torch.device("meta"):
        return RwkvForCausalLM(RwkvConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, **keys))


def other(time_decay, time_first, key, value, state=None, return_state=False):
    """By RWKV's name and of its shape, but with decays of its own."""
    return key * value, None


def test_code_of_a_scans_name_that_computes_something_else_stays():
    from transformers.models.rwkv import modeling_rwkv as file

    own, module = file.rwkv_linear_attention, small()
    with recurrence.installed(module):
        assert file.rwkv_linear_attention is SCANS["rwkv_linear_attention"].restated
    assert file.rwkv_linear_attention is own
    other.__name__ = "rwkv_linear_attention"
    with mock.patch.object(file, "rwkv_linear_attention", other), recurrence.installed(module):
        assert file.rwkv_linear_attention is other


def scaled(time_decay, time_first, key, value, state=None, return_state=False, scale=1.0):
    """RWKV's own with an argument more."""
    return SCANS["rwkv_linear_attention"].restated(time_decay, time_first, key, value)[0] * scale, None


def test_arguments_that_a_restatement_lacks_are_refused():
    from transformers.models.rwkv import modeling_rwkv as file

    scaled.__name__ = "rwkv_linear_attention"
    args, _ = SCANS["rwkv_linear_attention"].example(None, 5)
    with mock.patch.object(file, "rwkv_linear_attention", scaled), recurrence.installed(small()):
        torch.testing.assert_close(file.rwkv_linear_attention(*args)[0], scaled(*args)[0])
        with pytest.raises(CaptureError, match="rwkv_linear_attention is given scale"):
            file.rwkv_linear_attention(*args, scale=0.5)


class Griffin(torch.nn.Module):
    """RecurrentGemma's recurrence, times an attribute."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def _rnn_scan(self, *args):
        return SCANS["_rnn_scan"].restated(self, *args)[0] * self.factor, None


def test_a_method_is_tried_on_each_module():
    one, other = Griffin(1.0), Griffin(0.5)
    with recurrence.installed(torch.nn.ModuleList([one, other])):
        assert "_rnn_scan" in vars(one) and "_rnn_scan" not in vars(other)


@pytest.mark.parametrize("name", ["convolve", "recur", "recur_before", "recur_delta", "running_max"])
def test_the_operators_written_out_mean_what_their_rows_mean(name):
    """What examples are computed with, against the oracle."""
    operator, _, how = name.partition("_")
    operator = name if name == "running_max" else operator
    rng = np.random.default_rng(0)
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    t, heads, k, v = 9, 3, 4, 5
    operands, part, attrs, last = {
        "convolve": ((f(t, 6), f(6, 3)), ("window", 2, 6), {}, f(6)),
        "recur": ((f(t, heads, k), f(t, heads, k), f(t, heads, v), -np.abs(f(t, heads, k))), ("state", heads, k * v),
                  {"read": "before" if how == "before" else "after"}, f(t, heads) if how == "delta" else None),
        "running_max": ((f(t, 6), -np.abs(f(t, 6))), ("max", 1, 6), {}, None),
    }[operator]
    places = (np.arange(t, dtype=np.int32), np.zeros(t, np.int32), FixedState(StateSpec.fixed(*part)))
    extra = [] if last is None else [last]
    (wanted,) = row(operator).meaning(row(operator).complete(attrs), *operands, *places, *extra)
    tensors = [torch.from_numpy(x) if operator == "convolve" and i == 1 else torch.from_numpy(x)[None]
               for i, x in enumerate(operands)]
    more = [] if operator == "running_max" else [
        None if last is None else torch.from_numpy(last) if operator == "convolve" else torch.from_numpy(last)[None]]
    got = getattr(torch.ops.adaptc, operator)(*tensors, *more, *attrs.values())
    np.testing.assert_allclose(got[0].numpy(), wanted, rtol=1e-5, atol=1e-5)
