"""Tokenizers, chat templates, streaming detokenisation, stop strings."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_text import byte_fallback_tokenizer, byte_level_tokenizer

from adaptc.artifact_format import TextInfo
from adaptc.errors import ArtifactError, RequestError
from adaptc.runtime.text import ChatTemplate, Detokenizer, StopStrings, Tokenizer

KINDS = {"byte level": byte_level_tokenizer, "byte fallback": byte_fallback_tokenizer}
TEXTS = [
    "Hello world",
    "  two  spaces ",
    "naïve café — “quotes”",
    "日本語のテキスト",
    "👩‍👩‍👧‍👦 family 👍🏽",
    "tabs\t\nand lines\n",
    "",
    "a",
]


def tokenizer(kind="byte level", **info) -> Tokenizer:
    return Tokenizer(KINDS[kind](), TextInfo(**info))


def streamed(tok: Tokenizer, ids) -> list[str]:
    stream = Detokenizer(tok)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_streaming(kind, text):
    tok = tokenizer(kind)
    ids = tok.encode(text)
    pieces = streamed(tok, ids)
    assert "".join(pieces) == tok.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_tokens_stream_to_what_they_decode_to(kind, data):
    """Also broken characters, special tokens in the middle, spaces at odd places. Byte fallback alone looks back: a bad
    byte makes replacements of all bytes in its run, also of characters given out before."""
    tok = tokenizer(kind)
    size = tok._tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    text = tok.decode(ids)
    assert "".join(streamed(tok, ids)) == text or (kind == "byte fallback" and "\ufffd" in text)


def test_a_character_comes_whole():
    tok = tokenizer()
    ids = tok.encode("👍")
    assert len(ids) == 4 and streamed(tok, ids) == ["", "", "", "👍", ""]
    assert streamed(tok, ids[:2])[-1] == "\ufffd"


def test_special_tokens_are_not_text():
    tok = tokenizer()
    ids = tok.encode("a<|end|>b")
    assert len(ids) == 3 and tok.decode(ids) == "ab" and "".join(streamed(tok, ids)) == "ab"


def test_bos_once():
    tok = tokenizer(bos_id=0, add_bos=True)
    assert tok.encode("a")[0] == 0 and tok.encode("a").count(0) == 1
    assert tok.encode("<s>a") == tok.encode("a")
    assert tok.encode("") == [0]
    assert tokenizer(bos_id=0).encode("a") == tok.encode("a")[1:]


def test_what_tokenizer_json_adds_by_itself_is_off():
    data = json.loads(byte_level_tokenizer())
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    data["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tok = Tokenizer(json.dumps(data).encode(), TextInfo(bos_id=0, add_bos=True))
    assert tok.encode("a b c d e f g").count(0) == 1 and tok.decode(tok.encode("a b c d e f g")) == "a b c d e f g"


def test_a_broken_tokenizer_is_an_artifact_error():
    for raw in (b"{}", b"", b'{"version": "9.0"}'):
        with pytest.raises(ArtifactError, match="tokenizer.json can't be read by tokenizers"):
            Tokenizer(raw)


# ---- chat templates --------------------------------------------------------------------------------------------

CHATML = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
Be helpful.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}
    {% if add_generation_prompt %}
{{ '<|im_start|>assistant
' }}{% endif %}"""
RICH = """{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
{% generation %}{{ m.role }}: {{ m | tojson }}{% endgeneration %}

{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}{{ tools is none }}{{ strftime_now('%Y') | length }}"""
MESSAGES = [{"role": "user", "content": "Hi <b>é</b>"}, {"role": "tool", "content": "x"},
            {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "never"}]  # fmt: skip


def test_templates_render_as_the_published_ones_expect():
    assert ChatTemplate(CHATML).render(MESSAGES[:1]) == (
        "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nHi <b>é</b><|im_end|>\n<|im_start|>assistant\n"
    )
    text = ChatTemplate(RICH, {"bos_token": "<s>"}).render(MESSAGES)
    assert text.startswith('<s>user: {"role": "user", "content": "Hi <b>é</b>"}') and "never" not in text
    assert text.endswith("True4")


def test_templates_render_as_transformers_does():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    for source in (CHATML, RICH):
        for prompt in (False, True):
            expected, _ = utils.render_jinja_template(
                [MESSAGES], chat_template=source, add_generation_prompt=prompt, bos_token="<s>"
            )
            template = ChatTemplate(source, {"bos_token": "<s>"})
            assert template.render(MESSAGES, add_generation_prompt=prompt) == expected[0]


def test_templates_are_untrusted():
    def render(source):
        return ChatTemplate(source).render([{"role": "user", "content": "x"}])

    for attack in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
                   "{% set x = messages[0].update({'role': 'x'}) %}",
                   "{{ raise_exception.__globals__['json'] }}"):  # fmt: skip
        with pytest.raises(RequestError):
            render(attack)
    assert render("{{ raise_exception.__globals__ }}") == ""


def test_a_templates_refusal_is_told():
    template = ChatTemplate("{% if messages[0].role == 'system' %}{{ raise_exception('No system role!') }}{% endif %}")
    with pytest.raises(RequestError, match="No system role!"):
        template.render([{"role": "system", "content": "x"}])
    with pytest.raises(RequestError, match="template does not take these messages"):
        ChatTemplate("{{ messages[0].content + 'x' }}").render([{"role": "user", "content": None}])
    with pytest.raises(ArtifactError, match="chat_template.jinja"):
        ChatTemplate("{% if %}")


def test_bos_of_the_template_is_not_doubled():
    tok = tokenizer(bos_id=0, add_bos=True)
    text = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"}).render([{"content": "a"}])
    assert tok.encode(text) == tok.encode("a")


# ---- stop strings ----------------------------------------------------------------------------------------------


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_stop_strings_cut_the_same_wherever_pieces_end(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    stream, given_, at = StopStrings(stops), "", 0
    for piece in pieces:
        given_ += stream.push(piece)
        at += len(piece)
        if stream.found:
            break
        assert not any(stop in given_ for stop in stops)
        tail = text[len(given_) : at]
        assert text.startswith(given_) and (not tail or any(s.startswith(tail) for s in stops))
    given_ += stream.flush()
    hits = [text.find(s, 0, at) for s in stops if s in text[:at]]
    assert stream.found == bool(hits)
    assert given_ == (text[: min(hits)] if hits else text)


def test_text_that_can_be_no_stop_is_not_held():
    stream = StopStrings(["</end>"])
    assert [stream.push(p) for p in ("ab", "c<", "/e", "x", "</", "end>tail", "more")] == \
        ["ab", "c", "", "</ex", "", "", ""]  # fmt: skip
    assert stream.found and stream.flush() == ""


def test_a_real_tokenizer_and_template(smollm2_gguf):
    sources = pytest.importorskip("adaptc.sources")
    found = sources.open_source(smollm2_gguf).text()
    bos = found.special_tokens[found.bos_token]
    tok = Tokenizer(found.tokenizer_json, TextInfo(bos, found.add_bos, found.stop_ids))
    for text in (*TEXTS, *(TEXTS[4] + t for t in TEXTS), "def f(x):\n\treturn  x ** 2  # naïve\n" * 3):
        pieces = streamed(tok, ids := tok.encode(text))
        assert "".join(pieces) == tok.decode(ids) == text and not any("\ufffd" in piece for piece in pieces)
    template = ChatTemplate(found.chat_template, {"bos_token": found.bos_token, "eos_token": found.eos_token})
    chat = template.render([{"role": "user", "content": "Hi"}])
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tok.encode(chat)
    assert ids.count(bos) == 3 and tok.decode(ids).endswith("user\nHi\nassistant\n")  # <|im_start|> is its BOS
    assert found.special_tokens["<|im_end|>"] in tok.info.stop_ids
