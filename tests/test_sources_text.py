"""Tokenizers, templates and stop tokens, against transformers' own tokenizers."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import tiny_gguf
from tokenizers import Tokenizer

from adaptc.errors import InputError, UnsupportedError
from adaptc.sources import TextBundle, open_source

TRICKY = (
    "Hello world", "  two leading spaces", "\n\nnew\nlines\r\n\ttabs   ", "naïve café — “quotes” … 日本語のテキスト 🤖👩‍👩‍👧",
    "123456 3.14159 0x7F 12abc34", "<|im_start|>user\nhi<|im_end|>\n<bos><start_of_turn>model\n<end_of_turn>x<eos>", "",
    "a" * 40, " \u00a0\u3000x\u200b", "don't WE'LL I'm", "if x:\n        return y  # 4\n", "▁literal▁ underscore",
    "e\u0301 vs é \x00\x07", "[multimodal] <unused5> <repo_name>",
)

# AutoTokenizer.from_pretrained(..., gguf_file="gemma-3-270m-q4_k_m.gguf") of transformers 5.24.0, which takes 15 s.
GEMMA_IDS = (
    (2, 9259, 1902,),
    (2, 138, 13498, 5830, 9952,),
    (2, 108, 1951, 107, 8721, 251, 107, 255968, 39218, 139,),
    (2, 1789, 238527, 560, 33443, 2192, 999, 52231, 236919, 7881, 33375, 238582, 236945, 95830, 236743, 246143,
     243767, 237243, 243767, 237243, 244814,),
    (2, 236770, 236778, 236800, 236812, 236810, 236825, 236743, 236800, 236761, 236770, 236812, 236770, 236810,
     236819, 236743, 236771, 236781, 236832, 236811, 236743, 236770, 236778, 28180, 236800, 236812,),
    (2, 236820, 236909, 548, 236779, 3041, 111038, 2364, 107, 2202, 236820, 236909, 548, 236779, 643, 111038,
     107, 2, 105, 4368, 107, 106, 236781, 1,),
    (2,),
    (2, 128820, 128820, 128820, 128820, 128820,),
    (2, 236743, 432, 398, 465, 366, 366, 236781, 237141,),
    (2, 13246, 236789, 236745, 19716, 236789, 2182, 564, 236789, 236757,),
    (2, 584, 1123, 236787, 107, 144, 2060, 570, 138, 236865, 236743, 236812, 107,),
    (2, 37087, 138, 139158,),
    (2, 236744, 238288, 7728, 1559, 236743, 238, 245,),
    (2, 5, 236743, 11, 655, 30050, 236779, 1201, 236813,),
)


def tokenizer(text: TextBundle) -> Tokenizer:
    return Tokenizer.from_str(text.tokenizer_json.decode())


@pytest.fixture(scope="module")
def smollm2_text(smollm2_gguf) -> TextBundle:
    return open_source(smollm2_gguf).text()


def test_smollm2_ids_are_those_of_transformers(smollm2_gguf, smollm2_text):
    from transformers import AutoTokenizer

    text = smollm2_text
    ours = tokenizer(text)
    theirs = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    for sample in TRICKY:
        ids = ours.encode(sample).ids
        assert ids == theirs(sample)["input_ids"], sample
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert text.info.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert (text.info.bos_id, text.info.add_bos) == (1, False)
    assert text.chat_template == theirs.chat_template and "<|im_end|>" in text.chat_template
    assert text.info.stop_ids == (2,)
    assert text == open_source(smollm2_gguf).text()


def test_gemma_ids_are_those_of_transformers(gemma3_gguf):
    text = open_source(gemma3_gguf).text()
    ours = tokenizer(text)
    for sample, ids in zip(TRICKY, GEMMA_IDS, strict=True):
        assert ours.encode(sample).ids == list(ids), sample
    assert text.info.special_tokens == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert (text.info.bos_id, text.info.add_bos) == (2, True)
    assert text.chat_template is None and text.info.stop_ids == (1,)


def vocabulary(**changes):
    tokens = ["<unk>", "<s>", "</s>", "<|eot_id|>", "<|im_end|>", *map(chr, range(97, 123)), "ab"]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [3] * 5 + [1] * (len(tokens) - 5), "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, **changes,
    }


def gguf_text(tmp_path, **changes) -> TextBundle:
    return open_source(tiny_gguf.write(tmp_path / "m.gguf", raw_metadata=vocabulary(**changes))).text()


def test_stop_ids_are_the_end_tokens_of_metadata_and_template(tmp_path):
    assert gguf_text(tmp_path).info.stop_ids == (2,)
    assert gguf_text(tmp_path, **{"tokenizer.ggml.eot_token_id": 3}).info.stop_ids == (2, 3)
    text = gguf_text(tmp_path, **{"tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>"})
    assert text.info.stop_ids == (2, 4) and text.chat_template.endswith("<|im_end|>")


@pytest.mark.parametrize("add", [True, False])
def test_the_start_token_is_added_when_the_file_says_so(tmp_path, add):
    text = gguf_text(tmp_path, **{"tokenizer.ggml.add_bos_token": add})
    assert text.info.add_bos is add
    assert tokenizer(text).encode("abc").ids == ([1] if add else []) + [31, 7]


def test_files_without_tokenizer(tmp_path):
    assert open_source(tiny_gguf.write(tmp_path / "m.gguf")).text() == TextBundle()


def test_an_unknown_rule_for_splitting_text_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="splits text by the rule 'bailingmoe', .*it knows .*llama-bpe.*smollm"):
        gguf_text(tmp_path, **{"tokenizer.ggml.pre": "bailingmoe"})


def test_digits_are_split_one_by_one_where_the_file_says_so(tmp_path):
    digits = {"tokenizer.ggml.tokens": [*vocabulary()["tokenizer.ggml.tokens"], "1", "2", "12"],
              "tokenizer.ggml.merges": ["a b", "1 2"], "tokenizer.ggml.token_type": [3] * 5 + [1] * 30}
    assert len(tokenizer(gguf_text(tmp_path, **digits)).encode("12").ids) == 1
    assert len(tokenizer(gguf_text(tmp_path, **digits, **{"tokenizer.ggml.pre": "smollm"})).encode("12").ids) == 2


@pytest.mark.parametrize("changes", [
    {"tokenizer.ggml.model": "wordpiece"},
    {"tokenizer.ggml.eos_token_id": 1 << 20},
    {"tokenizer.ggml.merges": ["a zz"]},
])
def test_damaged_vocabularies(tmp_path, changes):
    with pytest.raises(InputError, match="tokenizer in m.gguf can't be built"):
        gguf_text(tmp_path, **changes)


@pytest.fixture
def folder(tmp_path, smollm2_text):
    """A Hugging Face folder with SmolLM2's tokenizer, as save_pretrained writes it."""
    import torch
    from safetensors.torch import save_file
    from transformers import PreTrainedTokenizerFast

    text = smollm2_text
    saved = PreTrainedTokenizerFast(tokenizer_object=tokenizer(text), **text.info.special_tokens)
    saved.chat_template = text.chat_template
    saved.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_folder_gives_what_its_files_say(folder, smollm2_text):
    source, original = open_source(folder), smollm2_text
    text = source.text()
    assert (text.chat_template, text.info) == (original.chat_template, replace(original.info, stop_ids=(0, 2, 5)))
    assert [tokenizer(text).encode(sample).ids for sample in TRICKY] == [
        tokenizer(original).encode(sample).ids for sample in TRICKY
    ]
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} <= set(source.hashes)


def test_a_damaged_tokenizer_is_named(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": 3}')
    with pytest.raises(InputError, match=f"the tokenizer of {folder.name} can't be read"):
        open_source(folder).text()


def test_a_damaged_stop_id_is_named(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ["x"]}))
    with pytest.raises(InputError, match=r"generation_config.json has eos_token_id = \['x'\]"):
        open_source(folder).text()


def test_a_folder_without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    assert open_source(folder).text() == TextBundle()


def test_of_templates_by_name_the_one_for_tools_is_taken_with_tools(tmp_path):
    """Command-R's kind: as transformers chooses, blanks and line ends at the templates' ends included."""
    import tiny_models
    from transformers import AutoTokenizer

    from adaptc.runtime.text import ChatTemplate

    folder = tiny_models.write(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"default": "  \n{% for m in messages %}{{ m.content }}\n{% endfor %}  \n",
             "tool_use": "\n  {{ tools | tojson }}{% if true %}\n{% endif %}\n\n", "rag": "never"}
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = ChatTemplate(open_source(folder).text().chat_template)
    chat, tools = [{"role": "user", "content": "Hi"}], [{"type": "function"}]
    for given in (None, tools):
        wanted = theirs.apply_chat_template(chat, tools=given, tokenize=False, add_generation_prompt=True)
        assert ours.render(chat, tools=given) == wanted
