"""A comparison's result as plain data, as a terminal table and as an HTML page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from rich.table import Table

from runs.export import winners_of
from runs.findings import peers_of
from runs.record import Basis, Finalist
from runs.report_shapes import shape_name, shapes_table
from runs.svg import Line, line_chart
from runs.templates.report_page import definitions, facts, page, section, table
from space.gpu import gpu_named
from tuner.compare import Compared
from tuner.standing import (
    NEAR,
    Contrast,
    Course,
    Mark,
    Proposals,
    best_known,
    contrasts,
    course_of,
    verdicts,
)

SAMPLES = 120  #: places of a curve by seconds or tokens


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that is said about a comparison."""

    compared: Compared
    courses: tuple[Course, ...]
    contrasts: tuple[Contrast, ...]
    verdict: tuple[str, ...]
    #: by arm: speed of its best kernels in the final timing over the fastest of each shape
    final_speed: dict[str, float]

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms, as they were named."""
        return self.compared.plan.arms

    def of(self, arm: str) -> list[Course]:
        """Return the runs of an arm."""
        return [c for c in self.courses if c.arm == arm]

    @property
    def predicted(self) -> bool:
        """Whether no time was measured."""
        return self.compared.plan.base.measure is Basis.PREDICTED

    @property
    def who(self) -> str:
        """One line on who proposed."""
        base = self.compared.plan.base
        if base.proposer == "builtin":
            return (
                "no model was asked: the builtin proposer's hand-written seeds stand in the "
                "model's place in the arms llm and assisted"
            )
        model = f", model {base.model}" if base.model else ""
        return f"proposals by {base.proposer}{model}"


def result_of(compared: Compared) -> Result:
    """Read the runs of a comparison. Raises StoreError when one is damaged."""
    plan = compared.plan
    replays = [(s.spec, s.replay()) for s in compared.stores]
    best = best_known([r.history for _, r in replays], plan.base.shapes)
    courses = tuple(course_of(spec, r.history, r.notes, best) for spec, r in replays)
    found = contrasts(courses, plan.arms, plan.base.budget)
    return Result(compared, courses, found, verdicts(found, plan.seeds), _final_speed(compared))


def _final_speed(compared: Compared) -> dict[str, float]:
    """Compare the arms' best kernels by the times that were taken side by side."""
    if compared.final is None or compared.plan.base.measure is Basis.PREDICTED:
        return {}
    finalists = compared.final.replay().finalists
    found: dict[str, list[float]] = {}
    for shape in compared.plan.base.shapes:
        times = {f.trial: f.timing.median_us for f in finalists if f.shape == shape}
        ours = [us for trial, us in times.items() if trial is not None]
        for arm in compared.plan.arms:
            trial = compared.entrants.get((arm, shape))
            if trial in times and ours:
                found.setdefault(arm, []).append(math.log(min(ours) / times[trial]))
    return {arm: math.exp(statistics.fmean(logs)) for arm, logs in found.items()}


def as_dict(result: Result) -> dict[str, Any]:
    """Return the whole result as JSON values."""
    plan = result.compared.plan
    arms = {}
    for arm in result.arms:
        courses = result.of(arm)
        arms[arm] = {
            "speed": [c.final for c in courses],
            "programs": [c.programs for c in courses],
            "seconds": [round(c.seconds, 3) for c in courses],
            "tokens": [c.tokens for c in courses],
            "near": {
                f"{near:g}": [None if (m := c.first(near)) is None else asdict(m) for c in courses]
                for near in NEAR
            },
            "proposals": [asdict(c.proposals) for c in courses],
            "final_speed": result.final_speed.get(arm),
            "curves": [[asdict(m) for m in c.marks] for c in courses],
        }
    return {
        "variant": plan.base.variant, "gpu": plan.base.gpu, "basis": str(plan.base.measure),
        "budget": plan.base.budget, "seeds": plan.seeds, "proposer": plan.base.proposer,
        "model": plan.base.model, "note": result.who, "arms": arms,
        "contrasts": [asdict(c) | {"differs": c.differs} for c in result.contrasts],
        "verdict": list(result.verdict), "folder": result.compared.folder.name,
        "runs": [s.spec.run_id for s in result.compared.stores],
        "finals": None if result.compared.final is None else result.compared.final.spec.run_id,
    }  # fmt: skip


# ---- tables --------------------------------------------------------------------------------------


def rows(result: Result) -> tuple[list[str], list[list[str]]]:
    """Return the titles and one row of text for each arm: means over seeds and their range."""
    tokens = any(c.tokens for c in result.courses)
    head = ["arm", "speed at the end", *(f"trials to {n:.0%}" for n in NEAR)]
    head += [f"seconds to {n:.0%}" for n in NEAR]
    head += ["side by side"] if result.final_speed else []
    head += ["tokens"] if tokens else []
    head += ["valid / repaired / rejected", "correct", "best shapes"]
    found = []
    for arm in result.arms:
        courses = result.of(arm)
        row = [arm, _range([c.final for c in courses], "{:.3f}")]
        for n in NEAR:
            row.append(_reached([c.first(n) for c in courses], lambda m: m.programs, "{:.0f}"))
        for n in NEAR:
            row.append(_reached([c.first(n) for c in courses], lambda m: m.seconds, "{:.0f}"))
        if result.final_speed:
            row.append(f"{result.final_speed[arm]:.3f}" if arm in result.final_speed else "-")
        if tokens:
            row.append(f"{statistics.fmean(c.tokens for c in courses):.0f}")
        found.append([*row, *_proposed([c.proposals for c in courses])])
    return head, found


def _range(values: Sequence[float], form: str) -> str:
    text = form.format(statistics.fmean(values))
    if len(values) > 1:
        text += f" ({form.format(min(values))}–{form.format(max(values))})"
    return text


def _reached(marks: Sequence[Mark | None], value: Callable[[Mark], float], form: str) -> str:
    """The mean of the runs that came so near, and how many did when not all."""
    found = [value(m) for m in marks if m is not None]
    if not found:
        return "never"
    text = _range(found, form)
    return text if len(found) == len(marks) else f"{text}, {len(found)} of {len(marks)} runs"


def _proposed(found: Sequence[Proposals]) -> list[str]:
    if not any(p.proposed for p in found):
        return ["-", "-", "-"]
    sums = [
        sum(getattr(p, name) for p in found)
        for name in ("valid", "repaired", "rejected", "correct", "best")
    ]
    return [" / ".join(str(n) for n in sums[:3]), str(sums[3]), str(sums[4])]


def terminal_table(result: Result) -> Table:
    """Return the table for a terminal."""
    plan = result.compared.plan
    what = "predicted" if result.predicted else "measured"
    title = f"{plan.base.variant} on {plan.base.gpu}: {plan.seeds} seeds, budget {plan.base.budget}"
    drawn = Table(title=f"{title} ({what}); speed relative to the best known; mean (least–most)")
    head, body = rows(result)
    for n, name in enumerate(head):
        drawn.add_column(name, justify="right" if n else "left", overflow="fold")
    for row in body:
        drawn.add_row(*row)
    return drawn


# ---- the page ------------------------------------------------------------------------------------


def html(result: Result) -> str:
    """Return the page of a comparison."""
    plan = result.compared.plan
    gpu = gpu_named(plan.base.gpu)
    title = f"Did the proposer help? {plan.base.variant} on {gpu.title}"
    banner = (
        '<div class="banner">Predicted: kernels were ranked by an analytic model; no time on this '
        "page was measured.</div>"
        if result.predicted
        else ""
    )
    head, body = rows(result)
    kinds = ["head", *["n"] * (len(head) - 1)]
    cells = [[escape(cell) for cell in row] for row in body]
    lines = "".join(f"<p>{escape(line)}.</p>" for line in result.verdict[1:])
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<div class="sub">{escape(plan.base.run_id)} · {plan.base.dtype} · '
        f"{len(plan.base.shapes)} shapes · {escape(result.who)}</div>",
        banner,
        facts([
            ("arms", str(len(plan.arms))), ("seeds an arm", str(plan.seeds)),
            ("programs a run", str(plan.base.budget)),
            ("programs in all", str(sum(c.programs for c in result.courses))),
        ]),
        section("Verdict", f'<p class="verdict">{escape(result.verdict[0])}.</p>{lines}'),
        section("Best so far", _charts(result)),
        section("Arms", "<p>Speed is relative to the best kernel that any run found for each shape "
                "(geometric mean); mean over seeds, least and most in brackets. Seconds are those "
                "of compiling and judging, added up, as if no arm had compiled for another.</p>"
                + table(list(zip(head, kinds, strict=True)), cells)),
        _side_by_side(result),
        section("How it was compared", definitions([
            ("runs", ", ".join(s.spec.run_id for s in result.compared.stores)),
            ("the same for all", "space, sketches, judge, budget, seeds; arms take turns"),
            ("llm", "the known-good point, then proposals only"),
            ("search", "the known-good point, then Optuna's TPE"),
            ("assisted", "the known-good point, the proposals, then TPE"),
            ("random", "the known-good point, then legal points, each as likely"),
            ("best known", "the least time of each shape over all runs, by the searches' times"),
            ("proposer", result.who),
        ])),
    ]  # fmt: skip
    return page(title, "".join(parts))


def _charts(result: Result) -> str:
    budget = result.compared.plan.base.budget
    what = "speed relative to the best known" + (" (predicted)" if result.predicted else "")
    seconds = max((c.seconds for c in result.courses), default=0.0)
    charts = [
        _chart(result, lambda m: float(m.programs), float(budget), budget, "programs", what),
        _chart(result, lambda m: m.seconds, seconds, SAMPLES, "seconds of work", what),
    ]
    if tokens := max((c.tokens for c in result.courses), default=0):
        charts.append(
            _chart(result, lambda m: float(m.tokens), float(tokens), SAMPLES, "tokens", what)
        )
    drawn = "".join(f"<div>{chart}</div>" for chart in charts)
    return (
        "<p>Mean over the seeds; the band is from the worst to the best seed. A curve starts when "
        f'every shape has a right kernel.</p><div class="pair">{drawn}</div>'
    )


def _chart(
    result: Result, x_of: Callable[[Mark], float], last: float, places: int, x_title: str,
    y_title: str,
) -> str:  # fmt: skip
    lines = []
    for arm in result.arms:
        courses = [c for c in result.of(arm) if c.marks]
        points, band = [], []
        for n in range(places + 1):
            x = last * n / places
            values = [
                before[-1]
                for c in courses
                if (before := [m.speed for m in c.marks if x_of(m) <= x + 1e-9])
            ]
            if courses and len(values) == len(courses):
                points.append((x, statistics.fmean(values)))
                band.append((x, min(values), max(values)))
        lines.append(Line(arm, tuple(points), tuple(band) if len(courses) > 1 else ()))
    return line_chart(lines, x_title, y_title, from_zero=False)


def _side_by_side(result: Result) -> str:
    """The best kernel of each arm and the peers, timed together."""
    final = result.compared.final
    if final is None:
        return ""
    replay = final.replay()
    finalists = replay.finalists
    spec = final.spec
    if result.predicted:
        text = shapes_table(
            spec, gpu_named(spec.gpu), winners_of(final, replay), finalists, linked=False
        )
        return section("The best of each shape", text)
    head = [("shape", "shape"), *((f"{arm}, µs", "n") for arm in result.arms), ("peers, µs", "n")]
    found = []
    for shape in spec.shapes:
        here = {f.trial: f for f in finalists if f.shape == shape and f.trial is not None}
        row = [escape(shape_name(shape))]
        for arm in result.arms:
            trial = result.compared.entrants.get((arm, shape))
            row.append(_timed(None if trial is None else here.get(trial)))
        row.append("<br>".join(
            f"<small>{escape(p.name)}</small> {p.timing.median_us:.1f}"
            for p in peers_of(finalists, shape)
        ) or "–")  # fmt: skip
        found.append(row)
    note = (
        "<p>The best kernel that each arm found for a shape, over its seeds, timed together and "
        "with the peers; the chosen one is bold.</p>"
    )
    return section("Side by side", note + table(head, found))


def _timed(finalist: Finalist | None) -> str:
    if finalist is None:
        return "–"
    t = finalist.timing
    text = f"{t.median_us:.1f} <small>{t.low_us:.1f}–{t.high_us:.1f}</small>"
    return f"<b>{text}</b>" if finalist.chosen else text
