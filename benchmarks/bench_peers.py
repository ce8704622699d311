"""Prefill and decode beside llama.cpp and OpenVINO GenAI on the same GGUF file, in one process, in turns.

    python benchmarks/bench_peers.py MODEL.gguf OUT.adapt [--prompts 256,1024] [--new 64] [--batch 1] [--rounds 5]

Each round runs every engine once at every point, with a prompt that none has seen (some keep prefixes); medians over
rounds count, and ratios of medians. An engine that isn't installed, or refuses the file, is named and left out.
``--batch N`` decodes N sequences together (llama.cpp through its batch interface; OpenVINO not at all). Decode rates are
of the steps after a prompt's first token. llama.cpp keeps caches in f16: compile OUT.adapt with ``--activations int8
--kv f16`` for the same.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time

VOCABULARY = range(100, 20000)
LARGEST_BATCH = 512
"""Tokens that llama.cpp is given at once."""


def prompt(number: int, length: int) -> list[int]:
    return [VOCABULARY[(7 * i * i + 13 * i + 1009 * number) % len(VOCABULARY)] for i in range(length)]


class Adaptc:
    name = "adaptc"

    def __init__(self, args):
        import adaptc

        self.session = adaptc.load(args.artifact, threads=args.threads, prefix_cache=False)

    def run(self, prompts: list[list[int]], new: int) -> tuple[float, float]:
        """Seconds until every prompt has its first token, and of ``new`` steps of all of them after it: what as many
        more tokens add, since requests that wait for their neighbours' prompts go on meanwhile."""
        if len(prompts) == 1:
            return self._arrivals(prompts[0], new + 1)
        first = self._seconds(prompts, 1)
        return first, self._seconds(prompts, new + 1) - first

    def _seconds(self, prompts: list[list[int]], tokens: int) -> float:
        engine = self.session.engine
        start = time.perf_counter()
        for ids in prompts:
            engine.add(ids, max_tokens=tokens)
        while engine.active:
            engine.step()
        return time.perf_counter() - start

    def _arrivals(self, ids: list[int], tokens: int) -> tuple[float, float]:
        engine, times = self.session.engine, [time.perf_counter()]
        engine.add(ids, max_tokens=tokens)
        while engine.active:
            times += [time.perf_counter() for _ in engine.step()]
        return times[1] - times[0], times[-1] - times[1]


class LlamaCpp:
    name = "llama.cpp"

    def __init__(self, args):
        import llama_cpp as c

        self.c = c
        c.llama_log_set(_SILENCE, None)
        c.llama_backend_init()
        model = c.llama_model_load_from_file(args.model.encode(), c.llama_model_default_params())
        params = c.llama_context_default_params()
        params.n_ctx = args.batch * (max(args.prompts) + args.new + 16)
        params.n_batch = params.n_ubatch = LARGEST_BATCH
        params.n_seq_max = args.batch
        params.n_threads = params.n_threads_batch = args.threads
        self.context = c.llama_init_from_model(model, params)
        self.batch = c.llama_batch_init(LARGEST_BATCH, 0, 1)

    def put(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        if self.c.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")

    def run(self, prompts: list[list[int]], new: int) -> tuple[float, float]:
        c, length = self.c, len(prompts[0])
        c.llama_memory_clear(c.llama_get_memory(self.context), True)
        start = time.perf_counter()
        for sequence, ids in enumerate(prompts):
            for at in range(0, length, LARGEST_BATCH):
                part = ids[at : at + LARGEST_BATCH]
                self.put([(t, at + i, sequence, at + i == length - 1) for i, t in enumerate(part)])
        middle = time.perf_counter()
        for step in range(new):
            self.put([(100 + step, length + step, sequence, True) for sequence in range(len(prompts))])
        return middle - start, time.perf_counter() - middle


_SILENCE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
"""Kept for as long as the library may call it."""


class OpenVino:
    name = "openvino-genai"

    def __init__(self, args):
        import openvino_genai

        if args.batch > 1:
            raise RuntimeError("it is measured with one sequence only")
        self.genai = openvino_genai
        self.pipeline = openvino_genai.LLMPipeline(args.model, "CPU", INFERENCE_NUM_THREADS=args.threads)

    def run(self, prompts: list[list[int]], new: int) -> tuple[float, float]:
        import numpy as np
        import openvino

        ids = np.array(prompts, np.int64)
        inputs = self.genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = self.genai.GenerationConfig(max_new_tokens=new + 1, ignore_eos=True, do_sample=False)
        metrics = self.pipeline.generate(inputs, config).perf_metrics
        return metrics.get_ttft().mean / 1e3, new * metrics.get_tpot().mean / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("artifact")
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[256, 1024])
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="names of engines, separated by commas")
    args = parser.parse_args()
    only = set(filter(None, args.only.split(",")))
    engines = []
    for kind in (Adaptc, LlamaCpp, OpenVino):
        if only and kind.name not in only:
            continue
        try:
            engines.append(kind(args))
        except Exception as error:  # whatever a peer's loader raises
            print(f"left out {kind.name}: {type(error).__name__}: {str(error)[:160]}", flush=True)
    number = 0
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for measured in range(-1, args.rounds):  # the first round warms caches
        for length in args.prompts:
            for engine in engines:
                number += 1
                prompts = [prompt(number * args.batch + i, length) for i in range(args.batch)]
                first, rest = engine.run(prompts, args.new)
                if measured >= 0:
                    pair = (args.batch * length / first, args.batch * args.new / rest)
                    rates.setdefault((engine.name, length), []).append(pair)
    print(f"{'engine':15} {'prompt':>6} {'prefill tok/s':>14} {'decode tok/s':>13} {'prefill ×':>10} {'decode ×':>9}")
    for length in args.prompts:
        ours = None
        for engine in engines:
            prefill, decode = (statistics.median(column) for column in zip(*rates[engine.name, length]))
            ours = ours or (prefill, decode)
            print(f"{engine.name:15} {length:6} {prefill:14.1f} {decode:13.1f} {ours[0] / prefill:10.2f} "
                  f"{ours[1] / decode:9.2f}", flush=True)


if __name__ == "__main__":
    main()
