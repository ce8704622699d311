"""Sessions: prompts of every kind in, text, tokens and logits out; errors; nothing left behind."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from runtime_fake import VOCABULARY, FakeLauncher, contents, greedy, plain, plan
from runtime_text import byte_level_tokenizer

from adaptc.artifact import write_artifact
from adaptc.artifact_format import TextInfo
from adaptc.errors import AdaptcError, ArtifactError, OptionError, RequestError
from adaptc.runtime import host, session
from adaptc.runtime.cache_size import SNAPSHOTS, default_cache_bytes, split_pages
from adaptc.runtime.engine import group_pages

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.fixture
def launcher(monkeypatch):
    fake = FakeLauncher()
    monkeypatch.setattr(session, "launcher", lambda name: {"fake": fake}[name])
    return fake


@pytest.fixture
def ids_only(tmp_path, launcher):
    with session.load(write_artifact(tmp_path / "m.adapt", contents(plan())), threads=1) as loaded:
        yield loaded
        free(loaded)


@pytest.fixture
def text(tmp_path, launcher):
    """A byte-level tokenizer of which the fake model knows the first 40 ids: <s>, <|end|> and ASCII from ! on."""
    info = TextInfo(bos_id=0, add_bos=True, stop_ids=(1,), special_tokens={"bos_token": "<s>"})
    files = dict(text=info, tokenizer=byte_level_tokenizer(), chat_template=TEMPLATE)
    with session.load(write_artifact(tmp_path / "m.adapt", contents(plan(), **files)), threads=1) as loaded:
        yield loaded
        free(loaded)


def free(loaded) -> None:
    if not loaded._closed:
        assert not loaded.engine.active and not loaded._live
        assert all(len(p.free_pages) + len(p.idle_pages) == p.pages and p.reserved == 0
                   for p in loaded.engine.pools.values())  # fmt: skip


def test_token_ids_without_a_tokenizer(ids_only):
    result = ids_only.generate(PROMPT, max_tokens=5)
    assert result.token_ids == tuple(greedy(PROMPT, 5, plan())) and result.text == ""
    assert result.finish_reason == "length" and 0 < result.ttft_s < 5 and 0 < result.tpot_s < 1
    assert ids_only.generate(np.array(PROMPT), 5).token_ids == result.token_ids
    assert ids_only.generate(tuple(PROMPT), 1).tpot_s is None
    with pytest.raises(RequestError, match="text needs a tokenizer"):
        ids_only.generate("hello")
    with pytest.raises(RequestError, match="chat template"):
        ids_only.generate([{"role": "user", "content": "hello"}])


def test_lists_of_prompts_equal_each_alone(ids_only):
    prompts = [PROMPT, PROMPT[:2], PROMPT[4:], PROMPT[::-1], PROMPT * 2, [7]]
    for options in ({}, dict(temperature=20.0, seed=11), dict(temperature=15.0, top_k=9, top_p=0.9, seed=12)):
        together = ids_only.generate(prompts, max_tokens=9, **options)
        alone = [ids_only.generate(p, max_tokens=9, **options) for p in prompts]
        assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    assert isinstance(ids_only.generate([PROMPT], max_tokens=1), list)
    sampled = [ids_only.generate(PROMPT, 9, temperature=50.0).token_ids for _ in range(5)]
    assert len(set(sampled)) > 1  # without a seed, another one each time


def test_stop_tokens(ids_only):
    options = dict(max_tokens=12, temperature=20.0, seed=5)
    tokens = ids_only.generate(PROMPT, **options).token_ids
    stop = next(i for i in range(2, 12) if tokens[i] not in tokens[:i])
    ids_only.artifact = dataclasses.replace(ids_only.artifact, text_info=TextInfo(stop_ids=(tokens[stop],)))
    result = ids_only.generate(PROMPT, **options)
    assert result.token_ids == tokens[: stop + 1] and result.finish_reason == "stop"
    assert ids_only.generate(PROMPT, **options, ignore_eos=True).token_ids == tokens
    assert ids_only.generate(PROMPT, **options, ignore_eos=True, stop_token_ids=[tokens[1]]).finish_reason == "stop"


def test_score(ids_only):
    expected = plain(PROMPT, plan())
    ids_only.poison_free_pages()
    for chunk in (None, 1, 3):
        for start in (0, 5, 11):
            logits = ids_only.score(PROMPT, start=start, chunk=chunk)
            assert logits.dtype == np.float32 and (logits == expected[start:]).all()
    assert ids_only.score(np.array(PROMPT[:1])).shape == (1, VOCABULARY)
    for bad in ([], [1, 99], [[1]], 5, None, "ab", np.array(3), [[1], [1, 2]]):
        with pytest.raises(RequestError):
            ids_only.score(bad)
    for options in (dict(start=12), dict(start=-1), dict(start=1.5), dict(chunk=0)):
        with pytest.raises(OptionError, match=next(iter(options))):
            ids_only.score(PROMPT, **options)


@pytest.mark.parametrize("prompt, words", [
    ([], "prompt is empty"), ("", "text needs a tokenizer"), ([[]], "Prompt 0: .*empty"),
    ([[1], [1, 40]], "Prompt 1: .*40"),
    ([1] * 49, "49 tokens; the artifact's context is 48"), ([1, "a"], "one kind. Got int, str"),
    (5, "A prompt is text"), ({}, "A prompt is"),
    (None, "A prompt is text"), (np.array(5), "A prompt is text"), ([None], "Got NoneType"), ([1.0], "Got float"), ([True], "Got bool"),
])  # fmt: skip
def test_prompts_that_are_refused(ids_only, prompt, words):
    with pytest.raises(RequestError, match=words):
        ids_only.generate(prompt)


@pytest.mark.parametrize("options", [
    dict(max_tokens=0), dict(max_tokens=2.0), dict(temperature=-1), dict(top_k=-1), dict(top_p=0), dict(seed=-1),
    dict(stop=[""]), dict(stop=[3]), dict(stop_token_ids=["a"]), dict(ignore_eos=1), dict(stop=5), dict(stop=b"a"),
    dict(stop=np.array("a")), dict(stop_token_ids=5), dict(stop_token_ids=[True]), dict(stop_token_ids=[-1]),
    dict(template={"messages": []}), dict(logit_bias=None),
])  # fmt: skip
def test_bad_options_are_named(ids_only, options):
    (name,) = options
    for call in (ids_only.generate, ids_only.stream):
        with pytest.raises(OptionError, match=f"^{name} must be"):
            call(PROMPT, **options)


def test_nothing_to_stop_at_and_sequences_of_every_kind(ids_only):
    whole = ids_only.generate(PROMPT, 4, stop=None, stop_token_ids=None)
    assert whole == dataclasses.replace(ids_only.generate(PROMPT, 4), ttft_s=whole.ttft_s, tpot_s=whole.tpot_s)
    first = whole.token_ids[:1]
    for ids in (first, list(first), set(first), np.array(first)):
        assert ids_only.generate(PROMPT, 4, stop_token_ids=ids).token_ids == first


def test_text_and_chat(text):
    assert text.encode("#$") == [0, 4, 5] and text.encode([{"role": "user", "content": "#$"}]) == [0, 4, 5, 31]
    result = text.generate("#$", max_tokens=8, ignore_eos=True)
    assert list(result.token_ids) == greedy([0, 4, 5], 8, plan())
    assert result.text == text.tokenizer.decode(result.token_ids) != ""
    chat = text.generate([[{"role": "user", "content": "#$"}]] * 2, max_tokens=4, ignore_eos=True)
    assert [list(r.token_ids) for r in chat] == [greedy([0, 4, 5, 31], 4, plan())] * 2
    assert len(text.generate(["#$", "%"], max_tokens=2)) == 2
    with pytest.raises(RequestError, match="outside the vocabulary"):
        text.generate("é")


def test_stop_strings_end_a_request_within_a_batch(text):
    full = [text.generate(p, max_tokens=16, ignore_eos=True) for p in ("#$", "(", "+,-")]
    stop = full[0].text[5:7]
    cut = text.generate(["#$", "(", "+,-"], max_tokens=16, ignore_eos=True, stop=stop)
    for result, whole in zip(cut, full):
        assert result.text == whole.text.split(stop)[0]
        assert result.finish_reason == ("stop" if stop in whole.text else "length")
        assert result.token_ids == whole.token_ids[: len(result.token_ids)]
    assert len(cut[0].token_ids) < 16
    free(text)


def test_streams(text):
    whole = text.generate("#$", max_tokens=12, ignore_eos=True)
    stream = text.stream("#$", max_tokens=12, ignore_eos=True)
    assert stream.result is None
    pieces = list(stream)
    assert "".join(pieces) == whole.text and len(pieces) > 3 and all(pieces)
    assert stream.result.token_ids == whole.token_ids and stream.result.finish_reason == "length"
    with pytest.raises(RequestError, match="stream takes one prompt"):
        text.stream(["a", "b"])
    with pytest.raises(RequestError, match="empty"):
        text.stream([])


def test_a_tokenizer_waits_until_text_is_asked_for(text):
    """Tokens come first where prompts are token ids: a large vocabulary takes longer than everything else."""
    stream = text.stream([2, 3, 4], max_tokens=6, ignore_eos=True)
    while text.engine.active:
        text._pump()
    assert "tokenizer" not in vars(text)
    assert "".join(stream) == stream.result.text == text.tokenizer.decode(stream.result.token_ids) != ""


def test_stop_strings_end_token_prompts_at_once(text):
    whole = text.generate([2, 3, 4], max_tokens=12, ignore_eos=True)
    stopped = text.generate([2, 3, 4], max_tokens=12, ignore_eos=True, stop=whole.text[4:6])
    assert stopped.finish_reason == "stop" and stopped.text == whole.text[: whole.text.index(whole.text[4:6])]
    assert len(stopped.token_ids) < len(whole.token_ids)


def test_streams_run_side_by_side(text):
    prompts = ["#$", "(", "+,-"]
    whole = [text.generate(p, max_tokens=10, ignore_eos=True).text for p in prompts]
    streams = [text.stream(p, max_tokens=10, ignore_eos=True) for p in prompts]
    got = ["", "", ""]
    for _ in range(40):
        for i, stream in enumerate(streams):
            got[i] += next(stream, "")
    assert got == whole and max(r for _, r, _ in text.executable.steps) == 3
    assert text.generate("#$", max_tokens=10, ignore_eos=True).text == whole[0]


def test_a_stream_left_early_frees_its_pages(text):
    stream = text.stream("#$", max_tokens=30, ignore_eos=True)
    next(stream)
    stream.close()
    assert stream.result.finish_reason == "abort" and 1 <= len(stream.result.token_ids) < 30
    free(text)
    for _ in text.stream("#$", max_tokens=30, ignore_eos=True):
        break
    free(text)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_call_frees_its_pages(ids_only, error):
    def fail(step):
        if step == start + 4:
            raise error

    expected = ids_only.generate(PROMPT, 20).token_ids
    ids_only.executable.fail = fail
    for call in (lambda: ids_only.generate([PROMPT] * 6, max_tokens=20), lambda: ids_only.score(PROMPT, chunk=1),
                 lambda: list(ids_only.stream(PROMPT, max_tokens=20))):  # fmt: skip
        start = len(ids_only.executable.steps)
        with pytest.raises(error):
            call()
        free(ids_only)
        ids_only.poison_free_pages()
    assert ids_only.generate(PROMPT, 20).token_ids == expected


def test_logits_that_give_no_token_fail_their_own_request_only(ids_only):
    run, logits = ids_only.executable.run, ids_only.executable.outputs("logits")

    def tainting(symbols):
        run(symbols)
        logits[symbols["S"] - 1] = np.nan

    ids_only.executable.run = tainting
    sound = ids_only.stream(PROMPT[:3], max_tokens=2)
    with pytest.raises(AdaptcError, match="NaN"):
        ids_only.generate([7], max_tokens=4)
    ids_only.executable.run = run
    assert list(sound) == [] and sound.result.token_ids == tuple(greedy(PROMPT[:3], 2, plan()))
    ids_only.executable.run = tainting
    tainted = ids_only.stream([7])
    with pytest.raises(AdaptcError, match="NaN"):
        next(tainted)


def test_threads_share_a_session(ids_only):
    prompts = [PROMPT[i:] for i in range(6)]
    expected = [ids_only.generate(p, 12).token_ids for p in prompts]
    got = [None] * 6

    def work(i):
        got[i] = ids_only.generate(prompts[i], 12).token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert got == expected


def test_close(tmp_path, launcher):
    loaded = session.load(write_artifact(tmp_path / "m.adapt", contents(plan())), threads=1)
    stream = loaded.stream(PROMPT, 20)
    loaded.close()
    loaded.close()
    assert loaded.executable.closed
    assert list(stream) == [] and stream.result.finish_reason == "abort"
    for call in (lambda: loaded.generate(PROMPT), lambda: loaded.score(PROMPT), lambda: loaded.stream(PROMPT)):
        with pytest.raises(RequestError, match="closed"):
            call()


# ---- loading ---------------------------------------------------------------------------------------------------


def test_load_options(tmp_path, launcher):
    out = write_artifact(tmp_path / "m.adapt", contents(plan()))
    for name, bad in (("threads", 0), ("threads", "2"), ("threads", True), ("cache_bytes", 0), ("cache_bytes", 1.5)):
        with pytest.raises(OptionError, match=f"^{name} must be"):
            session.load(out, **{name: bad})
    with pytest.raises(OptionError, match="cache_bytes is 100; a request of one token takes"):
        session.load(out, cache_bytes=100)
    session.load(out)
    assert launcher.loaded == [(host.physical_cores(), split_pages(plan(), default_cache_bytes(plan(), 2**40)))]
    with pytest.raises(ArtifactError, match="absent"):
        session.load(tmp_path / "absent")


def test_page_order_and_small_caches_change_nothing(tmp_path, launcher):
    out = write_artifact(tmp_path / "m.adapt", contents(plan()))
    one = default_cache_bytes(plan(max_requests=1), 0)
    with session.load(out) as loaded:
        expected = [r.token_ids for r in loaded.generate([PROMPT, PROMPT[3:], [1]], 20)]
    with session.load(out, cache_bytes=one, page_order_seed=4) as loaded:
        loaded.poison_free_pages()
        assert [r.token_ids for r in loaded.generate([PROMPT, PROMPT[3:], [1]], 20)] == expected
    with session.load(out, cache_bytes=one * 3 // 4) as loaded:
        assert loaded.generate(PROMPT, 4).token_ids == expected[0][:4]
        with pytest.raises(RequestError, match="larger cache_bytes"):
            loaded.generate(PROMPT, 36)


def bytes_of(plan_, pages) -> int:
    size = {s.name: s.page_bytes(plan_.page_size) for s in plan_.states}
    return sum(pages[g.name] * size[s] for g in plan_.groups for s in g.states)


@pytest.mark.parametrize("page_size", [1, 4, 5])
def test_cache_bytes_are_split_so_that_no_group_runs_out_first(page_size):
    plan_ = plan(page_size=page_size)
    one = default_cache_bytes(plan_, 0)
    whole = {g.name: group_pages(plan_, g, plan_.max_context) for g in plan_.groups}
    whole["fixed"] += SNAPSHOTS
    assert split_pages(plan_, one) == whole and bytes_of(plan_, whole) == one
    assert split_pages(plan_, 3 * one) == {n: 3 * c for n, c in whole.items()}
    assert split_pages(plan_, 10**12) == {n: plan_.max_requests * c for n, c in whole.items()}
    assert (
        default_cache_bytes(plan_, 2**50) == plan_.max_requests * one and default_cache_bytes(plan_, 8 * one) == 2 * one
    )
    least = bytes_of(plan_, {g.name: group_pages(plan_, g, 1) for g in plan_.groups})
    for size in range(least, 3 * one, max(1, one // 97)):
        pages = split_pages(plan_, size)
        assert min(pages.values()) >= 1 and bytes_of(plan_, pages) <= size
        fits = max(n for n in range(1, plan_.max_context + 1)
                   if all(group_pages(plan_, g, n) <= pages[g.name] for g in plan_.groups))  # fmt: skip
        longer = {g.name: group_pages(plan_, g, fits + 1) for g in plan_.groups}
        assert fits == plan_.max_context or bytes_of(plan_, longer) > size


def test_host_quotas(tmp_path):
    file = tmp_path / "limit"
    for content, cpus in (("max 100000", float("inf")), ("150000 100000", 2), ("400000 100000", 4)):
        file.write_text(content + "\n")
        assert host._quota(str(file)) == cpus
    assert host._quota(str(tmp_path / "absent")) == float("inf")
    file.write_text("1048576\n")
    assert host.memory_bytes(str(file)) == 1048576
    file.write_text("max\n")
    assert host.memory_bytes(str(file)) == host.memory_bytes(str(tmp_path / "absent")) > 1 << 28
    assert 1 <= host.physical_cores() <= len(os.sched_getaffinity(0))


def test_the_runtime_runs_without_the_compiler(tmp_path):
    """With torch, transformers, torch_mlir and the compiler's own parts made impossible to import."""
    files = dict(tokenizer=byte_level_tokenizer(), chat_template=TEMPLATE, text=TextInfo(0, True, (1,)))
    out = write_artifact(tmp_path / "m.adapt", contents(plan(), **files))
    code = f"""
        import sys

        class Blocker:
            blocked = ("torch", "transformers", "torch_mlir", "gguf", "networkx", "click",
                       "adaptc.passes", "adaptc.models",
                       "adaptc.driver", "adaptc.cli", "adaptc.capture", "adaptc.ir", "adaptc.ops", "adaptc.sources")
            def find_spec(self, name, path=None, target=None):
                if any(name == b or name.startswith(b + ".") for b in self.blocked):
                    raise ImportError("blocked: " + name)

        sys.meta_path.insert(0, Blocker())
        from adaptc.runtime import session
        assert not [m for m in sys.modules if m.startswith("adaptc.") and m.split(".")[1] not in
                    ("errors", "formats", "plan", "protocol", "artifact_format", "packages", "runtime", "backends")], sys.modules
        Blocker.blocked = Blocker.blocked[:-8]  # the fake backend below builds on the artifact writer's types
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from runtime_fake import FakeLauncher
        session.launcher = lambda name: FakeLauncher()
        with session.load({str(out)!r}, threads=1) as loaded:
            loaded.score([0, 4, 5])
            assert "jinja2" not in sys.modules and "tokenizers" not in sys.modules
            print(loaded.generate([{{"role": "user", "content": "#$"}}], 4, ignore_eos=True).token_ids)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert eval(run.stdout) == tuple(greedy([0, 4, 5, 31], 4, plan()))


# ---- samples, log-probabilities, tools -------------------------------------------------------------------------


def test_samples_of_a_prompt(ids_only):
    options = dict(temperature=20.0, seed=11, max_tokens=6)
    one = ids_only.generate(PROMPT, **options)
    three = ids_only.generate(PROMPT, n=3, **options)
    assert len({r.token_ids for r in three}) == 3 and three[0].token_ids == one.token_ids
    prompts = [PROMPT[:3], PROMPT, PROMPT[5:]]
    together = ids_only.generate(prompts, n=2, **options)
    assert [[r.token_ids for r in ids_only.generate(p, n=2, **options)] for p in prompts] == \
        [[r.token_ids for r in results] for results in together]  # fmt: skip
    with pytest.raises(OptionError, match="n must be an integer from 1 to 4"):
        ids_only.generate(PROMPT, n=5)
    with pytest.raises(OptionError, match="n must be 1 for a stream"):
        ids_only.stream(PROMPT, n=2)


def test_log_probabilities_and_penalties(ids_only):
    result = ids_only.generate(PROMPT, max_tokens=5, logprobs=3)
    rows = plain([*PROMPT, *result.token_ids], plan())[len(PROMPT) - 1 :].astype(np.float64)
    for logits, token, found in zip(rows, result.token_ids, result.logprobs, strict=False):
        shares = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        assert found.token == token and [i for i, _ in found.top] == np.argsort(-logits, kind="stable")[:3].tolist()
        assert abs(found.logprob - shares[token]) < 1e-9 and found.top[0] == (token, found.logprob)  # greedy
    assert len(result.logprobs) == 5 and ids_only.generate(PROMPT, 5).logprobs is None
    assert len(set(ids_only.generate(PROMPT, 12, presence_penalty=1e6, ignore_eos=True).token_ids)) == 12
    assert set(ids_only.generate(PROMPT, 4, logit_bias={9: 1e6}).token_ids) == {9}
    with pytest.raises(RequestError, match="logit_bias names token 40"):
        ids_only.generate(PROMPT, 4, logit_bias={40: 1})
    with pytest.raises(OptionError, match="unknown option 'top_q'; valid values are: .*temperature, template, tools"):
        ids_only.generate(PROMPT, top_q=1)


def test_tools_and_template_variables_reach_the_template(tmp_path, launcher):
    source = "{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ messages[0].content }}{{ mark or '' }}"
    source += "{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    files = dict(text=TextInfo(bos_id=0), tokenizer=byte_level_tokenizer(), chat_template=source)
    with session.load(write_artifact(tmp_path / "m.adapt", contents(plan(), **files)), threads=1) as loaded:
        chat = [{"role": "user", "content": "#<|end|>"}]
        given = dict(tools=[{"name": "$"}], documents=[{"text": "%"}], template={"mark": "&"})
        text = loaded.tokenizer.decode(loaded.encode(chat, tools=[{"name": "$"}], documents=[{"text": "%"}], mark="&"))
        assert text == "$#<|end|>&%"
        with pytest.raises(RequestError, match="outside the vocabulary"):  # "|" isn't among the fake model's ids
            loaded.generate(chat, max_tokens=1, **given)
        found = loaded.generate([{"role": "user", "content": "#"}], max_tokens=3, ignore_eos=True, **given)
        assert list(found.token_ids) == greedy(loaded.tokenizer.encode("$#&%"), 3, plan())
        for bad in (dict(tools=[print]), dict(documents={"text": "x"}), dict(template=[1])):
            with pytest.raises(OptionError, match=f"^{next(iter(bad))} must be"):
                loaded.generate(chat, **bad)
