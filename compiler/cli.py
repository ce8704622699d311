"""The ``adaptc`` command. Options mirror the dataclasses they fill; every command takes ``--json``.

Exit codes: 0 done, 2 bad input or usage (one clear sentence on stderr), 130 interrupted, 1 our own bug.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import fields
from pathlib import Path

import click

from adaptc.errors import AdaptcError
from adaptc.options import CHOICES, CompileOptions


class _Commands(click.Group):
    """Turns adaptc's errors into one sentence and their exit code, and Ctrl-C into 130."""

    def invoke(self, ctx):
        try:
            return super().invoke(ctx)
        except AdaptcError as error:
            click.echo(f"adaptc: {error}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("adaptc: interrupted.", err=True)
            ctx.exit(130)
        except BrokenPipeError:
            sys.stderr.close()
            ctx.exit(0)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="adaptc")
def main() -> None:
    """Compiles language models for accelerators, and runs the result."""


def _as_json(function):
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(function)


def _compile_options(function):
    """One flag for each field of CompileOptions."""
    for item in reversed(fields(CompileOptions)):
        kind = click.Choice(CHOICES[item.name]) if item.name in CHOICES else type(item.default)
        flag = "--" + item.name.replace("_", "-")
        form = {"is_flag": True} if kind is bool else {"type": kind, "show_default": True}
        function = click.option(flag, item.name, default=item.default, help=_help_of(item.name), **form)(function)
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
@click.option("--goldens", type=click.Path(path_type=Path), help="A file made by `adaptc golden`, kept in the artifact.")
@click.option("--force", is_flag=True, help="Replace an existing artifact; it stays loadable until the new one is done.")
@click.option("--workers", type=int, default=None, help="Processes that compile kernels. [default: one a core]")
@_compile_options
@_as_json
def compile_command(model, target, output, from_ir, goldens, force, workers, as_json, **options) -> None:
    """Compiles MODEL: a GGUF file, a Hugging Face directory, or a hub id."""
    from adaptc.driver import compile_model
    from adaptc.report import compile_text

    report = compile_model(model, target, output=output, from_ir=from_ir, goldens=goldens, force=force,
                           workers=workers, progress=_Bars(as_json), **options)
    click.echo(json.dumps(report.to_dict(), indent=1) if as_json else compile_text(report))


@main.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--chat", help="A user message, put into the model's chat template, instead of a plain PROMPT.")
@click.option("--system", help="A system message before --chat.")
@click.option("--max-tokens", default=128, show_default=True, help="Tokens to generate at most.")
@click.option("--temperature", default=0.0, show_default=True, help="0 = greedy.")
@click.option("--top-k", default=0, show_default=True, help="Sample among the k likeliest tokens; 0 = all.")
@click.option("--top-p", default=1.0, show_default=True, help="Sample among tokens of this total probability.")
@click.option("--seed", type=int, default=None, help="Makes sampling repeatable.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be repeated.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-text token.")
@click.option("--threads", type=int, default=None, help="Threads. [default: the free cores]")
@_as_json
def run(artifact, prompt, chat, system, max_tokens, temperature, top_k, top_p, seed, stop, ignore_eos, threads,
        as_json) -> None:
    """Runs ARTIFACT on PROMPT and streams the answer. With neither PROMPT nor --chat, reads standard input."""
    from adaptc.errors import OptionError
    from adaptc.runtime.session import load

    if system is not None and chat is None:
        raise OptionError("--system needs --chat: a plain prompt has no system message.")
    if chat is not None and prompt is not None:
        raise OptionError("both PROMPT and --chat are given; which of them is meant?")
    if chat is not None:
        request = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": chat}]
    else:
        request = prompt if prompt is not None else sys.stdin.read()
    start = time.perf_counter()
    with load(artifact, threads=threads) as session:
        loaded = time.perf_counter() - start
        stream = session.stream(request, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
                                seed=seed, stop=stop, ignore_eos=ignore_eos)
        for piece in stream:
            if not as_json:
                click.echo(piece, nl=False)
                sys.stdout.flush()
        result = stream.result
    if as_json:
        click.echo(json.dumps({"text": result.text, "token_ids": result.token_ids, "ttft_s": result.ttft_s,
                               "tpot_s": result.tpot_s, "finish_reason": result.finish_reason, "load_s": loaded}))
    else:
        speed = f", {1 / result.tpot_s:.1f} tokens/s" if result.tpot_s else ""
        click.echo(f"\n[{len(result.token_ids)} tokens, load {loaded:.2f} s, TTFT {result.ttft_s:.2f} s{speed}]", err=True)


@main.command()
@click.argument("what")
@click.option("--ir", "stage", help="Print this stage: captured, fused, sharded, laid_out or lowered.")
@click.option("--plan", "show_plan", is_flag=True, help="Print the plan: operators, kernels and buffers.")
@click.option("--memory", "show_memory", is_flag=True, help="Print the memory plan.")
@click.option("--target", default="cpu", show_default=True, help="Target whose passes shape a model's later stages.")
@_compile_options
@_as_json
def inspect(what, stage, show_plan, show_memory, target, as_json, **options) -> None:
    """Shows what is in WHAT: a model or an artifact. Without a flag, a summary."""
    from adaptc import driver, report

    if stage:
        text = driver.stage_text(what, stage, target, **options)
        click.echo(json.dumps({"stage": stage, "ir": text}) if as_json else text, nl=as_json)
        return
    facts = driver.inspect(what, target, **options)
    if show_plan:
        click.echo(facts.plan.to_json() if as_json else report.plan_text(facts.plan), nl=not as_json)
    elif show_memory:
        click.echo(json.dumps(facts.memory, indent=1) if as_json else report.memory_text(facts.memory))
    else:
        click.echo(json.dumps(facts.to_dict(), indent=1) if as_json else report.summary_text(facts))


@main.command()
@_as_json
def targets(as_json) -> None:
    """Lists the targets."""
    from dataclasses import asdict

    from adaptc import report
    from adaptc import targets as known

    rows = [known.target(name) for name in known.names()]
    click.echo(json.dumps([asdict(t) for t in rows], indent=1) if as_json else report.targets_text(rows))


@main.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The golden file (safetensors).")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="One prompt a line.")
@click.option("--steps", default=48, show_default=True, help="Greedy tokens a prompt.")
@_as_json
def golden(model, output, prompts, steps, as_json) -> None:
    """Records what the authors' own MODEL answers, for `compile --goldens`."""
    from adaptc import golden as goldens

    lines = tuple(prompts.read_text().splitlines()) if prompts else goldens.PROMPTS
    facts = goldens.record(model, output, prompts=lines, steps=steps, progress=_Bars(as_json))
    click.echo(json.dumps(facts, indent=1) if as_json else f"{output}: {len(lines)} prompts × {steps} steps.")


if __name__ == "__main__":
    main()
