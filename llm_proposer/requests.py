"""Write the requests that runs would send, as a batch file: `python -m llm_proposer.requests`.

Real replies can be made from it and put beside it; a run with `--proposer batch:DIR` then finds
the requests it would write already answered.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_proposer import builtin
from llm_proposer.client import Prompt
from llm_proposer.customs import CUSTOMS, Custom
from llm_proposer.describe import Subject
from llm_proposer.prompt import (
    Question,
    Task,
    code_prompt,
    one_step_prompt,
    seeds_prompt,
    sketch_prompt,
)
from llm_proposer.providers.batch import REQUESTS, request_line
from llm_proposer.seeds import seeds
from space.constraints import space_for
from space.gpu import GPUS, GpuSpec
from space.variant import Problem, paper_shapes, problems_of, variant_named

VARIANTS = ("mha", "gqa", "mla")
CARDS = ("h200", "l40s")
INDEX = "index.tsv"


@dataclass(frozen=True, slots=True)
class Request:
    """One request and what it is about."""

    variant: str
    gpu: str
    problem: str
    prompt: Prompt


def requests(gpus: Sequence[str] = CARDS) -> Iterator[Request]:
    """Yield every request for publication.

    Sketches and seeds for each problem of the main job, as a run asks first; code and one step
    for one causal problem; all four for each custom variant.
    """
    for gpu in (GPUS[name] for name in gpus):
        for variant in VARIANTS:
            yield from _of_variant(variant, gpu)
        for custom in CUSTOMS.values():
            yield from _of_custom(custom, gpu)


def _of_variant(name: str, gpu: GpuSpec) -> Iterator[Request]:
    variant = variant_named(name)
    shapes = tuple(s for causal in (False, True) for s in paper_shapes(variant, causal))
    problems = problems_of(name, gpu.dtypes[-1], shapes)
    causal = [p for p in problems if p.causal]
    shown = next((p for p in causal if p.head_dim == 128), causal[-1])
    for problem in problems:
        text = next(iter(builtin.sketches(name, problem.causal).values()))
        task = Task(problem, gpu, shapes, space=space_for(problem, gpu))
        prompts = [sketch_prompt(task), _seeds(name, text, task)]
        if problem == shown:
            prompts += [code_prompt(task, text), one_step_prompt(task)]
        yield from (Request(name, gpu.name, problem.key, p) for p in prompts)


def _of_custom(custom: Custom, gpu: GpuSpec) -> Iterator[Request]:
    shapes = tuple(s for s in paper_shapes(variant_named("mha"), custom.causal) if s.head_dim > 64)
    problem = Problem("mha", gpu.dtypes[-1], 128, 128, custom.causal)
    space = space_for(problem, gpu)
    task = Task(problem, gpu, shapes, reference=custom.reference, space=space)
    for prompt in (
        sketch_prompt(task),
        code_prompt(task, custom.sketch),
        one_step_prompt(task),
        _seeds(custom.name, custom.sketch, task),
    ):
        yield Request(custom.name, gpu.name, problem.key, prompt)


def _seeds(name: str, text: str, task: Task) -> Prompt:
    space = space_for(task.problem, task.gpu)
    subject = Subject(name, text, task.problem, task.gpu, space, task.shapes)
    return seeds_prompt(Question(subject, seeds(task.problem, task.gpu, space)[0]))


def write(folder: Path, model: str, gpus: Sequence[str] = CARDS) -> int:
    """Write the batch file and its index into `folder`; return how many requests there are.

    The same requests give the same bytes. Raises OSError.
    """
    listed = list(requests(gpus))
    folder.mkdir(parents=True, exist_ok=True)
    lines = (request_line(r.prompt, model) for r in listed)
    (folder / f"{REQUESTS}0001.jsonl").write_text("".join(f"{x}\n" for x in lines), "utf-8")
    rows = ["custom_id\tkind\tvariant\tgpu\tproblem"]
    rows += [
        f"{r.prompt.digest}\t{r.prompt.kind}\t{r.variant}\t{r.gpu}\t{r.problem}" for r in listed
    ]
    (folder / INDEX).write_text("".join(f"{x}\n" for x in rows), "utf-8")
    return len(listed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m llm_proposer.requests", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--model", default="gpt-5", help="model named in each request")
    parser.add_argument("--gpu", action="append", choices=sorted(GPUS), help="default: h200, l40s")
    options = parser.parse_args(argv)
    try:
        count = write(options.out, options.model, options.gpu or CARDS)
    except OSError as error:
        print(f"cannot write to {options.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    print(f"{count} requests in {options.out / f'{REQUESTS}0001.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
