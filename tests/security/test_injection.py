"""Nothing that a text says reaches C++ but names and numbers that were checked."""

from __future__ import annotations

import re

import pytest
from hostile import MARK, NAMES, NUMBERS, PLACES

from codegen.cute import translate
from codegen.cute.writer import Writer
from codegen.errors import PlanError, TLError
from codegen.tl.bind import bind
from codegen.tl.identifiers import MAX_INT, MAX_NAME, name_fault
from codegen.tl.parser import parse, read
from codegen.tl.printer import to_text
from space.gpu import gpu_named
from space.params import Point
from space.variant import DType, Problem

PROBLEM = Problem("mha", DType.FP16, 64, 64, False)
POINT = Point.of({"BM": 64, "BN": 32, "warps": 4, "stages": 2, "swizzle": 128})
WORDS = [n for n in NAMES if re.fullmatch(r"[A-Za-z_]\w*", n) and len(n) < 99]
#: an emitted line is printable ASCII and is one line to a compiler
LINE = re.compile(r"[ -~]*[^\\]|")


def emitted(text: str) -> str | None:
    """The source a text becomes, or None when it is refused by diagnostics."""
    try:
        program = bind(parse(text), PROBLEM, POINT)
        source = translate(program, PROBLEM, gpu_named("a100"))
    except (TLError, PlanError):
        return None
    return source.text


def code_of(source: str) -> str:
    """The source without its comments."""
    return "\n".join(line.split("//")[0] for line in source.splitlines())


def assert_harmless(source: str | None) -> None:
    if source is None:
        return
    assert all(LINE.fullmatch(line) for line in source.split("\n"))
    assert "??/" not in source
    code = code_of(source)
    assert 'include "/' not in code and "#define " + MARK not in code
    for word in re.findall(rf"\w*{MARK}\w*", code):
        assert name_fault(word) is None  # a name like any other


@pytest.mark.parametrize("place", PLACES)
def test_the_place_takes_a_harmless_name(place: str) -> None:
    name = {"mask": "padding", "dtype": "f16", "scalar": "30"}.get(place, "T1")
    assert emitted(PLACES[place].replace("{}", name)) is not None


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES, ids=lambda n: ascii(n[:24]))
def test_a_hostile_name_is_refused_or_harmless(place: str, name: str) -> None:
    assert_harmless(emitted(PLACES[place].replace("{}", name)))


@pytest.mark.parametrize("place", ["tile", "loop variable", "parameter"])
@pytest.mark.parametrize(
    "name",
    [n for n in NAMES if re.fullmatch(r"[A-Za-z_]\w*", n) and len(n) < 99],
    ids=lambda n: ascii(n[:24]),
)
def test_a_name_that_is_none_has_one_diagnostic_that_says_so(place: str, name: str) -> None:
    line = {
        "tile": f"Compute GEMM Q, K.T and get {name}", "loop variable": f"for {name} = 0:N",
        "parameter": f"Param {name} in {{1, 2}}",
    }[place]  # fmt: skip
    found = [d for d in read(f"Copy Q from global to shared\n{line}\nend\n").diagnostics]
    named = [d for d in found if d.code in ("bad-name", "too-long")]
    assert len(named) == 1 and named[0].span.line == 2
    assert named[0].message.isascii() and named[0].message.isprintable() and named[0].hint


@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: ascii(n[:24]))
@pytest.mark.parametrize("place", ["scalar", "factor", "mask", "parameter", "choices", "shape"])
def test_a_hostile_number_is_refused_or_harmless(place: str, number: str) -> None:
    text = {
        "choices": PLACES["parameter"].replace("{} = 1", f"stages in {{{number}}}"),
        "parameter": PLACES["parameter"].replace("{} = 1", f"c = {number}"),
        "mask": PLACES["mask"].replace("{}", f"window({number}, {number})"),
        "shape": PLACES["dtype"].replace("(BM, D)", f"({number}, D)").replace("{}", "f16"),
    }.get(place) or PLACES[place].replace("{}", number)
    assert_harmless(emitted(text))


def test_limits_of_names_and_numbers_are_exact() -> None:
    assert name_fault("S" * MAX_NAME) is None
    assert name_fault("S" * (MAX_NAME + 1)) is not None
    assert not read(f"Param c = {MAX_INT}\n").diagnostics
    (found,) = read(f"Param c = {MAX_INT + 1}\n").diagnostics
    assert found.code == "bad-number"


@pytest.mark.parametrize("text", ["a\nb", "a\rb", "a\\", "a??/", "a\x00", "a\u2028b", "a\x1b[2J"])
def test_the_emitter_writes_no_second_line(text: str) -> None:
    out = Writer()
    with pytest.raises(PlanError, match="not one line of C"):
        out.line(f"// {text}")


@pytest.mark.parametrize("name", NAMES, ids=lambda n: ascii(n[:24]))
def test_diagnostics_show_no_control_characters(name: str) -> None:
    """They are printed on terminals and sent back to models."""
    for text in (f"Copy {name}", f"{name} {name}", f"Compute {name} S", f"for {name} = 0:{name}"):
        for diagnostic in read(f"Copy Q from global to shared\n{text}\n").diagnostics:
            shown = str(diagnostic)
            assert shown.isprintable() and len(shown) < 2500


def test_a_variant_or_parameter_name_cannot_break_out_of_the_first_comment() -> None:
    text = PLACES["tile"].replace("{}", "S")
    hostile = Problem(f'mha\n#include "{MARK}"\n//', DType.FP16, 64, 64, False)
    point = Point((*POINT.items, (f"x\n#error {MARK}", 1)))
    gpu = gpu_named("a100")
    with pytest.raises(PlanError):
        translate(bind(parse(text), PROBLEM, POINT), hostile, gpu)
    with pytest.raises(PlanError):
        translate(bind(parse(text), PROBLEM, point), PROBLEM, gpu)


def test_what_is_printed_back_is_one_line_each_and_read_the_same() -> None:
    """The comments above emitted code are this text."""
    for place in PLACES.values():
        sketch = read(place.replace("{}", "T1")).sketch
        printed = to_text(sketch)
        assert printed.isascii() and all(LINE.fullmatch(x) for x in printed.split("\n"))
        assert parse(printed).statements == sketch.statements
