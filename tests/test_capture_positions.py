"""What a token's place in its sequence decides: rows of tables, and counts of the tokens before it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_capture import close, logits, tokens_of, weights
from test_capture_errors import SMALL, error, llama
from torch.nn.functional import embedding
from transformers import AutoModelForCausalLM, BertConfig, LlamaConfig, RobertaConfig

from adaptc.backends.reference.interpreter import Reference
from adaptc.capture import capture_module
from adaptc.ir.build import short_name

CONTEXT = SMALL["max_position_embeddings"]

FUNCTIONS = {
    "table": lambda m, x: x + m.table[:, : x.shape[1]],
    "columns": lambda m, x: x * m.table[0].t()[:, : x.shape[1]].t(),
    "table_from_its_third_row": lambda m, x: x + m.table[0, 2 : x.shape[1] + 2],
    "parameter": lambda m, x: x + m.rows[: x.shape[1]],
    "numbers": lambda m, x: x + embedding(m.numbers[:, : x.shape[1]], m.rows),
    "other_numbers": lambda m, x: x + embedding(m.others[: x.shape[1]], m.rows),
    "types": lambda m, x: x + embedding(m.types.expand(1, -1).gather(1, m.numbers[:, : x.shape[1]]), m.rows),
    "gather": lambda m, x: x * m.table[0, :, 0].gather(0, torch.arange(x.shape[1]))[:, None],
    "index": lambda m, x: x + m.table[0][torch.arange(x.shape[1])[None]],
    "index_of_columns": lambda m, x: x * m.table[0].t()[:, torch.arange(x.shape[1])].t(),
    "index_select": lambda m, x: x + m.table.index_select(1, torch.arange(x.shape[1])),
    "range_from_two": lambda m, x: x + embedding(torch.arange(2, x.shape[1] + 2), m.rows),
    "count": lambda m, x: x * (x[..., 0] > 0).int().cumsum(1)[..., None],
    "places_of_those_that_count": lambda m, x: x + embedding(
        (x[..., 0] > 0).long().cumsum(1) * (x[..., 0] > 0) + 1, m.rows),
}


def module_of(function) -> torch.nn.Module:
    """A model whose tables end a few rows after its context."""
    torch.manual_seed(0)
    module = llama(function)
    mixer = module.lm_head[0]
    mixer.register_buffer("table", torch.randn(1, CONTEXT + 2, 32), persistent=False)
    mixer.register_buffer("numbers", torch.arange(CONTEXT + 2)[None], persistent=False)
    mixer.register_buffer("types", torch.zeros(1, CONTEXT + 2, dtype=torch.long), persistent=False)
    mixer.register_buffer("others", torch.randperm(CONTEXT + 2), persistent=False)
    mixer.rows = torch.nn.Parameter(torch.randn(CONTEXT + 2, 32))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return module


@pytest.mark.parametrize("name", FUNCTIONS)
def test_steps_of_several_requests_continue_them(name):
    module = module_of(FUNCTIONS[name])
    program = capture_module(module, module.config)
    one, two = tokens_of(CONTEXT, 1), tokens_of(6, 2)
    wanted = logits(module, one)
    close(Reference(program, weights(module)).score(one), wanted)
    reference = Reference(program, weights(module))
    close(reference.step(one[:7], np.arange(7), np.zeros(7), [6]), wanted[6:7])
    mixed = np.concatenate([two, one[7:11]])
    positions = np.concatenate([np.arange(6), np.arange(7, 11)])
    got = reference.step(mixed, positions, np.array([1] * 6 + [0] * 4), [9, 5])
    close(got, np.stack([wanted[10], logits(module, two)[5]]))


def test_tables_of_one_value_and_of_their_own_numbers_are_not_kept():
    module = module_of(FUNCTIONS["types"])
    operators = [short_name(op) for _, op in capture_module(module, module.config).operators()]
    assert operators.count("gather_rows") == 1  # of the rows whose logits are wanted


@pytest.mark.parametrize("name", ["range_from_two", "places_of_those_that_count"])
def test_a_sequence_ends_where_a_table_does(name):
    """Whatever the configuration says."""
    module = module_of(FUNCTIONS[name])
    program = capture_module(module, LlamaConfig(**SMALL | dict(max_position_embeddings=100)))
    assert program.fact("context") == 64


@pytest.mark.parametrize("function, words", [
    (lambda m, x: x + m.table[:, : x.shape[1]] if x.shape[1] <= 20 else x, "T <= 20 is true"),
    (lambda m, x: x + m.table[:, -x.shape[1] :], "would make a token's result depend on how many others there are"),
    (lambda m, x: x + m.table[0, : x.shape[1]].sum(0), "reduce"),
    (lambda m, x: x * (x[..., 0] * 2).cumsum(1)[..., None], "ones and conditions alone"),
    (lambda m, x: x + embedding(torch.arange(1, 2 * x.shape[1], 2), m.rows), "one number for each token"),
    (lambda m, x: x + x[x[..., 0] > 0].sum(), "which only a run has"),
])  # fmt: skip
def test_what_depends_on_the_other_tokens_is_refused(function, words):
    assert words in error(module_of(function))


@pytest.mark.parametrize("config", [
    BertConfig(**SMALL, is_decoder=True),
    RobertaConfig(**SMALL, is_decoder=True, pad_token_id=1),
])  # fmt: skip
def test_decoders_of_encoders_families_count_as_their_authors_do(config):
    """Roberta counts the tokens that aren't padding: a prompt may hold those that are."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    program = capture_module(module, config)
    tokens = tokens_of(30, 3)
    tokens[[0, 4, 5, 17]] = 1
    for chunk in (30, 1, 7):
        close(Reference(program, weights(module)).score(tokens, chunk), logits(module, tokens))
