"""Records survive JSON, and JSON that no record could have written is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import EVENTS, SHAPE, SPEC, timing, trial

from codegen.kernel import Resources, SplitRule
from runs import codec
from runs.errors import CodecError
from runs.record import Basis, Broken, Measured, Rejected, RunSpec, Stage, TrialClass, TrialRecord
from space.params import Point
from space.variant import DType, Phase, Problem, Shape

AT = "2026-11-30T12:00:00.000+00:00"
positive = st.floats(min_value=1e-3, max_value=1e9, allow_nan=False)
rejections = st.sampled_from([c for c in TrialClass if c not in (TrialClass.OK, TrialClass.BROKEN)])
outcomes = st.one_of(
    st.builds(
        lambda us, ratio: Measured(
            (dataclasses.replace(timing(), median_us=us, low_us=us, high_us=us),), ratio
        ),
        positive, positive,
    ),
    st.builds(Rejected, rejections, st.sampled_from(Stage), st.text()),
    st.builds(Broken, st.sampled_from(Stage), st.text()),
)  # fmt: skip
points = st.dictionaries(st.text(), st.integers(-(2**63), 2**63), max_size=4).map(Point.of)
counts = st.integers(0, 2**40)
resources = st.tuples(st.builds(Resources, st.text(), counts, counts, counts, counts, counts))
trials = st.builds(
    lambda outcome, point, **rest: dataclasses.replace(
        trial(), outcome=outcome, point=point, **rest
    ),
    outcomes, points, index=counts, origin=st.text(), compile_s=positive, resources=resources,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(trials)
def test_any_trial_survives(record: TrialRecord) -> None:
    line = codec.encode_event(record, AT)
    assert "\n" not in line and "\r" not in line
    assert codec.decode_event(line) == record


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_every_event_survives(event: Any) -> None:
    assert codec.decode_event(codec.encode_event(event, AT)) == event


def test_specification_survives() -> None:
    assert codec.from_text(RunSpec, codec.to_text(SPEC)) == SPEC


DECODED = Shape(4, 32, 8, 1, 4096, 128, 128)
DECODE = dataclasses.replace(SPEC, shapes=(DECODED,), phase=Phase.DECODE, page=64)


def test_decode_records_survive_and_others_are_written_as_before() -> None:
    assert codec.from_text(RunSpec, codec.to_text(DECODE)) == DECODE
    problem = Problem("gqa", DType.BF16, 128, 128, False, Phase.DECODE, 64)
    outcome = Measured((dataclasses.replace(timing(DECODED), splits=7),), 0.9)
    record = dataclasses.replace(trial(0, outcome), problem=problem)
    assert codec.decode_event(codec.encode_event(record, AT)) == record
    for text in (codec.to_text(SPEC), codec.encode_event(trial(), AT)):
        assert not [f for f in codec.OF_DECODE if f'"{f}"' in text]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page": 32}, "page size 32 is not one of 16, 64, 128"),
        ({"page": -64}, "page size -64 is not one of"),
        ({"phase": Phase.PREFILL}, "a page size of 64; only a cache that is decoded from is paged"),
        ({"shapes": (dataclasses.replace(DECODED, seqlen_q=9),)}, "9 queries; .* at most 8"),
        ({"shapes": (Shape(1, 16, 1, 1, 64, 576, 512),), "phase": Phase.PREFILL, "page": 0},
         "head dims 576 and 512 are decoded with"),
    ],
)  # fmt: skip
def test_a_decode_run_that_cannot_be_is_refused(changes: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        codec.from_text(RunSpec, codec.to_text(dataclasses.replace(DECODE, **changes)))


@pytest.mark.parametrize("field", ["rows", "keys", "blocks_per_sm", "min_tiles"])
def test_a_split_rule_has_its_bounds(field: str) -> None:
    rule = SplitRule(128, 64, 4, 2)
    assert codec.from_text(SplitRule, codec.to_text(rule)) == rule
    for value in (0, -1, 1025):
        wrong = dataclasses.replace(rule, **{field: value})
        with pytest.raises(CodecError, match=f"{field} is {value}; 1 to "):
            codec.from_text(SplitRule, codec.to_text(wrong))


def damaged(path: str, value: Any) -> str:
    """The journal line of a good trial with one field changed (`...` removes it)."""
    line = json.loads(codec.encode_event(trial(), AT))
    *steps, last = path.split(".")
    place = line["data"]
    for step in steps:
        place = place[int(step)] if step.isdecimal() else place[step]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(line)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("index", True, "trial.index: True is not of type int"),
        ("index", -1, "trial: index -1 is negative"),
        ("index", 1.5, "trial.index: 1.5 is not of type int"),
        ("index", ..., "trial: no field 'index'"),
        ("colour", 1, "trial: unknown field 'colour'"),
        ("compile_s", "2", "trial.compile_s: '2' is not of type float"),
        ("problem.dtype", "fp4", "trial.problem.dtype: 'fp4' is not one of fp16, bf16"),
        ("point.items", [["BM"]], r"trial.point.items\[0\]: 1 entries, 2 wanted"),
        ("outcome.outcome", "won", "the tag 'outcome' is not one of measured, rejected, broken"),
        ("outcome.error_ratio", -1.0, "error ratio -1.0 is negative"),
        ("outcome.timings.0.low_us", 200.0, "is not inside its interval"),
        ("outcome.timings.0.median_us", 0.0, "is not inside its interval"),
        ("outcome.timings.0.splits", 0, "0 splits; 1 to 256 are possible"),
        ("outcome.timings.0.splits", 257, "257 splits"),
        ("problem.phase", "encode", "'encode' is not one of prefill, decode"),
        ("problem.page", 64, "a page size of 64; only a cache"),
        ("problem.phase", "decode", "which gqa-bf16-d128-causal-decode does not serve"),
        ("outcome.timings.0.shape.kv_heads", 3, "Hq=8 is not a multiple of Hkv=3"),
        ("outcome.timings.0.shape.causal", False, "which gqa-bf16-d128-causal does not serve"),
        ("outcome", {"outcome": "rejected", "trial_class": "ok", "stage": "time", "reason": ""},
         "a rejected trial cannot be ok"),
        ("outcome", {"outcome": "broken", "stage": "time", "reason": "", "latency_us": 1.0},
         "unknown field 'latency_us'"),
    ],
)  # fmt: skip
def test_names_the_field_at_fault(path: str, value: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        codec.decode_event(damaged(path, value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": 1, "a": 2}', "a key is given twice"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a journal line"),
        ('{"v":2,"kind":"trial","at":"","data":{}}', "schema 2; this version reads schema 1"),
        ('{"v":1,"kind":"eval","at":"","data":{}}', "unknown event 'eval'"),
        ('{"v":1,"kind":[],"at":"","data":{}}', "unknown event"),
    ],
)
def test_refuses_lines_that_are_no_event(text: str, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        codec.decode_event(text)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_does_not_write_what_it_could_not_read(bad: float) -> None:
    record = dataclasses.replace(trial(), outcome=Measured((timing(),), bad))
    with pytest.raises(CodecError, match="not finite"):
        codec.encode_event(record, AT)
    mixed = dataclasses.replace(trial(), outcome=Measured((timing(), timing()), 1.0))
    with pytest.raises(CodecError, match="timed twice"):
        codec.encode_event(mixed, AT)


def test_a_field_with_a_default_may_be_absent() -> None:
    record = codec.decode_event(damaged("judge_s", ...))
    assert record.judge_s == 0.0


def test_a_predicted_time_stays_predicted() -> None:
    outcome = Measured((timing(SHAPE, basis=Basis.PREDICTED),), 0.0)
    line = codec.encode_event(trial(0, outcome), AT)
    assert codec.decode_event(line).outcome.timings[0].basis is Basis.PREDICTED
