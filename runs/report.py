"""One HTML file that shows how a run came to its kernels; it opens offline and runs no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from runs.errors import StoreError
from runs.export import Winner, winners_of
from runs.findings import (
    LEAST_TRIALS,
    best_so_far,
    ceiling_tflops,
    elapsed_s,
    failures,
    importances,
    peers_of,
    rate_tflops,
)
from runs.rebuild import source_of
from runs.record import Basis, Finalist, Measured, RunSpec
from runs.report_shapes import problem_name, shape_name, shapes_table, short
from runs.store import Replay, RunStore
from runs.svg import Bar, Line, bar_chart, line_chart
from runs.templates.report_page import definitions, facts, folded, page, section, table
from space.gpu import GpuSpec, gpu_named
from space.variant import Shape

FORMULA = (
    "FLOPs = 2 · B · Hq · (D + Dv) · visible pairs; visible pairs = Sq · Sk without a mask, the "
    "unmasked ones with a causal mask (aligned bottom-right)"
)


@dataclass(frozen=True, slots=True)
class Talk:
    """One exchange with a model, as text."""

    kind: str
    asked: str
    answered: str
    facts: str  #: model, tokens, seconds
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _Run:
    """What every part of the page reads."""

    store: RunStore
    replay: Replay
    gpu: GpuSpec
    winners: tuple[Winner, ...]
    finalists: tuple[Finalist, ...]

    @property
    def spec(self) -> RunSpec:
        return self.store.spec

    @property
    def predicted(self) -> bool:
        return self.spec.measure is Basis.PREDICTED


def report(store: RunStore, talks: Sequence[Talk] = ()) -> str:
    """Return the page of a run as HTML text. Raises StoreError when the run is damaged."""
    replay = store.replay()
    gpu = gpu_named(store.spec.gpu)
    winners = tuple(winners_of(store, replay))
    run = _Run(store, replay, gpu, winners, replay.finalists)
    spec = run.spec
    title = f"{spec.variant} on {gpu.title}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<div class="sub">{escape(spec.run_id)} · {spec.dtype} · {_ending(replay)}</div>',
        _predicted_banner(run),
        _reference_note(spec),
        _figures(run),
        section("Best so far", _curves(run), "curves"),
        section("Each shape", shapes_table(spec, gpu, winners, run.finalists), "shapes"),
        section("Against the card's ceiling", _roofline(run), "roofline"),
        section("Which parameters mattered", _importances(run), "importances"),
        section("What failed, and why", _failures(run), "failures"),
        section("Winning programs", _sources(run), "sources"),
        section("Exchanges with the model", _talks(spec, talks), "model"),
        section("How it was measured" if not run.predicted else "How it was predicted",
                _protocol(run), "protocol"),
    ]  # fmt: skip
    return page(f"{title} · {spec.run_id}", "".join(parts))


def _ending(replay: Replay) -> str:
    end = replay.finished
    return escape(f"ended: {end.reason}" if end is not None else "not finished")


def _predicted_banner(run: _Run) -> str:
    if not run.predicted:
        return ""
    return (
        f'<div class="banner">Predicted: no {escape(run.gpu.title)} was there. Kernels were '
        "compiled for it and ranked by an analytic model; no time on this page was measured.</div>"
    )


def _reference_note(spec: RunSpec) -> str:
    if (r := spec.reference) is None:
        return ""
    numbers = ", ".join(f"{n} = {x:g}" for n, x in r.scalars)
    given = f" with {numbers}" if numbers else ""
    return (
        f"<p>Kernels compute <code>{escape(r.name)}</code>{escape(given)} and were checked "
        "against it. TFLOP/s count the two products of plain attention.</p>"
    )


def _figures(run: _Run) -> str:
    history = run.replay.history
    right = sum(isinstance(r.outcome, Measured) for r in history)
    mark = ' <i class="tag">predicted</i>' if run.predicted else ""
    found: list[tuple[str, str]] = [
        ("programs judged", f"{history.spent()} of {run.spec.budget}"),
        ("right kernels", str(right)),
        ("shapes with a kernel", f"{len(run.winners)} of {len(run.spec.shapes)}"),
    ]
    if run.winners:
        logs = [math.log(rate_tflops(w.shape, w.timing.median_us)) for w in run.winners]
        rate = math.exp(sum(logs) / len(logs))
        found.append((f"TFLOP/s, geometric mean{mark}", f"{rate:.0f}"))
    ratios = [
        math.log(peers[0].timing.median_us / w.timing.median_us)
        for w in run.winners
        if (peers := peers_of(run.finalists, w.shape))
    ]
    if ratios:
        mean = math.exp(sum(ratios) / len(ratios))
        found.append((f"speed over the best peer, {len(ratios)} shapes", f"{mean:.3f}×"))
    seconds = max(elapsed_s(run.store.dated()).values(), default=0.0)
    found.append(("of search", f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"))
    return facts(found)


def _curves(run: _Run) -> str:
    seconds = elapsed_s(run.store.dated())
    by_trials, by_seconds = [], []
    for problem in run.spec.problems:
        steps = best_so_far(run.replay.sound, problem, run.spec.shapes, seconds)
        name = problem_name(problem)
        by_trials.append(Line(name, tuple((float(s.trial), s.tflops) for s in steps)))
        by_seconds.append(Line(name, tuple((s.seconds, s.tflops) for s in steps)))
    what = "predicted TFLOP/s" if run.predicted else "TFLOP/s"
    return (
        f"<p>{what[0].upper()}{what[1:]} of the best kernels so far, geometric mean over the "
        "shapes of each problem; the axis does not start at 0.</p>"
        f'<div class="pair"><div>{_drawn(by_trials, "trials of the problem", what)}</div>'
        f"<div>{_drawn(by_seconds, 'seconds of the run', what)}</div></div>"
    )


def _drawn(lines: Sequence[Line], x_title: str, y_title: str) -> str:
    return line_chart(lines, x_title, y_title, from_zero=False)


def _roofline(run: _Run) -> str:
    charts = []
    spec, gpu = run.spec, run.gpu
    unit = "TFLOP/s predicted" if run.predicted else "TFLOP/s"
    for problem in run.spec.problems:
        bars = []
        for w in run.winners:
            if not problem.serves(w.shape):
                continue
            s, t = w.shape, w.timing
            peers = peers_of(run.finalists, s)[:1]
            bars.append(Bar(
                _length(s), rate_tflops(s, t.median_us),
                rate_tflops(s, t.high_us), rate_tflops(s, t.low_us),
                ceiling_tflops(s, spec.dtype, gpu),
                tuple((p.name, rate_tflops(s, p.timing.median_us)) for p in peers),
            ))  # fmt: skip
        if bars:
            drawn = bar_chart(bars, unit, "datasheet ceiling")
            charts.append(f"<div><h3>{escape(problem_name(problem))}</h3>{drawn}</div>")
    if not charts:
        return '<p class="quiet">No right kernel to draw.</p>'
    text = (
        f"The ceiling is the lesser of {gpu.tensor_tflops:g} TFLOP/s of tensor cores and what "
        f"{gpu.bandwidth_gbs:g} GB/s allow a shape, both from the datasheet."
    )
    if gpu.mma_sync_fraction < 1:
        text += (
            f" Kernels with mma.sync reach about {gpu.tensor_tflops * gpu.mma_sync_fraction:.0f} "
            "TFLOP/s of it on this card."
        )
    return f'<p>{escape(text)}</p><div class="pair">{"".join(charts)}</div>'


def _length(shape: Shape) -> str:
    keys = "" if shape.seqlen_k == shape.seqlen_q else f"×{shape.seqlen_k}"
    return f"B{shape.batch} S{shape.seqlen_q}{keys}"


def _importances(run: _Run) -> str:
    found = {p: importances(run.replay.history, p) for p in run.spec.problems}
    known = {p: shares for p, shares in found.items() if shares is not None}
    if not known:
        return f'<p class="quiet">No problem has {LEAST_TRIALS} right kernels: too few to say.</p>'
    names = list(dict.fromkeys(n for shares in known.values() for n in shares))
    names.sort(key=lambda n: -sum(shares.get(n, 0.0) for shares in known.values()))
    head = [("parameter", "k"), *((problem_name(p), "n") for p in known)]
    rows = []
    for name in names:
        cells = []
        for shares in known.values():
            share = shares.get(name)
            text = "–" if share is None else f"{share:.0%}"
            cells.append(f'<span class="heat" style="--h:{(share or 0) * 80:.0f}%">{text}</span>')
        rows.append([f"<code>{escape(name)}</code>", *cells])
    left_out = len(found) - len(known)
    more = f" {left_out} problems have fewer than {LEAST_TRIALS} right kernels." if left_out else ""
    return (
        "<p>Share of the variance of log time that a parameter explains by itself, over the right "
        "kernels, less what chance explains. The search chose these points, not chance: it looks "
        "longest where it is fast, and what acts only together with another parameter shows less "
        f"than it matters.{more}</p>" + table(head, rows, cards=False)
    )


def _failures(run: _Run) -> str:
    history = run.replay.history
    groups = failures(history)
    late = [n.as_dict() for n in run.replay.notes if n.topic == "rejected_in_final"]
    if not groups and not late:
        return f"<p>All {len(history)} trials ended right.</p>"
    head = [("class", "head"), ("stage", ""), ("trials", "n"), ("reason of the first", ""),
            ("its parameters", "")]  # fmt: skip
    rows = [
        [
            escape(g.trial_class), escape(g.stage), str(g.count),
            f'<span class="wrap">{escape(_clipped(g.reason))}</span>',
            f"<small>trial {g.example.index} · {escape(problem_name(g.example.problem))} · "
            f"{escape(short(g.example.point))}</small>",
        ]
        for g in groups
    ]  # fmt: skip
    rows += [
        [escape(str(v.get("class"))), "final checks", "1",
         escape(_clipped(str(v.get("reason")))), f"<small>trial {v.get('trial')}</small>"]
        for v in late
    ]  # fmt: skip
    failed = sum(g.count for g in groups)
    return f"<p>{failed} of {len(history)} trials ended otherwise than right.</p>" + table(
        head, rows
    )


def _clipped(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _sources(run: _Run) -> str:
    texts = dict(run.spec.sketches)
    for note in run.replay.notes:
        if note.topic == "sketch":
            texts[str(note.as_dict().get("name"))] = str(note.as_dict().get("text"))
    by_trial: dict[int, list[Winner]] = {}
    for w in run.winners:
        by_trial.setdefault(w.record.index, []).append(w)
    parts: list[str] = []
    for winners in by_trial.values():
        record = winners[0].record
        shapes = ", ".join(shape_name(w.shape) for w in winners)
        name = escape(problem_name(record.problem))
        summary = (
            f'<a id="trial-{record.index}"></a>trial {record.index} · {name} '
            f"<small>{escape(short(record.point))}</small>"
        )
        try:
            cuda = source_of(run.store, record).text
        except StoreError as error:
            cuda = f"// {error}"
        used = "; ".join(
            f"{r.registers} registers, {r.spill_store_bytes + r.spill_load_bytes} bytes spilled"
            for r in record.resources
        )
        body = (
            f'<p class="quiet">Best for {escape(shapes)}. {escape(used)}'
            f"{', ' if used else ''}{record.smem_bytes:,} bytes of shared memory.</p>"
            f'<div class="source"><div><h3>TL: {escape(record.sketch)}</h3>'
            f'<pre class="wrap">{escape(texts.get(record.sketch, ""))}</pre></div>'
            f"<div><h3>CuTe</h3><pre>{escape(cuda)}</pre></div></div>"
        )
        parts.append(folded(summary, body, opened=not parts))
    return "".join(parts) or '<p class="quiet">There is none.</p>'


def _talks(spec: RunSpec, talks: Sequence[Talk]) -> str:
    if not talks:
        return f'<p class="quiet">None: the proposer was {escape(spec.proposer)}.</p>'
    return "".join(
        folded(
            f"{escape(t.kind)}{' · failed' if t.failed else ''} <small>{escape(t.facts)}</small>",
            f'<div class="pair"><div><h3>asked</h3><pre class="wrap">{escape(t.asked)}</pre></div>'
            f'<div><h3>answered</h3><pre class="wrap">{escape(t.answered)}</pre></div></div>',
        )
        for t in talks
    )


def _protocol(run: _Run) -> str:
    spec = run.spec
    pairs = [
        ("run", spec.run_id), ("card", f"{run.gpu.title} ({run.gpu.arch})"),
        ("dtype", f"{spec.dtype}, sums in f32"), ("budget", f"{spec.budget} distinct programs"),
        ("seed", str(spec.seed)), ("proposer", spec.proposer), ("back end", spec.backend),
        ("formula", FORMULA),
        *([("function", f"{r.path}:{r.function}, SHA-256 {r.digest}")]
          if (r := spec.reference) is not None else []),
    ]  # fmt: skip
    topics: dict[str, list[tuple[str, str]]] = {}
    for note in run.replay.notes:
        if note.topic in ("sketch", "proposal", "model", "rejected_in_final"):
            continue  # shown elsewhere
        known = topics.setdefault(note.topic, [])
        if note.topic in ("final_conditions", "drift", "conditions"):
            known.append((str(len(known) + 1), ", ".join(f"{k} {v}" for k, v in note.values)))
        else:
            known += [(k, str(v)) for k, v in note.values if (k, str(v)) not in known]
    parts = [definitions(pairs)]
    for topic, values in topics.items():
        parts.append(folded(escape(topic.replace("_", " ")), definitions(values)))
    return "".join(parts)
