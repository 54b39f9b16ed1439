"""Every spelling of an online softmax becomes `Softmax S`, and only where that is the same."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tl_reference import attention, hidden_by, random_inputs

from codegen.tl.ast import Custom, Gemm, Program, Sketch, walk
from codegen.tl.bind import bind
from codegen.tl.interpreter import run
from codegen.tl.parser import parse
from codegen.tl.printer import to_text
from llm_proposer.builtin import programs, sketches
from space.params import Point
from space.variant import DType, Problem

POINT = Point.of({"BM": 32, "BN": 16})

LISTED_IN_THE_LANGUAGE = """
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
{mask}
  Compute RowMax S and get m_new
  Compute Subtract m, m_new and get alpha
  Compute Exp alpha
  Compute Subtract S, m_new and get new S
  Compute Exp S
  Compute RowSum S and get l_cur
  Compute Multiply l, alpha and get new l
  Compute Add l, l_cur and get new l
  Compute Multiply O, alpha and get new O
  Copy V from global to shared
  Compute GEMM S, V and accumulate O
  Copy m_new to m
end
Compute Divide O, l and get new O
Copy O from register to global
"""

IN_BASE_TWO = """
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Copy V from global to shared
  Compute GEMM Q, K.T and get S
  Compute Multiply S, scale_log2 and get new S
{mask}
  Compute Copy_of_max S
  Compute Max m, m_tile and get m_new
  Compute Subtract m, m_new and get alpha
  Compute Exp2 alpha
  Compute Subtract S, m_new and get P
  Compute Exp2 P
  Compute RowSum P and get p_sum
  Compute Multiply l, alpha and get new l
  Compute Add l, p_sum and get new l
  Compute Rescale O, alpha
  Compute GEMM P, V and accumulate O
  Copy m_new to m
end
Compute Normalize O, l
Copy O from register to global
""".replace("Compute Copy_of_max S", "Compute RowMax S and get m_tile")

SCALE_INSIDE_THE_EXPONENT = """
Copy Q from global to shared
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
{mask}
  Compute RowMax S, m and get m_new
  Compute Subtract m, m_new and get alpha
  Compute Multiply alpha, scale and get new alpha
  Compute Exp alpha
  Compute Subtract S, m_new and get new S
  Compute Multiply S, scale and get new S
  Compute Exp S and get P
  Compute RowSum P and get l_cur
  Compute Multiply l, alpha and get new l
  Compute Add l_cur, l and get new l
  Compute Multiply alpha, O and get new O
  Copy V from global to shared
  Compute GEMM P, V and accumulate O
  Copy m_new to m
end
Compute Divide O, l and get O_final
Copy O_final from register to global
"""

MAXIMUM_IN_PLACE = """
Copy Q from global to shared
Compute Fill m, -inf
Compute Fill l, 0
Compute Fill O, 0
for i = 0:N
  Copy K from global to shared
  Compute GEMM Q, K.T and get S
  Compute Multiply S, softmax_scale and get new S
{mask}
  Copy m to m_old
  Compute RowMax S and get m_tile
  Compute Max m, m_tile and get new m
  Compute Subtract m_old, m and get alpha
  Compute Exp alpha
  Compute Subtract S, m and get P
  Compute Exp P
  Compute RowSum P and get l_cur
  Compute Multiply l, alpha and get new l
  Compute Add l, l_cur and get new l
  Compute Multiply O, alpha and get new O
  Copy V from global to shared
  Compute GEMM P, V and accumulate O
end
Compute Divide O, l and get new O
Copy O from register to global
"""

FLASH_ATTENTION_1 = """
for j = 0:Tc
  Copy K from global to shared
  Copy V from global to shared
  for i = 0:Tr
    Copy Q from global to shared
    Copy O from global to register
    Copy l from global to register
    Copy m from global to register
    Compute GEMM Q, K.T and get S
    Compute Multiply S, scale and get new S
{mask}
    Compute RowMax S and get m_cur
    Compute Subtract S, m_cur and get P
    Compute Exp P
    Compute RowSum P and get l_cur
    Compute Max m, m_cur and get m_new
    Compute Subtract m, m_new and get alpha
    Compute Exp alpha
    Compute Subtract m_cur, m_new and get beta
    Compute Exp beta
    Compute Multiply O, l and get new O
    Compute Multiply O, alpha and get new O
    Compute Multiply l, alpha and get new l
    Compute Multiply l_cur, beta and get new l_cur
    Compute Add l, l_cur and get new l
    Compute Multiply P, beta and get new P
    Compute GEMM P, V and accumulate O
    Compute Divide O, l and get new O
    Copy O from register to global
    Copy l from register to global
    Copy m_new from register to global
  end
end
"""

SPELLINGS = {
    "the language's list": LISTED_IN_THE_LANGUAGE,
    "no update of m": LISTED_IN_THE_LANGUAGE.replace("  Copy m_new to m\n", ""),
    "no division": LISTED_IN_THE_LANGUAGE.replace("Compute Divide O, l and get new O\n", ""),
    "two divisions": LISTED_IN_THE_LANGUAGE.replace(
        "Compute Divide O, l and get new O\n", "Compute Divide O, l and get new O\n" * 2
    ),
    "base two": IN_BASE_TWO,
    "scale in the exponent": SCALE_INSIDE_THE_EXPONENT,
    "maximum in place": MAXIMUM_IN_PLACE,
    "flash attention 1": FLASH_ATTENTION_1,
    "built in": programs()["explicit_softmax"].replace("new S\n", "new S\n{mask}\n", 1),
}


def kernel_text(program: Program) -> str:
    """The program's statements with loop variables named alike."""
    (kernel,) = program.kernels
    return re.sub(r"\bj\b", "i", to_text(Sketch(kernel.body)))


def problem(causal: bool) -> Problem:
    return Problem("gqa", DType.FP16, 24, 16, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", list(SPELLINGS))
def test_it_becomes_the_canonical_program(name: str, causal: bool) -> None:
    mask = "  Compute Mask S, causal" if causal else ""
    program = bind(parse(SPELLINGS[name].replace("{mask}", mask)), problem(causal), POINT)
    order = "v_early" if name in ("base two", "flash attention 1") else "forward"
    canonical = bind(parse(sketches("gqa", causal)[order]), problem(causal), POINT)
    assert kernel_text(program) == kernel_text(canonical)
    assert program.scalars == ("scale",)
    assert {t.name for t in program.kernels[0].tensors} == {"Q", "K", "V", "O"}
    assert {(t.name, t.memory) for t in program.kernels[0].tiles} == {
        (t.name, t.memory) for t in canonical.kernels[0].tiles
    }
    for m, n in ((70, 50), (33, 90), (90, 33)):
        tensors = random_inputs((1, 4, 2, m, n, 24, 16))
        found = run(program, tensors, {"scale": 0.2}, DType.FP16, exact=True)["O"]
        np.testing.assert_allclose(
            found, attention(tensors, 0.2, hidden_by(m, n, causal)), atol=1e-12
        )


def is_softmax(program: Program) -> bool:
    return any(
        isinstance(s, Custom) and s.op == "Softmax" for k in program.kernels for s in walk(k.body)
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Compute Multiply O, alpha and get new O\n", ""),  # the accumulator is not rescaled
        ("Compute Multiply l, alpha and get new l\n", ""),  # the sum is not rescaled
        ("Compute Exp S\n", "Compute Exp2 S\n"),  # another function than a softmax
        ("Compute RowSum S and get l_cur\n", "Compute RowMax S and get l_cur\n"),
    ],
)
def test_what_is_no_softmax_stays_as_it_is_spelt(before: str, after: str) -> None:
    text = LISTED_IN_THE_LANGUAGE.replace("{mask}\n", "")
    assert before in text
    program = bind(parse(text.replace(f"  {before}", f"  {after}" if after else "")),
                   problem(False), POINT)  # fmt: skip
    assert not is_softmax(program)
    assert any(isinstance(s, Custom) and s.op == "RowMax" for s in walk(program.kernels[0].body))


def test_a_log_sum_exp_that_goes_out_keeps_the_running_state() -> None:
    program = bind(parse(programs()["split_kv"]), problem(False), POINT)
    assert not is_softmax(program)


def test_two_softmaxes_said_with_their_state_are_normalised_each_once() -> None:
    text = (
        "Copy Q1, Q2 from global to shared\nfor i = 0:N\n  Copy K1, K2, V from global to shared\n"
        "  Compute GEMM Q1, K1.T and get S1\n  Compute OnlineSoftmax S1\n"
        "  Compute Multiply O1, alpha1 and get new O1\n  Compute GEMM S1, V and accumulate O1\n"
        "  Compute GEMM Q2, K2.T and get S2\n  Compute OnlineSoftmax S2\n"
        "  Compute GEMM S2, V and accumulate O2\nend\nCompute Divide O1, l1 and get new O1\n"
        "Compute Subtract O1, O2 and get O\nCopy O from register to global\n"
    )
    program = bind(parse(text), Problem("mha", DType.FP16, 24, 24, False), POINT)
    divided = [
        (s.name, s.args) for s in walk(program.kernels[0].body)
        if isinstance(s, Custom) and s.op == "Normalize"
    ]  # fmt: skip
    assert sorted(name for name, _ in divided) == ["O1", "O2"]
    one, two = (random_inputs((1, 2, 2, 40, 40, 24, 24), seed) for seed in (1, 2))
    tensors = {"Q1": one["Q"], "K1": one["K"], "Q2": two["Q"], "K2": two["K"], "V": one["V"]}
    found = run(program, tensors, {"scale": 0.2}, DType.FP16, exact=True)["O"]
    hidden = hidden_by(40, 40)
    expected = attention(one, 0.2, hidden) - attention(two | {"V": one["V"]}, 0.2, hidden)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_scores_of_two_products_are_scaled_after_the_second() -> None:
    text = programs()["forward"].replace("Copy Q from", "Copy Q_nope, Q_rope from")
    text = text.replace("Copy K from", "Copy K_nope, K_rope from").replace(
        "  Compute GEMM Q, K.T and get S\n",
        "  Compute GEMM Q_nope, K_nope.T and get S\n"
        "  Compute GEMM Q_rope, K_rope.T and accumulate S\n",
    )
    text = text.replace("  Compute Scale S, scale\n", "")
    program = bind(parse(text), Problem("mla", DType.FP16, 48, 32, False), POINT)
    body = list(walk(program.kernels[0].body))
    last = max(n for n, s in enumerate(body) if isinstance(s, Gemm) and s.out == "S")
    assert isinstance(body[last + 1], Custom) and body[last + 1].op == "Scale"
    columns = {t.name: t.columns for t in program.kernels[0].tensors}
    assert columns == {"Q_nope": 32, "Q_rope": 16, "K_nope": 32, "K_rope": 16, "V": 32, "O": 32}
