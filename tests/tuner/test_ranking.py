"""Ranks against known answers, and the agreement of a made-up run with the model's own times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from codegen.kernel import Resources
from runs.record import Basis, Measured, Rejected, RunSpec, Stage, Timing, TrialClass, TrialRecord
from runs.store import RunStore
from space.constraints import smem_bytes, space_for
from space.gpu import GPUS
from space.params import Point
from space.variant import DType, Problem, Shape
from tuner.evaluate.model import Candidate, predict_us
from tuner.evaluate.ranking import agreements, average_ranks, main, read_groups, spearman

GPU = GPUS["h200"]
PROBLEM = Problem("mha", DType.BF16, 128, 128, False)
SHAPES = tuple(Shape(16384 // n, 16, 16, n, n, 128, 128) for n in (512, 4096))
RESOURCES = Resources("kernel", 168, 0, 0, 0, 0)

Rule = Callable[[float], float]


def points() -> list[Point]:
    """Some points of the Hopper space that differ in their key rows and turns."""
    first = {p.name: p.choices[0] for p in space_for(PROBLEM, GPU).params}
    base = Point.of(first | {"BM": 128, "consumer_warpgroups": 2, "stages": 2, "head_group": 1})
    return [base.replace(BN=n, pingpong=p) for n in (32, 64, 96, 128) for p in (0, 1)]


def record(index: int, point: Point, rule: Rule, basis: Basis = Basis.MEASURED) -> TrialRecord:
    """A right trial whose times are the model's, changed by `rule`."""
    smem = smem_bytes(PROBLEM, point)
    candidate = Candidate.of(PROBLEM, point, [RESOURCES], smem)
    times = [rule(predict_us(candidate, s, GPU)) for s in SHAPES]
    timings = tuple(Timing(s, t, t, t, 9, basis) for s, t in zip(SHAPES, times, strict=True))
    outcome = Measured(timings, 1.0)
    return TrialRecord(
        index, PROBLEM, "forward", point, "seed", outcome, resources=(RESOURCES,), smem_bytes=smem
    )


def folder(root: Path, rule: Rule, basis: Basis = Basis.MEASURED) -> Path:
    spec = RunSpec("20261130T1200Z-mha-h200", "mha", "h200", DType.BF16, SHAPES, 9, 0, basis)
    with RunStore.create(root, spec) as store:
        for index, point in enumerate(points()):
            store.append(record(index, point, rule, basis))
        wrong = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "row 3 differs")
        store.append(TrialRecord(99, PROBLEM, "forward", points()[0], "seed", wrong))
    return store.path


def test_equal_values_share_the_mean_rank() -> None:
    assert average_ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]


def test_correlation_of_known_ranks() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    y = np.array([2.0, 1.0, 4.0, 3.0, 5.0])
    assert spearman([(x, y)]) == pytest.approx(1 - 6 * 4 / (5 * 24))
    tied = np.array([1.0, 1.0, 2.0])
    assert spearman([(tied, np.array([1.0, 2.0, 3.0]))]) == pytest.approx(np.sqrt(3) / 2)


def test_a_difference_between_groups_is_no_agreement() -> None:
    short, long = np.array([1.0, 2.0, 3.0]), np.array([101.0, 102.0, 103.0])
    assert spearman([(short, short[::-1]), (long, long[::-1])]) == pytest.approx(-1.0)


@pytest.mark.parametrize("n", [0, 1, 2])
def test_too_few_trials_have_no_order(n: int) -> None:
    assert spearman([(np.arange(float(n)), np.arange(float(n)))]) is None


def test_times_without_a_difference_have_no_order() -> None:
    assert spearman([(np.ones(4), np.arange(4.0))]) is None


def test_a_run_as_predicted_agrees_in_full(tmp_path: Path) -> None:
    groups = read_groups([folder(tmp_path, lambda us: 2 * us)])
    assert [g.shape for g in groups] == list(SHAPES)
    one, pooled = agreements(groups)
    assert (one.name, pooled.name) == (PROBLEM.key, "all")
    assert (one.trials, one.pairs) == (8, 16)
    assert one.spearman == pytest.approx(1.0)
    assert one.rms_log == pytest.approx(np.log(2))


def test_a_run_the_other_way_round_disagrees_in_full(tmp_path: Path) -> None:
    _, pooled = agreements(read_groups([folder(tmp_path, lambda us: 1e6 / us)]))
    assert pooled.spearman == pytest.approx(-1.0)


def test_runs_are_ranked_apart(tmp_path: Path) -> None:
    runs = [folder(tmp_path, lambda us: us), folder(tmp_path, lambda us: 100 * us)]
    _, pooled = agreements(read_groups(runs))
    assert pooled.pairs == 32
    assert pooled.spearman == pytest.approx(1.0)


def test_command_prints_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(folder(tmp_path, lambda us: us))
    assert main([run]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[1].split() == [PROBLEM.key, "8", "16", "1.000", "0.000"]
    assert main([run, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [a["name"] for a in found] == [PROBLEM.key, "all"]
    assert found[0]["spearman"] == pytest.approx(1.0)


def test_predicted_times_are_not_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folder(tmp_path, lambda us: us, Basis.PREDICTED)
    assert main([str(run)]) == 1
    assert "no measured trial" in capsys.readouterr().err


def test_what_is_no_run_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error and len(error.splitlines()) == 1
