"""`tune sketch`: a built-in sketch, one that agrees with a reference, or a model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tuner.commands.tl import sketch_text
from tuner.errors import UsageError
from tuner.options import Options, gpu_of, spec_of
from tuner.session import Machine
from tuner.ways import Say


def sketch_for(
    options: Options, name: str | None, way: str, samples: int, words: str,
    machine: Callable[[], Machine], say: Say,
) -> str:  # fmt: skip
    """Return the TL text that was asked for. Raises TuneError and SpaceError for the user."""
    asks = (options.proposer or "builtin") != "builtin"
    if name is not None and (asks or options.reference is not None):
        raise UsageError("--name is a built-in sketch; leave --proposer and --reference out")
    if not asks:
        _refuse_models_options(options, way, samples, words)
    if asks:
        from tuner.commands.ways import sketch_of_model

        return sketch_of_model(options, way, samples, words, machine(), say)
    if options.reference is None:
        for option, given in (
            ("--gpu", options.gpu), ("--dtype", options.dtype), ("--shapes", options.shapes),
            ("--scalar", options.scalars),
        ):  # fmt: skip
            if given:
                raise UsageError(
                    f"{option} is for a sketch that is made or looked for: say --proposer or "
                    f"--reference, or leave {option} out"
                )
        return sketch_text(options.variant or "", bool(options.causal), name, options.phase)
    from runs.record import Basis
    from tuner.reference_sketches import with_reference

    gpu = gpu_of(replace(options, gpu=options.gpu or "h200"), ())
    spec = with_reference(spec_of(options, gpu, Basis.PREDICTED, "sketch"), options)
    return spec.sketches[0][1]


def _refuse_models_options(options: Options, way: str, samples: int, words: str) -> None:
    """Raise UsageError for what only a model is told, where none is asked."""
    for option, given in (
        ("--words", words), ("--way", way != "sketch"), ("--samples", samples != 1),
        ("--model", options.model), ("--base-url", options.base_url),
    ):  # fmt: skip
        if given:
            raise UsageError(
                f"{option} is for a model: say --proposer openai or --proposer batch:DIR"
            )
