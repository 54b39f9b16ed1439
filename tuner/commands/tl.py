"""`tune sketch`, `tune check` and `tune emit`: TL text, its faults, and the CuTe it becomes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from codegen.errors import PlanError, TLError
from codegen.tl.ast import Sketch
from space.constraints import Backend, space_for, violated
from space.gpu import check_dtype, gpu_named
from space.params import Point
from space.variant import Problem, Shape, check_shape, dtype_named, variant_named
from tuner.errors import UsageError
from tuner.phases import check_phase, page_size, phase_named, usual_head_dims


def sketch_text(variant: str, causal: bool, name: str | None, phase: str | None = None) -> str:
    """Return a built-in sketch as TL text. Raises SpaceError and UsageError."""
    from llm_proposer.builtin import sketches

    known = sketches(variant_named(variant).name, causal, phase_named(phase))
    if name is None:
        return next(iter(known.values()))
    if name not in known:
        raise UsageError(f"unknown sketch {name!r}; known sketches: {', '.join(known)}")
    return known[name]


@dataclass(frozen=True, slots=True)
class Checked:
    """What is wrong with a TL file, a line each, and a program that could stand in its place."""

    faults: tuple[str, ...]
    #: where a schedule was refused: the dataflow that remains, free of faults
    instead: str | None = None


def checked(path: Path) -> Checked:
    """Check a TL file. Raises UsageError when it cannot be read."""
    from codegen.tl.checker import check, repaired
    from codegen.tl.parser import read
    from tuner.sketches import read_sketch

    try:
        text, sketch = read_sketch(path)
        found = check(sketch)
    except TLError as error:
        text, found = path.read_text(encoding="utf-8"), error.diagnostics
        sketch = read(text).sketch
    return Checked(tuple(str(d) for d in found), repaired(sketch) if found else None)


@dataclass(frozen=True, slots=True)
class EmitRequest:
    """What `tune emit` was asked for; None where the default is wanted."""

    path: Path
    gpu: str
    variant: str | None
    dtype: str | None
    head_dim: str | None
    causal: bool | None
    params: tuple[str, ...]
    phase: str | None = None
    page_size: int | None = None


def emitted(request: EmitRequest) -> str:
    """Return the CuTe source of a TL file at a point. Raises TLError, SpaceError, UsageError."""
    from codegen.cute import translate
    from codegen.tl.bind import bind
    from tuner.sketches import check_splits, is_causal, read_sketch

    gpu = gpu_named(request.gpu)
    _, sketch = read_sketch(request.path)
    causal = is_causal(sketch) if request.causal is None else request.causal
    variant = variant_named(request.variant or "mha")
    dtype = gpu.dtypes[-1] if request.dtype is None else dtype_named(request.dtype)
    check_dtype(gpu, dtype)
    phase = phase_named(request.phase)
    page = page_size(phase, request.page_size)
    head_dim, head_dim_v = _head_dims(request.head_dim, usual_head_dims(variant, phase)[0])
    check_phase(variant, Shape(1, 1, 1, 1, 1, head_dim, head_dim_v), phase)
    check_splits(request.path, sketch, phase)
    problem = Problem(variant.name, dtype, head_dim, head_dim_v, causal, phase, page)
    point = _point(problem, request, sketch)
    if (broken := violated(problem, point, gpu)) is not None:
        raise UsageError(f"this point is not legal on {gpu.name}: {broken[0]}: {broken[1]}")
    try:
        return translate(bind(sketch, problem, point), problem, gpu).text
    except PlanError as error:
        raise UsageError(f"cannot lower {request.path} at this point: {error}") from None


def _head_dims(text: str | None, default: tuple[int, int]) -> tuple[int, int]:
    """Read `D` or `D,Dv`."""
    if text is None:
        return default
    parts = text.split(",")
    if len(parts) not in (1, 2) or not all(re.fullmatch(r"[0-9]{1,9}", p.strip()) for p in parts):
        raise UsageError(f"--head-dim {text!r} is not D or D,Dv with whole numbers")
    head_dim, head_dim_v = int(parts[0]), int(parts[-1])
    check_shape(Shape(1, 1, 1, 1, 1, head_dim, head_dim_v))
    return head_dim, head_dim_v


def _point(problem: Problem, request: EmitRequest, sketch: Sketch) -> Point:
    """The point asked for: what is not given comes from the sketch, then from the first seed."""
    from codegen.tl.bind import sketch_choices
    from llm_proposer.seeds import nearest_legal, seeds
    from tuner.sketches import restricted

    gpu = gpu_named(request.gpu)
    given = _given(request.params)
    # a parameter of the warp-level back end asks for that back end
    backend = Backend.MMA_SYNC if "warps" in given else Backend.AUTO
    whole = space_for(problem, gpu, backend)
    space = restricted(request.path.stem, whole, sketch_choices(sketch))
    start = whole.point(seeds(problem, gpu, whole)[0].as_dict() | given)  # refuses unknown names
    fixed = {name: (value,) for name, value in given.items()}
    return nearest_legal(problem, gpu, space.restrict(fixed), start.as_dict()) or start


def _given(words: tuple[str, ...]) -> dict[str, int]:
    given: dict[str, int] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not re.fullmatch(r"-?[0-9]{1,9}", value.strip()):
            raise UsageError(f"-p {word!r} is not NAME=NUMBER")
        if name.strip() in given:
            raise UsageError(f"-p {name.strip()} is given twice")
        given[name.strip()] = int(value)
    return given
