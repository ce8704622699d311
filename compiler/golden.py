"""Goldens: what the authors' own model answers, recorded to compare artifacts against.

A golden file is a safetensors file of N prompts × G greedy steps: ``tokens`` i32[N, longest] (prompt and answer,
padded with -1), ``prompt_lengths`` i32[N], ``top_ids``/``top_logits`` [N, G, 64], ``probe_ids`` i32[192] (seeded ids),
``probe_logits`` f32[N, G, 192] and ``log_sum_exp`` f32[N, G]. Step g's logits are those that chose answer token g.
The logits come from one forward over the whole sequence, without a cache, in float32; its metadata say from which
files and with which versions.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from adaptc.errors import ExistsError, InputError, OptionError, OutputError, RequestError, UnsupportedError

TOP = 64
PROBES = 192
PROBE_SEED = 20261
KIND, VERSION = "adaptc-goldens", "1"
TENSORS = {"tokens", "prompt_lengths", "top_ids", "top_logits", "probe_ids", "probe_logits", "log_sum_exp"}

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics state that",
    "Water boils at a lower temperature on high mountains because",
    "Translate to German: Good morning, my friends.\n",
    "Q: What is 17 + 25?\nA:",
    "In 1969, astronauts first",
    "A recipe for a simple tomato soup:\n1.",
    "The main difference between a list and a tuple in Python is",
)
"""Used when no prompts are given: prose, code, lists, arithmetic, another language."""


def record(model: str, output: Path, *, prompts: tuple[str, ...] = PROMPTS, steps: int = 48,
           force: bool = False, trust_remote_code: bool = False, progress=None) -> dict:
    """Writes a golden file for ``model`` and returns its metadata."""
    from safetensors.numpy import save

    if not prompts:
        raise RequestError("no prompts to record.", hint="Give a file with one prompt a line.")
    if steps < 1:
        raise OptionError(f"steps must be an integer of at least 1, got {steps}.")
    if not Path(output).parent.is_dir():
        raise OutputError(f"{output} can't be written: the directory {Path(output).parent} does not exist.")
    if not force and os.path.lexists(output):
        raise ExistsError(f"{output} already exists.", hint="Give another name or --force to replace it.")
    source = authors_source(model, trust_remote_code)
    module, tokenizer = authors_model(source), authors_tokenizer(source)
    config = module.config.get_text_config()
    vocabulary, context = config.vocab_size, config.max_position_embeddings
    encoded = [tokenizer(prompt).input_ids for prompt in prompts]
    for number, ids in enumerate(encoded, 1):
        if not ids:
            raise RequestError(f"prompt {number} is empty.")
        if len(ids) + steps > context:
            raise RequestError(f"prompt {number} has {len(ids)} tokens, and with {steps} steps it exceeds the model's "
                               f"context of {context}.")  # fmt: skip
    probes = np.sort(np.random.Generator(np.random.PCG64(PROBE_SEED)).choice(vocabulary, min(PROBES, vocabulary),
                                                                           replace=False)).astype(np.int32)
    rows = []
    for done, ids in enumerate(encoded):
        tokens, logits = greedy(module, ids, steps)
        rows.append(_record(tokens, len(ids), logits, probes))
        if progress:
            progress("goldens", done + 1, len(prompts))
    longest = max(len(r["tokens"]) for r in rows)
    # safetensors writes memory as it lies, and columns picked from logits lie column by column
    tensors = {name: np.ascontiguousarray(np.stack([r[name] for r in rows])) for name in rows[0] if name != "tokens"}
    tensors |= {"tokens": np.stack([_padded(r["tokens"], longest) for r in rows]), "probe_ids": probes}
    metadata = {"kind": KIND, "version": VERSION, "model": source.name,
                "files": json.dumps(source.hashes, sort_keys=True),
                "made_with": json.dumps(_versions(), sort_keys=True)}
    _write(Path(output), save(tensors, metadata))
    return metadata


def _write(output: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    beside = output.with_name(f".{output.name}.writing-{os.getpid()}")
    try:
        try:
            beside.write_bytes(content)
            os.replace(beside, output)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(f"{output} can't be written: {error.strerror}.") from error


def read(path: str | Path, source=None) -> bytes:
    """The bytes of a golden file; InputError when it isn't one, or isn't one of ``source``'s files."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} is not a golden file: {error}.", hint="Make one with `adaptc golden`.") from error
    if metadata.get("kind") != KIND or metadata.get("version") != VERSION or names != TENSORS:
        raise InputError(f"{path} is not a golden file of version {VERSION}.", hint="Make one with `adaptc golden`.")
    if source is not None and json.loads(metadata["files"]) != source.hashes:
        raise InputError(f"{path} was recorded from other files than {source.name}: from {metadata['model']}.",
                         hint="Record goldens of this very model with `adaptc golden`.")
    return Path(path).read_bytes()


def authors_source(model: str, trust_remote_code: bool):
    """The source of ``authors_model``, to be asked for its files: whether everything in them is used is not in question
    where their authors' own code reads them, so nothing has to be waived."""
    from adaptc.sources import open_source

    source = open_source(model, trust_remote_code=trust_remote_code, waive=("*",))
    source.config  # an AdaptcError for what transformers can't read, or only by code that isn't trusted
    return source


def authors_model(source):
    """transformers' own module with its own reading of the files: nothing of ours in between. UnsupportedError when
    transformers can't read the files, or fills a parameter at random because it finds none in them."""
    import torch
    from transformers import AutoModelForCausalLM

    from adaptc.sources.binding import listed

    if source.unread:
        raise _unread(source, source.unread)
    module, loaded = _by_transformers(AutoModelForCausalLM, source, dtype=torch.float32, output_loading_info=True)
    if missing := sorted(loaded["missing_keys"]):
        raise _unread(source, f"it finds nothing for {listed(missing)}")
    return module.eval()


def authors_tokenizer(source):
    """transformers' own tokenizer of the files. UnsupportedError when it can't read them, or there is none."""
    from transformers import AutoTokenizer

    return _by_transformers(AutoTokenizer, source)


def _by_transformers(kind, source, **options):
    path = source.files()[0]
    where = {"gguf_file": path.name} if source.kind == "gguf" else {"trust_remote_code": source.trust_remote_code}
    try:
        return kind.from_pretrained(path.parent, **options, **where)
    except Exception as error:  # errors of transformers share no narrower class
        raise _unread(source, str(error)) from error


def _unread(source, why: str) -> UnsupportedError:
    return UnsupportedError(f"transformers can't read {source.name} by itself: {why.rstrip('.')}.",
                            hint="Take the Hugging Face folder of the model as the reference." if source.kind == "gguf" else "")


def greedy(module, prompt: list[int], steps: int) -> tuple[list[int], np.ndarray]:
    """``prompt`` with ``steps`` greedy tokens after it, and the logits f32[steps, vocabulary] that chose them, from
    one forward over the whole sequence without a cache."""
    import torch

    with torch.inference_mode():
        tokens, cache, feed = list(prompt), None, list(prompt)
        for _ in range(steps):
            out = module(torch.tensor([feed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, feed = out.past_key_values, [int(out.logits[0, -1].argmax())]
            tokens += feed
        whole = module(torch.tensor([tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return tokens, whole.float().numpy()


def _padded(tokens: np.ndarray, length: int) -> np.ndarray:
    return np.pad(tokens, (0, length - len(tokens)), constant_values=-1)


def _record(tokens: list[int], prompt_length: int, logits: np.ndarray, probes: np.ndarray) -> dict[str, np.ndarray]:
    order = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    wide = logits.astype(np.float64)
    peak = wide.max(1)
    return {
        "tokens": np.array(tokens, np.int32),
        "prompt_lengths": np.int32(prompt_length),
        "top_ids": order.astype(np.int32),
        "top_logits": np.take_along_axis(logits, order, 1),
        "probe_logits": logits[:, probes],
        "log_sum_exp": (peak + np.log(np.exp(wide - peak[:, None]).sum(1))).astype(np.float32),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers")}
