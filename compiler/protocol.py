"""What a backend is. Standard library only; every part of adaptc may import this module.

A backend is a folder under ``backends/`` or an installed package with an entry point in the group
``adaptc.backends``. Its ``codegen`` side turns operators into kernels and objects at compile time; its ``launch``
side maps an artifact's objects and weights and runs steps. Neither side imports the other, and ``launch`` imports
no compiler: what they share is the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Callable, Iterable, Mapping, Protocol, Sequence

from adaptc.formats import WeightFormat
from adaptc.plan import Plan, row_bytes


@dataclass(frozen=True)
class TensorSpec:
    """A tensor as a kernel sees it: dtype of elements, row-major shape (ints and symbol names), and, for a weight,
    its storage format (then ``dtype`` is the logical "f32")."""

    dtype: str
    shape: tuple[int | str, ...]
    format: WeightFormat | None = None


@dataclass(frozen=True)
class StateSpec:
    """A state operand: its parts ((name, heads, width), ...), stored dtype, window (0 = unlimited), paging, the dtype of
    each head's scale where rows are codes, its kind, "rows" or "fixed", and tokens a row (``plan.State``). ``page_size``
    counts a page's rows. One of fixed size has ``plan.SLOT_ENTRIES`` pages, and the page size of the others only as the
    grain of what requests can share."""

    parts: tuple[tuple[str, int, int], ...]
    dtype: str
    window: int
    page_size: int
    key_block: int
    max_pages: int
    scale: str = ""
    kind: str = "rows"
    rate: int = 1

    @staticmethod
    def fixed(name: str, heads: int, width: int) -> "StateSpec":
        """A request's value of one part, not yet stored."""
        return StateSpec(((name, heads, width),), "f32", 0, 0, 0, 0, kind="fixed")

    def row_bytes(self) -> int:
        return row_bytes(self.parts, self.dtype, self.scale) if self.kind == "rows" else 0

    def token_bytes(self) -> Fraction:
        return Fraction(self.row_bytes(), self.rate)

    def request_bytes(self) -> int:
        return row_bytes(self.parts, self.dtype, self.scale) if self.kind == "fixed" else 0

    def page_bytes(self) -> int:
        """Of one that is stored."""
        return self.row_bytes() * self.page_size + self.request_bytes()


@dataclass(frozen=True)
class OpSpec:
    """One operator, apart from its place: what a backend needs to choose and generate kernels.

    attrs are plain Python values (int, float, str, bool, tuples of those); an operator with a region carries it as
    ``attrs["body"]``: a tuple of (op name, operand indices, attrs-as-sorted-tuple) rows in program order, where
    operand index i < len(operands) is an operand and the rest are earlier rows' results; ``attrs["yields"]`` are
    the indices of the results.
    """

    op: str
    operands: tuple[TensorSpec | StateSpec | None, ...]
    results: tuple[TensorSpec, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to generate: family and static parameters identify the code. ``symbol`` is derived from both."""

    family: str
    params: tuple[tuple[str, Any], ...]

    def param(self, name: str) -> Any:
        return dict(self.params)[name]


@dataclass(frozen=True)
class KernelUse:
    """A kernel applied within one operator. ``args`` names what each pointer is: "operand:i", "result:i",
    "state:i" / "pages:i" (page pool and block table of the state that is operand i), or "scratch:i"."""

    kernel: KernelSpec
    args: tuple[str, ...]


@dataclass(frozen=True)
class Selection:
    """How a backend carries out one operator: kernels in order (a barrier after each) and scratch buffers
    (dtype, shape) that they share."""

    uses: tuple[KernelUse, ...]
    scratch: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True)
class Probe:
    """A kernel that does as much of one thing as a core can, over ``source_bytes`` bytes of ones that all threads read
    and ``out_bytes`` a thread. All threads' calls together do ``work`` (bytes or operations) if it is ``shared``, else
    each does."""

    kernel: KernelSpec
    work: int
    shared: bool
    source_bytes: int
    out_bytes: int


class Codegen(Protocol):
    """The compile-time side (module ``adaptc.backends.<name>.codegen``, object ``CODEGEN``)."""

    name: str
    symbols: tuple[str, ...]
    """Order in which kernels read symbol values: ("T", "R", "S")."""
    tile: str
    """Name of the order that ``pack`` puts weights in; part of their type from the laid-out stage on."""

    def requirements(self, level: str) -> Mapping[str, str]:
        """What a machine must have to run kernels of ``level``, for the manifest. The launcher checks it."""

    def select(self, spec: OpSpec) -> Selection | None:
        """Kernels for an operator, or None when this backend has none (then its decomposition is used)."""

    def needs(self, operator: str) -> str:
        """What must hold of an operator for ``select`` to have kernels for it, as the end of "kernels take …";
        "" when nothing needs saying. Optional."""

    def choices(self, family: str) -> Mapping[str, Sequence[int]]:
        """Parameters that tuning may add to kernels of a family (``adaptc.tuning``), each with its legal values, the
        default first: they change no bit of what a kernel writes. OptionError for an unknown family; optional."""

    def symbol(self, kernel: KernelSpec) -> str:
        """The kernel's link name: stable, unique by content, a valid C identifier."""

    def signature(self, kernel: KernelSpec) -> tuple[str, ...]:
        """The kernel's buffers as in ``plan.Kernel.signature``."""

    def compile(self, kernels: Sequence[KernelSpec], level: str, *, workers: int = 1,
                progress: Callable[[int, int], None] | None = None) -> Mapping[str, bytes]:
        """Object files by file name, holding all ``kernels`` (and what runs them in order) for ``level``."""

    def probes(self, level: str) -> Mapping[str, Probe]:
        """Kernels that measure what a machine can do at most: "read" memory, and multiply and add, by dtype."""

    def level(self, name: str) -> str:
        """The full name of an instruction-set level; "native" is the highest that this machine runs. OptionError when
        it is unknown."""

    def check_level(self, level: str) -> None:
        """Raises OptionError when code for ``level`` can't be generated here, with the reason."""

    def packages(self, operators: Iterable[str], kernels: Iterable[KernelSpec]) -> frozenset[str]:
        """Installed packages whose kernels for these operators, or whose choice of them, an artifact has; optional."""

    def object_of(self, kernel: KernelSpec) -> str:
        """Name of the object file that ``compile`` puts the kernel into."""

    def packed_bytes(self, format: WeightFormat, shape: tuple[int, int]) -> int:
        """Bytes of a packed weight of ``shape`` (rows, columns), padding included."""

    def pack(self, format: WeightFormat, shape: tuple[int, int], codes: Mapping[str, Any]) -> bytes:
        """A weight in this backend's layout from its unpacked codes (see ``formats``), losing nothing."""

    def unpack(self, format: WeightFormat, shape: tuple[int, int], data: Any) -> Mapping[str, Any]:
        """The codes that ``pack`` was given, bit for bit, from the bytes that it made."""


class Executable(Protocol):
    """A plan made runnable in this process."""

    def inputs(self, role: str):
        """Writable numpy array over an input buffer, at its maximum shape."""

    def outputs(self, role: str):
        """Numpy array over an output buffer, at its maximum shape."""

    def read(self, handle: str, symbols: Mapping[str, int]):
        """A copy of any buffer's content as a numpy array, for tools and verification."""

    def state(self, name: str):
        """Numpy uint8 array [num_pages, page_bytes] over a state's pool of pages, or of slots."""

    def run(self, symbols: Mapping[str, int], *, stop_after: int | None = None, only: Sequence[int] | None = None,
            times: bool = False):
        """One step: the plan's kernels with these symbol values, up to and including operator id ``stop_after``; or
        the kernels of the operators ``only`` (ids, in this order, as often as they stand there), on whatever the
        buffers hold. With ``times``, returns seconds spent by operator id; else None."""

    def close(self) -> None:
        """Stops threads and releases memory."""


class Launcher(Protocol):
    """The run-time side (module ``adaptc.backends.<name>.launch``, object ``LAUNCHER``)."""

    name: str

    def choose_level(self, plan: Plan, wanted: str | None = None) -> str:
        """Which of the plan's levels to run: the best that this machine can, or ``wanted``. Raises ArtifactError when
        it can run none, OptionError when ``wanted`` is none of them or not for it; both say what is missing."""

    def load(self, plan: Plan, objects: Mapping[str, bytes], weights: Mapping[str, memoryview], *,
             threads: int, pages: Mapping[str, int]) -> Executable:
        """Maps kernels (one level's object files by name), weights (packed bytes by name) and page pools (``pages``:
        number of pages by group)."""

    def library(self, objects: Mapping[str, bytes]):
        """The objects' kernels for tools: ``call(symbol, arrays, symbols, tid, n)`` runs one thread's share of one
        kernel over numpy arrays that start at multiples of 64 bytes, in place."""
