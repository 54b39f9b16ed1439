"""Without a GPU: every attested program is translated again and is still the text that ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.cute import translate
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from runs.attest import Attestation, changes, load
from space.gpu import gpu_named

ATTESTED = Path(__file__).parent / "attested.json"


def digest_of(a: Attestation) -> str:
    """The digest of the program that the attestation names, as the translator emits it now."""
    text = sketches(a.problem.variant, a.problem.causal, a.problem.phase)[a.sketch]
    program = bind(parse(text), a.problem, a.point)
    return translate(program, a.problem, gpu_named(a.gpu)).digest


def test_attested_programs_are_still_what_ran() -> None:
    attested = load(ATTESTED)
    if not attested:
        pytest.skip("nothing was attested yet")
    today = {a.name: digest_of(a) for a in attested}
    assert not changes(attested, today), "\n".join(changes(attested, today))
