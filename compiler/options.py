"""What a compile can be told. The command line mirrors this dataclass and otherwise has no options of its own.

Standard library only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields

from adaptc import formats
from adaptc.errors import OptionError, one_of

KEPT = {"f32": ("f32", ""), "f16": ("f16", ""), "bf16": ("bf16", ""), "int8": ("i8", "f32")}
"""What caches can hold → (dtype of rows, dtype of the scale that each head's row has; "" = none)."""

CHOICES = {
    "weights": ("auto", *formats.CHOICES),
    "activations": ("f32", "int8"),
    "kv": ("auto", *KEPT),
}
"""Option → its values, where these are names."""

LARGEST = 2**31 - 1
"""Positions, rows and page numbers are 32-bit integers at run time."""


@dataclass(frozen=True)
class CompileOptions:
    """Options of one compile, of the driver and of the passes alike.

    weights         how weights are stored; auto keeps each tensor in the format of its file, bit for bit
    activations     f32, or int8: the inputs of linear maps are quantised on the fly, one scale a token and group of 32
    kv              what key/value caches hold; auto = f32 with f32 activations, f16 with int8. int8: one scale for
                    each token, head, and keys or values
    page_size       tokens in one page of a cache
    max_step_tokens tokens one step can process; buffers are planned for it
    max_requests    requests one step can serve, and rows whose logits one step can give
    max_context     tokens a request may have, prompt included; 0 = what the model's config says, or
                    32768 where it sets no end, as for many recurrent models
    level           levels of the kernels, by comma, e.g. x86-64-v3,x86-64-v4+avx512vnni: the artifact holds each, and
                    loading chooses; native = this machine's highest; "" = the target's default
    trust_remote_code  runs modelling code that lies in the model's folder; off, only transformers' own
    waive           a configuration key (dotted when nested), metadata key or tensor that nothing uses and that may go
                    unused; * and ? stand for any text and any character. What is used can't be waived
    """

    weights: str = "auto"
    activations: str = "f32"
    kv: str = "auto"
    page_size: int = 16
    max_step_tokens: int = 256
    max_requests: int = 32
    max_context: int = 0
    level: str = field(default="", metadata={"repeatable": True})
    trust_remote_code: bool = False
    waive: tuple[str, ...] = field(default=(), metadata={"repeatable": True})

    def __post_init__(self):
        for name, valid in CHOICES.items():
            if getattr(self, name) not in valid:
                raise one_of(f"value for {name}", getattr(self, name), valid)
        for name, least in (("page_size", 1), ("max_step_tokens", 1), ("max_requests", 1), ("max_context", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
                raise OptionError(f"{name} must be an integer from {least} to {LARGEST}, got {value!r}.")
        if not isinstance(self.level, str):
            raise OptionError(f"level must be a name, got {self.level!r}.")
        if not isinstance(self.trust_remote_code, bool):
            raise OptionError(f"trust_remote_code must be true or false, got {self.trust_remote_code!r}.")
        if not all(isinstance(name, str) and name for name in self.waive):
            raise OptionError(f"waive must be names, got {self.waive!r}.")

    @property
    def kv_dtype(self) -> str:
        if self.kv != "auto":
            return self.kv
        return "f16" if self.activations == "int8" else "f32"

    def to_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def of(options: dict) -> "CompileOptions":
        """From keyword arguments; an unknown name is an error that lists the valid ones. Options that may be given
        several times take one value or a list."""
        valid = [f.name for f in fields(CompileOptions)]
        for name in options:
            if name not in valid:
                raise one_of("compile option", name, valid)
        given = dict(options)
        for item in fields(CompileOptions):
            value = given.get(item.name, item.default)
            several = isinstance(value, (list, tuple))
            if isinstance(item.default, tuple):
                given[item.name] = tuple(value) if several else (value,)
            elif item.metadata.get("repeatable") and several:
                given[item.name] = ",".join(value)
        return CompileOptions(**given)
