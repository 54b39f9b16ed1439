"""What the planner says to a case that must be refused or pruned, without a launch."""

from __future__ import annotations

from codegen.cute import translate
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from space.constraints import smem_bytes, space_for, violated
from space.gpu import GPUS, GpuSpec, check_dtype
from space.legal import legal_points
from space.variant import Problem, SpaceError, check_shape
from tests.cases.case import Case
from tests.cases.verdict import FAIL, PASS, Verdict

#: GPUs that each resource case speaks of.
CARDS = {
    "h100-mla-prefill-262144": ("h100",),
    "l40s-smem-131074": ("l40s",),
    "sm89-no-wgmma": ("t4", "rtx8000", "a100", "l40s"),
    "t4-bf16": ("t4", "rtx8000"),
    "t4-smem-81920": ("t4", "rtx8000"),
    "headdim-512": ("t4", "rtx8000"),
}
HOPPER_ONLY = ("wgmma", "SM90_TMA", "cp.async.bulk", "mbarrier", "setmaxnreg")


def judge(case: Case) -> Verdict:
    """Ask the planner for every card that the case names."""
    said = ""
    try:
        shapes = case.shapes()
        for shape in shapes:
            check_shape(shape)
    except SpaceError as refused:
        return Verdict(PASS, f"refused: {refused}")
    for name in CARDS.get(case.id, tuple(GPUS)):
        try:
            check_dtype(GPUS[name], case.dtype)
        except SpaceError as refused:
            if "fp16" not in str(refused):
                return Verdict(FAIL, f"{name}: no remedy in {refused}")
            said = f"refused: {refused}"
            continue
        if case.kind == "reject":
            return Verdict(FAIL, f"{name}: nothing refuses it")
        for shape in shapes:
            verdict = _resources(case, case.problem(shape), GPUS[name])
            if verdict.state == FAIL:
                return verdict
            said = verdict.why
    return Verdict(PASS, said)


def _resources(case: Case, problem: Problem, gpu: GpuSpec) -> Verdict:
    """Points over the card's limit are pruned with both numbers; some point is legal and small."""
    space = space_for(problem, gpu)
    legal = legal_points(problem, gpu, space)
    if not len(legal):
        return Verdict(FAIL, f"no legal configuration of {problem.key} on {gpu.name}")
    limit = gpu.smem_per_block_bytes
    if over := [p for p in legal.cores if smem_bytes(problem, p) > limit]:
        return Verdict(FAIL, f"{over[0].key} is called legal on {gpu.name} with {limit} bytes")
    largest = {p.name: max(p.choices) for p in space.params}
    if "swizzle" in space.names:
        largest["swizzle"] = space.param("swizzle").choices[0]
    too_large = space.point(largest)
    pruned = violated(problem, too_large, gpu)
    if pruned is None:
        return Verdict(FAIL, f"{too_large.key} is called legal on {gpu.name}")
    if case.id == "sm89-no-wgmma":
        return _no_hopper(problem, gpu)
    return Verdict(PASS, f"{len(legal)} legal on {gpu.name}, none above {limit} bytes")


def _no_hopper(problem: Problem, gpu: GpuSpec) -> Verdict:
    space = space_for(problem, gpu)
    offered = [p.name for p in space.params if p.name == "consumer_warpgroups" and any(p.choices)]
    if offered:
        return Verdict(FAIL, f"{gpu.name} is offered {', '.join(offered)}")
    text = next(iter(sketches(problem.variant, problem.causal).values()))
    point = seeds(problem, gpu, space)[0]
    source = translate(bind(parse(text), problem, point), problem, gpu)
    if found := [word for word in HOPPER_ONLY if word in source.text]:
        return Verdict(FAIL, f"code for {gpu.name} holds {', '.join(found)}")
    return Verdict(PASS, f"no Hopper choice or instruction for {gpu.name}")
