"""argv → options → exit code: 0 found, 1 nothing correct, 2 usage, 3 the machine lacks it."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from space.variant import SpaceError
from tuner.arguments import Causal, Dtype, Function, Gpu, PageSize, PhaseName, Scalars
from tuner.errors import MachineError, TuneError, UsageError
from tuner.options import Options

if TYPE_CHECKING:
    from tuner.session import Machine

#: What the parser raises; Typer brings its own Click since 0.20, so it is found by its name.
_ParserError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="tune",
    help="Find, prove and export the fastest attention kernel for a GPU and a list of shapes.",
    epilog="Example: tune --variant mla --gpu l40s --budget 200",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def main_job(
    context: typer.Context,
    variant: Annotated[str | None, typer.Option(help="mha, gqa, mqa or mla.")] = None,
    gpu: Gpu = None,
    budget: Annotated[
        int | None, typer.Option(help="Distinct programs to compile and judge; default 200.")
    ] = None,
    phase: PhaseName = None,
    page_size: PageSize = None,
    dtype: Dtype = None,
    causal: Causal = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(help="paper, a file, or B,Hq,Hkv,Sq,Sk,D[,Dv] ... (several may follow)."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="auto, mma_sync or wgmma: which atoms are used.")
    ] = None,
    proposer: Annotated[
        str | None, typer.Option(help="builtin, openai or batch:DIR: who proposes beside Optuna.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model that is asked.")] = None,
    base_url: Annotated[
        str | None, typer.Option(help="A compatible endpoint, such as http://127.0.0.1:8000/v1.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens the model may take.")] = None,
    max_cost: Annotated[float | None, typer.Option(help="What the model may cost.")] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="MODEL=IN,OUT: cost of a million tokens.")
    ] = None,
    sketch: Annotated[Path | None, typer.Option(help="Search this TL sketch.")] = None,
    reference: Function = None,
    scalar: Scalars = None,
    measure: Annotated[
        str, typer.Option(help="auto, device (time on the GPU) or model (predict).")
    ] = "auto",
    minutes: Annotated[float | None, typer.Option(help="Stop searching after this long.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the search; default 0.")] = None,
    workers: Annotated[str | None, typer.Option(help="Compile processes.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs"),
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Search for the fastest right kernel of each shape, and export them."""
    if context.invoked_subcommand is not None:
        return
    if not context.obj["argv"]:
        typer.echo(context.get_help())
        return
    options = Options(
        variant, gpu, budget, phase, dtype, causal, tuple(shapes or ()), backend, proposer, sketch,
        measure, minutes, seed, workers, runs_dir, resume, json, model, base_url, max_tokens,
        max_cost, tuple(price or ()), page_size, reference, tuple(scalar or ()),
    )  # fmt: skip
    from tuner.session import tune
    from tuner.view import View

    view: View
    if json:
        from tuner.jsonlines import JsonView

        view = JsonView(sys.stdout)
    else:
        from tuner.terminal import TerminalView, make_console

        view = TerminalView(make_console())
    tune(options, view, context.obj["machine"]())


@app.command()
def sketch(
    context: typer.Context,
    variant: Annotated[str, typer.Option(help="mha, gqa, mqa or mla.")],
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal")] = None,
    name: Annotated[str | None, typer.Option(help="Which built-in sketch.")] = None,
    phase: PhaseName = None,
    gpu: Gpu = None,
    dtype: Dtype = None,
    shapes: Annotated[list[str] | None, typer.Option(help="What the sketch is for.")] = None,
    reference: Function = None,
    scalar: Scalars = None,
    proposer: Annotated[str | None, typer.Option(help="openai or batch:DIR: ask a model.")] = None,
    model: Annotated[str | None, typer.Option(help="The model that is asked.")] = None,
    base_url: Annotated[str | None, typer.Option(help="A compatible endpoint.")] = None,
    way: Annotated[str, typer.Option(help="sketch, two-stage or one-step.")] = "sketch",
    samples: Annotated[int, typer.Option(help="Programs asked for; the first right one.")] = 1,
    words: Annotated[str, typer.Option(help="What the kernel is to compute, for a model.")] = "",
    runs_dir: Annotated[Path, typer.Option(help="Where the exchanges go.")] = Path("runs"),
    out: Annotated[Path | None, typer.Option(help="Write it to this file.")] = None,
) -> None:
    """Print a TL sketch: a built-in one, or with --proposer one that a model writes."""
    options = Options(
        variant, gpu, phase=phase, dtype=dtype, causal=causal, shapes=tuple(shapes or ()),
        proposer=proposer, measure="model", runs_dir=runs_dir, model=model, base_url=base_url,
        reference=reference, scalars=tuple(scalar or ()), workers="1",
    )  # fmt: skip
    from tuner.commands.sketch import sketch_for

    machine = context.obj["machine"]

    def say(text: str) -> None:
        typer.echo(text, err=True)

    text = sketch_for(options, name, way, samples, words, machine, say)
    if out is None:
        typer.echo(text.rstrip("\n"))
    else:
        from tuner.commands.report import write_page

        typer.echo(f"sketch {write_page(out, text)}")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A TL file.")]) -> None:
    """Print every fault of a TL file, with its line; exit code 1 when there is one."""
    from tuner.commands.tl import checked

    found = checked(file)
    for line in found.faults:
        typer.echo(f"{file}: {line}")
    if found.instead is not None:
        typer.echo("the dataflow that remains, with nothing to refuse:\n")
        typer.echo(found.instead.rstrip("\n"))
    if found.faults:
        raise typer.Exit(1)
    typer.echo(f"{file}: no faults")


@app.command()
def emit(
    file: Annotated[Path, typer.Argument(help="A TL file.")],
    gpu: Annotated[str, typer.Option(help="t4, rtx8000, a100, l40s, h100 or h200.")],
    p: Annotated[list[str] | None, typer.Option("-p", help="A parameter, e.g. BM=128.")] = None,
    variant: Annotated[str | None, typer.Option(help="mha, gqa, mqa or mla.")] = None,
    head_dim: Annotated[str | None, typer.Option(help="D or D,Dv.")] = None,
    dtype: Dtype = None,
    causal: Causal = None,
    phase: PhaseName = None,
    page_size: PageSize = None,
) -> None:
    """Print the CuTe source that a TL file becomes at a point."""
    from tuner.commands.tl import EmitRequest, emitted

    request = EmitRequest(
        file, gpu, variant, dtype, head_dim, causal, tuple(p or ()), phase, page_size
    )
    typer.echo(emitted(request).rstrip("\n"))


@app.command("list")
def list_() -> None:
    """Print what works where: variants, GPUs and dtypes, with the legal configurations."""
    from tuner.commands.tables import print_catalog

    print_catalog()


@app.command()
def doctor() -> None:
    """Print what is missing on this machine and the command that mends it."""
    from tuner.commands.tables import print_findings

    if not print_findings():
        raise typer.Exit(MachineError.exit_code)


@app.command()
def export(
    runs: Annotated[list[Path], typer.Argument(help="Run folders.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
) -> None:
    """Write the best kernel of each shape as a folder that needs only torch and cuda-core."""
    from runs.export import export as export_run
    from runs.export import remarks
    from runs.store import RunStore

    manifest = export_run([RunStore.open(run) for run in runs], out)
    typer.echo(f"{len(manifest['kernels'])} kernels for {len(manifest['shapes'])} shapes in {out}")
    for line in remarks(manifest):
        typer.echo(line)


@app.command()
def compare(
    context: typer.Context,
    variant: Annotated[str | None, typer.Option(help="mha, gqa, mqa or mla.")] = None,
    gpu: Gpu = None,
    budget: Annotated[int, typer.Option(help="Programs that every run may judge.")] = 60,
    arms: Annotated[
        str | None, typer.Option(help="Two or more of llm, search, assisted, random (default all).")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of every arm.")] = 3,
    phase: PhaseName = None,
    page_size: PageSize = None,
    dtype: Dtype = None,
    causal: Causal = None,
    shapes: Annotated[
        list[str] | None, typer.Option(help="paper, a file, or B,Hq,Hkv,Sq,Sk,D[,Dv] ...")
    ] = None,
    backend: Annotated[str | None, typer.Option(help="auto, mma_sync or wgmma.")] = None,
    proposer: Annotated[str | None, typer.Option(help="builtin, openai or batch:DIR.")] = None,
    model: Annotated[str | None, typer.Option(help="The model that is asked.")] = None,
    base_url: Annotated[str | None, typer.Option(help="A compatible endpoint.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens a run's model may take.")] = None,
    max_cost: Annotated[float | None, typer.Option(help="What a run's model may cost.")] = None,
    price: Annotated[
        list[str] | None, typer.Option(help="MODEL=IN,OUT: cost of a million tokens.")
    ] = None,
    sketch: Annotated[Path | None, typer.Option(help="Search this TL sketch.")] = None,
    reference: Function = None,
    scalar: Scalars = None,
    measure: Annotated[str, typer.Option(help="auto, device or model.")] = "auto",
    seed: Annotated[int | None, typer.Option(help="The first seed; default 0.")] = None,
    workers: Annotated[str | None, typer.Option(help="Compile processes.")] = None,
    runs_dir: Annotated[Path, typer.Option(help="Where its folder goes.")] = Path("runs"),
    ways: Annotated[
        str | None, typer.Option(help="sketch, two-stage, one-step: pass@k of a model's programs.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="With --ways: programs of each way; default 10.")
    ] = None,
    repairs: Annotated[
        int | None, typer.Option(help="With --ways: repairs of each program; default 0.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this comparison.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Say whether the proposer helped: the same search with, without and by proposals alone."""
    from tuner.commands.compare import run_compare
    from tuner.compare import ARMS

    options = Options(
        variant, gpu, budget, phase, dtype, causal, tuple(shapes or ()), backend, proposer, sketch,
        measure, None, seed, workers, runs_dir, resume, json, model, base_url, max_tokens,
        max_cost, tuple(price or ()), page_size, reference, tuple(scalar or ()),
    )  # fmt: skip
    from tuner.commands.ways import is_ways, run_ways

    if ways is not None or (resume is not None and is_ways(resume)):
        if arms is not None:
            raise UsageError("--arms is a comparison of its own; leave it or --ways out")
        samples, repairs = 10 if samples is None else samples, repairs or 0
        run_ways(options, ways or "", samples, repairs, context.obj["machine"]())
        return
    for name, given in (("--samples", samples), ("--repairs", repairs)):
        if given is not None:
            raise UsageError(f"{name} goes with --ways; add that or leave {name} out")
    run_compare(options, arms or ",".join(ARMS), seeds, context.obj["machine"]())


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    out: Annotated[Path | None, typer.Option(help="The file; default: report.html in it.")] = None,
) -> None:
    """Write one HTML file that shows how a run came to its kernels; it opens offline."""
    from tuner.commands.report import write_report

    typer.echo(f"report {write_report(run, out)}")


@app.command()
def verify(
    target: Annotated[Path, typer.Argument(help="A run folder or an exported folder.")],
    seed: Annotated[
        int | None, typer.Option(help="Draw the problems from this; default: a new one.")
    ] = None,
    sanitizer: Annotated[
        str, typer.Option(help="auto, yes or no: compute-sanitizer over each kernel.")
    ] = "auto",
    reference: Annotated[
        str | None, typer.Option(help="FILE.py:function that an exported folder computes.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Judge the kernels of a run or an exported folder again, on problems that no search saw."""
    from tuner.commands.verify import run_verify

    if not run_verify(target, seed, sanitizer, json, typer.echo, reference=reference):
        raise typer.Exit(1)


@app.command()
def ablate(
    run: Annotated[Path, typer.Argument(help="A measured run folder.")],
    shapes: Annotated[
        list[str] | None, typer.Option(help="Shapes as the run's tables name them; default: all.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON list.")] = False,
) -> None:
    """Time each winner of a run beside the kernels that differ from it in one parameter."""
    from tuner.commands.ablate import run_ablate

    run_ablate(run, shapes or (), json, typer.echo)


def main(argv: Sequence[str] | None = None, machine: Machine | None = None) -> int:
    """Run `tune` and return its exit code. Tests inject a `machine`."""
    args = list(sys.argv[1:] if argv is None else argv)
    context = {"argv": args, "machine": (lambda: machine) if machine else _this_machine}
    try:
        command = typer.main.get_command(app)
        result = command.main(
            args=_spread(args), prog_name="tune", standalone_mode=False, obj=context
        )
        return result if isinstance(result, int) else 0
    except typer.Exit as done:
        return done.exit_code
    except _ParserError as error:
        return _fail(" ".join(error.format_message().split()), 2)
    except (typer.Abort, KeyboardInterrupt):
        return _fail("interrupted", 1)
    except Exception as error:
        if (code := _exit_code(error)) is None:
            raise  # a fault of this program: the traceback is what its reader needs
        return _fail(str(error), code)


def _this_machine() -> Machine:
    from tuner.workshop import this_machine

    return this_machine()


def _exit_code(error: Exception) -> int | None:
    """The exit code of an error that a user can act on, None for a fault of this program."""
    from codegen.errors import TLError, ToolchainMissing
    from runs.errors import NothingToExport, RunError

    match error:
        case TuneError():
            return error.exit_code
        case SpaceError() | TLError():
            return 2
        case ToolchainMissing():
            return MachineError.exit_code
        case NothingToExport():
            return 1
        case RunError():
            return 2
    return None


def _fail(text: str, code: int) -> int:
    for line in text.splitlines() or [""]:
        typer.echo(f"tune: {line}", err=True)
    return code


def _spread(args: Sequence[str]) -> list[str]:
    """Let several shapes follow one --shapes: each word with a comma gets its own."""
    spread: list[str] = []
    after_shapes = False
    for arg in args:
        if after_shapes and re.fullmatch(r"[\d,]*,[\d,]*|paper", arg) and spread[-1] != "--shapes":
            spread.append("--shapes")
        elif arg.startswith("-") or (spread and spread[-1] != "--shapes"):
            after_shapes = False
        spread.append(arg)
        after_shapes = after_shapes or arg == "--shapes"
    return spread


if __name__ == "__main__":
    sys.exit(main())
