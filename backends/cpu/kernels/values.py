"""SSA values and the types they have, as MLIR writes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """An SSA value: its name and its MLIR type."""

    name: str
    type: str

    def __str__(self) -> str:
        return self.name


def vec(lanes: int, element: str) -> str:
    """The type of a one-dimensional vector: ``vec(8, "f32") == "vector<8xf32>"``."""
    return f"vector<{lanes}x{element}>"


def element(type: str) -> str:
    """Element type of a vector type, or the scalar type itself."""
    return type[:-1].rpartition("x")[2] if type.startswith("vector<") else type


def lanes(type: str) -> int:
    """Number of lanes of a vector type; 0 for a scalar."""
    return int(type[len("vector<"):].partition("x")[0]) if type.startswith("vector<") else 0


def like(type: str, new_element: str) -> str:
    """``type`` with another element type: vector stays vector, scalar stays scalar."""
    return vec(lanes(type), new_element) if lanes(type) else new_element
