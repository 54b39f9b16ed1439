"""`tune compare`: run it, then a table, JSON and a page."""

from __future__ import annotations

import json

from tuner.commands.report import write_page
from tuner.compare import begin, check_model, compare, plan_of, read_plan
from tuner.comparison import as_dict, html, result_of, terminal_table
from tuner.options import Options, check_common
from tuner.reference import check_unchanged, examine
from tuner.session import Machine
from tuner.terminal import make_console

COMPARE = "compare.json"


def run_compare(options: Options, arms: str, seeds: int, machine: Machine) -> None:
    """Compare the arms, or go on with `options.resume`; write and print what came out.

    Raises TuneError, SpaceError, TLError or RunError for the user.
    """
    console = make_console()

    def say(text: str) -> None:
        if not options.json:
            console.print(text, soft_wrap=True, markup=False)

    if options.resume is None:
        plan = plan_of(options, arms, seeds, machine.devices)
        folder, plan = begin(options.runs_dir, plan)
    else:
        folder = options.resume
        plan = read_plan(folder)
        check_common(options)
        check_model(options, plan.base.proposer, plan.base.model)
        if plan.base.reference is not None:
            check_unchanged(plan.base.reference, folder)
            examine(plan.base)
    say(f"comparison {folder}: {', '.join(plan.arms)}; {plan.seeds} seeds of each")
    say(f"times are {plan.base.measure}")
    result = result_of(compare(folder, plan, options, machine, say))
    body = as_dict(result)
    text = json.dumps(body, indent=1, allow_nan=False)
    write_page(folder / COMPARE, text + "\n")
    write_page(folder / "compare.html", html(result))
    if options.json:
        print(json.dumps(body, allow_nan=False))
        return
    console.print(terminal_table(result))
    for line in (*result.verdict, result.who):
        say(line)
    say(f"page {folder / 'compare.html'}; figures {folder / COMPARE}")
