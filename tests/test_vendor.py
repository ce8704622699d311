"""A vendor adds a package and edits nothing: backend and target come by entry points (``tests/acme``)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models

ACME = Path(__file__).parent / "acme"
RUN = """
import sys
sys.path[:0] = sys.argv[3:]
import json, adaptc
model, out = sys.argv[1:3]
report = adaptc.compile(model, "acme-x1", output=out, page_size=4, max_step_tokens=16, weights="f32")
with adaptc.load(out) as session:
    logits = session.score(list(range(10, 40)), chunk=7)
    said = {"requirements": dict(session.manifest["requirements"]), "backend": session.plan.backend}
    said["packages"] = session.manifest["provenance"]["packages"]
coverage = {row.op: row.status for row in report.coverage}
print(json.dumps(said | {"coverage": coverage, "logits": logits.tolist()}))
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """What installing the package leaves beside it."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[adaptc.backends]\nacme = acme_adaptc\n[adaptc.targets]\nacme = acme_adaptc:TARGETS\n")
    return folder


@pytest.mark.parametrize("family", ["gemma3_text"])
def test_a_model_compiles_and_runs_on_a_backend_from_outside(package, tmp_path, family):
    import torch
    from transformers import AutoModelForCausalLM

    model = tiny_models.write(tmp_path / "model", family)
    done = subprocess.run([sys.executable, "-c", RUN, model, tmp_path / "out.adapt", package, ACME], check=True,
                          capture_output=True, text=True)
    said = json.loads(done.stdout)
    assert said["requirements"] == {"gen1": {"device": "acme gen1"}} and said["backend"] == "acme"
    assert said["packages"]["acme"]["for"] == ["adaptc.backends", "adaptc.targets"]
    assert said["coverage"]["rope"].startswith("decomposed into") and said["coverage"]["attention"] == "mapped"
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = module(torch.tensor([list(range(10, 40))]), use_cache=False).logits[0].numpy()
    assert np.abs(np.array(said["logits"]) - expected).max() < 1e-4 * np.abs(expected).max()
