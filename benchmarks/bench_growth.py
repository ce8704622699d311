"""How the cost of a token grows with depth, width, context, batch and threads, on random Llama models.

    python benchmarks/bench_growth.py [--folder DIR] [--rounds 3] [--only depth,width,context,batch,threads]

One thing changes at a time, the rest is the base: 8 layers, width 576 (9 query and 3 key heads of 64, MLP 1536),
vocabulary 4096, context 256, one request, two threads; weights int8, activations int8, caches f16. Points of one line
are measured in turns, medians count. The last column divides a point's milliseconds by the first point's, over the
growth of what changes: 1.0 is proportional growth, below it the fixed part weighs more.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

NEW, PREFILL = 24, 256


@dataclass(frozen=True)
class Setting:
    depth: int = 8
    width: int = 576
    context: int = 256
    batch: int = 1
    threads: int = 2


LINES = {
    "depth": (4, 8, 16),
    "width": (288, 576, 1152),
    "context": (256, 1024, 4096),
    "batch": (1, 2, 4, 8),
    "threads": (1, 2),
}


def artifact(folder: Path, setting: Setting) -> Path:
    """A random model of this depth and width, compiled; once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import adaptc

    path = folder / f"{setting.depth}x{setting.width}.adapt"
    if not path.exists():
        heads = setting.width // 64 if setting.width % 64 == 0 else setting.width // 32
        config = LlamaConfig(hidden_size=setting.width, intermediate_size=setting.width * 8 // 3 // 32 * 32,
                             num_hidden_layers=setting.depth, num_attention_heads=heads, num_key_value_heads=heads // 3,
                             vocab_size=4096, max_position_embeddings=8192, tie_word_embeddings=True)
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder / path.stem)
        adaptc.compile(str(folder / path.stem), "cpu", output=path, weights="int8", activations="int8", kv="f16")
    return path


def milliseconds(session, setting: Setting) -> tuple[float, float]:
    """Of a prefill of ``PREFILL`` tokens, and of a decode step at the setting's context and batch."""
    engine = session.engine
    prompts = [[(7 * i + 13 * j + 1) % 4096 for j in range(setting.context)] for i in range(setting.batch)]
    start = time.perf_counter()
    engine.add(prompts[0][:PREFILL], max_tokens=1)
    while engine.active:
        engine.step()
    prefill = time.perf_counter() - start
    for prompt in prompts:
        engine.add(prompt, max_tokens=NEW + setting.context)
    steps, seen = [], set()
    while len(steps) < NEW:
        before = time.perf_counter()
        seen |= (events := {event.request for event in engine.step()})
        if len(events) == setting.batch == len(seen):
            steps.append(time.perf_counter() - before)
    for request in seen:
        engine.abort(request)
    return 1e3 * prefill, 1e3 * statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where models and artifacts are kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(LINES))
    args = parser.parse_args()
    import adaptc

    with tempfile.TemporaryDirectory() as place:
        folder = args.folder or Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        print("what      value  prefill ms  decode ms  decode growth / growth")
        for what in args.only.split(","):
            settings = [replace(Setting(), **{what: value}) for value in LINES[what]]
            sessions = [adaptc.load(artifact(folder, s), threads=s.threads, prefix_cache=False) for s in settings]
            taken = [[milliseconds(session, s) for session, s in zip(sessions, settings)] for _ in range(args.rounds)]
            points = [[statistics.median(column) for column in zip(*rows)] for rows in zip(*taken)]
            for value, (prefill, decode) in zip(LINES[what], points):
                growth = decode / points[0][1] / (value / LINES[what][0])
                print(f"{what:8} {value:6}  {prefill:10.2f}  {decode:9.3f}  {growth:10.2f}", flush=True)
            for session in sessions:
                session.close()


if __name__ == "__main__":
    main()
