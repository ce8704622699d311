"""The authors' own module beside the captured program, module by module, and the file's values beside the stored ones.

Needs torch and transformers, and the model's files; everything else in this package needs only the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from adaptc.golden import authors_model, authors_source
from adaptc.verify import tolerances
from adaptc.verify.meaning import Recorder, layer_of
from adaptc.verify.report import Depth, Finding, Level
from adaptc.verify.subject import DENSE, Subject
from adaptc.verify.weights import lossless, tensor_order


def check(subject: Subject, model: str, tokens: list[int], trust_remote_code: bool,
          progress: Callable) -> tuple[Level, list[Depth]]:
    """Outputs of every module of ``model`` that the captured program has values of, on ``tokens``."""
    level = Level("authors")
    source = authors_source(model, trust_remote_code)
    if source.hashes != subject.artifact.manifest["sources"]:
        level.left_out.append(f"that {model} is what was compiled: its files aren't the ones in the manifest")
    else:
        _values(subject, source, level)
    recorder = Recorder(subject.captured, subject.values)
    recorder.score(tokens)
    progress("authors", 1, 2)
    values = [v for call in recorder.calls for v in call.values] + recorder.tail
    outputs = _authors_outputs(authors_model(source), tokens)
    progress("authors", 2, 2)
    converted = any(not lossless(w) for w in subject.stored.values())
    worst, least = tolerances.LAYERS["int8"] if converted else tolerances.AUTHORS

    compared: dict[str, tuple[float, float]] = {}
    for path, tensors in outputs:
        ours = next((v.rows for v in reversed(values) if v.source == path or v.source.startswith(path + ".")), None)
        ours = recorder.logits if path == "" else ours
        pairs = [(tolerances.relative(ours, t), tolerances.cosine(ours, t)) for t in tensors
                 if ours is not None and t.shape == ours.shape]
        if pairs:
            compared[path] = min(pairs)
    layers = list(recorder.layers())
    depths = [Depth(i, layer, *compared[layer], "authors") for i, layer in enumerate(layers) if layer in compared]
    if "" in compared:
        depths.append(Depth(len(layers), "", *compared[""], "authors"))
    for depth in depths:
        if not (depth.error <= worst and depth.cosine >= least):
            inside = [p for p, (e, c) in compared.items() if depth.module and layer_of(p) == depth.module
                      and not (e <= worst and c >= least)]
            module = inside[0] if inside else depth.module
            level.findings.append(Finding("the captured program's value isn't the authors' module's",
                                          "captured program", module, depth.error, worst))
            break
    level.covered.append(f"outputs of {len(compared)} modules ({len(depths)} layers and logits) of the authors' model "
                         f"on {len(tokens)} tokens (allowed: relative error {worst:g}, cosine {least:g})")
    if not depths:
        level.findings.append(Finding("no module of the authors' model has the name of a captured one",
                                      "captured program"))
    return level, depths


def _authors_outputs(module, tokens: list[int]) -> list[tuple[str, list[np.ndarray]]]:
    """(module path, its output tensors as [tokens, the rest]) in the order in which modules finish."""
    import torch

    found: list[tuple[str, list[np.ndarray]]] = []

    def hook(path: str):
        def keep(_module, _inputs, output):
            parts = output.values() if isinstance(output, Mapping) else output
            parts = parts if isinstance(parts, Iterable) and not isinstance(parts, torch.Tensor) else [parts]
            found.append((path, [p.detach().float().numpy().reshape(len(tokens), -1) for p in parts
                                 if isinstance(p, torch.Tensor) and p.is_floating_point()
                                 and p.numel() % len(tokens) == 0]))

        return keep

    handles = [m.register_forward_hook(hook(path)) for path, m in module.named_modules()]
    try:
        with torch.inference_mode():
            module(torch.tensor([tokens]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _values(subject: Subject, source, level: Level) -> None:
    """Stored values of converted weights against the file's, within what their format can hold."""
    worst, count = 0.0, 0
    for name, weight in subject.stored.items():
        if lossless(weight):
            continue
        exact = source.tensors[weight.tensor].values().astype(np.float64)
        kept = tensor_order(weight, subject.values(name)).reshape(exact.shape)
        size = float(np.mean(exact**2))
        error = float(np.sqrt(np.mean((kept - exact) ** 2) / size)) if size else 0.0
        bound = tolerances.CONVERTED[(weight.spec.format or DENSE).name]
        worst, count = max(worst, error), count + 1
        if not error <= bound:
            level.findings.append(Finding("the converted weight is further from the file's than its format explains",
                                          f"tensor {weight.tensor}", name.rpartition(".")[0], error, bound))
    if count:
        level.covered.append(f"{count} converted weights against the file's values")
        level.figures["largest relative RMS error of a converted weight"] = worst
