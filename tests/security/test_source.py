"""The program evaluates nothing and starts nothing that others wrote: read off its own source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(
    f.relative_to(ROOT)
    for package in ("space", "codegen", "runs", "llm_proposer", "tuner")
    for f in (ROOT / package).rglob("*.py")
    if not f.relative_to(ROOT).parts[1][0].isdigit()
)
#: names that run, load or start what they are given
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "breakpoint",
    "os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.spawnl", "os.spawnv",
    "os.posix_spawn", "pty.spawn", "commands.getoutput",
    "subprocess.getoutput", "subprocess.getstatusoutput",
    "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.load", "marshal.loads",
    "shelve.open", "dill.loads", "cloudpickle.loads", "joblib.load", "torch.load", "torch.jit.load",
    "numpy.load", "np.load", "yaml.load", "yaml.unsafe_load", "runpy.run_path", "runpy.run_module",
    "importlib.util.spec_from_file_location", "code.interact", "ctypes.CDLL", "types.FunctionType",
    "tempfile.mktemp", "tarfile.open", "shutil.unpack_archive", "zipfile.ZipFile",
}  # fmt: skip
SUBPROCESS = {"run", "Popen", "call", "check_call", "check_output"}
#: file -> what it may use, and why
ALLOWED = {
    # jobs come down a pipe from the parent alone; what comes up meets the restricted class
    "tuner/worker.py": {"pickle.loads", "pickle.Unpickler", "subprocess.Popen"},
    # the file that the user names by --reference, at its digest and not from a run's folder
    "tuner/evaluate/function.py": {"importlib.util.spec_from_file_location"},
    # arrays that a process of ours wrote; pickles in them are refused
    "tuner/evaluate/gate.py": {"numpy.load"},
    # a fixed command without a shell; its argument is a folder of ours
    "tuner/sanitizer.py": {"subprocess.Popen"},
    # the driver's library by its fixed name
    "runs/templates/tensor_map.py": {"ctypes.CDLL"},
}
#: imports the module that a table of literals in the same file names
IMPORTERS = {"tuner/evaluate/peers.py"}


def dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{dotted(value)}.{attr}"
    return "?"


def aliases(tree: ast.AST) -> dict[str, str]:
    """What each imported name stands for."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return found


def names_used(tree: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Every dotted name in a file, imports resolved."""
    known = aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            head, _, rest = dotted(node).partition(".")
            head = known.get(head, head)
            yield (f"{head}.{rest}" if rest else head), node


def faults(source: str, allowed: frozenset[str] | set[str] = frozenset()) -> list[str]:
    tree = ast.parse(source)
    known = aliases(tree)
    found = []
    for name, node in names_used(tree):
        module, _, function = name.rpartition(".")
        starts = module == "subprocess" and function in SUBPROCESS
        if (name in FORBIDDEN or starts) and name not in allowed:
            found.append(f"line {node.lineno}: {name}")
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        for keyword in call.keywords:
            if keyword.arg == "shell" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                found.append(f"line {call.lineno}: shell=")
        head, _, rest = dotted(call.func).partition(".")
        name = f"{known.get(head, head)}.{rest}" if rest else known.get(head, head)
        if name == "importlib.import_module" and not isinstance(call.args[0], ast.Constant):
            found.append(f"line {call.lineno}: import of a computed name")
    return found


@pytest.mark.parametrize("file", FILES, ids=str)
def test_nothing_is_evaluated_unpickled_or_started(file: Path) -> None:
    allowed = set(ALLOWED.get(file.as_posix(), ()))
    found = faults((ROOT / file).read_text(), allowed)
    if file.as_posix() in IMPORTERS:
        found = [f for f in found if "computed name" not in f]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "eval(x)", "exec(x)", "import os; os.system(x)", "from os import system; system(x)",
        "import os as o; o.popen(x)", "import pickle as p; p.loads(x)",
        "from pickle import loads as l\nl(x)", "import subprocess; subprocess.run(x)",
        "from subprocess import Popen; Popen(x)", "f(x, shell=True)", "f(x, shell=flag)",
        "import torch; torch.load(x)", "import numpy as np; np.load(x)",
        "import importlib; importlib.import_module(x)", "g = eval", "__import__(x)",
    ],
)  # fmt: skip
def test_the_walk_sees_it(line: str) -> None:
    assert faults(line)


def test_the_exceptions_are_still_needed() -> None:
    for file, allowed in ALLOWED.items():
        used = {name for name, _ in names_used(ast.parse((ROOT / file).read_text()))}
        assert allowed <= used


def test_the_worker_unpickles_only_through_its_own_class() -> None:
    """`pickle.loads` reads jobs in `main`; the parent's end reads through `loads`."""
    tree = ast.parse((ROOT / "tuner/worker.py").read_text())
    places = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and dotted(node.func) == "pickle.loads"
    ]
    assert places == ["main"]
