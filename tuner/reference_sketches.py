"""Which sketches a run with a reference searches: the user's, or a built-in one that agrees."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from codegen.errors import TLError
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from runs.record import Reference, RunSpec
from space.variant import Phase
from tuner.errors import UsageError
from tuner.evaluate import gate
from tuner.options import Options
from tuner.reference import (
    Source,
    answers_of,
    examine,
    read_reference,
    with_mask,
    with_numbers,
)
from tuner.sketches import TILES, is_causal, with_user_sketch


def with_reference(spec: RunSpec, options: Options) -> RunSpec:
    """Return `spec` with the reference and the sketches to search for it.

    The function is run here for the first time, before anything is compiled. Raises UsageError,
    and TLError when a sketch has faults.
    """
    assert options.reference is not None
    source = read_reference(options.reference, options.scalars)
    spec = replace(spec, reference=source.reference)
    if options.sketch is not None:
        spec = _with_sketch(spec, options, source)
        examine(spec)
        return spec
    examine(spec)
    if not source.causal and options.causal is None:
        return _first_that_agrees(spec)
    return _agreeing(spec) or _none(spec)


def _with_sketch(spec: RunSpec, options: Options, source: Source) -> RunSpec:
    """The user's sketch with the function's numbers compiled in."""
    assert options.sketch is not None
    spec = with_user_sketch(spec, options.sketch, options.causal)
    ((name, text),) = spec.sketches
    return replace(spec, sketches=((name, completed(text, spec, source.reference)),))


def completed(text: str, spec: RunSpec, reference: Reference) -> str:
    """Return a sketch with the reference's scalars as Params where it reads them.

    Raises UsageError when it reads one that the reference does not give.
    """
    problem = spec.problems[0]
    wanted = bind(parse(text), problem, TILES).scalars
    given = dict(reference.scalars)
    if missing := [s for s in wanted if s != "scale" and s not in given]:
        known = ", ".join(given) or "none"
        raise UsageError(
            f"the sketch reads {missing[0]}, and {reference.name} gives no number of that name "
            f"(it gives: {known}); make it a keyword of the function with a default, say --scalar "
            f"{missing[0]}=NUMBER, or write `Param {missing[0]} = NUMBER` in the sketch"
        )
    return with_numbers(text, {s: given[s] for s in wanted if s != "scale"})


def agrees(text: str, spec: RunSpec) -> str | None:
    """Return what the interpreter finds wrong with a sketch on the spec's problems, or None."""
    masked = is_causal(parse(text))
    for problem in spec.problems:
        if problem.causal == masked:
            program = bind(parse(text), problem, TILES)
            wrong = gate.fault(program, problem, answers_of(spec, problem))
            if wrong is not None:
                return wrong
    return None


# ---- built-in programs ---------------------------------------------------------------------------


def _first_that_agrees(spec: RunSpec) -> RunSpec:
    """A function with a mask of its own: under which one a built-in program agrees with it."""
    for causal in (False, True):
        part = with_mask(spec, causal)  # one query of decode has no mask: nothing may be left
        if part.shapes and (found := _agreeing(part)) is not None:
            return found
    return _none(spec)


def _agreeing(spec: RunSpec) -> RunSpec | None:
    """The spec with a built-in program for each of its masks, or None where there is none."""
    assert spec.reference is not None
    chosen = []
    for causal in dict.fromkeys(s.causal for s in spec.shapes):
        part = with_mask(spec, causal)
        found = next(
            ((n, t) for n, t in _candidates(part, causal) if agrees(t, part) is None), None
        )
        if found is None:
            return None
        chosen.append((f"{found[0]}-causal" if causal else found[0], found[1]))
    return replace(spec, sketches=tuple(chosen))


def _candidates(spec: RunSpec, causal: bool) -> Iterator[tuple[str, str]]:
    """Built-in programs under a mask that read no number the reference does not give."""
    from llm_proposer.builtin import functions, sketches

    assert spec.reference is not None
    decodes = spec.phase is Phase.DECODE
    known = sketches(spec.variant, causal, spec.phase) if decodes else functions(causal)
    for name, text in known.items():
        try:
            yield name, completed(text, spec, spec.reference)
        except (UsageError, TLError):
            continue


def _none(spec: RunSpec) -> RunSpec:
    assert spec.reference is not None
    if spec.phase is Phase.DECODE:
        raise UsageError(
            f"no built-in decode program computes {spec.reference.name}; say --sketch FILE.tl, one "
            f"that splits its keys like `tune sketch --phase decode`; a causal function has to "
            f"take `causal`, since kernels for one query have no mask and serve several too"
        )
    raise UsageError(
        f"no built-in program computes {spec.reference.name}; say --sketch FILE.tl, or have a "
        f"model write one: tune sketch --reference {spec.reference.path}:"
        f"{spec.reference.function} --proposer openai --model NAME --out FILE.tl"
    )
