"""Whether a time holds on data that nobody has seen.

A launcher may keep its results by the content of its inputs and only copy them when the same
content comes again, as it does in every timing. So the inputs of a timed shape are drawn again:
the columns of Q and K change places and signs together, which leaves every score what it was, and
those of V, which moves the columns of the right output. No 16-bit value is rounded
by this, the answer is known without working it out again, and the draw comes from the system's
entropy, so that no earlier trial can have met it. A user's function may tell columns apart (rotary
embeddings do): it is asked again.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from runs.record import Rejected, Stage, TrialClass
from space.variant import Shape
from tuner.evaluate.arena import V_MEAN, Bay
from tuner.evaluate.clock import Clock, Launcher
from tuner.evaluate.inputs import Triple
from tuner.evaluate.output import flip_signs
from tuner.evaluate.reference import expect
from tuner.evaluate.timing import GRAPH_US, Sample
from tuner.evaluate.verify import Exam, grade

#: A launch on new data may take so many times the timed median. New columns change nothing that a
#: kernel's time depends on, so one window of several must come as near to the median as windows
#: of one kernel come to each other; the rest is what a replay could still gain.
FRESH_FACTOR = 1.2
#: What a lone window adds to its launches: the gaps around it, a few microseconds, and inputs that
#: a longer graph finds in L2 and these launches do not. Inputs that stay there are at most an
#: eighth of the cache, 14 us of reading on the card where that is most (L40S). On an H200 right
#: kernels needed none of it: at 18 shapes their slowest of 20 draws was within the factor alone.
FRESH_SLACK_US = 20.0
#: New draws before the kernel is blamed. Another process on the card delays some windows, a
#: replay computes in all of them; an honest kernel mostly needs one.
FRESH_TRIES = 8


@dataclass(frozen=True, slots=True)
class Draw:
    """Where the columns of Q and K (D of them) and of V (Dv) go, and which change their sign."""

    seed: int
    columns: torch.Tensor
    flips: torch.Tensor  #: bool
    v_columns: torch.Tensor
    v_flips: torch.Tensor

    @staticmethod
    def new(s: Shape, seed: int, device: torch.device) -> Draw:
        """Draw from `seed`. Where V is the first columns of K they move among themselves."""
        generator = torch.Generator().manual_seed(seed)

        def order(first: int, past: int) -> torch.Tensor:
            return first + torch.randperm(past - first, generator=generator)

        def coins(size: int) -> torch.Tensor:
            return torch.randint(2, (size,), generator=generator).bool()

        flips, v_flips, v_columns = coins(s.head_dim), coins(s.head_dim_v), order(0, s.head_dim_v)
        columns = order(0, s.head_dim)
        if s.latent:
            columns = torch.cat((v_columns, order(s.head_dim_v, s.head_dim)))
            v_flips = flips[: s.head_dim_v]
        moved = (t.to(device) for t in (columns, flips, v_columns, v_flips))
        return Draw(seed, *moved)

    def inputs(self, tensors: Triple) -> Triple:
        """Return Q, K and V with their columns moved, as new tensors."""
        q, k, v = tensors
        return (
            flip_signs(q[..., self.columns], self.flips),
            flip_signs(k[..., self.columns], self.flips),
            flip_signs(v[..., self.v_columns], self.v_flips),
        )

    def answer(self, exact: torch.Tensor) -> torch.Tensor:
        """Return the right output for the moved inputs, from that for the inputs as they were."""
        moved = exact[..., self.v_columns]
        return torch.where(self.v_flips, -moved, moved)


def new_seed() -> int:
    """Return a seed that nothing before tells."""
    return secrets.randbits(62)


def renew(bay: Bay, seed: int, slot: int = 0) -> Exam:
    """Put new data on every slot of a bay and return the problem that is now on `slot`."""
    last = bay.exam(-1, slot)
    draw = Draw.new(bay.shape, seed, last.inputs.q.device)
    for n, other in enumerate(bay.slots):
        if n != slot:
            _put(other.tensors, draw.inputs(other.tensors))
    fresh = draw.inputs(last.pristine)
    _put(last.inputs.tensors, fresh)
    if last.inputs.function is None:
        right = tuple(replace(part, exact=draw.answer(part.exact)) for part in last.expected)
    else:
        right = expect(last.inputs)
    return replace(
        last, name=f"{last.name}, columns drawn from {seed}", pristine=fresh, expected=right
    )


def redraw(bay: Bay, seed: int, slot: int = 0) -> Exam:
    """Put numbers that were never there on `slot`, and work out the answer to them.

    Dearer than `renew`, and sure where a kernel knows moved columns again: for finalists.
    """
    last = bay.exam(-1, slot)
    q, k, v = last.inputs.tensors
    generator = torch.Generator(q.device).manual_seed(seed)
    for tensor, mean in ((q, 0.0), (k, 0.0), (v, V_MEAN)):
        if tensor is not v or not last.inputs.latent:
            tensor.normal_(mean, 1.0, generator=generator)
    pristine = (q.clone(), k.clone(), v.clone())
    name = f"{last.name}, drawn anew from {seed}"
    return replace(last, name=name, pristine=pristine, expected=expect(last.inputs))


def _put(tensors: Triple, moved: Triple) -> None:
    """Copy in place; where V is part of K it gets the same values twice."""
    for tensor, new in zip(tensors, moved, strict=True):
        tensor.copy_(new)


def check_fresh(
    calls: Sequence[Launcher], bay: Bay, clock: Clock, sample: Sample,
    draw_seed: Callable[[], int] = new_seed,
) -> Rejected | None:  # fmt: skip
    """Return the rejection of a time that does not hold on new data, or of what comes out then.

    `calls` launch on the bay's slots in their order. Short kernels run as one graph of them, so
    that the slack is shared; one that cannot be captured runs alone. What comes out on one of the
    slots, nobody knows which, is judged. Device faults are raised.
    """
    slot = secrets.randbelow(len(calls))
    call, count = calls[slot], 1
    if sample.median_us < GRAPH_US:
        others = [c for n, c in enumerate(calls) if n != slot]
        with contextlib.suppress(RuntimeError):
            call, count = clock.graphed([*others, calls[slot]]), len(calls)
    return check_call(call, count, bay, clock, sample, draw_seed, slot)


def check_call(
    call: Launcher, count: int, bay: Bay, clock: Clock, sample: Sample,
    draw_seed: Callable[[], int] = new_seed, slot: int = 0,
    fresh: Callable[[Bay, int, int], Exam] = renew,
) -> Rejected | None:  # fmt: skip
    """See `check_fresh`; `call` makes `count` launches, the last of them on `slot`.

    `fresh` makes the new data. The output is poisoned for one launch and spoiled for the next.
    """
    made_ready = itertools.cycle((bay.output.spoil, bay.output.poison))
    bay.output.poison()  # the guard bands
    limit_us = FRESH_FACTOR * sample.median_us * count + FRESH_SLACK_US
    quickest = float("inf")
    for _ in range(FRESH_TRIES):
        exam = fresh(bay, draw_seed(), slot)
        next(made_ready)()
        _, us = clock.windows_us([_nothing, call])  # the first window after a wait reads low
        graded = grade(exam)
        if isinstance(graded, Rejected):
            return replace(graded, stage=Stage.TIME)
        quickest = min(quickest, us)
        if quickest <= limit_us:
            return None
    return Rejected(
        TrialClass.TIMING_INVALID, Stage.TIME,
        f"{bay.exams[-1].name}: {count} launch(es) on data that is new took {quickest:.0f} us, the "
        f"quickest of {FRESH_TRIES}, where {sample.median_us:.1f} us each were timed and "
        f"{limit_us:.0f} us are allowed: results are kept by their inputs, or another process "
        "keeps the device busy",
    )  # fmt: skip


def _nothing() -> None:
    return None
