"""Which TL sketches a run searches, for which problems, in which space."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from codegen.errors import TLError
from codegen.tl.ast import Custom, For, Name, Sketch, walk
from codegen.tl.ast import Param as Declared
from runs.record import RunSpec
from runs.safe import MAX_NAME, is_safe_name
from space.constraints import Backend, space_for
from space.gpu import GpuSpec
from space.params import Param, Point, Space
from space.variant import Phase, Problem
from tuner.errors import UsageError

TILES = Point((("BM", 64), ("BN", 64)))  #: sizes at which a program is only looked at


def read_sketch(path: Path) -> tuple[str, Sketch]:
    """Read and parse a sketch file. Raises UsageError, and TLError with every fault."""
    from codegen.tl.parser import parse

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"no sketch file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"cannot read {path}: {why}") from None
    return text, parse(text)


def is_causal(sketch: Sketch) -> bool:
    """Return whether the sketch masks causally."""
    return any(
        isinstance(s, Custom) and s.op == "Mask" and Name("causal") in s.args
        for s in walk(sketch.statements)
    )


def check_splits(path: Path, sketch: Sketch, phase: Phase) -> None:
    """Raise UsageError unless the sketch splits its keys as kernels of `phase` do.

    A decode kernel takes the number of splits from its launch; in prefill a Param fixes it.
    """
    from codegen.tl.flow import names_in
    from codegen.tl.vocabulary import SPLIT_BOUNDS, SPLIT_COUNT

    statements = list(walk(sketch.statements))
    split = any(
        {*names_in(s.lo), *names_in(s.hi)} & set(SPLIT_BOUNDS)
        for s in statements
        if isinstance(s, For)
    )
    fixed = any(isinstance(s, Declared) and s.name == SPLIT_COUNT for s in statements)
    if phase is Phase.PREFILL and split and not fixed:
        raise UsageError(
            f"{path} leaves {SPLIT_COUNT} to the launch, as decode does; use --phase decode or "
            f"give it a Param {SPLIT_COUNT}"
        )
    if phase is Phase.DECODE and not split:
        raise UsageError(
            f"{path} does not split its keys, as decode does: loop over {'..'.join(SPLIT_BOUNDS)} "
            f"and combine, like `tune sketch --phase decode`; or use --phase prefill"
        )
    if phase is Phase.DECODE and fixed:
        raise UsageError(
            f"{path} has a Param {SPLIT_COUNT}, which the launch chooses in decode; leave it out"
        )


def with_user_sketch(spec: RunSpec, path: Path, causal: bool | None) -> RunSpec:
    """Return `spec` with the user's sketch and only the shapes under the sketch's own mask.

    Raises UsageError when the mask asked for is not the sketch's, TLError when it has faults.
    """
    from codegen.tl.checker import check

    text, sketch = read_sketch(path)
    masked = is_causal(sketch)
    if causal is not None and causal != masked:
        has = "masks causally; use --causal" if masked else "has no causal mask; use --no-causal"
        raise UsageError(f"{path} {has}")
    shapes = tuple(s for s in spec.shapes if s.causal == masked)
    if not shapes:
        raise UsageError(
            f"{path} masks causally, which one query does not need; use a sketch without the mask"
        )
    name = re.sub(r"[^A-Za-z0-9._-]", "_", path.stem)
    if not is_safe_name(name):
        raise UsageError(
            f"{path}: a run keeps its sketch by the file's name, which must begin with a letter, "
            f"a digit or _ and have at most {MAX_NAME} characters before .tl; rename the file"
        )
    spec = replace(spec, shapes=shapes, sketches=((name, text),))
    if found := {d: None for p in spec.problems for d in check(sketch, p)}:
        raise TLError(tuple(found))
    check_splits(path, sketch, spec.phase)
    return spec


def check_numbers(spec: RunSpec) -> None:
    """Raise UsageError when the user's sketch reads a number that nobody gives it."""
    from codegen.tl.bind import bind
    from codegen.tl.parser import parse

    ((name, text),) = spec.sketches
    try:
        wanted = bind(parse(text), spec.problems[0], TILES).scalars
    except TLError:
        return  # each of its points says why
    if missing := [s for s in wanted if s != "scale"]:
        raise UsageError(
            f"{name} reads {missing[0]}, which plain attention does not give: write `Param "
            f"{missing[0]} = NUMBER` in it, or say --reference FILE.py:function with that keyword"
        )


def with_builtin_sketches(spec: RunSpec) -> RunSpec:
    """Return `spec` with the default hand-written sketch of each mask it has."""
    from llm_proposer.builtin import sketches

    chosen = []
    for causal in dict.fromkeys(s.causal for s in spec.shapes):
        name, text = next(iter(sketches(spec.variant, causal, spec.phase).items()))
        chosen.append((f"{name}-causal" if causal else name, text))
    return replace(spec, sketches=tuple(chosen))


def sketched_spaces(spec: RunSpec, gpu: GpuSpec) -> Sequence[tuple[str, str, Problem, Space]]:
    """Pair every sketch with the problems under its mask, and the space its Params leave."""
    from codegen.tl.bind import sketch_choices
    from codegen.tl.parser import parse

    pairs = []
    for name, text in spec.sketches:
        sketch = parse(text)
        choices = sketch_choices(sketch)
        for problem in spec.problems:
            if problem.causal == is_causal(sketch):
                space = restricted(name, space_for(problem, gpu, Backend(spec.backend)), choices)
                pairs.append((name, text, problem, space))
    return pairs


def restricted(name: str, space: Space, choices: Mapping[str, tuple[int, ...]]) -> Space:
    """Limit a space to what a sketch's Params say. Raises UsageError on a value it has not."""
    params = []
    for p in space.params:
        wanted = choices.get(p.name)
        kept = p.choices if wanted is None else tuple(c for c in p.choices if c in wanted)
        if not kept:
            said = ", ".join(str(c) for c in wanted or ())
            offered = ", ".join(str(c) for c in p.choices)
            raise UsageError(
                f"sketch {name}: Param {p.name} in {{{said}}} has no value that the space "
                f"offers; use some of {offered}"
            )
        params.append(Param(p.name, kept, p.meaning))
    return Space(tuple(params))
