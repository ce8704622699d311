"""What can't be captured is refused by name: operator, module and source line."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig

from adaptc.capture import capture_module
from adaptc.errors import CaptureError, InputError

torch.set_num_threads(1)

SMALL = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
             max_position_embeddings=64, num_hidden_layers=1)


class Mixer(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.conv = torch.nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x):
        return self.function(self, x)


def llama(function) -> torch.nn.Module:
    module = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.float32)
    module.lm_head = torch.nn.Sequential(Mixer(function), module.lm_head)
    return module.eval()


def error(module) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_module(module, module.config)
    return str(caught.value)


MIXERS = {
    "mean": (lambda m, x: x + x.mean(1, keepdim=True), "reduce"),
    "mean_of_all": (lambda m, x: x * x.mean(), "reduce"),
    "softmax": (lambda m, x: torch.softmax(x, 1), "reduce"),
    "view": (lambda m, x: x.reshape(1, 32, x.shape[1]).transpose(1, 2) + x, "reshape"),
    "pairs": (lambda m, x: (x @ x.transpose(1, 2)).sum(2, keepdim=True) + x, "dot_general"),
    "pairs_of_sums": (lambda m, x: (x.sum(2)[:, :, None] * x.sum(2)[:, None]).amax(2, keepdim=True) + x, "mul"),
    "contraction": (lambda m, x: (x.transpose(1, 2) @ x).sum(1)[:, None] + x, "dot_general"),
    "first_token": (lambda m, x: x + x[:, :1], "aten.slice.Tensor"),
    "last_token": (lambda m, x: x + x[:, -1:], "aten.slice.Tensor"),
    "count": (lambda m, x: x / x.shape[1], "aten.div.Tensor"),
    "embedded": (lambda m, x: torch.nn.functional.embedding(torch.arange(x.shape[1]), x[0]).unsqueeze(0), "embedding"),
    "flip": (lambda m, x: x.flip(1), "aten.flip.default"),
    "cumsum": (lambda m, x: x.cumsum(1), "aten.cumsum.default"),
    "conv": (lambda m, x: m.conv(x.transpose(1, 2)).transpose(1, 2), "aten.conv"),
    "roll": (lambda m, x: x.roll(1, 1), "aten.roll.default"),
}


@pytest.mark.parametrize("name", MIXERS)
def test_mixing_tokens_outside_attention_is_refused(name):
    function, operator = MIXERS[name]
    message = error(llama(function))
    line = function.__code__.co_firstlineno
    assert operator in message
    assert "module lm_head.0" in message
    assert re.search(rf"test_capture_errors\.py:{line}\b", message), message


def test_functions_of_one_token_and_its_position_pass():
    module = llama(lambda m, x: x * torch.arange(x.shape[1]).float()[None, :, None].cos())
    program = capture_module(module, module.config)
    assert program.stage == "captured"


def test_all_that_cannot_be_captured_is_listed_at_once():
    """An operator without a rule, one whose rule doesn't take it so, and one that mixes tokens, each in two layers."""

    def function(m, x):
        y = torch.special.i0(x) + x.topk(3, largest=False).values.sum(-1, keepdim=True)
        return torch.nn.functional.layer_norm(y + x.mean(1, keepdim=True), (32,))

    module = llama(function)
    module.lm_head = torch.nn.Sequential(Mixer(function), *module.lm_head)
    message = error(module)
    assert "3 things" in message and message.count("1 more place") == 3
    for number, words in enumerate(("1 operator.s. of this model: aten.i0.default", "aten.topk.default", "reduce"), 1):
        assert re.search(rf"\({number}\) [^:]*{words} in module lm_head.0 .test_capture_errors", message), message


def test_every_unknown_operator_is_listed():
    special = torch.special
    message = error(llama(lambda m, x: special.bessel_j0(x) + special.erfcx(x) + special.bessel_j0(x)))
    assert "2 operator(s)" in message and "1 more place" in message
    assert "special_bessel_j0" in message and "special_erfcx" in message


def test_attention_keywords_without_a_meaning_here():
    from transformers.models.llama import modeling_llama

    module = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.float32)
    original = modeling_llama.LlamaAttention.forward
    attend = lambda self, *args, **kwargs: original(self, *args, **kwargs, head_weights=torch.ones(1))  # noqa: E731
    with mock.patch.object(modeling_llama.LlamaAttention, "forward", attend):
        message = error(module)
    assert "head_weights" in message and "model.layers.0.self_attn" in message and "LlamaAttention" in message


def test_masks_of_another_kind():
    config = Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True)
    message = error(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    assert "or_mask_function" in message and "gemma3_text" in message


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_of_no_tokens(window):
    module = AutoModelForCausalLM.from_config(MistralConfig(**SMALL, sliding_window=window), dtype=torch.float32)
    assert re.search(rf"model.layers.0.self_attn .*its mask is sliding, .*no width of it, or {window}", error(module))


def test_a_context_below_zero():
    module = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), dtype=torch.float32)
    with pytest.raises(InputError, match="-5 tokens at most"):
        capture_module(module, LlamaConfig(**SMALL | dict(max_position_embeddings=-5)))


def test_hooks_are_removed_after_an_error():
    from transformers import masking_utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    error(llama(lambda m, x: x.flip(1)))
    assert "adaptc" not in ALL_ATTENTION_FUNCTIONS
    assert modeling_llama.create_causal_mask is masking_utils.create_causal_mask


def test_large_buffers():
    """Numbers are a weight that the files don't have, whichever layers have them; nothing else may be so large."""
    module = llama(lambda m, x: x + m.table[:32].to(x))
    module.lm_head = torch.nn.Sequential(Mixer(module.lm_head[0].function), *module.lm_head)
    for mixer in module.lm_head[:2]:
        mixer.register_buffer("table", torch.arange(1 << 17) / 3.0, persistent=False)
    weights = capture_module(module, module.config).weights()
    assert [w.tensor for w in weights.values() if "table" in w.name] == ["computed:lm_head.0.table"]
    for mixer in module.lm_head[:2]:
        mixer.table = mixer.table.long()
    message = error(module)
    assert "lm_head.0.table" in message and "131072" in message


class Counting(torch.nn.Module):
    """Gives another result in every forward: ``write`` says how it keeps ``seen``."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.register_buffer("seen", torch.ones(1), persistent=False)
        self.other = torch.ones(1)

    def forward(self, x):
        return self.write(self, x)


def replaced(m, x):
    m.seen = m.seen * 2
    return x * m.seen


def no_buffer(m, x):
    m.other = m.other * 2
    return x * m.other


def left_for(m, x):
    y = x * m.seen
    m.seen.copy_(x[:, -1, :1].sum())
    return y


@pytest.mark.parametrize("write", [lambda m, x: x * m.seen.add_(1), left_for, replaced, no_buffer])
def test_what_a_forward_leaves_for_the_next_one_is_refused(write):
    module = llama(None)
    module.lm_head[0] = Counting(write)
    message = error(module)
    assert "read by the next one" in message and "module lm_head.0" in message, message


def logged(m, x):
    m.seen.add_(x.sum())
    return x


def test_what_no_forward_reads_may_be_written():
    module = llama(None)
    module.lm_head[0] = Counting(logged)
    assert capture_module(module, module.config).stage == "captured"
