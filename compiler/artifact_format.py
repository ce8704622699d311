"""What an artifact directory holds, for the one who writes it and the one who reads it. Standard library only.

See docs/artifact.md. An artifact is a directory of plain files; ``manifest.json`` lists every other file with its
size and SHA-256. SHA-256 because CPUs have instructions for it (1.7 GB/s a core measured, twice BLAKE2b) and
``sha256sum`` can check it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields

from adaptc.errors import ArtifactError

FORMAT_VERSION = 1
"""Raised when a reader of the version before could misread the files; a reader refuses what is newer than itself."""

MANIFEST = "manifest.json"
PLAN = "plan.json"
CAPTURED = "ir/captured.mlir"
LAID_OUT = "ir/laid_out.mlir"
KERNELS = "kernels/"
"""Below it one directory a level, with the same file names in each."""
WEIGHTS = "weights.safetensors"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
TEXT = "text.json"
GOLDENS = "goldens.safetensors"
TUNING = "tuning.json"

REQUIRED = (PLAN, CAPTURED, LAID_OUT, WEIGHTS, TEXT)
"""Files every artifact has, beside the manifest and the kernels that its plan names."""

ALIGNMENT = 64
"""Every tensor's data starts at a multiple of this within weights.safetensors: a cache line, an AVX-512 vector."""

MANIFEST_FIELDS = (
    "adaptc", "digest", "files", "format", "levels", "model", "options", "provenance", "requirements", "sources",
    "states", "target", "tensors", "tolerances",
)  # fmt: skip


def canonical(value: object) -> bytes:
    """The one JSON spelling of ``value`` used in artifacts: sorted keys, UTF-8, one field a line."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


def manifest_digest(manifest: Mapping) -> str:
    """SHA-256 of the manifest's canonical text without its ``digest`` field."""
    return hashlib.sha256(canonical({k: v for k, v in manifest.items() if k != "digest"})).hexdigest()


@dataclass(frozen=True)
class TextInfo:
    """What the model's files say about text beside the tokenizer itself (text.json).

    bos_id     put before a prompt when ``add_bos`` and the prompt doesn't start with it already
    stop_ids   tokens that end a generation: end of sequence, end of turn; sorted
    special_tokens  names that chat templates use, e.g. {"bos_token": "<s>", "eos_token": "</s>"}
    """

    bos_id: int | None = None
    add_bos: bool = False
    stop_ids: tuple[int, ...] = ()
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return canonical(asdict(self))

    @staticmethod
    def from_json(text: bytes) -> TextInfo:
        try:
            data = json.loads(text)
            if unknown := sorted(set(data) - {f.name for f in fields(TextInfo)}):
                raise ArtifactError(f"{TEXT}: unknown field {unknown[0]!r}.")
            info = TextInfo(**{**data, "stop_ids": tuple(data.get("stop_ids", ()))})
        except (ValueError, TypeError) as error:
            raise ArtifactError(f"{TEXT} is not a valid description of the model's text: {error}.") from error
        if info.add_bos and info.bos_id is None:
            raise ArtifactError(f"{TEXT}: add_bos is true, but bos_id is null.")
        return info
