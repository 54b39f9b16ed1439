"""Kernels that work when they are judged and not when they are timed are seen in the finals."""

from __future__ import annotations

from collections.abc import Callable

import torch

from runs.record import Rejected, TrialClass
from tuner.evaluate.finals import WARM_ROUNDS, interleave
from tuner.evaluate.output import allocate
from tuner.evaluate.witness import Witness

CPU = torch.device("cpu")


class Steps:
    """A clock that runs every window once and says how many there were."""

    def windows_us(
        self, calls: list[Callable[[], object]], during: Callable[[], object] | None = None,
        before: Callable[[], object] | None = None,
    ) -> list[float]:  # fmt: skip
        for call in calls:
            if before is not None:
                before()
            call()
        return [1.0 for _ in calls]


def finals(lazy_from: int) -> dict[str, Rejected | None]:
    """Race a kernel that works with one that stops at its `lazy_from`-th launch, and a peer."""
    output = allocate((1, 4, 2, 8), torch.float16, CPU)
    witness = Witness(output)
    launches = 0

    def works() -> None:
        output.tensor.fill_(1.0)

    def lazy() -> None:
        nonlocal launches
        launches += 1
        if launches <= lazy_from:
            output.tensor.fill_(2.0)

    for name, call in {"works": works, "lazy": lazy}.items():
        call()
        witness.remember(name)
    calls = {"works": works, "lazy": lazy, "peer": lambda: output.tensor.fill_(3.0)}
    interleave(calls, Steps(), 5, None, witness.look)
    return {name: witness.against(name, "a shape") for name in ("works", "lazy")}


def test_every_timed_window_is_looked_at() -> None:
    rounds = 5 + WARM_ROUNDS
    assert finals(lazy_from=1 + rounds) == {"works": None, "lazy": None}
    for missed in (1, 2, rounds):
        found = finals(lazy_from=1 + rounds - missed)
        assert found["works"] is None
        lazy = found["lazy"]
        assert isinstance(lazy, Rejected) and lazy.trial_class is TrialClass.NONDETERMINISTIC
        assert lazy.reason.startswith(f"a shape: {missed} of {rounds} timed launches gave other")
