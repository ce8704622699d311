"""Storage formats of weights, as data. Standard library only.

A format says how one logical float32 row is stored: integer or float *codes*, *groups* of consecutive
columns that share a scale (and a minimum), and the levels those scales are stored in. The value of a code is

    value = scale(group) * (code - zero) + min_sign * minimum(group)        (all in float32, in this order)

which is the definition of the GGML block formats (https://github.com/ggml-org/ggml, ggml-quants.c). MXFP4 is that of
OCP Microscaling Formats 1.0, with every value doubled and every scale halved, as GGML has it: values are integers then.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class WeightFormat:
    """How a weight's rows are stored.

    codes       f32 | f16 | bf16 (float codes, no groups) | i8 | u4 | u5 | u6
    zero        subtracted from the integer code
    values      what each integer code stands for, where that isn't the integer itself
    group       columns that share one scale; 0 for float codes
    rows        rows that do, too
    scale       dtypes of the scale's levels, innermost first: ("f16",) or ("u6", "f16") = 6-bit × f16; "e8m0" is a byte
                e that stands for 2^(e - 128), and for no number where it is 255
    minimum     dtypes of the minimum's levels, same convention; () = none
    min_sign    +1: value = scale*code + minimum (Q4_1); -1: scale*code - minimum (Q4_K)
    superblock  columns that share one value of the outermost level; equals ``group`` with one level
    """

    name: str
    codes: str
    zero: int = 0
    group: int = 0
    scale: tuple[str, ...] = ()
    minimum: tuple[str, ...] = ()
    min_sign: int = 1
    superblock: int = 0
    values: tuple[int, ...] = ()
    rows: int = 1

    @property
    def is_float(self) -> bool:
        return self.group == 0

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return int(self.codes.lstrip("bfiu"))

    def published_bytes(self, shape: tuple[int, ...]) -> int:
        """What a file takes for a tensor of ``shape``: its codes, and a scale and a minimum a group."""
        *lead, columns = (1, *shape)
        lines = prod(lead)
        total = -(-lines * columns * self.bits // 8)
        if not self.group:
            return total
        groups = -(-columns // self.group) * -(-lines // self.rows)
        widths = [int(dtype.lstrip("bfiue").removesuffix("m0")) for dtype in (*self.scale[:1], *self.minimum[:1])]
        outer = [int(dtype.lstrip("bfiu")) for dtype in (*self.scale[1:], *self.minimum[1:])]
        blocks = -(-columns // self.superblock) * lines if outer else 0
        return total + -(-(groups * sum(widths) + blocks * sum(outer)) // 8)


_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _f(*args, **kw) -> tuple[str, WeightFormat]:
    fmt = WeightFormat(*args, **kw)
    return fmt.name, fmt


FORMATS: dict[str, WeightFormat] = dict(
    (
        _f("f32", "f32"),
        _f("f16", "f16"),
        _f("bf16", "bf16"),
        _f("q8_0", "i8", 0, 32, ("f16",), superblock=32),
        _f("q4_0", "u4", 8, 32, ("f16",), superblock=32),
        _f("q4_1", "u4", 0, 32, ("f16",), ("f16",), +1, superblock=32),
        _f("q5_0", "u5", 16, 32, ("f16",), superblock=32),
        _f("q5_1", "u5", 0, 32, ("f16",), ("f16",), +1, superblock=32),
        _f("q4_k", "u4", 0, 32, ("u6", "f16"), ("u6", "f16"), -1, superblock=256),
        _f("q5_k", "u5", 0, 32, ("u6", "f16"), ("u6", "f16"), -1, superblock=256),
        _f("q6_k", "u6", 32, 16, ("i8", "f16"), superblock=256),
        _f("mxfp4", "u4", group=32, scale=("e8m0",), superblock=32, values=_E2M1_DOUBLED),
    )
)
"""Every format adaptc can keep bit for bit, by the name used in reports and in the IR."""

CHOICES: dict[str, str] = {"f32": "f32", "bf16": "bf16", "int8": "q8_0", "int4": "q4_1"}
"""``--weights`` value → format that weights are converted to (``auto`` keeps each tensor's own)."""
