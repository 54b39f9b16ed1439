"""Text of a model is TL and integers: every place where text could become code is listed here.

Kernels that cheat from the host (streams, threads, library calls, patched timers) need host code,
and nothing that a model, a sketch file, a run folder or a manifest says becomes any.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from naive import naive

from codegen.cute import translate
from codegen.errors import CompileError, PlanError, TLError
from codegen.kernel import KernelSource
from codegen.nvrtc import compile_source
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from llm_proposer.builtin import sketches
from llm_proposer.seeds import seeds
from space.constraints import space_for
from space.gpu import gpu_named
from space.variant import DType, Problem

ROOT = Path(__file__).parents[2]
PACKAGES = ("space", "codegen", "runs", "llm_proposer", "tuner")

#: Calls through which data could become code, by the end of their dotted name.
WAYS = re.compile(
    r"^(eval|exec|compile|__import__|input)$"
    r"|(^|\.)(import_module|exec_module|run_path|run_module|CDLL|PyDLL|LoadLibrary)$"
    r"|^(pickle|marshal|joblib|torch|dill|cloudpickle|shelve|yaml)\.(load|loads|open)$"
    r"|(^|\.)Unpickler$|^_OurUnpickler$"
    r"|^subprocess\.(run|Popen|call|check_call|check_output)$|^Popen$"
    r"|^os\.(system|popen|exec\w+|spawn\w+|posix_spawn\w*|fork)$"
    r"|(^|\.)(load_inline|cpp_extension)$"
    r"|(^|\.)(cuModuleLoad\w*|cuLibraryLoad\w*|cuLink\w+|nvrtcCompileProgram)$"
)

#: (file, call) -> what goes in there. A new way in needs a reason here.
KNOWN = {
    ("codegen/nvrtc.py", "importlib.import_module"): "a fixed name: the compiler's bindings",
    ("codegen/nvrtc.py", "nvrtc.nvrtcCompileProgram"): "device text that the translator wrote",
    ("runs/published/20261201-h200/reader.py", "driver.cuModuleLoadData"): "its own, just compiled",
    ("runs/published/20261201-h200/reader.py", "nvrtc.nvrtcCompileProgram"): "a text in the file",
    ("runs/templates/launch.py", "importlib.import_module"): "a fixed name: the driver's bindings",
    ("runs/templates/launch.py", "driver.cuModuleLoadData"): "device code, checked by its digest",
    ("runs/templates/tensor_map.py", "ctypes.CDLL"): "a fixed name: the driver",
    ("tuner/evaluate/conditions.py", "importlib.import_module"): "a fixed name: NVML's bindings",
    ("tuner/evaluate/function.py", "spec.loader.exec_module"): (
        "the file that the user names by --reference, at the digest of the run's beginning and "
        "not from a run's folder; in a worker process"
    ),
    ("tuner/evaluate/l2.py", "importlib.import_module"): "a fixed name: the driver's bindings",
    ("tuner/evaluate/peers.py", "importlib.import_module"): "fixed names: the peers' packages",
    ("tuner/pools.py", "importlib.import_module"): "a fixed name: our own module",
    ("tuner/sanitizer.py", "subprocess.Popen"): "a fixed command; a folder of ours is its argument",
    ("tuner/worker.py", "subprocess.Popen"): "a fixed command: our own worker",
    ("tuner/worker.py", "pickle.loads"): "jobs that the parent process made",
    ("tuner/worker.py", "_OurUnpickler"): "answers of the worker: our own classes only",
}


def calls(path: Path) -> Iterator[str]:
    """Yield the dotted name of every call in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            yield ast.unparse(node.func)


def ways() -> set[tuple[str, str]]:
    """Every place in the product where data could become code."""
    files = (p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
    return {
        (str(path.relative_to(ROOT)), name)
        for path in files
        if not path.relative_to(ROOT).parts[1][:1].isdigit()  # a run's folder is data
        for name in calls(path)
        if WAYS.search(name)
    }


def test_every_way_from_data_to_code_is_known() -> None:
    found = ways()
    assert found - set(KNOWN) == set(), "a new way; give the reason why no text of a model gets in"
    assert set(KNOWN) - found == set(), "a way that is no more"


def test_scan_sees_what_it_looks_for(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("eval('1'); os.system('x'); pickle.load(f); re.compile('a'); torch.load(p)")
    seen = {name for name in calls(file) if WAYS.search(name)}
    assert seen == {"eval", "os.system", "pickle.load", "torch.load"}


def test_model_text_is_imported_nowhere_as_python() -> None:
    """The proposer's package has no way at all: what comes in is parsed."""
    assert not [way for way in ways() if way[0].startswith("llm_proposer/")]


# ---- what of a sketch reaches the emitted text -------------------------------------------------

PROBLEM = Problem("mha", DType.FP16, 64, 64, True)
GPU = gpu_named("a100")
MARK = "zzhostile"
SKETCH = next(iter(sketches("mha", True).values()))

HOSTILE = {
    "comment with a line continuation": f"# {MARK} \\\nCopy",
    "comment that closes a comment": f"# */ {MARK} /*\nCopy",
    "comment with a trigraph": f"# {MARK} ??/\nCopy",
    "comment with a carriage return": f"# {MARK}\r {MARK}(); //\nCopy",
    "comment with a line separator": f"# {MARK}\u2028{MARK}();\nCopy",
    "name with a quote": f'Copy "{MARK}"; system("x") //',
    "name with a brace": f"Copy {MARK}}} void f() {{",
    "name with a newline escape": f"Copy {MARK}\\n#include",
    "preprocessor line": f"#include <{MARK}>\nCopy",
    "asm statement": f'asm volatile("{MARK}");\nCopy',
    "number that is an expression": f"Param {MARK} = 1); system(\nCopy",
}


def emitted(text: str) -> str:
    """The device text that a sketch becomes at the known-good point."""
    point = seeds(PROBLEM, GPU, space_for(PROBLEM, GPU))[0]
    return translate(bind(parse(text), PROBLEM, point), PROBLEM, GPU).text


@pytest.mark.parametrize("what", list(HOSTILE))
def test_hostile_text_is_refused_or_leaves_no_trace(what: str) -> None:
    hostile = SKETCH.replace("Copy", HOSTILE[what], 1)
    assert hostile != SKETCH
    try:
        text = emitted(hostile)
    except (TLError, PlanError):
        return
    assert MARK not in text
    plain = [line for line in emitted(SKETCH).splitlines() if "// TL" not in line]
    assert [line for line in text.splitlines() if "// TL" not in line] == plain


@pytest.mark.parametrize("name", ["asm", "goto", "__asm__", "main", "blockIdx", "smem", "forward"])
def test_tensor_with_a_reserved_name_is_renamed_or_refused(name: str) -> None:
    hostile = re.sub(r"\bS\b", name, SKETCH)
    try:
        text = emitted(hostile)
    except (TLError, PlanError):
        return
    source = KernelSource(text, "sm_80", (), ())
    assert compile_source(source, "sm_80").resources  # it is a name, or it would not compile


def test_comment_lines_of_emitted_text_do_not_run_on() -> None:
    assert not [line for line in emitted(SKETCH).splitlines() if line.rstrip().endswith("\\")]


# ---- what device text can reach ----------------------------------------------------------------

OUTSIDE = {
    "a library call": ("cublasHandle_t handle; cublasHgemm(handle);", ""),
    "an external function": ("library_attention(Q);", 'extern "C" __device__ void '
                             "library_attention(T const*);"),
    "a launch of another kernel": ("other<<<1, 1>>>();", "__global__ void other() {}"),
    "a limit of the context": ("cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, 1);", ""),
    "a file": ('fopen("x", "w");', "#include <cstdio>"),
    "a header of the system": ("", "#include <unistd.h>"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(OUTSIDE))
def test_device_text_cannot_reach_the_host(what: str) -> None:
    before, outside = OUTSIDE[what]
    source = naive(PROBLEM)
    text = source.text.replace("constexpr int D =", f"{outside}\nconstexpr int D =", 1)
    text = text.replace("auto score =", f"{before}\n  auto score =", 1)
    with pytest.raises(CompileError):
        compile_source(KernelSource(text, source.arch, source.launches, source.tensors), "sm_90a")
