"""An artifact against transformers on the same model: every logit of teacher-forced steps, and free-running greedy tokens.

    python benchmarks/compare.py MODEL OUT.adapt [--steps 48] [--threads 2]

Prints, for each prompt of ``adaptc.golden.PROMPTS``, the largest absolute difference of a logit from transformers'
float32 forward without a cache, and how many greedy tokens agree before the first step whose reference top-two margin
is below 1e-3. Exit code 1 when a difference exceeds 5e-4 or a token differs before such a step (bounds for
``--activations f32 --weights auto``). For GGUF files the reference is transformers' own reading of the file.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch

import adaptc
from adaptc.golden import PROMPTS, authors_model, authors_tokenizer, greedy
from adaptc.sources import open_source

TOLERANCE, MARGIN = 5e-4, 1e-3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("artifact")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = open_source(args.model)
    module, tokenizer = authors_model(source), authors_tokenizer(source)
    failed, worst = 0, 0.0
    with adaptc.load(args.artifact, threads=args.threads, prefix_cache=False) as session:
        for prompt in PROMPTS:
            ids = tokenizer(prompt).input_ids
            tokens, logits = greedy(module, ids, args.steps)
            ours = session.score(tokens[:-1], start=len(ids) - 1)
            difference = float(np.abs(ours - logits).max())
            top = np.sort(logits, 1)[:, -2:]
            close = np.flatnonzero(top[:, 1] - top[:, 0] < MARGIN)
            end = int(close[0]) if len(close) else args.steps
            answer = list(session.generate(ids, max_tokens=args.steps, ignore_eos=True).token_ids)
            same = answer[:end] == tokens[len(ids) : len(ids) + end]
            print(f"{difference:.2e}  {end:3d} greedy tokens {'agree' if same else 'DIFFER'}  {prompt[:50]!r}")
            failed += difference > TOLERANCE or not same
            worst = max(worst, difference)
    print(f"largest difference of a logit: {worst:.2e} (bound {TOLERANCE:.0e})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
