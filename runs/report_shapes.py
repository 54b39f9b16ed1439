"""The table of a run's shapes: the chosen kernel of each beside every peer, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from runs.export import Winner
from runs.findings import ceiling_tflops, peers_of, rate_tflops
from runs.record import Basis, Finalist, Measured, RunSpec, Timing
from runs.templates.report_page import table
from space.gpu import GpuSpec
from space.params import Point
from space.variant import Problem, Shape


def shape_name(shape: Shape) -> str:
    """Return a shape in words: `B4 H16/16 2048×2048 D192/128 causal`."""
    dims = str(shape.head_dim)
    if shape.head_dim != shape.head_dim_v:
        dims += f"/{shape.head_dim_v}"
    mask = "causal" if shape.causal else "full"
    return (
        f"B{shape.batch} H{shape.heads}/{shape.kv_heads} {shape.seqlen_q}×{shape.seqlen_k} "
        f"D{dims} {mask}"
    )


def problem_name(problem: Problem) -> str:
    """Return a problem in words: `D192/128 causal`."""
    dims = str(problem.head_dim)
    if problem.head_dim != problem.head_dim_v:
        dims += f"/{problem.head_dim_v}"
    return f"D{dims} {'causal' if problem.causal else 'full'}"


def shapes_table(
    spec: RunSpec,
    gpu: GpuSpec,
    winners: Sequence[Winner],
    finalists: Sequence[Finalist],
    linked: bool = True,
) -> str:
    """Return the table of the chosen kernel and every peer, a row for each shape.

    With `linked` each kernel leads to its program on the same page.
    """
    predicted = spec.measure is Basis.PREDICTED
    columns = ["shape", "µs", "interval", "TFLOP/s", "of ceiling", "peers", "speed", "error", "by"]
    if not any(f.trial is None for f in finalists):
        columns = [c for c in columns if c not in ("peers", "speed")]
    if predicted:
        columns.remove("error")
    by_shape = {w.shape: w for w in winners}
    cells = [
        _shape_cells(spec, gpu, s, by_shape.get(s), peers_of(finalists, s)) for s in spec.shapes
    ]
    if not linked:
        columns.remove("by")
    titles = {
        "µs": "predicted µs" if predicted else "µs",
        "peers": "peers, µs",
        "speed": "speed ÷ best peer",
        "error": "error ÷ plain" if spec.reference is None else "error ÷ function's own",
        "by": "kernel",
    }
    head = [(titles.get(c, c), "shape" if c == "shape" else "n") for c in columns]
    rows = [[of_shape.get(c, "–") for c in columns] for of_shape in cells]
    note = (
        "Times come from the search alone: the run was not finished."
        if winners and not predicted and not all(w.final for w in winners)
        else ""
    )
    return (f'<p class="quiet">{note}</p>' if note else "") + table(head, rows)


def _shape_cells(
    spec: RunSpec, gpu: GpuSpec, shape: Shape, w: Winner | None, peers: Sequence[Finalist]
) -> dict[str, str]:
    """Return what the table says of a shape, by column."""
    cells = {"shape": escape(shape_name(shape))}
    if peers:
        beside = "<br>".join(
            f"<small>{escape(p.name)}</small> {_us(p.timing.median_us)}" for p in peers
        )
        cells["peers"] = f"<span>{beside}</span>"
    if w is None:
        return cells | {"by": "no right kernel"}
    t = w.timing
    rate = rate_tflops(shape, t.median_us)
    cells |= {
        "µs": _us(t.median_us),
        "interval": f"{_us(t.low_us)}–{_us(t.high_us)}",
        "TFLOP/s": f"{rate:.0f}",
        "of ceiling": f"{rate / ceiling_tflops(shape, spec.dtype, gpu):.0%}",
        "by": f'<span><a href="#trial-{w.record.index}">trial {w.record.index}</a> '
        f"<small>{escape(w.record.origin)}</small></span>",
    }
    if peers:
        cells["speed"] = _against(peers, t)
    if isinstance(w.record.outcome, Measured) and w.record.outcome.error_ratio is not None:
        cells["error"] = f"{w.record.outcome.error_ratio:.2f}"
    return cells


def short(point: Point) -> str:
    """Return a point as `BM=128 BN=64 ...`."""
    return " ".join(f"{name}={value}" for name, value in point.items)


def _against(peers: Sequence[Finalist], timing: Timing) -> str:
    if not peers:
        return "–"
    best = peers[0].timing
    ratio = best.median_us / timing.median_us
    apart = best.high_us < timing.low_us or timing.high_us < best.low_us
    kind = ("good" if ratio > 1 else "bad") if apart else ""
    return f'<span class="{kind}">{ratio:.3f}</span>' + ("" if apart else " <small>tie</small>")


def _us(us: float) -> str:
    return f"{us:,.0f}" if us >= 1000 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"
