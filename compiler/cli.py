"""The ``adaptc`` command. Options mirror the dataclasses they fill; every command that reports takes
``--json`` (`opt` and `completion` print what other programs read).

Exit codes: 0 done, 2 bad input or usage (one clear sentence on stderr, with the id that docs/errors.md explains),
130 interrupted, 1 `verify` found something, `coverage` found operators missing, or our own bug.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path

import click

from adaptc.errors import AdaptcError, DamagedFileError, InputError, OptionError, OutputError, RequestError, one_of
from adaptc.options import CHOICES, CompileOptions


class _Commands(click.Group):
    """Turns adaptc's errors into one sentence and their exit code, and Ctrl-C into 130."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except AdaptcError as error:
            click.echo(f"adaptc: [{error.code}] {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            exec("")  # CPython remembers an interrupt within a text's exec (dataclasses, say) and would end by SIGINT
            click.echo("adaptc: interrupted.", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            ctx.exit(0)
        except OSError as error:
            if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still buffered goes nowhere
            problem = OutputError(f"standard output can't be written: {error.strerror}.")
            click.echo(f"adaptc: [{problem.code}] {problem}", err=True)
            ctx.exit(problem.exit_code)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="adaptc")
def main() -> None:
    """Compiles language models for accelerators, and runs the result."""


def _as_json(function):
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(function)


def _compile_options(function):
    """One flag for each field of CompileOptions."""
    for item in reversed(fields(CompileOptions)):
        many = item.metadata.get("repeatable", False)
        kind = click.Choice(CHOICES[item.name]) if item.name in CHOICES else str if many else type(item.default)
        flag = "--" + item.name.replace("_", "-")
        form = {"is_flag": True} if kind is bool else {"type": kind, "multiple": many, "show_default": True}
        function = click.option(flag, item.name, default=() if many else item.default, help=_help_of(item.name),
                                **form)(function)
    return function


def _help_of(name: str) -> str:
    """A field's sentence in the docstring of CompileOptions: documented once."""
    lines = CompileOptions.__doc__.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith(name + " "))
    text = [lines[start].strip().removeprefix(name).strip()]
    for line in lines[start + 1 :]:
        if not line.startswith(" " * 8):
            break
        text.append(line.strip())
    return " ".join(text)


def _pass_options(function):
    """--print-after and --time-passes: what passes do, on stderr."""
    for option in (
        click.option("--time-passes", is_flag=True, help="Print what each pass took to stderr."),
        click.option("--print-after", default="",
                     help="Print the program after these passes (names separated by commas, or all) to stderr."),
    ):
        function = option(function)
    return function


class _PassLog:
    """Called after each pass; prints what --print-after and --time-passes ask for."""

    def __init__(self, print_after: str, time_passes: bool):
        from adaptc.passes import names

        self.shown, self.timed, self.times = _names(print_after), time_passes, []
        for name in self.shown:
            if name not in ("all", *names()):
                raise one_of("pass", name, ("all", *names()))

    def __call__(self, program, done) -> None:
        self.times.append(done)
        if done.name in self.shown or "all" in self.shown:
            click.echo(f"// after {done.name}\n{program.text()}", err=True)

    def close(self) -> None:
        from adaptc import report

        if self.timed:
            click.echo(report.times_text(self.times), err=True)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


class _Bars:
    """Progress on stderr: one line that is redrawn on a terminal, nothing elsewhere."""

    def __init__(self, quiet: bool):
        self.on = not quiet and sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        if self.on:
            filled = "█" * (24 * done // max(total, 1))
            click.echo(f"\r{what:<10} {filled:<24} {done}/{total} ", nl=done >= total, err=True)


@main.command("compile")
@click.argument("model")
@click.option("--target", default="cpu", show_default=True, help="What to compile for; see `adaptc targets`.")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The artifact, e.g. OUT.adapt.")
@click.option("--from", "from_ir", type=click.Path(path_type=Path),
              help="A stage printed by `inspect --ir`, to start from; weights and tokenizer come from MODEL.")
@click.option("--goldens", type=click.Path(path_type=Path), help="A file made by `adaptc golden`, to keep inside.")
@click.option("--tune", type=click.Path(path_type=Path), metavar="FILE",
              help="Measures here which tile sizes and the like are fastest, writes FILE, and compiles with it.")
@click.option("--tuning", type=click.Path(path_type=Path), metavar="FILE",
              help="Compiles with what --tune has written: other speed, the same results bit for bit.")
@click.option("--force", is_flag=True, help="Replace an artifact; it stays loadable until the new one is done.")
@click.option("--workers", type=int, default=None, help="Processes that compile kernels. [default: one a core]")
@_pass_options
@_compile_options
@_as_json
def compile_command(model, target, output, from_ir, goldens, tune, tuning, force, workers, print_after, time_passes,
                    as_json, **options) -> None:
    """Compiles MODEL: a GGUF file, a Hugging Face directory, or a hub id. Passes run once, whatever the levels."""
    from adaptc.driver import compile_model
    from adaptc.report import compile_text

    log = _PassLog(print_after, time_passes)
    report = compile_model(model, target, output=output, from_ir=from_ir, goldens=goldens, tune=tune, tuning=tuning,
                           force=force, workers=workers, progress=_Bars(as_json), after=log, **options)
    log.close()
    click.echo(json.dumps(report.to_dict(), indent=1) if as_json else compile_text(report))


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--chat", help="A user message, put into the model's chat template, instead of a plain PROMPT.")
@click.option("--system", help="A system message before --chat.")
@click.option("--tools", type=click.Path(path_type=Path), help="A JSON file of function schemas, for --chat.")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens to generate at most.")
@click.option("--temperature", default=0.0, show_default=True, help="0 = greedy.")
@click.option("--top-k", default=0, show_default=True, help="Sample among the k likeliest tokens; 0 = all.")
@click.option("--top-p", default=1.0, show_default=True, help="Sample among tokens of this total probability.")
@click.option("--min-p", default=0.0, show_default=True, help="… at least this times as likely as the likeliest.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Divides logits of tokens seen; 1 = off.")
@click.option("--presence-penalty", default=0.0, show_default=True, help="Taken from logits of tokens of the answer.")
@click.option("--frequency-penalty", default=0.0, show_default=True, help="… once for each time they occur there.")
@click.option("--logit-bias", multiple=True, metavar="ID=BIAS", help="Added to a token's logit; may be repeated.")
@click.option("--logprobs", type=int, default=None, help="With --json: log-probabilities, also of N tokens.")
@click.option("-n", default=1, show_default=True, help="Samples of the prompt; more than one are printed at the end.")
@click.option("--seed", type=int, default=None, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@click.option("--threads", type=int, default=None, help="Threads. [default: the free cores]")
@click.option("--level", help="Which of the artifact's levels to run. [default: the best that this machine runs]")
@_as_json
def run(artifact, prompt, chat, system, tools, max_tokens, n, logit_bias, threads, level, as_json, **options) -> None:
    """Runs ARTIFACT on PROMPT and streams the answer. With neither PROMPT nor --chat, reads standard input."""
    from adaptc.runtime.session import load

    if options["logprobs"] is not None and not as_json:
        raise OptionError("--logprobs needs --json: the text of an answer has no place for them.")
    request = _request(prompt, chat, system, tools)
    options |= {"logit_bias": _bias(logit_bias), "tools": _tools(tools), "n": n}
    start = time.perf_counter()
    with load(artifact, threads=threads, level=level) as session:
        loaded = time.perf_counter() - start
        if n > 1:
            results = session.generate(request, max_tokens, **options)
        else:
            stream = session.stream(request, max_tokens, **options)
            for piece in stream:
                if not as_json:
                    click.echo(piece, nl=False)
                    sys.stdout.flush()
            results = [stream.result]
    if as_json:
        found = [asdict(result) | {"load_s": loaded} for result in results]
        click.echo(json.dumps(found if n > 1 else found[0]))
        return
    for number, result in enumerate(results if n > 1 else ()):
        click.echo(f"[{number}] {result.text}")
    tokens, first = sum(len(r.token_ids) for r in results), results[0]
    speed = f", {1 / first.tpot_s:.1f} tokens/s" if first.tpot_s else ""
    click.echo(f"\n[{tokens} tokens, load {loaded:.2f} s, TTFT {first.ttft_s:.2f} s{speed}]", err=True)


def _request(prompt, chat, system, tools):
    """What `run` continues: text, or the messages of a chat."""
    if chat is not None and prompt is not None:
        raise OptionError("both PROMPT and --chat are given; which of them is meant?")
    if chat is None:
        for name, value in (("--system", system), ("--tools", tools)):
            if value is not None:
                raise OptionError(f"{name} needs --chat: a plain prompt has no messages.")
        return prompt if prompt is not None else _standard_input()
    return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": chat}]


def _standard_input() -> str:
    if sys.stdin is None:
        raise RequestError("There is no prompt: standard input is closed.", hint="Give PROMPT or --chat.")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        what = f"{error.reason} at byte {error.start}"
        raise RequestError(f"The prompt on standard input is not UTF-8: {what}.") from error


def _bias(pairs: tuple[str, ...]) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, _, bias in (pair.partition("=") for pair in pairs)}
    except ValueError:
        raise OptionError(f"--logit-bias must be ID=BIAS, for example 42=-1.5; got {' '.join(pairs)}.") from None


def _tools(path: Path | None):
    if path is None:
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path} can't be read as JSON: {error}.") from error


@main.command()
@click.argument("what")
@click.option("--ir", "stage", help="Print this stage: captured, fused, sharded, laid_out or lowered.")
@click.option("--plan", "show_plan", is_flag=True, help="Print the plan: operators, kernels and buffers.")
@click.option("--memory", "show_memory", is_flag=True, help="Print the memory plan.")
@click.option("--profile-table", "show_profile", is_flag=True, help="Print FLOPs, bytes and bound of every operator.")
@click.option("--target", default="cpu", show_default=True, help="Target whose passes shape a model's later stages.")
@_compile_options
@_as_json
def inspect(what, stage, show_plan, show_memory, show_profile, target, as_json, **options) -> None:
    """Shows what is in WHAT: a model or an artifact. Without a flag, a summary.

    Of a config.json, or a folder with that and no weights: parameters, caches, bodies, profile and coverage at full
    size, without weights.
    """
    from adaptc import driver, report, sources

    if (stage is not None) + show_plan + show_memory + show_profile > 1:
        raise OptionError("--ir, --plan, --memory and --profile-table each print another thing; give one of them.")
    flag = "--ir" if stage is not None else "--plan" if show_plan else "--memory" if show_memory else ""
    if sources.is_described(what):
        if flag:
            raise OptionError(f"{flag} needs weights, and {what} is a configuration without them.",
                              hint="Without a flag, its sizes, profile and coverage are printed; --profile-table prints "
                              "the profile alone.")
        found = driver.sizes(what, target, **options)
        if show_profile:
            rows = [asdict(row) for row in found.profile]
            click.echo(json.dumps(rows, indent=1) if as_json else report.profile_text(found.profile))
        else:
            click.echo(json.dumps(found.to_dict(), indent=1) if as_json else report.sizes_text(found))
        return
    if stage is not None:
        text = driver.stage_text(what, stage, target, **options)
        click.echo(json.dumps({"stage": stage, "ir": text}) if as_json else text, nl=as_json)
        return
    facts = driver.inspect(what, target, **options)
    if show_plan:
        click.echo(facts.plan.to_json() if as_json else report.plan_text(facts.plan), nl=not as_json)
    elif show_memory:
        click.echo(json.dumps(facts.memory, indent=1) if as_json else report.memory_text(facts.memory))
    elif show_profile:
        rows = [asdict(row) for row in facts.profile]
        click.echo(json.dumps(rows, indent=1) if as_json else report.profile_text(facts.profile))
    else:
        click.echo(json.dumps(facts.to_dict(), indent=1) if as_json else report.summary_text(facts))


@main.command()
@click.argument("model")
@click.option("--target", default="cpu", show_default=True, help="The target; see `adaptc targets`.")
@_compile_options
@_as_json
@click.pass_context
def coverage(ctx, model, target, as_json, **options) -> None:
    """Shows how TARGET carries out every operator of MODEL; exits with 1 when one is missing."""
    from adaptc import driver, report

    found = driver.coverage(model, target, **options)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in found.rows], indent=1))
    else:
        click.echo(report.survey_text(found))
    ctx.exit(1 if found.missing else 0)


@main.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--passes", default="", help="Names of passes, separated by commas, to run in this order.")
@click.option("--to", "stage", default="", help="Instead of --passes: run the pipeline up to this stage.")
@_pass_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write it. [default: standard output]")
@click.option("--target", default="cpu", show_default=True, help="Target whose backend passes ask.")
@_compile_options
def opt(file, passes, stage, print_after, time_passes, output, target, **options) -> None:
    """Runs passes on FILE, a stage printed by `inspect --ir`, and prints what they make of it."""
    from adaptc import driver

    log = _PassLog(print_after, time_passes)
    program = driver.optimise(file, _names(passes), stage, target, log, **options)
    log.close()
    if output is None:
        click.echo(program.text(), nl=False)
    else:
        driver.write_text(output, program.text())


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--level", default="all", show_default=True,
              type=click.Choice(("operator", "layer", "model", "equivalences", "all")), help="What to check.")
@click.option("--against", metavar="MODEL", help="Adds the authors' own model, layer by layer; needs torch.")
@click.option("--text", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="A text to compare perplexity on.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draws error by depth as SVG into this file.")
@click.option("--trust-remote-code", is_flag=True, help="Runs modelling code that lies in the folder of --against.")
@click.option("--seed", default=0, show_default=True, help="Of what is made up: operands, tokens, orders of pages.")
@_as_json
def verify(artifact, level, against, text, plot, trust_remote_code, seed, as_json) -> None:
    """Checks ARTIFACT against its own captured program. Exit code 0: it passes; 1: it doesn't; 2: bad input."""
    from adaptc.verify import LEVELS
    from adaptc.verify import verify as check
    from adaptc.verify.plot import write
    from adaptc.verify.report import text as as_text

    levels = LEVELS if level == "all" else (level,)
    if plot is not None and "layer" not in levels and against is None:
        raise OptionError("--plot draws error by depth, which only the layer level and --against measure.")
    report = check(artifact, levels=levels, against=against, text=text, trust_remote_code=trust_remote_code, seed=seed,
                   progress=_Bars(as_json))
    if plot is not None:
        write(report, plot)
    click.echo(json.dumps(report.to_dict(), indent=1) if as_json else as_text(report))
    if not report.passed:
        sys.exit(1)


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prompt-lengths", default="32,128", show_default=True, help="Tokens of prompts, separated by commas.")
@click.option("--concurrency", default="1,4", show_default=True, help="Requests at once, separated by commas.")
@click.option("--new-tokens", default=32, show_default=True, help="Tokens generated for each request.")
@click.option("--rounds", default=1, show_default=True, help="Times every point is measured; medians count.")
@click.option("--ops", is_flag=True, help="Also run attention and matrix kernels alone.")
@click.option("--suite", type=click.Path(path_type=Path),
              help="Records a baseline into this folder instead: fixed prompt lengths and concurrency, as JSON and SVG.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts, which are random token ids.")
@click.option("--threads", type=int, default=None, help="Threads. [default: the free cores]")
@click.option("--level", help="Which of the artifact's levels to run. [default: the best that this machine runs]")
@_as_json
@click.pass_context
def bench(ctx, artifact, prompt_lengths, concurrency, new_tokens, rounds, ops, suite, seed, threads, level, as_json) -> None:
    """Measures ARTIFACT here: TTFT, TPOT, throughput and memory over prompt lengths and concurrency."""
    from adaptc import driver, report
    from adaptc.runtime import bench as measured
    from adaptc.runtime.session import load

    if suite is not None:
        for name in ("prompt_lengths", "concurrency", "new_tokens", "rounds", "ops"):
            if ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
                raise OptionError(f"--suite measures points of its own; --{name.replace('_', '-')} has no meaning then.")
        driver.make_folder(suite)
    with load(artifact, threads=threads, level=level) as session:
        if suite is not None:
            found = measured.suite(session, seed=seed, progress=_Bars(as_json))
        else:
            found = measured.bench(session, prompt_lengths=_numbers("--prompt-lengths", prompt_lengths),
                                   concurrency=_numbers("--concurrency", concurrency), new_tokens=new_tokens,
                                   rounds=rounds, seed=seed, operators=ops, progress=_Bars(as_json))
    data = json.dumps(found.to_dict(), indent=1)
    if suite is not None:
        driver.write_text(suite / "baseline.json", data + "\n")
        measured.chart(found).write(suite / "baseline.svg")
    click.echo(data if as_json else report.bench_text(found))


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--prompt", "prompt_tokens", type=int, default=None,
              help="Tokens of a prompt. [default: 256, or as many as the context has room for]")
@click.option("--concurrency", default=1, show_default=True, help="Requests at once.")
@click.option("--steps", default=16, show_default=True, help="Decode steps.")
@click.option("--seed", default=0, show_default=True, help="Of the prompts, which are random token ids.")
@click.option("--threads", type=int, default=None, help="Threads. [default: the free cores]")
@click.option("--level", help="Which of the artifact's levels to run. [default: the best that this machine runs]")
@click.option("--trace", type=click.Path(path_type=Path), help="Writes every step and operator here, for Perfetto.")
@click.option("--roofline", type=click.Path(path_type=Path), help="Draws operators below the machine's roofs as SVG.")
@_as_json
def profile(artifact, prompt_tokens, concurrency, steps, seed, threads, level, trace, roofline, as_json) -> None:
    """Measures where ARTIFACT's time goes here, operator by operator, against what this machine can do."""
    from adaptc import driver, report
    from adaptc.runtime import profile as measured
    from adaptc.runtime.session import load

    with load(artifact, threads=threads, level=level) as session:
        peaks = driver.peaks(session.plan.backend, session.level, session.threads)
        found = measured.profile(session, prompt_tokens=prompt_tokens, concurrency=concurrency, steps=steps, seed=seed,
                                 peaks=peaks)
    if trace is not None:
        driver.write_text(trace, json.dumps(measured.trace(found, session.plan)))
    if roofline is not None:
        measured.roofline(found, peaks).write(roofline)
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else report.spent_text(found))


def _numbers(name: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise OptionError(f"{name} must be integers separated by commas, got {text!r}.") from None


@main.command()
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
def completion(shell) -> None:
    """Prints the completion script of SHELL, for example: eval "$(adaptc completion bash)"."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    click.echo(kind(main, {}, "adaptc", "_ADAPTC_COMPLETE").source())


@main.command()
@_as_json
def targets(as_json) -> None:
    """Lists the targets."""
    from adaptc import report
    from adaptc import targets as known

    rows = [known.target(name) for name in known.names()]
    click.echo(json.dumps([asdict(t) for t in rows], indent=1) if as_json else report.targets_text(rows))


@main.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The golden file (safetensors).")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="One prompt a line.")
@click.option("--force", is_flag=True, help="Replace a golden file.")
@click.option("--steps", default=48, show_default=True, help="Greedy tokens a prompt.")
@click.option("--trust-remote-code", is_flag=True, help="Runs modelling code that lies in the model's folder.")
@_as_json
def golden(model, output, prompts, force, steps, trust_remote_code, as_json) -> None:
    """Records what the authors' own MODEL answers, for `compile --goldens`."""
    from adaptc import golden as goldens

    try:
        lines = tuple(prompts.read_text("utf-8").splitlines()) if prompts else goldens.PROMPTS
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{prompts} can't be read: {error}.") from error
    facts = goldens.record(model, output, prompts=lines, steps=steps, force=force, trust_remote_code=trust_remote_code,
                           progress=_Bars(as_json))
    click.echo(json.dumps(facts, indent=1) if as_json else f"{output}: {len(lines)} prompts × {steps} steps.")


if __name__ == "__main__":
    main()
