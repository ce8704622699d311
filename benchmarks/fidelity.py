"""What 8-bit activations and 16-bit caches cost: KL divergence and perplexity against float32, beside llama.cpp's.

    python benchmarks/fidelity.py MODEL.gguf OUT.adapt [--tokens 4096] [--window 512] [--threads 2]

The reference is transformers in float32 on its own reading of the file (dequantised weights). The text is Python's own
reference manual (``pydoc_data.topics``), cut into windows that every engine reads afresh. Prints mean and 99th
percentile of KL(reference ‖ engine) over all positions, and perplexity as a ratio to the reference's. llama.cpp takes
part when ``llama_cpp`` is installed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch

import adaptc
from adaptc.golden import authors_model, authors_source, authors_tokenizer

Engine = Callable[[list[int]], np.ndarray]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def llama_cpp_engine(model: str, window: int, threads: int) -> Engine | None:
    try:
        import llama_cpp
    except ImportError:
        return None
    llama = llama_cpp.Llama(model, n_ctx=window, n_batch=window, n_threads=threads, n_threads_batch=threads,
                            logits_all=True, verbose=False)

    def run(ids: list[int]) -> np.ndarray:
        llama.reset()
        llama.eval(ids)
        return np.array(llama.scores[: len(ids)])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("artifact")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = authors_source(args.model, False)
    module, tokenizer = authors_model(source), authors_tokenizer(source)
    session = adaptc.load(args.artifact, threads=args.threads)
    engines: dict[str, Engine] = {"adaptc": lambda ids: session.score(ids)}
    if (other := llama_cpp_engine(str(Path(args.model)), args.window, args.threads)) is not None:
        engines["llama.cpp"] = other
    text = "\n".join(topics[name] for name in sorted(topics)[10:60])
    ids = tokenizer(text, add_special_tokens=False).input_ids[: args.tokens]
    divergence: dict[str, list[float]] = {name: [] for name in engines}
    surprise: dict[str, list[float]] = {name: [] for name in ("reference", *engines)}
    for start in range(0, len(ids) - 1, args.window):
        window = ids[start : start + args.window]
        with torch.inference_mode():
            wanted = log_softmax(module(torch.tensor([window]), use_cache=False).logits[0].float().numpy())
        following = np.array(window[1:])[:, None]
        said = lambda logs: (-np.take_along_axis(logs[:-1], following, 1)[:, 0]).tolist()  # noqa: E731
        surprise["reference"] += said(wanted)
        for name, engine in engines.items():
            logs = log_softmax(engine(window))
            divergence[name] += (np.exp(wanted) * (wanted - logs)).sum(-1).tolist()
            surprise[name] += said(logs)
    perplexity = {name: float(np.exp(np.mean(values))) for name, values in surprise.items()}
    print(f"reference: perplexity {perplexity['reference']:.4f} over {len(ids)} tokens in windows of {args.window}")
    for name, values in divergence.items():
        print(f"{name}: mean KL {np.mean(values):.5f}, p99 {np.percentile(values, 99):.4f}, perplexity "
              f"{100 * (perplexity[name] / perplexity['reference'] - 1):+.2f} %", flush=True)


if __name__ == "__main__":
    main()
