"""The search over a machine without compiler or GPU: budget, repeats, blame, stops, resume."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from fake_machine import CAUSAL, FULL, FakeMachine, a100

from llm_proposer.seeds import seeds
from runs.record import Basis, Broken, History, Measured, Outcome, Rejected, Stage, TrialClass
from runs.store import Replay, RunStore
from space.constraints import space_for, violated
from space.gpu import GPUS
from tuner.cli import main
from tuner.lanes import Candidate
from tuner.loop import ALIKE

SHAPE = "1,16,16,4096,4096,128,128"


def tune(tmp_path: Path, fake: FakeMachine, *words: str, sketch: str = FULL) -> int:
    file = tmp_path / "sketch.tl"
    file.write_text(sketch)
    args = ["--variant", "mha", "--gpu", "a100", "--shapes", SHAPE, "--sketch", str(file)]
    return main([*args, "--runs-dir", str(tmp_path / "runs"), *words], fake.machine())


def only_run(tmp_path: Path) -> Path:
    (run,) = [p for p in (tmp_path / "runs").iterdir() if p.is_dir()]
    return run


def replay(tmp_path: Path) -> Replay:
    return RunStore.open(only_run(tmp_path)).replay()


def rejected(trial_class: TrialClass, reason: str = "no good") -> Rejected:
    return Rejected(trial_class, Stage.VERIFY, reason)


# ---- budget ------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 5])
def test_the_budget_is_spent_exactly_and_no_program_twice(tmp_path: Path, depth: int) -> None:
    fake = a100(depth=depth)
    assert tune(tmp_path, fake, "--budget", "30") == 0
    history = replay(tmp_path).history
    assert history.spent() == 30
    assert [r.index for r in history] == list(range(30))
    assert len({(r.problem, r.point.key) for r in history}) == 30
    assert len(fake.shops[0].judged) == 30
    assert fake.shops[0].closed


def test_first_trial_is_the_known_good_one_and_seeds_follow(tmp_path: Path) -> None:
    tune(tmp_path, a100(), "--budget", "12")
    history = replay(tmp_path).history
    problem = history.records[0].problem
    wanted = seeds(problem, GPUS["a100"], space_for(problem, GPUS["a100"]))
    assert [r.point for r in history][: len(wanted)] == list(wanted)
    origins = [r.origin for r in history]
    assert origins[0] == "first"
    assert set(origins[1 : len(wanted)]) == {"seed"}
    assert set(origins[len(wanted) :]) == {"sampler"}


def test_no_illegal_point_is_ever_compiled(tmp_path: Path) -> None:
    tune(tmp_path, a100(), "--budget", "40")
    for record in replay(tmp_path).history:
        assert violated(record.problem, record.point, GPUS["a100"]) is None


def test_what_does_not_fit_costs_no_budget(tmp_path: Path) -> None:
    def verdict(c: Candidate) -> Outcome | None:
        return rejected(TrialClass.TOO_LARGE) if c.point["BN"] == 64 else None

    tune(tmp_path, a100(verdict), "--budget", "15")
    history = replay(tmp_path).history
    assert history.spent() == 15
    assert len(history) > 15


def test_a_program_met_before_is_a_free_duplicate(tmp_path: Path, monkeypatch: object) -> None:
    """Points that give the same source are judged once."""
    fake = a100()
    import fake_machine

    honest = fake_machine.build

    def same_for_any_head_group(candidate: Candidate) -> object:
        point = candidate.point.replace(head_group=1, epilogue_smem=1, peel=1)
        return honest(Candidate(candidate.sketch, candidate.text, candidate.problem, point, ""))

    assert isinstance(monkeypatch, pytest.MonkeyPatch)
    monkeypatch.setattr(fake_machine, "build", same_for_any_head_group)
    tune(tmp_path, fake, "--budget", "40")
    history = replay(tmp_path).history
    repeats = [r for r in history if r.outcome.trial_class is TrialClass.DUPLICATE]
    judged = [r for r in history if isinstance(r.outcome, Measured)]
    assert repeats
    assert len(judged) == len({r.source_digest for r in history}) == 40
    for r in repeats:
        assert isinstance(r.outcome, Rejected)
        assert "the same program as trial" in r.outcome.reason


# ---- blame -------------------------------------------------------------------------------------


def test_the_search_leaves_a_region_of_bad_kernels(tmp_path: Path) -> None:
    def verdict(c: Candidate) -> Outcome | None:
        return rejected(TrialClass.WRONG_OUTPUT) if c.point["swizzle"] != 128 else None

    tune(tmp_path, a100(verdict), "--budget", "80")
    late = replay(tmp_path).history.records[40:]
    assert sum(isinstance(r.outcome, Measured) for r in late) > 0.6 * len(late)


def test_broken_machinery_costs_no_budget_and_is_no_kernels_fault(tmp_path: Path) -> None:
    calls = 0

    def verdict(c: Candidate) -> Outcome | None:
        nonlocal calls
        calls += 1
        return Broken(Stage.LAUNCH, "driver gone") if calls in (3, 7) else None

    assert tune(tmp_path, a100(verdict), "--budget", "10") == 0
    history = replay(tmp_path).history
    assert (history.spent(), len(history)) == (10, 12)


# ---- stops -------------------------------------------------------------------------------------


def test_trials_that_all_fail_alike_stop_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def verdict(c: Candidate) -> Outcome:
        return rejected(TrialClass.LAUNCH_FAILED, f"error {len(c.point.key)} from the driver")

    fake = a100(verdict)
    assert tune(tmp_path, fake, "--budget", "100") == 1
    assert len(fake.shops[0].judged) == ALIKE
    said = capsys.readouterr().err
    assert "launch_failed at verify: error" in said
    assert "tune emit" in said and "-p BM=" in said
    assert len(said.splitlines()) == 1


def test_different_failures_do_not_stop_it(tmp_path: Path) -> None:
    classes = (TrialClass.PRECISION, TrialClass.TIMEOUT)
    count = 0

    def verdict(c: Candidate) -> Outcome:
        nonlocal count
        count += 1
        return rejected(classes[count % 2])

    fake = a100(verdict)
    assert tune(tmp_path, fake, "--budget", "20") == 1
    assert len(fake.shops[0].judged) == 20


def test_one_right_kernel_is_enough_to_go_on(tmp_path: Path) -> None:
    count = 0

    def verdict(c: Candidate) -> Outcome | None:
        nonlocal count
        count += 1
        return None if count == 1 else rejected(TrialClass.WRONG_OUTPUT)

    assert tune(tmp_path, a100(verdict), "--budget", "25") == 0
    assert replay(tmp_path).history.spent() == 25


def test_a_space_that_is_used_up_ends_the_search(tmp_path: Path) -> None:
    tiny = "Param BM in {128}\nParam BN in {64}\nParam warps in {4}\nParam stages in {1}\n"
    tiny += "Param swizzle in {128}\nParam q_in_registers in {0}\nParam p_in_registers in {1}\n"
    tiny += "Param blocks_per_sm in {1}\nParam head_group in {1}\nParam peel in {1}\n" + FULL
    fake = a100()
    assert tune(tmp_path, fake, "--budget", "100", sketch=tiny) == 0
    found = replay(tmp_path)
    assert found.finished is not None
    assert found.finished.reason == "every legal point of the space has been tried"
    assert len(found.history) == 4  # rescale_threshold and epilogue_smem are left


def test_minutes_end_the_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tuner.loop

    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 1.0
        return now

    monkeypatch.setattr(tuner.loop.time, "monotonic", clock)
    assert tune(tmp_path, a100(), "--budget", "5000", "--minutes", "1") == 0
    found = replay(tmp_path)
    assert found.finished is not None and "minutes are over" in found.finished.reason
    assert 5 < len(found.history) < 60


def test_an_interrupt_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    count = 0

    def verdict(c: Candidate) -> Outcome | None:
        nonlocal count
        count += 1
        if count == 9:
            raise KeyboardInterrupt
        return None

    fake = a100(verdict)
    assert tune(tmp_path, fake, "--budget", "20") == 0
    assert not fake.exported
    assert fake.shops[0].closed
    found = replay(tmp_path)
    assert found.finished is not None and found.finished.reason == "interrupted"
    assert len(found.history) == 8
    again = a100()
    assert main(["--resume", str(only_run(tmp_path))], again.machine()) == 0
    assert replay(tmp_path).history.spent() == 20
    assert again.exported


# ---- resume ------------------------------------------------------------------------------------


def without_times(history: History) -> list[object]:
    return [(r.index, r.problem, r.sketch, r.point, r.origin, r.outcome) for r in history]


def test_a_journal_cut_anywhere_resumes_to_the_same_run(tmp_path: Path) -> None:
    """With one candidate in flight, a resumed run equals the run that was never stopped."""
    assert tune(tmp_path, a100(), "--budget", "25", "--seed", "3") == 0
    whole = replay(tmp_path).history
    run = only_run(tmp_path)
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    trials = [n for n, line in enumerate(lines) if json.loads(line)["kind"] == "trial"]
    rng = random.Random(5)
    for cut in rng.sample(range(1, len(trials)), 4):
        torn = lines[trials[cut]][: rng.randrange(len(lines[trials[cut]]))]
        (run / "journal.jsonl").write_bytes(b"".join(lines[: trials[cut]]) + torn)
        assert main(["--resume", str(run)], a100().machine()) == 0
        assert without_times(replay(tmp_path).history) == without_times(whole)


def test_a_finished_run_resumed_does_nothing_more_unless_budget_is_added(tmp_path: Path) -> None:
    tune(tmp_path, a100(), "--budget", "10")
    run = str(only_run(tmp_path))
    again = a100()
    assert main(["--resume", run], again.machine()) == 0
    assert again.shops[0].judged == []
    more = a100()
    assert main(["--resume", run, "--budget", "13"], more.machine()) == 0
    assert len(more.shops[0].judged) == 3
    assert replay(tmp_path).history.spent() == 13


# ---- problems, finalists, predicted ------------------------------------------------------------


def test_both_masks_share_the_budget_and_their_best_points(tmp_path: Path) -> None:
    args = ["--variant", "mha", "--gpu", "a100", "--shapes", SHAPE, "--budget", "40"]
    fake = a100()
    assert main([*args, "--runs-dir", str(tmp_path / "runs")], fake.machine()) == 0
    history = replay(tmp_path).history
    counts = {c: sum(r.problem.causal == c for r in history) for c in (False, True)}
    assert counts[False] == counts[True] == 20
    assert any(r.origin == "sibling" for r in history)


def test_the_winner_comes_from_the_final_timing(tmp_path: Path) -> None:
    tune(tmp_path, a100(), "--budget", "20")
    found = replay(tmp_path)
    (chosen,) = [f for f in found.finalists if f.chosen]
    assert chosen.trial is not None
    ours = [f.timing.median_us for f in found.finalists if f.trial is not None]
    assert chosen.timing.low_us <= min(ours) * 1.01
    assert [f.name for f in found.finalists if f.trial is None] == ["fa2"]


def test_without_the_gpu_times_are_predicted_and_peers_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeMachine()
    assert tune(tmp_path, fake, "--budget", "10", sketch=CAUSAL) == 0
    out = capsys.readouterr().out
    assert "no A100 here (no GPU): times are predicted, not measured" in out
    found = replay(tmp_path)
    bases = {t.basis for r in found.history if isinstance(r.outcome, Measured)
             for t in r.outcome.timings}  # fmt: skip
    assert bases == {Basis.PREDICTED}
    assert all(f.trial is not None for f in found.finalists)
    assert sum(f.chosen for f in found.finalists) == 1
    assert out.count("TFLOP/s predicted") >= 10


def test_a_predicted_run_resumed_on_the_card_measures_its_shortlist_first(tmp_path: Path) -> None:
    assert tune(tmp_path, FakeMachine(), "--budget", "15") == 0
    predicted = only_run(tmp_path)
    before = (predicted / "journal.jsonl").read_bytes()
    best = sorted(
        (r for r in RunStore.open(predicted).replay().history if isinstance(r.outcome, Measured)),
        key=lambda r: (r.outcome.timings[0].median_us, r.index),  # type: ignore[union-attr]
    )[:3]
    card = a100()
    assert main(["--resume", str(predicted)], card.machine()) == 0
    (measured,) = [p for p in (tmp_path / "runs").iterdir() if p != predicted]
    store = RunStore.open(measured)
    assert store.spec.measure is Basis.MEASURED
    history = store.replay().history
    listed = [r.point.key for r in history if r.origin == "shortlist"]
    first = history.records[0].point.key
    assert listed[:2] == [r.point.key for r in best if r.point.key != first][:2]
    assert history.spent() == 15
    assert (predicted / "journal.jsonl").read_bytes() == before
    # and the measured run itself can be resumed
    again = a100()
    assert main(["--resume", str(measured), "--budget", "17"], again.machine()) == 0
    assert len(again.shops[0].judged) == 2


def test_a_measured_run_is_not_resumed_without_its_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tune(tmp_path, a100(), "--budget", "5")
    assert main(["--resume", str(only_run(tmp_path))], FakeMachine().machine()) == 3
    assert "not here" in capsys.readouterr().err
