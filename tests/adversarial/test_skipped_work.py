"""Work that is left out where nobody looks: by the output's old content, the address, old lengths.

Each kernel here is right in every launch that a judge would look at if all launches were alike.
"""

from __future__ import annotations

import torch

from codegen.kernel import KernelSource
from runs.record import Measured, Outcome, Rejected, TrialClass
from space.variant import DType, Phase, Problem, Shape
from tests.tuner.evaluate import fakes
from tests.tuner.evaluate.decode_fakes import Decoder
from tests.tuner.evaluate.scripted_clock import ScriptedClock
from tuner.evaluate.checks import trial_checks
from tuner.evaluate.finals import run_finals
from tuner.evaluate.inputs import Check, Data, Layout, make
from tuner.evaluate.judge import Judge
from tuner.evaluate.launch import Launcher, Prepare, Start
from tuner.evaluate.verify import set_exam, verify
from tuner.job import Entry, FinalsResult

T = torch.Tensor
CPU = torch.device("cpu")
PROBLEM = Problem("gqa", DType.FP16, 32, 32, True)
SHAPE = Shape(2, 4, 2, 64, 64, 32, 32, True)
SLOW_US, QUICK_US = 900.0, 300.0


class Skipper:
    """Right; `skips` says, of Q, K, V and the output before a launch, when it takes a short cut."""

    slow_us, quick_us = SLOW_US, QUICK_US

    def __init__(self, clock: ScriptedClock) -> None:
        self.clock = clock

    def skips(self, q: T, k: T, v: T, out: T) -> bool:
        """Whether nothing needs to be done."""
        return False

    def done(self, q: T, k: T, v: T, out: T) -> None:
        """Called after work was done."""

    def instead(self, q: T, k: T, v: T, out: T, scale: float) -> None:
        """What is done in place of the work."""

    @property
    def prepare(self) -> Prepare:
        def prepare(q: T, k: T, v: T, out: T, scale: float) -> Launcher:
            def launch() -> None:
                if self.skips(q, k, v, out):
                    self.instead(q, k, v, out, scale)
                    return self.clock.call("kernel", self.quick_us)()
                fakes.right(q, k, v, out, scale, True)
                self.done(q, k, v, out)
                return self.clock.call("kernel", self.slow_us)()

            return launch

        return prepare

    def unload(self) -> None:
        """Nothing to free."""


class UnlessPoisoned(Skipper):
    """Works only where the output holds NaN, as it does before a launch that is judged."""

    def skips(self, q: T, k: T, v: T, out: T) -> bool:
        return not bool(out.isnan().any())


class OwnResultIsThere(Skipper):
    """Leaves the output when it holds what the last launch left there."""

    last: T | None = None

    def skips(self, q: T, k: T, v: T, out: T) -> bool:
        return self.last is not None and torch.equal(out, self.last)

    def done(self, q: T, k: T, v: T, out: T) -> None:
        self.last = out.clone()


class FirstAddress(Skipper):
    """Works on the first Q it meets in the timing's memory, and does nothing for others.

    It is short: a time that is known again is that of all slots together.
    """

    slow_us, quick_us = 90.0, 30.0
    first: int | None = None

    def skips(self, q: T, k: T, v: T, out: T) -> bool:
        if q.shape[:2] != (SHAPE.batch, SHAPE.seqlen_q):
            return False
        self.first = self.first or q.data_ptr()
        return q.data_ptr() != self.first


class KnowsColumns(Skipper):
    """Keeps results by what stays when columns move and change signs, and finds the columns again.

    That it knows the result is taken for granted here: it costs it `QUICK_US`.
    """

    def __init__(self, clock: ScriptedClock) -> None:
        super().__init__(clock)
        self.met: set[bytes] = set()

    def _key(self, q: T, k: T, v: T) -> bytes:
        return b"".join(t.abs().sort(-1).values.numpy().tobytes() for t in (q, k, v))

    def skips(self, q: T, k: T, v: T, out: T) -> bool:
        return self._key(q, k, v) in self.met

    def instead(self, q: T, k: T, v: T, out: T, scale: float) -> None:
        fakes.right(q, k, v, out, scale, True)

    def done(self, q: T, k: T, v: T, out: T) -> None:
        self.met.add(self._key(q, k, v))


def tried(kind: type[Skipper]) -> Outcome:
    """Judge a kernel as a trial."""
    clock = ScriptedClock()
    kernel = kind(clock)
    judge = Judge(CPU, clock, lambda *_: kernel, None)
    return judge.judge(PROBLEM, KernelSource("", "sm_80", (), ()), b"", (SHAPE,), 1, {})


def final(kind: type[Skipper]) -> FinalsResult:
    """Judge a kernel as a finalist."""
    clock = ScriptedClock()
    kernel = kind(clock)
    judge = Judge(CPU, clock, lambda *_: kernel, None)
    entry = Entry(0, KernelSource("", "sm_80", (), ()), b"", (SHAPE,))
    return run_finals(judge, PROBLEM, (entry,), (SHAPE,), 1, {}, rounds=3)


def test_kernel_that_skips_nothing_is_measured() -> None:
    assert isinstance(tried(Skipper), Measured)
    assert [f.trial for f in final(Skipper).finalists] == [0]


def test_work_that_only_a_poisoned_output_starts_is_found_out() -> None:
    outcome = tried(UnlessPoisoned)
    assert isinstance(outcome, Rejected)
    result = final(UnlessPoisoned)
    assert not result.finalists and len(result.rejected) == 1


def test_output_that_is_left_as_it_was_is_spoiled_before_each_window() -> None:
    """It does the work each time then, and its time is that of the work."""
    outcome = tried(OwnResultIsThere)
    assert isinstance(outcome, Measured)
    assert outcome.timings[0].median_us == SLOW_US
    (finalist,) = final(OwnResultIsThere).finalists
    assert finalist.timing.median_us == SLOW_US


def test_what_comes_out_at_any_of_the_timed_addresses_is_judged() -> None:
    """A trial judges two slots of eight that it draws: both are the right one once in 64."""
    outcomes = [tried(FirstAddress) for _ in range(6)]
    assert sum(isinstance(o, Rejected) for o in outcomes) >= 4


def test_columns_that_are_known_again_are_no_help_in_the_finals() -> None:
    result = final(KnowsColumns)
    assert not result.finalists
    ((_, why),) = result.rejected
    assert why.trial_class is TrialClass.TIMING_INVALID
    assert "drawn anew from" in why.reason or "data that is new" in why.reason


def test_output_with_gaps_is_written_by_its_own_stride() -> None:
    def packed(q: T, k: T, v: T, out: T, scale: float, causal: bool) -> None:
        inside = torch.empty(out.shape, dtype=out.dtype)
        fakes.right(q, k, v, inside, scale, causal)
        out.as_strided(out.shape, inside.stride(), out.storage_offset()).copy_(inside)

    check = Check("gaps", Shape(2, 4, 2, 40, 50, 32, 32, True), layout=Layout.EMBEDDED)
    exam = set_exam(check.name, make(check, DType.FP16, CPU))
    assert exam.output.gaps
    assert isinstance(verify(fakes.kernel(fakes.right, True), exam), float)
    verdict = verify(fakes.kernel(packed, True), exam)
    assert isinstance(verdict, Rejected) and "outside the output" in verdict.reason


def test_lengths_are_read_at_each_launch() -> None:
    problem = Problem("gqa", DType.FP16, 32, 32, False, Phase.DECODE)
    check = next(c for c in trial_checks(problem) if c.counts and c.data is Data.NORMAL)
    exam = set_exam(check.name, make(check, DType.FP16, CPU))
    honest = Decoder()
    assert isinstance(verify(honest.prepare, exam), float)

    def keeps_lengths(*args: T, key_counts: T | None = None, **others: object) -> Launcher:
        kept = None if key_counts is None else key_counts.clone()
        return honest.prepare(*args, key_counts=kept, **others)  # type: ignore[arg-type]

    verdict = verify(keeps_lengths, exam)
    assert isinstance(verdict, Rejected) and verdict.trial_class is TrialClass.WRONG_OUTPUT
    assert "fewer keys" in verdict.reason
    assert isinstance(verify(honest.prepare, exam), float)  # the lengths are as they were


def test_workspace_holds_nan_before_every_launch_that_is_judged() -> None:
    """A second kernel that does not wait finds the results of the launch before, or now NaN."""
    check = Check("small", Shape(1, 2, 1, 16, 24, 32, 32, False))
    exam = set_exam(check.name, make(check, DType.FP16, CPU))
    seen: list[bool] = []

    def prepare(q: T, k: T, v: T, out: T, scale: float) -> Launcher:
        workspace = torch.zeros(4)

        class Packed:
            """Stands for the packed launch."""

            def launch(self, stream: int) -> None:
                """Right; leaves numbers in the workspace."""
                seen.append(bool(workspace.isnan().all()))
                workspace.fill_(1.0)
                fakes.right(q, k, v, out, scale, False)

        start = Start(Packed(), (workspace,), ())  # type: ignore[arg-type]
        start.stream = lambda: 0
        return start

    assert isinstance(verify(prepare, exam, 4), float)
    assert len(seen) == 6 and all(seen)
