"""Three ways to compute a case: the TL interpreter, an emitted kernel, an exported folder."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any, Protocol

import torch

from codegen.cute import translate
from codegen.nvrtc import compile_source
from codegen.tl import interpreter
from codegen.tl.ast import Program
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from runs.templates import manifest as manifests
from space.constraints import space_for
from space.gpu import GpuSpec, gpu_named, gpu_of_device_name
from space.variant import Problem
from tuner.evaluate.cache import Cache
from tuner.evaluate.launch import Launcher, LaunchError, LoadedKernel, Prepare

T = torch.Tensor
Window = tuple[int, int] | None
SCOPE_WORK = 1 << 29  #: multiply-adds that the interpreter is given


class Runner(Protocol):
    """Makes the function that computes a problem."""

    device: torch.device
    most_work: float

    def prepare(self, problem: Problem, window: Window) -> Prepare:
        """Return the kernel, as `verify` takes it."""


def sketch_text(problem: Problem, window: Window) -> str:
    """The default sketch, with a window mask in it if one is asked for."""
    text = next(iter(sketches(problem.variant, problem.causal, problem.phase).values()))
    if window is None:
        return text
    mask = "  Compute Mask S, causal\n"
    return text.replace(mask, f"{mask}  Compute Mask S, window({window[0]}, {window[1]})\n")


def program_of(problem: Problem, gpu: GpuSpec, window: Window) -> Program:
    """The default sketch at the known-good point."""
    point = seeds(problem, gpu, space_for(problem, gpu))[0]
    return bind(parse(sketch_text(problem, window)), problem, point)


class InterpreterRunner:
    """Runs the bound program on the CPU."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.most_work = float(SCOPE_WORK)
        self._gpu = gpu_named("a100")

    def prepare(self, problem: Problem, window: Window) -> Prepare:
        """See `Runner.prepare`."""
        program = program_of(problem, self._gpu, window)

        def prepare(
            q: T, k: T, v: T, out: T, scale: float, key_counts: T | None = None,
            pages: T | None = None, splits: int | None = None,
        ) -> Launcher:  # fmt: skip
            cache = Cache(key_counts, pages)

            def run(q: T, k: T, v: T) -> T:
                given = {"Q": q, "K": k, "V": v}
                count = splits or interpreter.DEFAULT_SPLITS
                found = interpreter.run(
                    program, given, {"scale": scale}, problem.dtype, splits=count
                )
                return torch.as_tensor(found["O"])

            def launch() -> None:
                if not cache.tables:
                    out.copy_(run(q, k, v))
                    return
                for b, length in enumerate(cache.lengths(k)):
                    rows = (cache.sequence(t, b, length) for t in (k, v))
                    out[b : b + 1] = run(q[b : b + 1], *rows)

            return launch

        return prepare


class KernelRunner:
    """Emits, compiles and launches the kernel on the GPU that is present."""

    def __init__(self, cache: Path | None = None) -> None:
        self.device = torch.device("cuda", 0)
        self.most_work = float("inf")
        name = torch.cuda.get_device_name(self.device)
        gpu = gpu_of_device_name(name)
        if gpu is None:
            raise SystemExit(f"{name} is not a GPU that is known")
        self.gpu = gpu
        self._cache = cache
        self._loaded = functools.lru_cache(maxsize=None)(self._load)

    def prepare(self, problem: Problem, window: Window) -> Prepare:
        """See `Runner.prepare`."""
        return self._loaded(problem, window).prepare

    def _load(self, problem: Problem, window: Window) -> LoadedKernel:
        source = translate(program_of(problem, self.gpu, window), problem, self.gpu)
        cubin = compile_source(source, self.gpu.arch, self._cache)
        return LoadedKernel(source, cubin.image, self.device)


class NotInFolder(Exception):
    """The folder holds no kernel of this head dim, mask and type; says which."""


class ExportRunner:
    """Calls `attention` of an exported folder; what it was not made for is not in scope."""

    def __init__(self, folder: Path) -> None:
        self.device = torch.device("cuda", 0)
        self.most_work = float("inf")
        self._attention = _import(folder).attention
        keys = manifests.read(folder).shapes
        self._kinds = {(k.head_dim, k.head_dim_v, k.causal, k.dtype, k.phase, k.page) for k in keys}

    def prepare(self, problem: Problem, window: Window) -> Prepare:
        """See `Runner.prepare`. Raises NotInFolder."""
        if window is not None:
            raise NotInFolder("an exported folder has no window mask")
        kind = (
            problem.head_dim, problem.head_dim_v, problem.causal, str(problem.dtype),
            str(problem.phase), problem.page,
        )  # fmt: skip
        if kind not in self._kinds:
            raise NotInFolder(f"the folder has no kernel of {problem.key}")

        def prepare(
            q: T, k: T, v: T, out: T, scale: float, key_counts: T | None = None,
            pages: T | None = None, splits: int | None = None,
        ) -> Launcher:  # fmt: skip
            def launch() -> None:
                try:
                    self._attention(
                        q, k, v, causal=problem.causal, scale=scale, out=out,
                        seqlens_k=key_counts, block_table=pages, allow_untuned=True,
                    )  # fmt: skip
                except (ValueError, LookupError) as refused:
                    raise LaunchError(str(refused)) from refused

            return launch

        return prepare


def _import(folder: Path) -> Any:
    init = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        "exported_cases", init, submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder} is not an exported folder: no {init.name}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["exported_cases"] = module
    spec.loader.exec_module(module)
    return module
