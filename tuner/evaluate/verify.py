"""Decides whether a kernel is right. The launch is injected, so any callable can be judged.

The order is: launch, guard bands, inputs, holes, NaN and Inf maps, error, cosine, the same with V
negated and, of a cache, with fewer keys, repeats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from runs.record import Rejected, Stage, TrialClass
from tuner.evaluate.inputs import Inputs
from tuner.evaluate.launch import Launcher, LaunchError, Prepare, Start
from tuner.evaluate.output import EDGE, Output, allocate, flip_signs, same_bits
from tuner.evaluate.reference import Expected, Part, expect, whole

ERROR_FACTOR = 2.0  #: times the error of plain attention at the same dtype
ERROR_FLOOR = 1e-5
COSINE_MIN = 0.9999
#: A wider error than this times plain attention's is no rounding: the output is wrong.
PRECISION_FACTOR = 8.0
LATE_TRIES = 3
#: Limit where every element of a large output is looked at: their worst is worse than a sample's.
WHOLE_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Exam:
    """A problem ready to be given to any number of kernels: inputs, their copy, the answer."""

    name: str
    inputs: Inputs
    pristine: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    expected: Expected
    output: Output
    #: copies of `inputs.tables`, where the inputs may be written to
    tables: tuple[torch.Tensor, ...] = ()
    #: of a cache: fewer keys of each sequence, and the answer for them
    fewer: tuple[torch.Tensor, Expected] | None = None

    @property
    def output_sizes(self) -> tuple[int, int, int, int]:
        """B, Sq, Hq, Dv."""
        q, v = self.inputs.q, self.inputs.v
        return q.shape[0], q.shape[1], q.shape[2], v.shape[3]


def set_exam(name: str, inputs: Inputs) -> Exam:
    """Work out the answer of a problem once."""
    q, v = inputs.q, inputs.v
    sizes = (q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    tables = tuple(t.clone() for _, t in inputs.tables)
    heads_first = q.stride(2) > q.stride(1)
    gaps = not heads_first and q.shape[0] > 1 and q.stride(0) > q.shape[1] * q.stride(1)
    edges = q.shape[3] < q.stride(2) <= q.shape[3] + 2 * EDGE  # as those of Q are
    output = allocate(sizes, q.dtype, q.device, heads_first, gaps, edges)
    q_copy, k_copy, v_copy = (t.clone() for t in inputs.tensors)
    return Exam(
        name, inputs, (q_copy, k_copy, v_copy), expect(inputs), output, tables, _fewer(inputs)
    )


def _fewer(inputs: Inputs) -> tuple[torch.Tensor, Expected] | None:
    """A third of the keys of each sequence less, and the answer then; None without lengths."""
    if inputs.cache is None or inputs.cache.key_counts is None:
        return None
    counts = inputs.cache.key_counts
    shorter = counts - counts // 3
    return shorter, expect(replace(inputs, cache=replace(inputs.cache, key_counts=shorter)))


def verify(prepare: Prepare, exam: Exam, repeats: int = 1) -> float | Rejected:
    """Return the worst error over plain attention's own, or why the kernel is not right.

    The answer must follow the data at the same addresses (V is negated once), and `repeats` more
    launches must give the same bits. Device faults are raised by torch.
    """
    inputs, output = exam.inputs, exam.output
    try:
        launch = inputs.given_to(prepare, output.tensor)
        graded = _ask(launch, exam)
    except LaunchError as error:
        return Rejected(TrialClass.LAUNCH_FAILED, Stage.LAUNCH, f"{exam.name}: {error}")
    if isinstance(graded, Rejected):
        return _blame(launch, exam, graded)
    first = output.tensor.clone()
    flipped = _ask(launch, exam, -1)
    if isinstance(flipped, Rejected):
        return _blame(launch, exam, flipped)
    shortened = _ask_fewer(launch, exam)
    if isinstance(shortened, Rejected):
        restore(exam)
        return shortened
    unsteady = repeat(launch, exam, first, repeats)
    if unsteady is not None:
        return _late(launch, exam, first) or unsteady
    return max(graded, flipped, shortened)


def synchronize(device: torch.device) -> None:
    """Wait for the device; a fault of the kernel is raised here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _ask(launch: Launcher, exam: Exam, sign: int = 1) -> float | Rejected:
    """Launch on a poisoned output, with V as it is or negated, and judge what is there then.

    Where V is part of K, Q and K are negated: scores stay, and the answer turns all the same.
    """
    turned = exam.inputs.turned if sign < 0 else ()
    for tensor, _ in turned:
        flip_signs(_stored_once(tensor))
    exam.output.poison()
    _forget(launch)
    launch()
    synchronize(exam.inputs.q.device)
    graded = grade(exam, sign)
    for tensor, _ in turned:
        flip_signs(_stored_once(tensor))
    return graded


def _forget(launch: Launcher) -> None:
    """Take from a launch what an earlier one of the same tensors handed from kernel to kernel."""
    if isinstance(launch, Start):
        launch.forget()


def _ask_fewer(launch: Launcher, exam: Exam) -> float | Rejected:
    """Launch with fewer keys at the same addresses, as a graph is replayed later; 0 without any."""
    if exam.fewer is None:
        return 0.0
    cache, (shorter, expected) = exam.inputs.cache, exam.fewer
    assert cache is not None and cache.key_counts is not None
    cache.key_counts.copy_(shorter)
    tables = tuple(t.clone() for _, t in exam.inputs.tables)
    asked = replace(exam, name=f"{exam.name}, fewer keys", expected=expected, tables=tables)
    graded = _ask(launch, asked)
    cache.key_counts.copy_(exam.tables[0])
    return graded


def _stored_once(t: torch.Tensor) -> torch.Tensor:
    """The elements of an expanded tensor that are in memory."""
    return t[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())]


def _blame(launch: Launcher, exam: Exam, first: Rejected) -> Rejected:
    """A kernel that was wrong once and then follows its inputs is not wrong but unsteady."""
    restore(exam)
    if first.trial_class is TrialClass.INPUT_MODIFIED:
        return first
    for sign in (-1, 1):
        again = _ask(launch, exam, sign)
        restore(exam)
        if isinstance(again, Rejected):
            return first
    return Rejected(
        TrialClass.NONDETERMINISTIC, Stage.VERIFY, f"wrong, then right on repeat: {first.reason}"
    )


def restore(exam: Exam) -> None:
    """Put the inputs back after a kernel that may have changed them."""
    for tensor, copy in zip(exam.inputs.tensors, exam.pristine, strict=True):
        _put_back(tensor, copy)
    for (_, tensor), copy in zip(exam.inputs.tables, exam.tables, strict=True):
        tensor.copy_(copy)


def _put_back(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    stored = _stored_once(tensor)
    stored.copy_(copy[tuple(slice(0, size) for size in stored.shape)])


def repeat(launch: Launcher, exam: Exam, first: torch.Tensor, repeats: int) -> Rejected | None:
    """Launch again and again; the bits must stay. The device is asked once, at the end."""
    steady = []
    for n in range(repeats):
        if n % 2:
            exam.output.poison()
        else:
            exam.output.spoil()
        _forget(launch)
        launch()
        steady.append(same_bits(exam.output.tensor, first))
    if not steady:
        return None
    changed = [i for i, same in enumerate(torch.stack(steady).tolist()) if not same]
    if not changed:
        return None
    return Rejected(
        TrialClass.NONDETERMINISTIC, Stage.VERIFY,
        f"{exam.name}: repeat {changed[0] + 1} of {repeats} gave other bits than the first launch; "
        f"{len(changed)} did",
    )  # fmt: skip


def _late(launch: Launcher, exam: Exam, first: torch.Tensor) -> Rejected | None:
    """Work on another stream shows: in stream order the output is not there, after a wait it is."""
    for _ in range(LATE_TRIES):
        exam.output.poison()
        launch()
        in_order = same_bits(exam.output.tensor, first)
        synchronize(first.device)
        if in_order or not same_bits(exam.output.tensor, first):
            return None
    return Rejected(
        TrialClass.TIMING_INVALID, Stage.VERIFY,
        f"{exam.name}: the output was not complete in stream order, only after a full wait: "
        "work ran outside the stream it was given",
    )  # fmt: skip


def grade(exam: Exam, sign: int = 1) -> float | Rejected:
    """Judge what lies in the exam's output now; `sign` is -1 when V is negated."""
    output = exam.output
    hits = int(output.guard_hits())
    if hits:
        return _wrong(exam, f"{hits} elements outside the output were written")
    if (changed := _changed(exam, sign)) is not None:
        return Rejected(
            TrialClass.INPUT_MODIFIED, Stage.VERIFY, f"{exam.name}: {changed} was changed"
        )
    holes = output.unwritten()
    if holes.any():
        first = tuple(holes.nonzero()[0].tolist())
        return _wrong(
            exam, f"{int(holes.sum())} elements never written, first [b, s, h, d] {first}"
        )
    worst = 0.0
    for part in exam.expected:
        signed = part if sign > 0 else replace(part, exact=-part.exact)
        ratio = compare(output.tensor[part.index], signed, exam.name)
        if isinstance(ratio, Rejected):
            return ratio
        worst = max(worst, ratio)
    return worst


def _changed(exam: Exam, sign: int) -> str | None:
    """The name of an input that is not as it was given, or None."""
    inputs = exam.inputs
    negated = {name for _, name in inputs.turned} if sign < 0 else set()
    for name, now, was in zip("QKV", inputs.tensors, exam.pristine, strict=True):
        if name == "V" and inputs.latent:
            continue  # part of K
        if not same_bits(now, flip_signs(was.clone()) if name in negated else was):
            return name
    for (name, now), was in zip(inputs.tables, exam.tables, strict=True):
        if not torch.equal(now, was):
            return name
    return None


def check_whole(exam: Exam) -> Rejected | None:
    """Look at every element of a large output, of which `grade` sees a sample.

    For what is worth a second: finalists and exported kernels.
    """
    if len(exam.expected) == 1:
        return None
    own = max(part.own_error for part in exam.expected)
    for part in whole(exam.inputs, own):
        verdict = compare(exam.output.tensor[part.index], part, exam.name, WHOLE_FACTOR)
        if isinstance(verdict, Rejected):
            return verdict
    return None


def compare(
    got: torch.Tensor, part: Part, name: str, factor: float = ERROR_FACTOR
) -> float | Rejected:
    """Return the error over plain attention's own in one part, or the evidence against it."""
    if not got.numel():
        return 0.0
    exact = part.exact
    rounded = exact.to(got.dtype)  # an exact value past the 16-bit range is Inf in a right output
    finite = rounded.isfinite()
    unlike = torch.where(finite, ~got.isfinite(), ~_same_special(got, rounded))
    if unlike.any():
        at = _first(unlike, part)
        return Rejected(
            TrialClass.WRONG_OUTPUT, Stage.VERIFY,
            f"{name}: {_value(got, at, part)} at [b, s, h, d] {at} where "
            f"{_value(exact, at, part):.6g} is right; {int(unlike.sum())} such NaN or Inf",
        )  # fmt: skip
    error = torch.where(finite, (got.double() - exact).abs(), 0.0)
    largest = float(error.max())
    own = part.own_error + ERROR_FLOOR / ERROR_FACTOR
    ratio = largest / own
    cosine = _cosine(got.double()[finite], exact[finite])
    if ratio <= factor and cosine >= COSINE_MIN:
        return ratio
    at = _first(error == largest, part)
    slight = ratio <= PRECISION_FACTOR and cosine >= COSINE_MIN
    return Rejected(
        TrialClass.PRECISION if slight else TrialClass.WRONG_OUTPUT, Stage.VERIFY,
        f"{name}: {_value(got, at, part):.6g} at [b, s, h, d] {at} where "
        f"{_value(exact, at, part):.6g} is right: error {largest:.3g}, limit "
        f"{factor * own:.3g} ({factor:g}x {part.yardstick}'s own + {ERROR_FLOOR:g}), "
        f"cosine {cosine:.6f}, {int((error > factor * own).sum())} elements over the limit",
    )  # fmt: skip


def _same_special(got: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return (got.isnan() & right.isnan()) | (got == right)


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    norms = float(a.norm() * b.norm())
    if norms == 0.0 or not math.isfinite(norms):
        return 1.0  # all zero, or past what a cosine can tell: the error bound decides alone
    return float(a @ b) / norms


def _first(mask: torch.Tensor, part: Part) -> tuple[int, ...]:
    """The place of the first true element, in the coordinates of the whole output."""
    place: list[int] = mask.nonzero()[0].tolist()
    starts = [s.start or 0 for s in part.index]
    return (*(p + s for p, s in zip(place, starts, strict=False)), place[3])


def _value(t: torch.Tensor, at: tuple[int, ...], part: Part) -> float:
    starts = [s.start or 0 for s in part.index]
    local = [a - s for a, s in zip(at, starts, strict=False)]
    return float(t[local[0], local[1], local[2], at[3]])


def _wrong(exam: Exam, evidence: str) -> Rejected:
    return Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, f"{exam.name}: {evidence}")
