"""Compile options: what they default to and what they refuse."""

from __future__ import annotations

import pytest

from adaptc.errors import OptionError
from adaptc.formats import CHOICES as FORMAT_CHOICES
from adaptc.options import CHOICES, CompileOptions


def test_defaults_are_valid_and_round_trip():
    options = CompileOptions()
    assert CompileOptions.of(options.to_dict()) == options
    assert CompileOptions.of({"weights": "int4", "page_size": 1}) == CompileOptions(weights="int4", page_size=1)


def test_weight_choices_are_the_formats_ones():
    assert CHOICES["weights"] == ("auto", *FORMAT_CHOICES)


@pytest.mark.parametrize("options,message", [
    ({"weights": "int3"}, "unknown value for weights 'int3'; valid values are: auto, f32, bf16, int8, int4."),
    ({"activations": "bf16"}, "unknown value for activations 'bf16'; valid values are: f32, int8."),
    ({"kv": "fp8"}, "unknown value for kv 'fp8'; valid values are: auto, f32, f16, bf16, int8."),
    ({"kv": None}, "unknown value for kv None"),
    ({"page_size": 0}, "page_size must be an integer from 1 to 2147483647, got 0."),
    ({"page_size": True}, "page_size must be an integer from 1 to 2147483647, got True."),
    ({"max_step_tokens": 1.5}, "max_step_tokens must be an integer from 1 to 2147483647, got 1.5."),
    ({"max_requests": "8"}, "max_requests must be an integer from 1 to 2147483647, got '8'."),
    ({"max_context": -1}, "max_context must be an integer from 0 to 2147483647, got -1."),
    ({"page_size": 2**31}, "page_size must be an integer from 1 to 2147483647, got 2147483648."),
    ({"level": 3}, "level must be a name, got 3."),
    ({"pagesize": 4}, "unknown compile option 'pagesize'; valid values are: weights, activations, kv, page_size"),
])
def test_refused(options, message):
    with pytest.raises(OptionError) as error:
        CompileOptions.of(options)
    assert message in str(error.value)


@pytest.mark.parametrize("kv,activations,dtype", [
    ("auto", "f32", "f32"), ("auto", "int8", "f16"), ("bf16", "int8", "bf16"), ("f32", "int8", "f32"), ("int8", "f32", "int8"),
])
def test_cache_dtype_follows_activations_unless_said(kv, activations, dtype):
    assert CompileOptions(kv=kv, activations=activations).kv_dtype == dtype
