"""Imports follow the layers: space ← codegen ← runs ← llm_proposer ← tuner.

And heavy packages stay where they belong, so that `tune --help` starts fast and an exported
folder needs nothing of this project.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("space", "codegen", "runs", "llm_proposer", "tuner")
ALLOWED = {
    "space": set(),
    "codegen": {"space"},
    "runs": {"space", "codegen"},
    "llm_proposer": {"space", "codegen", "runs"},
    "tuner": {"space", "codegen", "runs", "llm_proposer"},
}
#: third-party package -> path prefixes that may import it; elsewhere it is a fault
HOMES = {
    "torch": ("tuner/evaluate/", "runs/templates/"),
    "optuna": ("tuner/sampler.py",),
    "openai": ("llm_proposer/providers/",),
    "ray": ("tuner/pools",),
    "triton": ("tuner/evaluate/",),
    "typer": ("tuner/",),
    "rich": ("tuner/",),
    "joblib": ("tuner/",),
    "numpy": ("codegen/tl/", "tuner/"),
    "cuda": ("codegen/nvrtc.py", "runs/templates/launch.py", "tuner/"),
}
FILES = sorted(
    p.relative_to(ROOT)
    for package in PACKAGES
    for p in (ROOT / package).rglob("*.py")
    if not any(part[0].isdigit() or part == "published" for part in p.relative_to(ROOT).parts)
)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every absolute import of a file, at any depth, with its line."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                yield node.module or "", node.lineno
        elif isinstance(node, ast.Call) and _name(node.func) in ("import_module", "__import__"):
            named = [a.value for a in node.args[:1] if isinstance(a, ast.Constant)]
            yield from ((str(name), node.lineno) for name in named)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@pytest.mark.parametrize("path", FILES, ids=str)
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    package = path.parts[0]
    for module, line in imports(path):
        top = module.split(".")[0]
        where = f"{path}:{line} imports {module}"
        if top in PACKAGES:
            assert top == package or top in ALLOWED[package], where
        elif top not in sys.stdlib_module_names:
            homes = HOMES.get(top, ())
            assert path.as_posix().startswith(homes), where


def test_the_walk_sees_the_files_it_is_for() -> None:
    names = {p.as_posix() for p in FILES}
    assert {"space/variant.py", "codegen/nvrtc.py", "runs/templates/launch.py"} <= names
    assert "cuda.bindings.nvrtc" in {m for m, _ in imports(Path("codegen/nvrtc.py"))}


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parts[:2] == ("runs", "templates")], ids=str
)
def test_templates_import_nothing_of_the_project(path: Path) -> None:
    assert not [m for m, _ in imports(path) if m.split(".")[0] in PACKAGES]


@pytest.mark.parametrize("path", [p for p in FILES if "tl" in p.parts[:2]], ids=str)
def test_tl_never_imports_the_back_end(path: Path) -> None:
    assert not [m for m, _ in imports(path) if m.startswith("codegen.cute")]


def test_the_interpreter_shares_only_the_tree_with_the_translator() -> None:
    for path in (p for p in FILES if p.parts[:2] == ("codegen", "cute")):
        assert not [m for m, _ in imports(path) if m.startswith("codegen.tl.interpreter")], path


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from tuner import cli\n"
        "print(sorted({'torch', 'optuna', 'openai', 'numpy', 'joblib', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_help_answers_at_once() -> None:
    code = "import sys; from tuner.cli import main; sys.exit(main(['--help']))"
    times = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True)
        times.append(time.perf_counter() - started)
        assert done.returncode == 0, done.stderr.decode()
    assert min(times) < 0.3
