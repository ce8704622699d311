"""Text in, token ids out, and back: tokenizer, chat template, streaming detokeniser, stop strings.

What users say in a chat stays text, also when it spells a control token: see ``encode_chat``.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING

from adaptc.artifact_format import TextInfo
from adaptc.errors import ArtifactError, RequestError, TemplateError

if TYPE_CHECKING:  # each is loaded when it is first needed: prompts of token ids need neither
    import tokenizers

REPLACEMENT = "\ufffd"
"""What decoders put for bytes that aren't UTF-8, as the first bytes of a character are until its last has come."""


class Tokenizer:
    """The model's own tokenizer. What it adds by itself is off: ``info`` says whether a prompt starts with BOS."""

    def __init__(self, data: bytes, info: TextInfo = TextInfo()):
        import tokenizers

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
        ids = _ids(self._tokenizer, text)
        if self.info.add_bos and ids[:1] != [self.info.bos_id]:
            ids = [self.info.bos_id, *ids]
        return ids

    @cached_property
    def control(self) -> dict[str, int]:
        """Control tokens: what the tokenizer's authors declare special, with their ids."""
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special}

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat, without BOS: a template writes it where the model wants it."""
        return _ids(self._tokenizer, text)

    def encode_literal(self, text: str, controls: Mapping[str, int]) -> list[int]:
        """Ids of ``text`` in which nothing is a control token but the substitutes ``controls`` (text → id of the
        token that it stands for). One call for the whole text, so that what a tokenizer does at the beginning of a
        text is done there alone."""
        added, table = self._tokenizer.get_added_tokens_decoder(), self._literal
        table.add_tokens([_substitute(alias, added[i]) for alias, i in controls.items()])
        stands_for = {table.token_to_id(alias): i for alias, i in controls.items()}
        ids = _ids(table, text)
        if wrong := sorted(set(ids) & set(self.control.values())):
            raise RequestError(f"The model's tokenizer makes the control token {added[wrong[0]].content!r} of what "
                               "messages say.", hint="Take it out of them.")  # fmt: skip
        return [stands_for.get(i, i) for i in ids]

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A copy that doesn't know control tokens."""
        copy = self._tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    @cached_property
    def marks(self) -> Marks:
        return Marks(self.control)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"The prompt is not Unicode text: {error.reason} at character {error.start}.") from error
    return tokenizer.encode(text, add_special_tokens=False).ids


# ---- chat templates --------------------------------------------------------------------------------------------


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A chat template, rendered as transformers renders it (utils/chat_template_utils.py), sandboxed."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None):
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(jinja2.ext.Extension):
            """``{% generation %}`` marks what the assistant said, for training; when rendering it is its body."""

            tags = {"generation"}

            def parse(self, parser):
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def raise_exception(message: str):
            raise jinja2.exceptions.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateError as error:
            raise ArtifactError(f"chat_template.jinja can't be read: {error}.") from error
        self._special_tokens = dict(special_tokens or {})

    def render(self, messages: Sequence[Mapping], /, *, add_generation_prompt: bool = True, **variables) -> str:
        """The prompt that ``messages`` make. Raises TemplateError with the template's own words when it refuses."""
        values = {"tools": None, "documents": None, **self._special_tokens, **variables, "messages": list(messages),
                  "add_generation_prompt": add_generation_prompt}  # fmt: skip
        try:
            return self._template.render(values)
        except Exception as error:  # templates are programs: they raise whatever their expressions do
            raise TemplateError(f"The model's chat template does not take these messages: {error}.") from error


class Marks:
    """Substitutes for control tokens in text: marks, which a template takes for text like any other (digits and points,
    which no filter for case, JSON or HTML changes), and aliases, of characters that no text has."""

    def __init__(self, control: Mapping[str, int]):
        self._ids, self._nonce = control, str(secrets.randbits(64))
        names = sorted((name for name in control if name), key=lambda name: (-len(name), name))
        starts = sorted({name[0] for name in names})
        self.names = re.compile("|".join(map(re.escape, names)) or "(?!)")  # the longest first
        self.starts = re.compile("|".join(map(re.escape, starts)) or "(?!)")
        self._texts = [*names, *starts]
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._marks = re.compile(f"{self._nonce}\\.(\\d+)\\.")

    def hide(self, value, what: re.Pattern):
        """``value`` with a mark for each ``what`` (``names`` of control tokens or their ``starts``) in its strings."""
        if isinstance(value, str):
            return what.sub(lambda match: f"{self._nonce}.{self._numbers[match[0]]}.", value)
        if isinstance(value, Mapping):
            return {self.hide(key, what): self.hide(item, what) for key, item in value.items()}
        return [self.hide(item, what) for item in value] if isinstance(value, (list, tuple)) else value

    def show(self, text: str) -> str:
        """The text with what the marks stand for."""
        return self._marks.sub(lambda match: self._texts[int(match[1])], text)

    def alias(self, text: str) -> tuple[str, dict[str, int]]:
        """The text with aliases for the control tokens it has, and the id that each alias stands for."""
        found: dict[str, int] = {}

        def one(match: re.Match) -> str:
            alias = f"\ue002{self._nonce}.{self._ids[match[0]]}\ue003"
            found[alias] = self._ids[match[0]]
            return alias

        return self.names.sub(one, text), found


def _substitute(alias: str, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
    """``alias`` as a token that takes the place of ``token``, and the spaces around it that it would take."""
    return type(token)(alias, special=False, normalized=False, lstrip=token.lstrip, rstrip=token.rstrip,
                                 single_word=token.single_word)  # fmt: skip


def encode_chat(tokenizer: Tokenizer, template: ChatTemplate, messages: Sequence[Mapping], /, **variables) -> list[int]:
    """Token ids of the prompt that ``messages`` make: control tokens are what the template writes, and nothing that
    messages, tools, documents or other variables say.

    Ordinarily these are the ids of the rendered text, as in transformers. When something given makes a control token
    of it, by itself or joined with its neighbours, the template's own control tokens go under aliases while the text
    is tokenised by a tokenizer that knows no others.
    """
    given = {**_plain(variables), "messages": _plain(list(messages))}
    rendered = _render(template, given)
    marks = tokenizer.marks
    marked = _marked(template, given, rendered, marks)
    if marks.names.findall(marked) == marks.names.findall(rendered):
        return tokenizer.encode_rendered(rendered)
    text, controls = marks.alias(marked)
    return tokenizer.encode_literal(marks.show(text), controls)


def _marked(template: ChatTemplate, given: Mapping, rendered: str, marks: Marks) -> str:
    """The text ``rendered`` of what is ``given``, with marks wherever what is given begins a control token; when the
    template looks at such characters, and so renders another text, only where it spells a whole one."""
    fine = marks.hide(given, marks.starts)
    if fine == given:
        return rendered
    try:
        if marks.show(marked := _render(template, fine)) == rendered:
            return marked
    except TemplateError:
        pass
    whole = marks.hide(given, marks.names)
    try:
        return rendered if whole == given else _render(template, whole)
    except TemplateError as error:  # it may quote what it was given
        raise TemplateError(marks.show(error.message)) from error


def _render(template: ChatTemplate, given: Mapping) -> str:
    return template.render(given["messages"], **{name: value for name, value in given.items() if name != "messages"})


def _plain(value):
    """``value`` with mappings as dictionaries and tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


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
        if len(text) <= len(self._known):
            return ""
        return self._emit(text, len(self._ids)) if not text.endswith(REPLACEMENT) else self._certain(text)

    def flush(self) -> str:
        """What is still held back when no token follows: the start of a character that never ended."""
        return self._emit(self._tokenizer.decode(self._ids[self._start :]), len(self._ids))

    def _certain(self, text: str) -> str:
        """The part of a text with a broken end that no token can mend: a character that is still incomplete began
        within the last three tokens, since each brought a byte of it and the longest characters have four."""
        end = len(self._ids) - 3
        if end <= self._whole:
            return ""
        start = self._tokenizer.decode(self._ids[self._start : end])
        whole = len(start) > len(self._known) and text.startswith(start)  # not within a character that is complete now
        return self._emit(start, end) if whole else ""

    def _emit(self, text: str, whole: int) -> str:
        """The new part of ``text``, that of ids[start:whole], from where the window then goes on."""
        piece = text[len(self._known) :]
        self._start = self._whole
        self._whole = whole
        self._known = self._tokenizer.decode(self._ids[self._start : whole])
        return piece


class StopStrings:
    """Cuts a stream of pieces before the stop string that is complete first (of several, the longest), also one that
    spans pieces: the text doesn't depend on where pieces end."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """The text that can't be part of a stop string; after a stop string was ``found``, nothing."""
        if self.found or not self._stops:
            return "" if self.found else piece
        self._held += piece
        hits = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        self.found = bool(hits)
        return self._give(min(hits)[1] if hits else len(self._held) - self._possible_start())

    def flush(self) -> str:
        return "" if self.found else self._give(len(self._held))

    def _possible_start(self) -> int:
        """Length of the longest end of the held text that a stop string starts with."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops)), 0)

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        return given
