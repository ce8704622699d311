"""Reports as text for people. The data are the dataclasses' own; JSON output prints those instead."""

from __future__ import annotations

from typing import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]], right: str = "") -> str:
    """Aligned columns; those whose index is in ``right`` are right-aligned."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    ends = [str(i) in right for i in range(len(header))]
    padded = ([c.rjust(w) if r else c.ljust(w) for c, w, r in zip(line, widths, ends)] for line in lines)
    first, *others = ("  ".join(cells).rstrip() for cells in padded)
    return "\n".join([first, "  ".join("-" * w for w in widths), *others])


def quantity(value: float, unit: str = "") -> str:
    """1234567 → "1.23 M"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def profile_text(rows) -> str:
    parts = []
    for tokens in sorted({r.tokens for r in rows}):
        phase = "decode (1 token)" if tokens == 1 else f"prefill ({tokens} tokens)"
        chosen = [r for r in rows if r.tokens == tokens]
        total = sum(r.seconds for r in chosen)
        body = table(
            ("module", "operator", "places", "shapes", "FLOPs", "bytes", "time", "share", "bound by"),
            ((r.module, r.op, r.count, r.shapes, quantity(r.flops), quantity(r.bytes, "B"),
              f"{1e3 * r.seconds:.3f} ms", f"{100 * r.seconds / total:.1f} %", r.bound) for r in chosen),
            right="24567",
        )
        parts.append(f"{phase}: {1e3 * total:.2f} ms by the target's roofline\n{body}")
    return "\n\n".join(parts)


def bench_text(found) -> str:
    """The report of ``runtime.bench``."""
    ms = lambda seconds: "-" if seconds is None else f"{1e3 * seconds:.2f}"  # noqa: E731
    parts = [f"{found.artifact} ({found.level}), seed {found.seed}", table(
        ("prompt", "requests", "new", "TTFT ms", "worst", "TPOT ms", "worst", "prefill tok/s", "new tok/s"),
        ((p.prompt_tokens, p.concurrency, p.new_tokens, ms(p.ttft_median), ms(p.ttft_worst), ms(p.tpot_median),
          ms(p.tpot_worst), f"{p.prefill_per_second:.1f}", f"{p.generated_per_second:.1f}") for p in found.points),
        right="012345678",
    )]
    if found.operators:
        parts.append("Kernels alone\n" + table(
            ("phase", "tokens", "context", "operator", "places", "µs a place", "GFLOP/s", "GB/s", "kernels"),
            ((o.phase, o.tokens, o.context, o.op, o.places, f"{1e6 * o.seconds:.1f}",
              f"{o.flops / o.seconds / 1e9:.2f}", f"{o.bytes / o.seconds / 1e9:.2f}", " ".join(o.kernels))
             for o in found.operators), right="124567",
        ))
    return "\n\n".join([*parts, memory_text(found.memory)])


def spent_text(found) -> str:
    """The report of ``runtime.profile``."""
    parts = [f"{found.artifact} ({found.level})"]
    if found.peaks:
        rates = ", ".join(f"{rate / 1e9:.0f} G{dtype} op/s" for dtype, rate in sorted(found.peaks.operations.items()))
        parts[0] += f", {found.peaks.threads} thread(s); this machine now: {found.peaks.bandwidth / 1e9:.1f} GB/s, {rates}"
    for phase in found.phases:
        rows = sorted((r for r in found.rows if r.phase == phase.name), key=lambda r: -r.seconds)
        body = table(
            ("operator", "module", "places", "ms", "share", "GFLOP/s", "GB/s", "of the roof", "bound by"),
            ((r.op, r.module, r.places, f"{1e3 * r.seconds:.3f}", f"{100 * r.share:.1f} %",
              f"{r.flops / max(r.seconds, 1e-9) / 1e9:.2f}", f"{r.bytes / max(r.seconds, 1e-9) / 1e9:.2f}",
              f"{100 * r.limit / max(r.seconds, 1e-9):.0f} %" if r.limit is not None else "", r.bound or "")
             for r in rows),
            right="234567",
        )
        parts.append(f"{phase.name}: {phase.tokens} tokens, context {phase.context}: {1e3 * phase.operators:.2f} ms in "
                     f"operators, {1e3 * phase.wall:.2f} ms with the host's part ({phase.steps} steps measured)\n{body}")
    return "\n\n".join(parts)


def survey_text(found) -> str:
    """The report of ``adaptc coverage``."""
    flops, moved = sum(r.flops for r in found.rows) or 1, sum(r.bytes for r in found.rows) or 1
    share = lambda part, whole: f"{100 * part / whole:.1f} %"  # noqa: E731
    return "\n".join((
        f"shares of a step of {found.tokens} token(s) with {found.context} in the cache",
        table(("operator", "places", "FLOPs", "bytes", "status", "modules", "source"),
              ((r.op, r.count, share(r.flops, flops), share(r.bytes, moved), r.status, ", ".join(r.modules),
                _few(r.lines)) for r in found.rows), right="123"),
        f"missing: {', '.join(r.op for r in found.missing)}" if found.missing else "nothing is missing",
    ))


def _few(lines: Sequence[str], most: int = 2) -> str:
    """The first lines of source, each file named once: ``modeling.py:65, 66 …``."""
    shown, last = [], ""
    for line in lines[:most]:
        file, _, number = line.rpartition(":")
        shown.append(number if file == last else line)
        last = file
    return ", ".join(shown) + (" …" if len(lines) > most else "")


def times_text(times) -> str:
    """What passes took."""
    return table(("stage", "pass", "ms"), ((t.stage, t.name, f"{1e3 * t.seconds:.1f}") for t in times), right="2")


def coverage_text(rows) -> str:
    return table(("operator", "places", "status", "modules"),
                 ((r.op, r.count, r.status, ", ".join(r.modules)) for r in rows), right="1")


def memory_text(memory: dict[str, int]) -> str:
    return table(("memory", "bytes"), ((name, f"{size:,}") for name, size in memory.items()), right="1")


def compile_text(report) -> str:
    parts = [
        f"{report.model} for {report.target} ({', '.join(report.levels)}) → {report.output}",
        "Compute profile\n" + profile_text(report.profile),
        "Operator coverage\n" + coverage_text(report.coverage),
        "Memory\n" + memory_text(report.memory),
        "Bodies\n" + "\n".join(f"  {name}: {count} places" for name, count in report.bodies.items()),
    ]
    if report.clones:
        parts.append("Bodies cloned\n" + "\n".join(f"  {why}" for why in report.clones))
    if report.format_notes:
        parts.append("Formats and merges that aren't as chosen\n" + "\n".join(f"  {note}" for note in report.format_notes))
    if report.left_out:
        parts.append("Tensors left out\n" + "\n".join(f"  {note}" for note in report.left_out))
    if report.conversion_errors:
        worst = sorted(report.conversion_errors.items(), key=lambda item: -item[1])
        parts.append("Weights converted (relative RMS error a tensor)\n"
                     + table(("tensor", "error"), ((n, f"{e:.2e}") for n, e in worst), right="1"))
    seconds = ((stage, f"{spent:.2f}") for stage, spent in report.seconds.items())
    parts.append("Time\n" + table(("stage", "seconds"), seconds, right="1"))
    return "\n\n".join(parts)


def plan_text(plan) -> str:
    rows = ((op.id, op.op, op.source, op.provider, " ".join(c.kernel for c in op.calls), " ".join(op.outputs))
            for op in plan.operators())
    return table(("id", "operator", "module", "provider", "kernels", "outputs"), rows, right="0")


def summary_text(facts) -> str:
    lines = [f"{name}: {value}" for name, value in facts.summary.items()]
    return "\n".join(lines) + "\n\n" + memory_text(facts.memory)


def sizes_text(found) -> str:
    """The report of ``adaptc inspect`` of a configuration."""
    facts = (
        ("model", f"{found.model} ({found.architecture})"),
        ("parameters", f"{found.parameters:,} ({quantity(found.parameters)})"),
        ("active, a token", f"{found.active:,} ({quantity(found.active)}), without the input embedding"),
        *([("with the wrapper's other parts", f"{quantity(found.parameters + found.other_parts)}, active "
            f"{quantity(found.active + found.other_parts)}")] if found.other_parts else ()),
        ("weights as stored", f"{found.weights:,} bytes"),
        (f"cache ({found.kv}), a token", f"{found.cache_token:,} bytes"),
        (f"cache, a request of {found.context} tokens", f"{found.cache_request:,} bytes"),
        *((f"of it whatever its length, {name}", f"{size:,} bytes") for name, size in found.cache_fixed.items()),
        ("distinct bodies", ", ".join(f"{name} × {count}" for name, count in found.bodies.items()) or "none"),
    )
    return "\n\n".join([
        table(("size", "value"), facts),
        "Compute profile\n" + profile_text(found.profile),
        "Operator coverage\n" + survey_text(found.coverage),
        *(f"Note: {note}." for note in found.notes),
    ])


def targets_text(rows) -> str:
    return table(
        ("target", "backend", "levels", "compute", "memory bandwidth"),
        ((t.name, t.backend, ", ".join(t.levels),
          ", ".join(f"{d} {quantity(v, 'op/s')}" for d, v in t.compute.items()),
          quantity(t.memory[-1].bandwidth, "B/s")) for t in rows),
    )
