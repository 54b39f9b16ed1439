"""`tune compare --ways` and `tune sketch --proposer`: programs of a model, and how far they get."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from llm_proposer.budget import Ledger
from llm_proposer.errors import NotConfigured
from llm_proposer.proposer import REPAIRS
from llm_proposer.session import BATCH, open_session
from runs import codec
from runs.errors import CodecError
from runs.files import read_regular
from runs.record import Basis, RunSpec
from runs.store import new_run_id
from space.gpu import gpu_named
from space.variant import Phase
from tuner.commands.report import write_page
from tuner.compare import check_model
from tuner.errors import MachineError, NothingFound, UsageError
from tuner.options import (
    Options,
    basis_of,
    check_common,
    device_index,
    gpu_of,
    settings_of,
    spec_of,
    workers_of,
)
from tuner.plans import PLAN, begin_folder
from tuner.reference import check_unchanged, examine, read_reference
from tuner.session import Machine
from tuner.terminal import make_console
from tuner.ways import WAYS, Level, Rate, Sample, Say, rates, sampled

FORMAT, RESULT = "tltune-ways", "ways.json"
MAX_SAMPLES, MAX_REPAIRS = 1000, 10
USUAL_DIM = 128  #: head dim that a sketch is asked for, where several are meant


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sampled: `samples` programs of each way for each problem of `base`."""

    ways: tuple[str, ...]
    samples: int
    repairs: int
    base: RunSpec


def plan_of(
    options: Options, ways: str, samples: int, repairs: int, devices: tuple[str, ...]
) -> Plan:
    """Build the plan of a new sampling. Raises UsageError, SpaceError and MachineError."""
    check_common(options)
    chosen = tuple(dict.fromkeys(w.strip() for w in ways.split(",")))
    if unknown := [w for w in chosen if w not in WAYS]:
        raise UsageError(f"--ways: unknown way {unknown[0]!r}; known ways: {', '.join(WAYS)}")
    if not 1 <= samples <= MAX_SAMPLES:
        raise UsageError(f"--samples {samples} is not from 1 to {MAX_SAMPLES}")
    if not 0 <= repairs <= MAX_REPAIRS:
        raise UsageError(f"--repairs {repairs} is not from 0 to {MAX_REPAIRS}")
    if (options.proposer or "builtin") == "builtin":
        raise UsageError("a model has to be asked: say --proposer openai or --proposer batch:DIR")
    check_model(options, options.proposer or "", options.model)
    gpu = gpu_of(options, devices)
    basis = basis_of(options.measure, gpu, devices)
    name = new_run_id(f"ways-{options.variant}", gpu.name)
    base = spec_of(options, gpu, basis, name)
    if base.phase is Phase.DECODE:
        raise UsageError(
            "a model is asked for no decode programs: what it could write otherwise is fixed "
            "there; use --phase prefill"
        )
    if options.reference is not None:
        source = read_reference(options.reference, options.scalars)
        base = replace(base, reference=source.reference)
        if not source.causal and options.causal is None:
            raise UsageError(
                f"{source.reference.name} takes no `causal`: say --causal or --no-causal, which of "
                f"the two is its own mask"
            )
        examine(base)
    return Plan(chosen, samples, repairs, base)


def is_ways(folder: Path) -> bool:
    """Whether a folder is a sampling of ways and not a comparison of arms."""
    try:
        body = json.loads(read_regular(folder / PLAN))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(body, dict) and body.get("format") == FORMAT


def begin(root: Path, plan: Plan) -> tuple[Path, Plan]:
    """Make the folder under `root`; its name may get a number. Raises StoreError."""

    def body(base: RunSpec) -> dict[str, Any]:
        return {
            "format": FORMAT, "ways": list(plan.ways), "samples": plan.samples,
            "repairs": plan.repairs, "base": codec.to_json(base),
        }  # fmt: skip

    folder, base = begin_folder(root, plan.base, body)
    return folder, replace(plan, base=base)


def read_plan(folder: Path) -> Plan:
    """Read a plan back. Raises UsageError."""
    try:
        body = codec.parse(read_regular(folder / PLAN).decode())
        ways, samples, repairs = tuple(body["ways"]), body["samples"], body["repairs"]
        if body.get("format") != FORMAT or not set(ways) <= set(WAYS) or not ways:
            raise CodecError("its format or ways are others")
        if type(samples) is not int or not 1 <= samples <= MAX_SAMPLES:
            raise CodecError(f"samples are not from 1 to {MAX_SAMPLES}")
        if type(repairs) is not int or not 0 <= repairs <= MAX_REPAIRS:
            raise CodecError(f"repairs are not from 0 to {MAX_REPAIRS}")
        return Plan(ways, samples, repairs, codec.from_json(RunSpec, body["base"]))
    except OSError as error:
        raise UsageError(f"{folder} is no sampling of ways: {error.strerror}") from None
    except (UnicodeDecodeError, CodecError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{folder} is no sampling of ways: {error}") from None


def run_ways(options: Options, ways: str, samples: int, repairs: int, machine: Machine) -> None:
    """Sample the ways, or go on with `options.resume`; write and print what came out.

    Raises TuneError, SpaceError or RunError for the user.
    """
    console = make_console()

    def say(text: str) -> None:
        if not options.json:
            console.print(text, soft_wrap=True, markup=False)

    if options.resume is None:
        plan = plan_of(options, ways, samples, repairs, machine.devices)
        folder, plan = begin(options.runs_dir, plan)
    else:
        folder, plan = options.resume, read_plan(options.resume)
        check_common(options)
        if plan.base.reference is not None:
            check_unchanged(plan.base.reference, folder)
            examine(plan.base)
    say(f"sampling {folder}: {', '.join(plan.ways)}; {plan.samples} programs of each")
    found, ledger = take(folder, plan, options, machine, say)
    if pending := sum(s.level is Level.PENDING for s in found):
        replies = plan.base.proposer.removeprefix(BATCH)
        raise NothingFound(
            f"{pending} of {len(found)} programs wait for replies: answer "
            f"{replies}/requests-*.jsonl, put the output file beside it, then "
            f"tune compare --resume {folder}"
        )
    measured = plan.base.measure is Basis.MEASURED
    table = rates(found, plan.ways, measured)
    body = as_dict(plan, found, table, ledger)
    write_page(folder / RESULT, json.dumps(body, indent=1, allow_nan=False) + "\n")
    if options.json:
        print(json.dumps(body, allow_nan=False))
        return
    console.print(terminal_table(table))
    if not measured:
        say("no GPU level: this machine has none of the card that was named")
    say(f"figures {folder / RESULT}; exchanges {folder / 'exchanges.jsonl'}")


def take(
    folder: Path, plan: Plan, options: Options, machine: Machine, say: Say, words: str = ""
) -> tuple[tuple[Sample, ...], Ledger]:
    """Ask for every sample and take it as far as it gets; exchanges are kept in `folder`.

    Raises UsageError when the model cannot be asked, MachineError without the measured card.
    """
    gpu = gpu_named(plan.base.gpu)
    device = device_index(gpu, machine.devices)
    if plan.base.measure is Basis.MEASURED and device is None:
        raise MachineError(f"{folder} was judged on a {gpu.title}, which is not here")
    try:
        settings = settings_of(options, plan.base.proposer, plan.base.model)
        session = open_session(settings, folder, os.environ)
    except NotConfigured as error:
        raise UsageError(str(error)) from None
    with (
        closing(session),
        closing(machine.open_workshop(plan.base, gpu, device, workers_of(options))) as bench,
    ):
        found = tuple(
            sampled(
                plan.base,
                gpu,
                plan.ways,
                plan.samples,
                plan.repairs,
                session.client,
                bench,
                say,
                words,
            )
        )
    return found, session.ledger


def as_dict(
    plan: Plan, found: tuple[Sample, ...], table: tuple[Rate, ...], ledger: Ledger
) -> dict[str, Any]:
    """Return everything that is said as JSON values."""
    return {
        "format": FORMAT,
        "variant": plan.base.variant,
        "gpu": plan.base.gpu,
        "proposer": plan.base.proposer,
        "model": plan.base.model,
        "reference": codec.to_json(plan.base.reference),
        "repairs": plan.repairs,
        "spent": dict(ledger.spent.facts),
        "rates": [
            {
                "way": r.way, "level": r.level.title, "samples": r.samples, "passed": r.passed,
                "pass_at": {str(k): p for k, p in r.pass_at},
            }
            for r in table
        ],
        "samples": [
            {
                "way": s.way, "problem": s.problem, "number": s.number, "level": s.level.title,
                "note": s.note, "text": s.text,
            }
            for s in found
        ],
    }  # fmt: skip


def terminal_table(table: tuple[Rate, ...]) -> Table:
    """Return pass@k by way and level."""
    ks = sorted({k for r in table for k, _ in r.pass_at})
    shown = Table(title="programs that pass, and pass@k (unbiased, mean over the problems)")
    for name in ("way", "level", "passed", *(f"pass@{k}" for k in ks)):
        shown.add_column(name, justify="left" if name in ("way", "level") else "right")
    for r in table:
        values = dict(r.pass_at)
        cells = [f"{values[k]:.3f}" if k in values else "-" for k in ks]
        shown.add_row(r.way, r.level.title, f"{r.passed}/{r.samples}", *cells)
    return shown


def sketch_of_model(
    options: Options, way: str, samples: int, words: str, machine: Machine, say: Say
) -> str:
    """Return the first of a model's programs that the interpreter finds right.

    What only `words` describe is checked by the checker alone, which is said. Raises NothingFound
    when no program will do, or when replies are still to come.
    """
    one_mask = replace(options, causal=bool(options.causal))
    plan = plan_of(one_mask, way, samples, REPAIRS, machine.devices)
    problems = plan.base.problems
    shown = next((p for p in problems if p.head_dim == USUAL_DIM), problems[0])
    shapes = plan.base.shapes_of(shown)
    plan = replace(plan, base=replace(plan.base, shapes=shapes))
    folder, plan = begin(options.runs_dir, plan)
    found, _ = take(folder, plan, options, machine, say, words)
    best = max(found, key=lambda s: s.level)
    unproved = bool(words) and plan.base.reference is None
    if best.level >= (Level.CHECKED if unproved else Level.INTERPRETED):
        if unproved:
            say("nothing says what it must compute: it was checked as TL alone; give --reference")
        return best.text
    if any(s.level is Level.PENDING for s in found):
        replies = plan.base.proposer.removeprefix(BATCH)
        raise NothingFound(
            f"the model has not answered yet: answer {replies}/requests-*.jsonl, put the output "
            f"file beside it, and say the same command again"
        )
    raise NothingFound(f"no program of the model is right; the furthest: {best.note}")
