"""No special cases: a family under other names, in a folder with its own code, is the same program up to names."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp(prefix="adaptc-tests-modules-"))

import families
import numpy as np
import pytest
import renamed

import adaptc
from adaptc.capture import capture
from adaptc.errors import AdaptcError
from adaptc.ir.canonical import canonical_text
from adaptc.sources import open_source

FAMILIES = ("llama", "qwen3", "gemma2", "phi3_longrope", "olmo2", "granite", "starcoder2", "gpt2", "opt", "mixtral",
            "gpt_oss")


@pytest.mark.parametrize("family", FAMILIES)
def test_same_program_under_other_names(family, tmp_path):
    plain, other = renamed.write(tmp_path, family)
    one = capture(open_source(plain))
    two = capture(open_source(other, trust_remote_code=True))
    assert canonical_text(one) == canonical_text(two)
    layers = {name for name in one.weights() if any(part.isdigit() for part in name.split("."))}
    assert layers and not layers & set(two.weights()), "weights of layers all have other names"


def test_the_canonical_text_tells_programs_apart(tmp_path):
    texts = [canonical_text(capture(open_source(families.write(tmp_path / str(i), "gemma2", **changes))))
             for i, changes in enumerate(({}, {"query_pre_attn_scalar": 17}, {"sliding_window": 9}))]
    assert len(set(texts)) == 3


def test_code_of_a_folder_runs_only_when_trusted(tmp_path):
    plain, other = renamed.write(tmp_path, "llama")
    with pytest.raises(AdaptcError, match="trust-remote-code"):
        families.compile_family(other, tmp_path / "a.adapt")
    families.compile_family(plain, tmp_path / "plain.adapt")
    families.compile_family(other, tmp_path / "other.adapt", trust_remote_code=True)
    logits = []
    for name in ("plain", "other"):
        with adaptc.load(tmp_path / f"{name}.adapt", threads=1) as session:
            logits.append(session.score(families.tokens_of(20, 0)))
    assert np.array_equal(*logits)
