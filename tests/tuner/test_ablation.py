"""One parameter at a time: which neighbours are tried, and what the table says of them."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
from fake_machine import FULL, done

from codegen.kernel import Cubin, KernelSource
from runs.record import (
    Basis,
    Finalist,
    Measured,
    Rejected,
    RunSpec,
    Stage,
    Timing,
    TrialClass,
    TrialRecord,
)
from runs.store import RunStore
from space.constraints import space_for, violated
from space.gpu import GPUS
from space.legal import legal_points
from space.variant import DType, Problem, Shape
from tuner.ablation import changes, open_run, table
from tuner.cli import main
from tuner.commands.ablate import measure
from tuner.errors import UsageError
from tuner.job import Built, CompileJob, FinalsJob, FinalsResult

SHAPE = Shape(4, 16, 16, 1024, 1024, 128, 128)
PROBLEM = Problem("mha", DType.BF16, 128, 128, False)
GPU = GPUS["h200"]
LEGAL = legal_points(PROBLEM, GPU, space_for(PROBLEM, GPU))
POINT = next(p for p in LEGAL if p["BM"] == 128 and p["BN"] == 128 and p["overlap"])


class Compiles:
    """Builds everything but kernels of 80 keys; the point is the source's text."""

    def submit(self, job: CompileJob) -> Future[Built | Rejected]:
        if job.point["BN"] == 112:
            return done(Rejected(TrialClass.COMPILE_ERROR, Stage.COMPILE, "serialised"))
        source = KernelSource(job.point.key, "sm_90a", (), ())
        return done(Built(source, Cubin(b"", job.arch, source.digest, "key", "", (), 0.0, "13")))


class Judges:
    """Times by the text: without overlap everything takes twice as long."""

    def finals(self, job: FinalsJob) -> Future[FinalsResult]:
        assert not job.with_peers
        found = []
        for e in job.entries:
            us = 200.0 if "overlap=0" in e.source.text else 100.0
            timing = Timing(SHAPE, us, us, us, 15, Basis.MEASURED)
            found.append(Finalist(SHAPE, e.trial, f"trial {e.trial}", timing))
        return done(FinalsResult(tuple(found)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    spec = RunSpec(
        "20261130T1200Z-mha-h200", "mha", "h200", DType.BF16, (SHAPE,), 1, 0, Basis.MEASURED,
        sketches=(("forward", FULL),),
    )  # fmt: skip
    timing = Timing(SHAPE, 100.0, 99.0, 101.0, 25, Basis.MEASURED)
    store = RunStore.create(tmp_path, spec)
    outcome = Measured((timing,), 1.0)
    store.append(TrialRecord(0, PROBLEM, "forward", POINT, "first", outcome))
    store.append(Finalist(SHAPE, 0, "trial 0", timing, chosen=True))
    store.close()
    return store.path


def test_neighbours_differ_in_one_parameter_and_are_legal() -> None:
    found = list(changes(LEGAL, POINT))
    assert {c.name for c in found} >= {"BN", "stages", "overlap", "pingpong", "persistent"}
    for change in found:
        assert violated(PROBLEM, change.point, GPU) is None
        differing = {k for k, v in change.point.items if v != POINT[k]}
        assert differing - {"consumer_warpgroups"} == {change.name}
        assert change.point[change.name] == change.value != POINT[change.name]
    assert max(sum(c.name == p.name for c in found) for p in LEGAL.space.params) <= 3


def test_effects_are_ratios_to_the_winner_and_refusals_have_reasons(run: Path) -> None:
    spec, replay = open_run(run)
    found = measure(spec, replay, (), Compiles(), Judges(), "sm_90a")
    by_name = {(e.name, e.value): e for e in found}
    assert by_name["overlap", 0].ratio == pytest.approx(2.0)
    assert by_name["BN", 112].ratio is None and by_name["BN", 112].reason == "serialised"
    assert all(e.ratio == pytest.approx(1.0) for e in found if e.ratio and e.name != "overlap")
    text = "\n".join(table(found))
    assert "| overlap | 1 |" in text and "2.000" in text and "not built: serialised" in text


def test_a_shape_the_run_does_not_have_is_named(run: Path) -> None:
    spec, replay = open_run(run)
    with pytest.raises(UsageError, match="1,2,3 is no shape"):
        measure(spec, replay, ("1,2,3",), Compiles(), Judges(), "sm_90a")


def test_without_the_card_it_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", str(run)]) == 3
    assert "h200" in capsys.readouterr().err
