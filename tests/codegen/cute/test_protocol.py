"""The Hopper barrier protocol: every legal choice plays to its end, and broken ones do not."""

from __future__ import annotations

import itertools

import pytest

from codegen.cute import protocol
from codegen.cute.protocol import Step, check_protocol
from codegen.errors import PlanError

BOTH = (True, False)
CHOICES = list(itertools.product((1, 2), (1, 2, 3, 4), (1, 2, 3, 4), BOTH, BOTH, BOTH, BOTH))


def waits_for_ever(choice: tuple[int, int, int, bool, bool, bool, bool]) -> bool:
    """What `space.hopper` prunes as `turns_end`."""
    _, stages, consumers, overlap, skip, _, pingpong = choice
    return stages == 1 and consumers > 1 and overlap and skip and pingpong


@pytest.mark.parametrize("choice", CHOICES)
def test_only_what_the_space_prunes_deadlocks(
    choice: tuple[int, int, int, bool, bool, bool, bool],
) -> None:
    if waits_for_ever(choice):
        with pytest.raises(PlanError, match="everybody waits"):
            check_protocol(*choice)
    else:
        check_protocol(*choice)


def test_a_producer_that_loads_values_before_their_keys_deadlocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def eager(overlap: bool):  # type: ignore[no-untyped-def]
        counts = {"rows": 0, "values": 0, "keys": 0}
        for tiles in protocol.BLOCKS:
            for ring in ["rows", *["values", "keys"] * tiles]:
                yield Step("wait", "empty", ring, counts[ring])
                yield Step("arrive", "full", ring, counts[ring])
                counts[ring] += 1

    monkeypatch.setattr(protocol, "producer_steps", eager)
    with pytest.raises(PlanError, match="deadlock"):
        check_protocol(1, 1, 2, True, False, False, False)


@pytest.mark.parametrize("choice", CHOICES)
def test_blocks_of_a_cluster_end_where_one_block_does(
    choice: tuple[int, int, int, bool, bool, bool, bool],
) -> None:
    if waits_for_ever(choice):
        with pytest.raises(PlanError, match="everybody waits"):
            check_protocol(*choice, cluster=2)
    else:
        check_protocol(*choice, cluster=2)


def test_a_cluster_whose_blocks_let_go_only_of_their_own_slots_deadlocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = protocol._do

    def local(blocks: list[protocol._Block], block: int, step: Step) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            if step.side == "empty":
                patch.setattr(protocol, "reached", lambda ring, block, cluster: (block,))
            return plain(blocks, block, step)

    check_protocol(1, 2, 2, True, False, False, False, cluster=2)
    monkeypatch.setattr(protocol, "_do", local)
    with pytest.raises(PlanError, match="deadlock"):
        check_protocol(1, 2, 2, True, False, False, False, cluster=2)


def test_a_cluster_that_does_not_wait_for_the_other_blocks_overwrites_their_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def hasty(ring: protocol._Ring, index: int) -> bool:
        last = index - ring.stages
        return last < 0 or ring.own.get(last, 0) == ring.consumers

    check_protocol(1, 2, 2, True, True, False, False, cluster=2)
    monkeypatch.setattr(protocol._Ring, "released", hasty)
    with pytest.raises(PlanError, match="overwrite a slot that is read"):
        check_protocol(1, 2, 2, True, True, False, False, cluster=2)


def test_a_consumer_that_forgets_to_let_go_of_skipped_tiles_deadlocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = protocol.consumer_steps

    def forgetful(overlap: bool, passed_over: int, late_rows: bool, turns: object):  # type: ignore[no-untyped-def]
        seen = {"keys": 0}
        for step in plain(overlap, passed_over, late_rows, turns):
            if step == Step("arrive", "empty", "keys", 2):
                seen["keys"] += 1
                continue
            yield step

    monkeypatch.setattr(protocol, "consumer_steps", forgetful)
    with pytest.raises(PlanError, match="deadlock"):
        check_protocol(1, 2, 2, True, True, False, False)
