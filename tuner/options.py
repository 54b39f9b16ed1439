"""What the user typed, checked, as a RunSpec. Every fault is one UsageError line."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runs.record import Basis, RunSpec
from space.constraints import Backend
from space.gpu import GPUS, GpuSpec, check_dtype, gpu_named, gpu_of_device_name
from space.variant import (
    DType,
    Phase,
    Shape,
    SpaceError,
    Variant,
    dtype_named,
    parse_shape,
    variant_named,
)
from tuner.errors import MachineError, UsageError
from tuner.phases import check_phase, masked, page_size, phase_named, usual_shapes

if TYPE_CHECKING:
    from llm_proposer.session import ModelSettings

DEFAULT_BUDGET = 200
MOST = 10**18 - 1  #: a record keeps whole numbers of 63 bits


@dataclass(frozen=True, slots=True)
class Options:
    """The main command's options as typed; None where nothing was."""

    variant: str | None = None
    gpu: str | None = None
    budget: int | None = None
    phase: str | None = None
    dtype: str | None = None
    causal: bool | None = None
    shapes: tuple[str, ...] = ()
    backend: str | None = None
    proposer: str | None = None
    sketch: Path | None = None
    measure: str = "auto"
    minutes: float | None = None
    seed: int | None = None
    workers: str | None = None
    runs_dir: Path = Path("runs")
    resume: Path | None = None
    json: bool = False
    model: str | None = None
    base_url: str | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    prices: tuple[str, ...] = ()
    page_size: int | None = None
    reference: str | None = None
    scalars: tuple[str, ...] = ()


def gpu_of(options: Options, devices: tuple[str, ...]) -> GpuSpec:
    """Return the GPU that was named, or the one that is present. Raises UsageError."""
    if options.gpu is not None:
        return gpu_named(options.gpu)
    known = [spec for name in devices if (spec := gpu_of_device_name(name)) is not None]
    if not known:
        raise UsageError(f"no GPU named and none known here; say --gpu, one of {', '.join(GPUS)}")
    return known[0]


def device_index(gpu: GpuSpec, devices: tuple[str, ...]) -> int | None:
    """Return which of the `devices` present is a `gpu`, or None."""
    for index, name in enumerate(devices):
        if gpu_of_device_name(name) == gpu:
            return index
    return None


def basis_of(measure: str, gpu: GpuSpec, devices: tuple[str, ...]) -> Basis:
    """Decide between measuring and predicting. Raises UsageError and MachineError."""
    if measure not in ("auto", "device", "model"):
        raise UsageError(f"unknown --measure {measure!r}; known: auto, device, model")
    present = device_index(gpu, devices) is not None
    if measure == "device" and not present:
        here = ", ".join(devices) or "no GPU"
        raise MachineError(
            f"--measure device wants a {gpu.title} ({gpu.name}); here is {here}. "
            f"Use --measure model for predicted times"
        )
    return Basis.MEASURED if present and measure != "model" else Basis.PREDICTED


def check_common(options: Options) -> None:
    """Raise UsageError for what no run of this version does."""
    phase = phase_named(options.phase)
    if options.resume is None:  # a run that goes on has its own
        page_size(phase, options.page_size)
    _check_text("--model", options.model)
    _check_text("--proposer", options.proposer)
    _check_proposer(options)
    if options.scalars and options.reference is None and options.resume is None:
        raise UsageError(
            "--scalar goes with --reference: without one, kernels are checked against plain "
            "attention, which takes no number but its scale"
        )
    backend_named(options.backend)
    check_whole("--budget", options.budget, 1, "at least 1")
    if options.minutes is not None and not 0 < options.minutes < float("inf"):
        raise UsageError(f"--minutes {options.minutes:g} is not more than 0")
    check_whole("--seed", options.seed, 0, "0 or more")
    workers_of(options)


def check_whole(name: str, value: int | None, least: int, wanted: str) -> None:
    """Raise UsageError for a whole number below `least`, or more than a record keeps."""
    if value is not None and value < least:
        raise UsageError(f"{name} {value} is not {wanted}")
    if value is not None and value > MOST:
        raise UsageError(f"{name} is more than {MOST}, the most that a run records; use less")


def _check_text(name: str, value: str | None) -> None:
    """Refuse an argument whose bytes were no UTF-8: a record is text."""
    try:
        (value or "").encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} {value!a} is not UTF-8; type it again in UTF-8") from None


def _check_proposer(options: Options) -> None:
    """Refuse what can never work; a missing key or model only costs the run its model."""
    from llm_proposer.errors import NotConfigured
    from llm_proposer.session import check_settings

    settings = settings_of(options, options.proposer or "builtin", options.model)
    if settings.proposer == "openai":
        settings = replace(settings, proposer="batch:anywhere")
    try:
        check_settings(settings, {})
    except NotConfigured as error:
        raise UsageError(str(error)) from None


def settings_of(options: Options, proposer: str, model: str | None) -> ModelSettings:
    """Return what the proposer of a run needs to ask its model."""
    from llm_proposer.session import ModelSettings

    return ModelSettings(
        proposer, model or None, options.base_url, options.max_tokens, options.max_cost,
        options.prices,
    )  # fmt: skip


def backend_named(name: str | None) -> Backend:
    """Return the back end called `name`, the fastest of the GPU for None. Raises UsageError."""
    if name is None:
        return Backend.AUTO
    if name not in tuple(Backend):
        raise UsageError(f"unknown --backend {name!r}; known back ends: {', '.join(Backend)}")
    return Backend(name)


def workers_of(options: Options) -> int | None:
    """Return the number of compile workers asked for, None for the machine's default."""
    if options.workers is None:
        return None
    if options.workers == "ray":
        raise UsageError("--workers ray is not in this version; use a number of processes")
    if not re.fullmatch(r"0*[1-9][0-9]{0,3}", options.workers):
        given = options.workers[:80]
        raise UsageError(f"--workers {given!r} is not a number of at least 1, at most 9999")
    return int(options.workers)


def spec_of(options: Options, gpu: GpuSpec, basis: Basis, run_id: str) -> RunSpec:
    """Build the specification of a new run, sketches aside. Raises UsageError or SpaceError."""
    check_common(options)
    if options.variant is None:
        raise UsageError("no --variant; say --variant mha, gqa, mqa or mla")
    variant = variant_named(options.variant)
    dtype = gpu.dtypes[-1] if options.dtype is None else dtype_named(options.dtype)
    check_dtype(gpu, dtype)
    phase = phase_named(options.phase)
    words = options.shapes or ("paper",)
    return RunSpec(
        run_id=run_id,
        variant=variant.name,
        gpu=gpu.name,
        dtype=DType(dtype),
        shapes=read_shapes(words, variant, options.causal, phase),
        budget=DEFAULT_BUDGET if options.budget is None else options.budget,
        seed=options.seed or 0,
        measure=basis,
        proposer=options.proposer or "builtin",
        backend=backend_named(options.backend),
        minutes=options.minutes,
        model=options.model or "",
        phase=phase,
        page=page_size(phase, options.page_size),
    )


def read_shapes(
    words: tuple[str, ...], variant: Variant, causal: bool | None, phase: Phase = Phase.PREFILL
) -> tuple[Shape, ...]:
    """Return the shapes that `words` (paper, a file, or a shape each) stand for, in order.

    With `causal` None every shape is tuned under both masks, where they differ. Raises UsageError
    or SpaceError.
    """
    plain: list[Shape] = []
    for word in words:
        if word == "paper":
            plain.extend(usual_shapes(variant, phase))
        elif "," in word:
            plain.append(parse_shape(word))
        else:
            plain.extend(_shapes_in(Path(word)))
    for shape in plain:
        if (reason := variant.admits(shape)) is not None:
            raise UsageError(f"shape {shape.key} is not {variant.name}: {reason}")
        check_phase(variant, shape, phase)
    found = [s for shape in plain for s in masked(shape, phase, causal)]
    found.sort(key=lambda s: s.causal)
    return tuple(dict.fromkeys(found))


def _shapes_in(path: Path) -> list[Shape]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        raise UsageError(
            f"--shapes {str(path)!r} is neither 'paper', a shape B,Hq,Hkv,Sq,Sk,D[,Dv] "
            f"nor a file of shapes that can be read"
        ) from None
    shapes = []
    for number, line in enumerate(lines, start=1):
        if text := line.split("#")[0].strip():
            try:
                shapes.append(parse_shape(text))
            except SpaceError as error:
                raise UsageError(f"{path} line {number}: {error}") from None
    if not shapes:
        raise UsageError(f"{path} holds no shapes")
    return shapes
