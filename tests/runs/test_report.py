"""The report of a run: whole, offline, honest about predicted times, safe against its content."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from records import OTHER, PROBLEM, SHAPE, SPEC, finalist, kernel, measured, timing, trial

from runs.findings import best_so_far, ceiling_tflops, elapsed_s, failures, importances
from runs.record import (
    Basis,
    Finished,
    History,
    Measured,
    Note,
    Rejected,
    Resumed,
    Stage,
    TrialClass,
    TrialRecord,
)
from runs.report import Talk, report
from runs.store import RunStore
from runs.svg import Line, line_chart, ticks
from space.gpu import GPUS
from space.params import Point
from space.variant import DType

EVIL = '<script>alert("x")</script>'
BAD = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, f"NaN at [0, 3] {EVIL}")


def finished(folder: Path, basis: Basis = Basis.MEASURED) -> RunStore:
    store = RunStore.create(folder, replace(SPEC, measure=basis))
    source, cubin = kernel()
    store.put_kernel(source, cubin)
    ratio = 0.9 if basis is Basis.MEASURED else None
    right = Measured((timing(SHAPE, 100.0, basis), timing(OTHER, 300.0, basis)), ratio)
    store.append(Note("environment", (("driver", "570.1"), ("evil", EVIL))))
    store.append(replace(trial(0, right, cubin.key), source_digest=source.digest))
    store.append(trial(1, BAD))
    store.append(trial(2, Rejected(BAD.trial_class, BAD.stage, BAD.reason.replace("3", "7"))))
    if basis is Basis.MEASURED:
        for f in (finalist(0, SHAPE, 90.0, chosen=True), finalist(None, SHAPE, 120.0)):
            store.append(f)
    store.append(Finished("budget spent", 3))
    return store


def text_of(html: str) -> str:
    return re.sub(r"<[^>]+>", " ", html.split("</style>")[1])


def test_every_part_is_there_and_nothing_comes_from_outside(tmp_path: Path) -> None:
    html = report(finished(tmp_path))
    for title in (
        "Best so far",
        "Each shape",
        "ceiling",
        "parameters mattered",
        "What failed",
        "Winning programs",
        "Exchanges with the model",
        "How it was measured",
    ):
        assert title in html
    assert html.count("<svg") >= 3
    assert not re.search(r"""(src|href)=["'](?!#)|url\(|@import|<script|https?:""", html)
    said = text_of(html)
    assert "Copy Q from global to shared" in said and "// kernel one" in said
    assert "570.1" in said and "FLOPs = 2" in said


def test_what_a_run_holds_is_text_and_never_markup(tmp_path: Path) -> None:
    talk = Talk("seeds", EVIL, EVIL, EVIL, failed=True)
    html = report(finished(tmp_path), [talk])
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 5


def test_our_speed_over_the_peer_is_of_the_final_timing(tmp_path: Path) -> None:
    said = text_of(report(finished(tmp_path)))
    assert "1.333" in said and "89.0–91.0" in said


def test_predicted_is_said_everywhere_and_no_peer_is_shown(tmp_path: Path) -> None:
    said = text_of(report(finished(tmp_path, Basis.PREDICTED)))
    assert "no time on this page was measured" in said
    assert "predicted µs" in said and "Predicted TFLOP/s" in said and "fa2" not in said
    measured_page = text_of(report(finished(tmp_path / "other")))
    assert "redicted" not in measured_page


def test_failures_alike_but_for_numbers_are_one_with_an_example(tmp_path: Path) -> None:
    (group,) = failures(finished(tmp_path).replay().history)
    assert (group.count, group.example.index, group.trial_class) == (2, 1, "wrong_output")


def test_a_run_without_a_right_kernel_has_a_report(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path, SPEC)
    store.append(trial(0, BAD))
    said = text_of(report(store))
    assert "no right kernel" in said and "not finished" in said


# ---- what the records say ----------------------------------------------------------------------


def varied(bn: int, index: int, us: float) -> TrialRecord:
    point = Point.of({"BM": 128, "BN": bn, "stages": 1 + index % 2})
    return replace(trial(index, measured(timing(SHAPE, us))), point=point)


def test_importance_finds_the_parameter_that_decides_and_not_the_other() -> None:
    records = [varied(32 * (1 + n // 2 % 2), n, 100.0 + 50 * (n // 2 % 2)) for n in range(16)]
    shares = importances(History(tuple(records)), PROBLEM)
    assert shares is not None
    assert shares["BN"] == pytest.approx(1.0)
    assert shares["stages"] < 0.05
    assert "BM" not in shares


def test_importance_of_a_handful_of_trials_is_not_given() -> None:
    assert importances(History(tuple(varied(32, n, 100.0 + n) for n in range(11))), PROBLEM) is None


def test_best_so_far_starts_when_every_shape_has_a_time_and_never_falls() -> None:
    outcomes = (
        measured(timing(SHAPE, 100.0)), measured(timing(OTHER, 300.0)),
        measured(timing(SHAPE, 200.0), timing(OTHER, 200.0)),
    )  # fmt: skip
    history = History(tuple(trial(n, o) for n, o in enumerate(outcomes)))
    steps = best_so_far(history, PROBLEM, (SHAPE, OTHER), {1: 5.0, 2: 9.0})
    assert [(s.trial, s.seconds) for s in steps] == [(2, 5.0), (3, 9.0)]
    assert steps[1].tflops == pytest.approx(steps[0].tflops * 1.5**0.5)


def test_seconds_leave_out_the_time_between_a_stop_and_a_resume() -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    events = (Note("a", ()), trial(0), Resumed(1), trial(1))
    at = [start + timedelta(seconds=s) for s in (0, 4, 4000, 4003)]
    assert elapsed_s(tuple(zip(at, events, strict=True))) == {0: 4.0, 1: 7.0}


def test_the_ceiling_of_a_shape_without_work_for_the_tensor_cores_is_the_memory() -> None:
    gpu = GPUS["h200"]
    short = replace(SHAPE, seqlen_q=1, causal=False)
    assert ceiling_tflops(short, DType.BF16, gpu) < 0.1 * gpu.tensor_tflops
    long = replace(SHAPE, seqlen_q=8192, seqlen_k=8192)
    assert ceiling_tflops(long, DType.BF16, gpu) == gpu.tensor_tflops


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.12, 0.31) == pytest.approx([0.15, 0.2, 0.25, 0.3])


def test_a_chart_of_one_point_or_none_is_drawn() -> None:
    assert "<svg" in line_chart([Line("one", ((0.0, 0.0),))], "x", "y")
    assert "Nothing" in line_chart([], "x", "y")
