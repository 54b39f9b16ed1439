"""Seeds out of replies: real ones, and what else models write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import BASE, GQA, HISTORY, HOPPER_BASE, HOPPER_SPACE, MLA, SUBJECT, SYNC_SPACE

from llm_proposer.describe import known_points
from llm_proposer.loose_json import objects
from llm_proposer.seed_reply import Proposal, SeedReply, Verdict, read_seeds
from space.constraints import violated
from space.gpu import GPUS

REPLIES = Path(__file__).parents[1] / "codegen" / "tl" / "replies"
OK, MENDED, NO = Verdict.ACCEPTED, Verdict.REPAIRED, Verdict.REJECTED


def on_hopper(text: str) -> SeedReply:
    return read_seeds(text, MLA, GPUS["h200"], HOPPER_SPACE, HOPPER_BASE)


def on_ada(text: str, known: dict[str, str] | None = None) -> SeedReply:
    return read_seeds(text, GQA, GPUS["l40s"], SYNC_SPACE, BASE, known)


def one(text: str) -> Proposal:
    (found,) = on_ada(text).proposals
    return found


def real(name: str) -> str:
    return (REPLIES / f"{name}.txt").read_text(encoding="utf-8")


# ---- real replies --------------------------------------------------------------------------------

#: reply -> what becomes of each proposal on Hopper, where all of them were meant for
OUTCOMES = {
    "tune-04": [
        (OK, ""),
        (MENDED, "moved to out_buffer=0"),
        (MENDED, "moved to stages=1"),
        (OK, ""),
        (OK, ""),
        (OK, ""),
        (NO, "cluster is not a parameter here"),
        (OK, ""),
        (OK, ""),
        (OK, ""),
    ],
    "tune-05": [
        (NO, "kv_splits and pack_gqa are not parameters here"),
        (NO, "kv_splits and pack_gqa are not parameters here"),
        (NO, "kv_splits and pack_gqa are not parameters here"),
        (NO, "kv_splits and pack_gqa are not parameters here"),
        (NO, "kv_splits and pack_gqa are not parameters here"),
        (NO, "kv_splits and pack_gqa are not parameters here"),
        (NO, "kv_splits and pack_gqa are not parameters here"),
        (NO, "kv_splits and pack_gqa and epilogue are not parameters here"),
        (NO, "kv_splits and pack_gqa are not parameters here"),
        (NO, "kv_splits and pack_gqa and q_in_registers are not parameters here"),
    ],
    "tune-06": [
        (NO, "kv_splits is not a parameter here"),
        (NO, "kv_splits is not a parameter here"),
        (NO, "kv_splits is not a parameter here"),
        (NO, "kv_splits is not a parameter here"),
        (NO, "kv_splits and pack_gqa are not parameters here"),
        (NO, "kv_splits and cluster are not parameters here"),
        (NO, "kv_splits and epilogue are not parameters here"),
        (NO, "kv_splits is not a parameter here"),
        (NO, "kv_splits is not a parameter here"),
        (NO, "kv_splits is not a parameter here"),
    ],
}


@pytest.mark.parametrize("name", list(OUTCOMES))
def test_real_replies(name: str) -> None:
    found = on_hopper(real(name)).proposals
    assert [p.verdict for p in found] == [v for v, _ in OUTCOMES[name]]
    for proposal, (_, reason) in zip(found, OUTCOMES[name], strict=True):
        assert reason in proposal.reason
        assert proposal.why
        if proposal.point is not None:
            assert violated(MLA, proposal.point, GPUS["h200"]) is None


def test_what_is_kept_of_a_real_reply() -> None:
    first, second, *_ = on_hopper(real("tune-04")).proposals
    assert first.point == HOPPER_BASE.replace(pingpong=1, overlap=1)
    assert first.why == "Softmax hidden both within and between warpgroups"
    assert second.point == HOPPER_BASE.replace(BN=128, stages=2, out_buffer=0)
    assert second.reason.startswith("245880 bytes of shared memory wanted, 232448 there; moved")


# ---- wrappings -----------------------------------------------------------------------------------

TWO = '{"BN": 32, "why": "small"}, {"stages": 2, "why": "deep"}'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"proposals": [{TWO}]}}',
        f"[{TWO}]",
        f"Here they are [see 1]:\n\n```json\n[{TWO},]\n```\nGood luck {{really}}!",
        f'{{"analysis": "BN {{is}} [key]", "seeds": [{TWO}]}}',
        f"<think>maybe {{'BN': 128}}?</think>[{TWO}]",
        TWO.replace("}, {", "}\n{"),
        "[" + TWO.replace('"', "'") + "]",
        f"[{TWO}, // the rest is worse\n]",
        f'[{TWO}, {{"BN": 128, "why": "cut o',
        '{"proposals": [{"params": {"BN": 32}, "why": "small"}, '
        '{"changes": {"stages": 2}, "why": "deep"}]}',
        json.dumps(
            {
                "proposals": [
                    {**dict.fromkeys(SYNC_SPACE.names), "BN": 32, "why": "small"},
                    {**dict.fromkeys(SYNC_SPACE.names), "stages": 2, "why": "deep"},
                ]
            }
        ),
    ],
)
def test_two_seeds_are_found_in_every_wrapping(text: str) -> None:
    found = on_ada(text)
    assert [p.point for p in found.usable] == [BASE.replace(BN=32), BASE.replace(stages=2)]
    assert [p.why for p in found.usable] == ["small", "deep"]


@pytest.mark.parametrize("text", ["", "I would try BN=32.", "{}", "[]", "[1, 2]", "{not json}"])
def test_a_reply_without_proposals_says_so(text: str) -> None:
    found = on_ada(text)
    assert found.usable == ()
    if not found.proposals:
        assert "no JSON object with proposals" in found.fault


# ---- values and names ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ('{"BN": "32"}', {"BN": 32}),
        ('{"BN": 32.0}', {"BN": 32}),
        ('{"peel": true, "why": "w"}', {"peel": 1}),
        ('{"peel": "on"}', {"peel": 1}),
        ('{"bn": 32}', {"BN": 32}),
        ("{'BN': 32, 'peel': True, 'stages': None}", {"BN": 32, "peel": 1}),
        ('{"BLOCK_N": 32, "num_stages": 2}', {"BN": 32, "stages": 2}),
        ('{"epilogue": "direct"}', {"epilogue_smem": 0}),
        ('{"BN": 32, "cluster": 1, "kv_splits": 1, "pack_gqa": false}', {"BN": 32}),
        ('{"BN": 32, "stages": null}', {"BN": 32}),
    ],
)
def test_what_is_meant_is_taken(text: str, changes: dict[str, int]) -> None:
    found = one(text)
    assert (found.verdict, found.point) == (OK, BASE.replace(**changes))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"BN": [32, 64]}', "BN=[32, 64] is no whole number"),
        ('{"BN": "large"}', 'BN="large" is no whole number'),
        ('{"BN": 32.5}', "BN=32.5 is no whole number"),
        ('{"BN": 1e400}', "BN=Infinity is no whole number"),
        ('{"turbo": 1}', "turbo is not a parameter here"),
        ('{"persistent": true, "BN": 32}', "persistent is not a parameter here"),
        ('{"cluster": 2, "BN": 32}', "cluster is not a parameter here"),
        ('{"BN": 64}', "it changes nothing of the base"),
        ('{"why": "all is well"}', "it changes nothing of the base"),
    ],
)
def test_what_cannot_be_is_rejected_with_its_reason(text: str, reason: str) -> None:
    found = one(text)
    assert (found.verdict, found.point) == (NO, None)
    assert found.reason == reason
    assert reason in found.remark and found.given in found.remark


def test_a_value_that_is_not_offered_becomes_the_nearest() -> None:
    found = one('{"BN": 48, "stages": 9}')
    assert found.verdict is MENDED
    assert "BN=48 is not offered, 32 is nearest" in found.reason
    assert "stages=9 is not offered, 3 is nearest" in found.reason
    assert found.point == BASE.replace(BN=32, stages=3)


def test_a_point_that_does_not_fit_keeps_what_was_proposed() -> None:
    found = one('{"stages": 3, "BN": 64}')
    assert found.verdict is MENDED and found.point is not None
    assert (found.point["stages"], found.point["BN"]) == (3, 64)
    assert violated(GQA, found.point, GPUS["l40s"]) is None
    assert "131072 bytes of shared memory wanted, 101376 there; moved to " in found.reason


def test_a_contradiction_is_moved_to_what_is_legal() -> None:
    (found,) = on_hopper('{"BM": 192, "consumer_warpgroups": 2, "BN": 64}').proposals
    assert found.verdict is MENDED and found.point is not None
    assert found.point["BM"] == 64 * found.point["consumer_warpgroups"]
    assert "BM=192 is not 64 rows for each of 2 warpgroups" in found.reason


def test_what_was_tried_or_said_before_is_not_taken_again() -> None:
    known = dict(known_points(SUBJECT.trials(HISTORY)))
    found = on_ada('[{"BN": 32}, {"peel": 1}, {"peel": true}, {"stages": 2}]', known).proposals
    assert [p.verdict for p in found] == [NO, OK, NO, NO]
    assert found[0].reason == "already tried: trial 2 (ok)"
    assert found[2].reason == "already tried: proposal 2 of this reply"
    assert found[3].reason == "already tried: trial 5 (wrong_output)"


def test_a_flood_is_cut() -> None:
    many = json.dumps([{"BN": 32, "n": n} for n in range(5000)])
    assert len(on_ada(many).proposals) == 50


@settings(max_examples=150, deadline=None)
@given(st.text() | st.text(alphabet="[]{}\",:\\ab1 \n'"))
def test_no_text_makes_it_fail(text: str) -> None:
    for proposal in on_ada(text).proposals:
        if proposal.point is not None:
            assert violated(GQA, proposal.point, GPUS["l40s"]) is None


def test_deep_nesting_is_no_crash() -> None:
    assert objects("[" * 100_000 + "]" * 100_000) == []
    assert objects('{"a":' * 50_000 + "1" + "}" * 50_000) == [{"a": 1}]
