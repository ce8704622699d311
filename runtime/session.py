"""A loaded artifact: prompts in, text and logits out."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Integral

import numpy as np

from adaptc.artifact_format import CHAT_TEMPLATE, TOKENIZER
from adaptc.backends import launcher
from adaptc.errors import AdaptcError, OptionError, RequestError, one_of
from adaptc.protocol import Executable
from adaptc.runtime.cache_size import default_cache_bytes, split_pages
from adaptc.runtime.engine import Engine, Event, Statistics
from adaptc.runtime.host import memory_bytes, physical_cores
from adaptc.runtime.loader import Artifact, load_artifact
from adaptc.runtime.prefix import SNAPSHOT_TOKENS
from adaptc.runtime.sampler import Logprob, Sampling, check
from adaptc.runtime.text import ChatTemplate, Detokenizer, StopStrings, Tokenizer, encode_chat

Prompt = str | Sequence[int] | Sequence[Mapping]
"""Text, token ids, or chat messages ({"role": …, "content": …})."""

MOST_THREADS = 1024
"""Beyond any machine's cores; systems let a process start tens of thousands and then spend minutes in barriers."""


@dataclass(frozen=True)
class Result:
    """What became of a prompt.

    text           up to the stop string or stop token, without special tokens; "" without a tokenizer
    token_ids      every token generated, a stop token included
    ttft_s         seconds from the call to the first token, waiting included; None if there is none
    tpot_s         mean seconds between tokens after the first; None with fewer than two
    finish_reason  "stop" (stop token or string) | "length" (max_tokens or the context's end) | "abort"
    logprobs       of every token generated, when the call asked for them; else None
    """

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float | None
    tpot_s: float | None
    finish_reason: str
    logprobs: tuple[Logprob, ...] | None = None


def _items(value):
    """Several things, or None for none, as a list; anything else as it is, for ``check`` to refuse."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return list(value or ()) if value is None or isinstance(value, (list, tuple, set, frozenset)) else value


@dataclass(frozen=True)
class GenerateOptions:
    """How prompts are continued. ``generate`` and ``stream`` take these by name, and the fields of
    ``adaptc.runtime.sampler.Sampling``, which say how tokens are chosen. Without ``seed`` a new one is drawn; with one
    every prompt gives what it gives alone.

    n               samples of each prompt; each draws for itself, and sample 0 is what n = 1 gives
    stop            a string or several: text ends before the one that is complete first
    stop_token_ids  tokens that end the answer, beside the model's own
    ignore_eos      goes on past the model's own stop tokens, not past ``stop_token_ids``
    tools           for chat messages: JSON schemas of functions, as the model's chat template takes them
    documents       for chat messages: documents to answer from, as the template takes them
    template        other variables of the template, e.g. {"enable_thinking": False}
    """

    sampling: Sampling = Sampling()
    n: int = 1
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    tools: Sequence[Mapping] | None = None
    documents: Sequence[Mapping] | None = None
    template: Mapping | None = None

    def __post_init__(self):
        check("n", self.n, Integral, "an integer ≥ 1", lambda v: v >= 1)
        stop = [self.stop] if isinstance(self.stop, str) else _items(self.stop)
        check("stop", stop, list, "a string or a list of strings, none of them empty",
              lambda texts: all(isinstance(text, str) and text for text in texts))  # fmt: skip
        ids = _items(self.stop_token_ids)
        check("stop_token_ids", ids, list, "a list of token ids",
              lambda ids: all(_kind(token) == "token" and token >= 0 for token in ids))  # fmt: skip
        if not isinstance(self.ignore_eos, bool):
            raise OptionError(f"ignore_eos must be True or False, got {self.ignore_eos!r}.")
        for name in ("tools", "documents"):
            check(name, getattr(self, name) or (), (list, tuple), "a list of mappings (JSON schemas, not functions)",
                  lambda items: all(isinstance(item, Mapping) for item in items))  # fmt: skip
        check("template", self.template or {}, Mapping, "variables by name, none of them called messages",
              lambda names: all(isinstance(name, str) and name != "messages" for name in names))  # fmt: skip
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))

    @property
    def variables(self) -> dict:
        """What the chat template is given beside the messages."""
        named = {"tools": self.tools, "documents": self.documents}
        return {**(self.template or {}), **{name: list(items) for name, items in named.items() if items}}

    @staticmethod
    def of(options: Mapping) -> GenerateOptions:
        """From keyword arguments; an unknown name is an error that lists the valid ones."""
        sampler = {f.name for f in fields(Sampling)} - {"sample"}
        own = {f.name for f in fields(GenerateOptions)} - {"sampling"}
        for name in options:
            if name not in sampler | own:
                raise one_of("option", name, sorted(sampler | own))
        chosen = {name: options[name] for name in options if name in sampler}
        if chosen.get("seed") is None:
            chosen["seed"] = secrets.randbits(64)
        return GenerateOptions(Sampling(**chosen), **{name: options[name] for name in options if name in own})


def load(path: str | os.PathLike, threads: int | None = None, cache_bytes: int | None = None, *,
         level: str | None = None, page_order_seed: int | None = None, prefix_cache: bool = True,
         snapshot_tokens: int = SNAPSHOT_TOKENS) -> Session:  # fmt: skip
    """Loads the artifact at ``path``.

    threads          default: the physical cores this process may use
    cache_bytes      total size of the page pools; default: room for as many requests of ``max_context`` tokens as
                     the plan takes at once, but at most a quarter of the memory, and for one in any case
    level            which of the artifact's levels to run; default: the best that this machine runs
    page_order_seed  hands cache pages out in random order, for tests
    prefix_cache     prompts that start with the tokens of earlier ones take over what the caches still hold of those;
                     this changes no bit of a result
    snapshot_tokens  of models with fixed-size states: a hit is possible after every so many tokens, rounded up to
                     whole pages, and after a prompt's last full page

    Raises ArtifactError for a damaged artifact or one that this machine can't run, OptionError for bad options.
    """
    if threads is not None:
        check("threads", threads, Integral, f"an integer from 1 to {MOST_THREADS}", lambda v: 1 <= v <= MOST_THREADS)
    if cache_bytes is not None:
        check("cache_bytes", cache_bytes, Integral, "an integer ≥ 1", lambda v: v >= 1)
    check("snapshot_tokens", snapshot_tokens, Integral, "an integer ≥ 1", lambda v: v >= 1)
    if not isinstance(prefix_cache, bool):
        raise OptionError(f"prefix_cache must be True or False, got {prefix_cache!r}.")
    artifact = load_artifact(path)
    plan = artifact.plan
    pages = split_pages(plan, cache_bytes or default_cache_bytes(plan, memory_bytes()))
    backend = launcher(plan.backend)
    chosen = backend.choose_level(plan, level)
    threads = threads or physical_cores()
    executable = backend.load(plan, artifact.kernels(chosen), artifact.weights, threads=threads, pages=pages)
    return Session(artifact, executable, pages, level=chosen, threads=threads, page_order_seed=page_order_seed,
                   prefix_cache=prefix_cache, snapshot_tokens=snapshot_tokens)  # fmt: skip


class Session:
    """A loaded model. Threads may share it: their requests run in the same steps."""

    def __init__(self, artifact: Artifact, executable: Executable, pages: Mapping[str, int], *, level: str,
                 threads: int = 1, page_order_seed: int | None = None, prefix_cache: bool = True,
                 snapshot_tokens: int = SNAPSHOT_TOKENS):  # fmt: skip
        self.level, self.threads = level, threads
        self.artifact, self.plan, self.manifest = artifact, artifact.plan, artifact.manifest
        self.executable = executable
        self.engine = Engine(artifact.plan, executable, pages, page_order_seed=page_order_seed,
                             prefix_cache=prefix_cache, snapshot_tokens=snapshot_tokens)  # fmt: skip
        self._lock = threading.RLock()
        self._live: dict[int, _Generation] = {}
        self._closed = False

    def generate(self, prompt: Prompt | Sequence[Prompt], max_tokens: int = 256, **options
                 ) -> Result | list[Result] | list[list[Result]]:  # fmt: skip
        """Continues one prompt, or each of a list of prompts (then returns a list), and waits for the end.

        Text is tokenised as it is; chat messages go through the model's chat template. ``options`` are those of
        ``GenerateOptions`` and ``Sampling``: temperature, top_k, top_p, min_p, seed, n, stop, tools, … With ``n``
        above 1 a prompt's result is a list of ``n``. Raises RequestError for a prompt that can't be served,
        OptionError for options.
        """
        many = _is_batch(prompt)
        chosen = _options(max_tokens, options)
        with self._generations(prompt if many else [prompt], max_tokens, chosen, numbered=many) as generations:
            while any(g.finish is None for g in generations):
                self._pump()
        results = [g.result() for g in generations]
        if chosen.n > 1:
            results = [results[i : i + chosen.n] for i in range(0, len(results), chosen.n)]
        return results if many else results[0]

    def stream(self, prompt: Prompt, max_tokens: int = 256, **options) -> Stream:
        """Like ``generate`` for one prompt and one sample, but gives the text in pieces as it comes."""
        if _is_batch(prompt):
            raise RequestError("stream takes one prompt, got a list of prompts.", hint="Start one stream for each.")
        chosen = _options(max_tokens, options)
        check("n", chosen.n, Integral, "1 for a stream", lambda v: v == 1)
        return Stream(self, prompt, max_tokens, chosen)

    def score(self, token_ids: Sequence[int] | np.ndarray, start: int = 0, chunk: int | None = None) -> np.ndarray:
        """Logits f32[len(token_ids) - start, vocabulary] at positions ``start`` …, through the caches that generation
        uses. ``chunk`` tokens a step: None = as many as a step takes, 1 = the decode path."""
        self._check_open()
        ids = self.engine.checked(token_ids)
        check("start", start, Integral, f"an integer from 0 to {len(ids) - 1}", lambda v: 0 <= v < len(ids))
        logits = np.empty((len(ids) - start, self.plan.vocabulary), np.float32)
        with self._lock:
            request = self.engine.score(ids, logits, start=start, chunk=chunk)
            generation = self._live[request] = _Generation(None)
        try:
            while generation.finish is None:
                self._pump()
        finally:
            self._drop(request)
        return logits

    def encode(self, prompt: Prompt, /, **variables) -> Sequence[int] | np.ndarray:
        """The token ids that a prompt stands for. Of chat messages, what they say stays text, control tokens are the
        template's; ``variables`` are given to it (tools, documents, …)."""
        if isinstance(prompt, str):
            return self._need(self.tokenizer, "text needs a tokenizer").encode(prompt)
        if len(prompt) and isinstance(prompt[0], Mapping):
            template = self._need(self.chat_template, "chat messages need a chat template")
            return encode_chat(self._need(self.tokenizer, "text needs a tokenizer"), template, prompt, **variables)
        return prompt

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, read when text is first asked for (a large vocabulary takes a second, and the library
        holds Python's lock meanwhile)."""
        data = self.artifact.read(TOKENIZER)
        return None if data is None else Tokenizer(data, self.artifact.text_info)

    def _tokenizer(self) -> Tokenizer | None:
        return self.tokenizer

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        source = self.artifact.read(CHAT_TEMPLATE)
        return None if source is None else ChatTemplate(source.decode(), self.artifact.text_info.special_tokens)

    @property
    def statistics(self) -> Statistics:
        """What has been counted since the artifact was loaded: tokens of prompts, and those that were reused."""
        with self._lock:
            return replace(self.engine.statistics)

    def poison_free_pages(self) -> None:
        """Fills all free cache pages with NaN, for tests."""
        with self._lock:
            self.engine.poison_free_pages()

    def close(self) -> None:
        """Aborts what runs and releases threads and memory. Closing twice is closing once."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for request in list(self._live):
                    self._drop(request)
                self.executable.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    # ---- requests in flight ------------------------------------------------------------------------------------

    def _need(self, part, why: str):
        if part is None:
            raise RequestError(f"The artifact {self.artifact.path} can't take this prompt: {why} and it has none.",
                               hint="Give token ids.")  # fmt: skip
        return part

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("The session is closed.", hint="Load the artifact again.")

    @contextmanager
    def _generations(self, prompts: Sequence[Prompt], max_tokens: int, options: GenerateOptions, *,
                     numbered: bool = False) -> Iterator[list[_Generation]]:  # fmt: skip
        """Starts a generation for each sample of each prompt; whatever ends the block, their pages are free then."""
        self._check_open()
        own = () if options.ignore_eos else self.artifact.text_info.stop_ids
        stop_ids = {*options.stop_token_ids, *own}
        requests: list[int] = []
        generations: list[_Generation] = []
        try:
            for i, prompt in enumerate(prompts):
                samples = [_Generation(self._tokenizer, options) for _ in range(options.n)]
                try:
                    ids = self.encode(prompt, **options.variables)
                    with self._lock:
                        added = self.engine.add_samples(ids, options.n, max_tokens=max_tokens,
                                                        sampling=options.sampling, stop_ids=stop_ids)  # fmt: skip
                        requests += added
                        self._live.update(zip(added, samples))
                except RequestError as error:
                    if not numbered:
                        raise
                    raise type(error)(f"Prompt {i}: {error.message}", hint=error.hint) from error
                generations += samples
            yield generations
        finally:
            for request in requests:
                self._drop(request)

    def _drop(self, request: int) -> None:
        """Forgets a request and, if it still runs, aborts it."""
        with self._lock:
            generation = self._live.pop(request, None)
            self.engine.abort(request)
            if generation is not None:
                generation.end("abort")

    def _pump(self) -> None:
        """One step of the engine; its events go to whom they belong, also to other streams and threads."""
        with self._lock:
            self._check_open()
            for event in self.engine.step():
                generation = self._live.get(event.request)
                if generation is not None:
                    generation.push(event)
                    if generation.finish is not None and event.finish is None:  # a stop string: the engine knows none
                        self.engine.abort(event.request)


class _Generation:
    """One prompt's way from tokens to text. Tokens become text when it is asked for (``read``), or at once where a stop
    string may end it. ``tokenizer`` gives the tokenizer, or None; it is called when it is needed."""

    def __init__(self, tokenizer: Callable[[], Tokenizer | None] | None, options: GenerateOptions = GenerateOptions()):
        self.started = time.perf_counter()
        self.first = self.last = None
        self.tokens: list[int] = []
        self.pieces: deque[str] = deque()
        self.text: list[str] = []
        self.finish: str | None = None
        self.error: AdaptcError | None = None
        self._tokenizer = tokenizer
        self._unread: deque[int] = deque()
        self._reading = threading.Lock()
        self._ended = self._flushed = False
        self._stop = StopStrings(options.stop)
        self._at_once = bool(options.stop) and self._detokenizer is not None
        self._logprobs: list[Logprob] | None = None if options.sampling.logprobs is None else []

    def push(self, event: Event) -> None:
        if event.token is not None and self.finish is None:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.tokens.append(event.token)
            if self._logprobs is not None:
                self._logprobs.append(event.logprob)
            if event.finish != "stop":
                self._unread.append(event.token)
                if self._at_once:
                    self.read()
        if self._stop.found:
            self.end("stop")
        elif event.finish is not None:
            self.error = event.error
            self.end(event.finish)

    def end(self, finish: str) -> None:
        if self.finish is None:
            self._ended = True
            if self._at_once:
                self.read()
            self.finish = "stop" if self._stop.found else finish

    def read(self) -> None:
        """Makes pieces of text of the tokens that have come. Any thread may ask."""
        with self._reading:
            ended = self._ended  # no token comes after that
            if self._flushed or not (ended or self._unread) or self._detokenizer is None:
                return
            while self._unread:
                self._give(self._stop.push(self._detokenizer.push(self._unread.popleft())))
            if ended:
                self._flushed = True
                self._give(self._stop.push(self._detokenizer.flush()))
                self._give(self._stop.flush())

    @cached_property
    def _detokenizer(self) -> Detokenizer | None:
        tokenizer = self._tokenizer() if self._tokenizer else None
        return None if tokenizer is None else Detokenizer(tokenizer)

    def _give(self, piece: str) -> None:
        if piece:
            self.pieces.append(piece)
            self.text.append(piece)

    def result(self) -> Result:
        """Raises what ended the generation, if an error did."""
        if self.error is not None:
            raise self.error
        self.read()
        gaps = len(self.tokens) - 1
        return Result(
            text="".join(self.text),
            token_ids=tuple(self.tokens),
            ttft_s=None if self.first is None else self.first - self.started,
            tpot_s=(self.last - self.first) / gaps if gaps > 0 else None,
            finish_reason=self.finish or "abort",
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
        )


class Stream(Iterator[str]):
    """Pieces of text as they come; ``result`` holds everything when they have ended. Closing or dropping it aborts."""

    def __init__(self, session: Session, prompt: Prompt, max_tokens: int, options: GenerateOptions):
        self._pieces = _stream(session, prompt, max_tokens, options)
        self._generation = next(self._pieces)  # starts it now: errors are raised here, and streams run side by side

    @property
    def result(self) -> Result | None:
        return None if self._generation.finish is None else self._generation.result()

    def __next__(self) -> str:
        return next(self._pieces)

    def close(self) -> None:
        """Ends the generation now and frees its pages; ``result`` then says "abort"."""
        self._pieces.close()


def _stream(session: Session, prompt: Prompt, max_tokens: int, options: GenerateOptions) -> Iterator:
    """The generation, then its pieces. No method, so that dropping the stream drops this and frees the pages."""
    with session._generations([prompt], max_tokens, options) as (generation,):
        yield generation
        ended = False
        while not ended:
            ended = generation.finish is not None
            generation.read()
            while generation.pieces:
                yield generation.pieces.popleft()
            if generation.finish is None:
                session._pump()
        generation.result()  # an error ends the pieces with it


# ---- options and prompts ---------------------------------------------------------------------------------------


def _options(max_tokens: int, options: Mapping) -> GenerateOptions:
    check("max_tokens", max_tokens, Integral, "an integer ≥ 1", lambda v: v >= 1)
    return GenerateOptions.of(options)


def _is_batch(prompt) -> bool:
    """Whether ``prompt`` is a list of prompts. Raises RequestError for what is neither a prompt nor a list of them."""
    if isinstance(prompt, str) or (isinstance(prompt, np.ndarray) and prompt.ndim == 1):
        return False
    if not isinstance(prompt, (list, tuple, np.ndarray)) or (isinstance(prompt, np.ndarray) and not prompt.ndim):
        raise RequestError("A prompt is text, a list of token ids or a list of chat messages, got "
                           f"{type(prompt).__name__}.")  # fmt: skip
    kinds = {_kind(item) for item in prompt}
    if len(kinds) > 1 or "other" in kinds:
        found = ", ".join(sorted({type(item).__name__ for item in prompt}))
        raise RequestError("A prompt is text, a list of token ids or a list of chat messages; a list of prompts holds "
                           f"prompts of one kind. Got {found}.")  # fmt: skip
    return kinds in ({"text"}, {"list"})


def _kind(item) -> str:
    table = ((str, "text"), (bool, "other"), (Integral, "token"), (Mapping, "message"),
             ((list, tuple, np.ndarray), "list"))  # fmt: skip
    return next((name for kind, name in table if isinstance(item, kind)), "other")
