"""What turns text into tokens and back: as data that needs no transformers, taken from transformers' own tokenizers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from adaptc.artifact_format import TextInfo
from adaptc.errors import InputError, UnsupportedError
from adaptc.models import gguf as rules


@dataclass(frozen=True)
class TextBundle:
    """A model's tokenizer, and what goes with it into an artifact.

    tokenizer_json  for the ``tokenizers`` library; b"" for a model without tokenizer. Its post-processor adds what the
                    authors' tokenizer adds when special tokens are asked for (``encode(add_special_tokens=True)``);
                    ``info.add_bos`` is whether that includes BOS at the start
    """

    tokenizer_json: bytes = b""
    chat_template: str | None = None
    info: TextInfo = TextInfo()

    def to_bytes(self) -> bytes:
        """One line of JSON, then the tokenizer's own."""
        rest = {"chat_template": self.chat_template, "info": asdict(self.info)}
        return json.dumps(rest).encode() + b"\n" + self.tokenizer_json

    @staticmethod
    def from_bytes(data: bytes) -> "TextBundle":
        """What ``to_bytes`` was called on."""
        line, _, tokenizer = data.partition(b"\n")
        rest = json.loads(line)
        return TextBundle(tokenizer, rest["chat_template"], TextInfo.from_json(json.dumps(rest["info"]).encode()))


def bundle(tokenizer: Any, stop_ids: Iterable[int | None]) -> TextBundle:
    """The text bundle of a transformers tokenizer backed by the ``tokenizers`` library, with further stop ids."""
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    added = json.loads(text := backend.to_str())["added_tokens"]
    special = {token["content"]: token["id"] for token in added if token["special"]}
    template = _one_template(tokenizer.chat_template)
    stops = {tokenizer.eos_token_id, *stop_ids}
    stops |= {special[token] for token in rules.END_OF_TURN if template and token in template and token in special}
    first = backend.encode("", add_special_tokens=True).ids[:1]
    info = TextInfo(
        bos_id=special.get(tokenizer.bos_token),
        add_bos=tokenizer.bos_token_id is not None and first == [tokenizer.bos_token_id],
        stop_ids=tuple(sorted(id for id in stops if id is not None)),
        special_tokens={k: v for k in ("bos_token", "eos_token") if (v := getattr(tokenizer, k)) is not None},
    )
    return TextBundle(text.encode("utf-8"), template, info)


def _one_template(template: str | Mapping[str, str] | None) -> str | None:
    """A tokenizer's chat template; of several by name, one that does what transformers does: "tool_use" when tools are
    given, else "default". None when there is none for plain chats."""
    if not isinstance(template, Mapping):
        return template
    default, tools = template.get("default"), template.get("tool_use")
    if default is None or tools is None:
        return default
    # the + keeps blanks and line ends beside the tags, as they are at a text's ends; jinja drops one final line end
    return "".join(("{%+ if tools +%}", tools.removesuffix("\n"), "{%+ else +%}", default.removesuffix("\n"),
                    "{%+ endif +%}"))  # fmt: skip


def gguf_bundle(architecture: str, metadata: Mapping[str, Any], name: str) -> TextBundle:
    """The text bundle of a GGUF file's metadata, by transformers' conversion. InputError when it can't be built."""
    from transformers import TokenizersBackend
    from transformers.integrations.gguf import convert_gguf_tokenizer

    if "tokenizer.ggml.tokens" not in metadata:
        return TextBundle(chat_template=metadata.get("tokenizer.chat_template"))
    stated, options = (_renamed(metadata, group) for group in ("tokenizer", "tokenizer_config"))
    split = _splitter(stated, name)
    try:
        if stated.get("tokenizer_type") == "llama":
            options.setdefault("add_bos_token", True)  # llama.cpp's default for SentencePiece vocabularies
        for token, key in _SPECIAL.items():
            index = metadata.get(f"tokenizer.ggml.{key}")
            options[token] = None if index is None else stated["tokens"][index]
        backend, extra = convert_gguf_tokenizer(architecture, stated)
        if split is not None:
            backend.pre_tokenizer = split
        tokenizer = TokenizersBackend(tokenizer_object=backend, **options, **extra)
        stops = [metadata.get(f"tokenizer.ggml.{key}") for key in _STOPS]
        return bundle(tokenizer, stops)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise InputError(f"the tokenizer in {name} can't be built: {error}.", hint="The file is damaged.") from error


_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_keys() -> set[str]:
    """Metadata keys of GGUF files that ``gguf_bundle`` reads."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    read = {f"tokenizer.{key}" for group in GGUF_TOKENIZER_MAPPING.values() for key in group}
    return read | {f"tokenizer.ggml.{key}" for key in (*_SPECIAL.values(), *_STOPS)}


def _renamed(metadata: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Metadata under transformers' names for it; arrays of numbers as lists."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    names = {f"tokenizer.{key}": name for key, name in GGUF_TOKENIZER_MAPPING[group].items()}
    found = {name: metadata[key] for key, name in names.items() if key in metadata}
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in found.items()}


def _splitter(stated: Mapping[str, Any], name: str) -> Any:
    """The pre-tokenizer that transformers' conversion would miss; UnsupportedError for one that nobody here knows.

    An unknown one would be read as GPT-2's, which cuts text at other places than the authors' tokenizer does.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    kind = stated.get("pre_tokenizer_type", "default")
    if stated.get("tokenizer_type") != "gpt2":
        return None
    if kind in rules.DIGIT_SPLITTERS:
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    known = {"default", *rules.GPT2_SPLITTERS, *GGUF_PRE_TOKENIZER_SPLITS}
    if kind not in known:
        raise UnsupportedError(
            f"{name} splits text by the rule {kind!r}, which adaptc doesn't know; it knows "
            f"{', '.join(sorted(known | set(rules.DIGIT_SPLITTERS)))}.",
            hint="Compile the model from its Hugging Face folder instead.",
        )
    return None
