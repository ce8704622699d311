"""The plan: the waist between compiler and runtime. Plain frozen data, JSON on disk, standard library only.

A plan says, for one rank, which native kernels a step calls, in which order and over which buffers. It names
buffers by handle and never holds tensor bytes. Everything a tool needs to inspect, time or call a kernel by
itself is here: each operator's output buffers, each kernel's symbol and the buffers it takes.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod

from adaptc.errors import ArtifactError, NewerFormatError

PLAN_VERSION = 1

ALIGNMENT = 64
"""Bytes that every buffer starts at a multiple of: a cache line, and the widest vector."""

STATE_KINDS = ("rows", "fixed")
"""What a request keeps: rows, one a token, or one value (``State``)."""

DTYPE_BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "i1": 1}

SLOT_ENTRIES = 2
"""Entries a request has in the table of a group of fixed states: the slot that a step reads and the one it writes."""


@dataclass(frozen=True)
class Symbol:
    """A dynamic dimension. ``T`` tokens of the step, ``R`` requests in it, ``S`` rows whose logits are wanted."""

    name: str
    max: int


@dataclass(frozen=True)
class Buffer:
    """One named piece of memory.

    kind     "input" | "output" | "arena" (at ``offset`` bytes from the arena's start) | "weight" (``source`` is
             its key in weights.safetensors) | "state" (``source`` is the state's name; a page pool) |
             "pages" (``source`` is the cache group; the block table, i32[R, max_pages])
    shape    entries are ints or symbol names; row-major, dense
    bytes    size with every symbol at its maximum (0 for state: the runtime decides the number of pages)
    """

    handle: str
    kind: str
    dtype: str
    shape: tuple[int | str, ...]
    bytes: int
    offset: int = 0
    source: str = ""


@dataclass(frozen=True)
class Kernel:
    """A native function ``void symbol(const void* const* buffers, const int64_t* symbols, int64_t tid, int64_t n)``.

    ``buffers`` holds one pointer a signature entry, in order; ``symbols`` holds the plan's symbols' current
    values in the plan's order; thread ``tid`` of ``n`` does its share. Signature entries read
    ``"<role>:<dtype>[<shape>]"`` with role in | out | inout | weight | state | pages | scratch.
    """

    symbol: str
    object: str
    signature: tuple[str, ...]


@dataclass(frozen=True)
class Call:
    """One kernel over buffers (handles, as in the kernel's signature). All threads meet at a barrier after it."""

    kernel: str
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class Operator:
    """One operator of the laid-out IR at one place, with the kernels that carry it out.

    id        stable from the IR to profiles: position in program order, 0-based
    op        operator name in the operator table; ``source`` the module path in the authors' model
    flops     {"": constant, "T": per token, "S": per sampled row, ...}; same for ``traffic`` in bytes
    """

    id: int
    op: str
    source: str
    provider: str
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]
    flops: dict[str, int]
    traffic: dict[str, int]


@dataclass(frozen=True)
class Segment:
    """A run of operators carried out without returning to the host. kind: "native" (later: collective, host)."""

    kind: str
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class StatePart:
    """One component of a row that a token appends, or of a request's value, e.g. ``k`` of [heads, width]."""

    name: str
    heads: int
    width: int


def row_bytes(parts: Iterable[tuple[str, int, int]], dtype: str, scale: str) -> int:
    """Bytes of one row of a state, or of a value of fixed size, from its parts' (name, heads, width)."""
    scales = DTYPE_BYTES[scale] if scale else 0
    return sum(heads * (width * DTYPE_BYTES[dtype] + scales) for _, heads, width in parts)


def page_rows(page_size: int, rate: int) -> int:
    """Rows of a page of states of a ``rate``: those of ``page_size`` tokens, and one at least."""
    return max(1, page_size // rate)


def page_tokens(page_size: int, rate: int) -> int:
    """Tokens whose rows a page of states of a ``rate`` holds."""
    return page_rows(page_size, rate) * rate


@dataclass(frozen=True)
class State:
    """A state's contract.

    kind "rows": tokens append rows of ``parts``; ``window`` 0 = all are kept, else only rows with position >
    p - window are ever read from position p. There is a row for every ``rate`` tokens: the token at position p appends
    one if rate divides p + 1, as row p // rate, and sees the first (p + 1) // rate. Within a page the layout is, for each
    part in order, [heads][``page_rows``][width] of ``dtype``. Where rows are codes, i8, each head's row has a ``scale`` of that dtype
    ("" = none): after all rows, for each part in order, [heads][``page_rows``].

    kind "fixed": a request has one value of ``parts``, float32, which every token replaces by the next one. Within a
    slot the layout is, for each part in order, [heads][width]; how a width is ordered is up to the kernels."""

    name: str
    kind: str
    group: str
    dtype: str
    window: int
    parts: tuple[StatePart, ...]
    scale: str = ""
    rate: int = 1

    def _bytes(self) -> int:
        return row_bytes(((p.name, p.heads, p.width) for p in self.parts), self.dtype, self.scale)

    def token_bytes(self) -> Fraction:
        """What each token of a request takes."""
        return Fraction(self._bytes() if self.kind == "rows" else 0, self.rate)

    def request_bytes(self) -> int:
        """What a request takes, however long it is."""
        return self._bytes() if self.kind == "fixed" else 0

    def page_bytes(self, page_size: int) -> int:
        """A page of the state's pool, or a slot of it."""
        return self._bytes() * (page_rows(page_size, self.rate) if self.kind == "rows" else 1)


@dataclass(frozen=True)
class CacheGroup:
    """States that share one block table, i32[R, max_pages], and so have the same pages live.

    kind "rows": states of one window and one rate; entry i of a request's row is the page of its positions from
    i·tokens on, where a page has rows of so many tokens (``page_tokens``), -1 where it has none. max_pages is
    ceil(max_context / tokens).

    kind "fixed": all states of fixed size. A page is a slot: one value of each of them. A request's row is [slot to
    read, slot to write]: a step starts from what the first one holds, from the initial value where it is -1, leaves
    the value after the request's tokens of this step in the second, and may use that one as memory meanwhile. It never
    changes the first, so a step that is run again gives the same. max_pages is ``SLOT_ENTRIES``."""

    name: str
    window: int
    states: tuple[str, ...]
    max_pages: int
    kind: str = "rows"
    rate: int = 1

    def page_tokens(self, page_size: int) -> int:
        """Tokens that one of the group's pages is for, in a plan of ``page_size``."""
        return page_tokens(page_size, self.rate)


@dataclass(frozen=True)
class Plan:
    target: str
    levels: tuple[str, ...]
    """Levels that every kernel is there for, each whole: the launcher runs one of them."""
    backend: str
    vocabulary: int
    max_context: int
    max_step_tokens: int
    max_requests: int
    page_size: int
    key_block: int
    arena_bytes: int
    symbols: tuple[Symbol, ...]
    buffers: tuple[Buffer, ...]
    kernels: tuple[Kernel, ...]
    states: tuple[State, ...]
    groups: tuple[CacheGroup, ...]
    segments: tuple[Segment, ...]
    inputs: dict[str, str]
    """Role → buffer handle. Roles: tokens i32[T], positions i32[T], requests i32[T] (row of the block tables of
    each token's request), sampled i32[S] (token rows whose logits are wanted), pages:<group> i32[R, max_pages], and, if a
    result depends on it, lengths i32[R] (tokens that each request may come to have, as it declared)."""
    outputs: dict[str, str]
    """Role → buffer handle. Role: logits f32[S, vocabulary]."""
    version: int = PLAN_VERSION

    def operators(self) -> tuple[Operator, ...]:
        return tuple(op for segment in self.segments for op in segment.operators)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The plan that ``text`` says. ArtifactError names the field that is missing, unknown or of another type."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArtifactError(f"plan.json is not JSON: {error}") from error
        version = data.get("version") if isinstance(data, dict) else None
        if isinstance(version, int) and version > PLAN_VERSION:
            raise NewerFormatError(f"plan.json has format version {version}; this adaptc reads up to {PLAN_VERSION}.",
                                hint="Install a newer adaptc or compile the model again.")
        plan = _parse(Plan, data, "plan")
        if version is None or version < 1:
            raise ArtifactError(f"plan.version: expected a number from 1 to {PLAN_VERSION}, got {version!r}")
        return plan


def kind_of(path: str) -> str:
    """A module path without instance numbers: ``model.layers.*.self_attn``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) or "(model)"


def evaluate(form: Mapping[str, int], symbols: Mapping[str, float]) -> float:
    """A sum of products of symbols (``Operator.flops``, ``traffic``) for given values, e.g. {"": 5, "T*C<512": 3} with
    T and C: ``C<512`` is at most 512 of C, ``C/4<512`` at most 512 of a quarter of C."""
    return sum(n * prod(_value(s, symbols) for s in key.split("*") if s) for key, n in form.items())


def _value(symbol: str, symbols: Mapping[str, float]) -> float:
    name, _, most = symbol.partition("<")
    name, _, rate = name.partition("/")
    value = symbols[name] / int(rate) if rate else symbols[name]
    return min(value, int(most)) if most else value


def _parse(kind, data, where: str):
    """``data`` (from JSON) as a value of the annotated type ``kind``; wrong, missing and unknown fields are named."""
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise ArtifactError(f"{where}: expected an object, got {type(data).__name__}")
        hints, required = _fields(kind)
        unknown = sorted(data.keys() - hints.keys())
        if unknown:
            raise ArtifactError(f"{where}: unknown field {unknown[0]!r}")
        missing = sorted(required - data.keys())
        if missing:
            raise ArtifactError(f"{where}: missing field {missing[0]!r}")
        return kind(**{k: _parse(hints[k], v, f"{where}.{k}") for k, v in data.items()})
    origin, args = _form(kind)
    if origin is tuple:
        if not isinstance(data, list):
            raise ArtifactError(f"{where}: expected a list, got {type(data).__name__}")
        return tuple(_parse(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise ArtifactError(f"{where}: expected an object, got {type(data).__name__}")
        return {k: _parse(args[1], v, f"{where}.{k}") for k, v in data.items()}
    kinds = args if origin in (typing.Union, types.UnionType) else (kind,)
    if type(data) not in kinds:  # not isinstance: true and false are no ints here
        raise ArtifactError(f"{where}: expected {' or '.join(k.__name__ for k in kinds)}, got {data!r:.80}")
    return data


@cache
def _fields(kind: type) -> tuple[Mapping[str, typing.Any], frozenset[str]]:
    """A dataclass's fields with their types, and the names of those without a default."""
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    return typing.get_type_hints(kind), frozenset(required)


@cache
def _form(kind) -> tuple[typing.Any, tuple]:
    return typing.get_origin(kind), typing.get_args(kind)
