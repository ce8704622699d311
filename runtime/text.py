"""Text in, token ids out, and back: tokenizer, chat template, streaming detokeniser, stop strings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from adaptc.artifact_format import TextInfo
from adaptc.errors import ArtifactError, RequestError

REPLACEMENT = "\ufffd"
"""What decoders put for bytes that aren't UTF-8, as the first bytes of a character are until its last has come."""


class Tokenizer:
    """The model's own tokenizer. What it adds by itself is off: ``info`` says whether a prompt starts with BOS."""

    def __init__(self, data: bytes, info: TextInfo = TextInfo()):
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as error:  # the library raises plain Exception
            raise ArtifactError(f"tokenizer.json can't be read by tokenizers {tokenizers.__version__}: {error}.",
                                hint="Install the version named in the manifest's provenance.") from error  # fmt: skip
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.info = info

    def encode(self, text: str) -> list[int]:
        """Ids of ``text`` with BOS in front where the model wants it, once: also when the text writes it itself."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The prompt is not Unicode text: {error.reason} at character {error.start}.") from error
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self.info.add_bos and ids[:1] != [self.info.bos_id]:
            ids = [self.info.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


# ---- chat templates --------------------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant said, for training; when rendering it is its body."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str):
    raise jinja2.exceptions.TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A chat template, rendered as transformers renders it (utils/chat_template_utils.py), sandboxed."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateError as error:
            raise ArtifactError(f"chat_template.jinja can't be read: {error}.") from error
        self._special_tokens = dict(special_tokens or {})

    def render(self, messages: Sequence[Mapping], *, add_generation_prompt: bool = True, **variables) -> str:
        """The prompt that ``messages`` make. Raises RequestError with the template's own words when it refuses."""
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.exceptions.TemplateError, TypeError, KeyError, ValueError) as error:
            raise RequestError(f"The model's chat template does not take these messages: {error}.") from error


# ---- streaming -------------------------------------------------------------------------------------------------


class Detokenizer:
    """Turns tokens into text as they come. The pieces joined are the text of all tokens together.

    Decoders look at neighbours (leading spaces, bytes of one character), so each token is decoded together with those
    before it, from the last place where the text was whole, and the text known already is cut off.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._whole = 0  # the window; and the tokens whose text has been given out
        self._known = ""  # text of ids[start:whole]

    def push(self, token: int) -> str:
        """The text that became certain with ``token``; "" within a character."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith(REPLACEMENT) or len(text) <= len(self._known):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """What is still held back when no token follows: the start of a character that never ended."""
        return self._emit(self._tokenizer.decode(self._ids[self._start :]))

    def _emit(self, text: str) -> str:
        piece, whole = text[len(self._known) :], len(self._ids)
        self._start = self._whole
        self._whole = whole
        self._known = self._tokenizer.decode(self._ids[self._start : whole])
        return piece


class StopStrings:
    """Cuts a stream of pieces before the first stop string, also one that spans pieces."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that can't be part of a stop string; after a stop string was ``found``, nothing."""
        if self.found or not self._stops:
            return "" if self.found else piece
        self._held += piece
        hits = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.found = bool(hits)
        return self._give(min(hits) if hits else len(self._held) - self._possible_start())

    def flush(self) -> str:
        return "" if self.found else self._give(len(self._held))

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that a stop string starts with."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        return given
