"""What `tune verify` judges: the chosen kernels of a run, or all kernels of an exported folder.

A folder is data here, also an exported one: its Python files are compared, never imported.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runs.export import FILES, TEMPLATES, winners_of
from runs.files import read_regular
from runs.rebuild import stored_kernel
from runs.record import Reference
from runs.store import RunStore
from runs.templates import manifest as manifests
from space.variant import Phase, Problem, Shape, dtype_named
from tuner.errors import NothingFound, UsageError
from tuner.reference import read_reference


@dataclass(frozen=True, slots=True)
class Subject:
    """One kernel on disk and the shapes it was chosen for."""

    name: str
    gpu: str
    problem: Problem
    shapes: tuple[Shape, ...]
    folder: Path
    #: the cubin's key in a run, the kernel's name in an exported folder
    kernel: str
    exported: bool
    reference: Reference | None = None  #: what it must agree with; plain attention for None


@dataclass(frozen=True, slots=True)
class Verified:
    """A kernel that is right: on how many problems, and its worst error over plain attention's."""

    problems: int
    error_ratio: float


def subjects_of(target: Path) -> tuple[Subject, ...]:
    """Return the kernels of a run or an exported folder, read and checked once.

    Raises UsageError, NothingFound, or StoreError when a run is damaged.
    """
    if (target / "spec.json").is_file():
        found = _of_run(target)
    elif (target / "manifest.json").is_file():
        found = _of_export(target)
    else:
        raise UsageError(
            f"{target} is neither a run (spec.json) nor an exported folder (manifest.json)"
        )
    if not found:
        raise NothingFound(f"no right kernel in {target}")
    return found


def _of_run(folder: Path) -> tuple[Subject, ...]:
    store = RunStore.open(folder)
    winners = winners_of(store, store.replay())
    found = []
    for index in dict.fromkeys(w.record.index for w in winners):
        mine = [w for w in winners if w.record.index == index]
        record = mine[0].record
        stored_kernel(store, record)  # a damaged one is refused here, with its reason
        found.append(
            Subject(
                f"{record.problem.key} trial {index}", store.spec.gpu, record.problem,
                tuple(w.shape for w in mine), folder, record.cubin_key, exported=False,
                reference=store.spec.reference,
            )
        )  # fmt: skip
    return tuple(found)


def _of_export(folder: Path) -> tuple[Subject, ...]:
    try:
        manifest = manifests.read(folder)
        for entry in manifest.kernels.values():
            entry.image()
    except manifests.ManifestError as error:
        raise UsageError(str(error)) from None
    found = []
    for name in manifest.kernels:
        keys = [key for key, kernel in manifest.shapes.items() if kernel == name]
        for kind in dict.fromkeys(_kind(k) for k in keys):
            mine = [k for k in keys if _kind(k) == kind]
            shapes, first = tuple(_shape(k) for k in mine), mine[0]
            problem = Problem(
                _variant(shapes), dtype_named(first.dtype), first.head_dim, first.head_dim_v,
                first.causal, Phase(first.phase), first.page,
            )  # fmt: skip
            found.append(Subject(name, first.gpu, problem, shapes, folder, name, exported=True))
    return tuple(found)


def referred(target: Path, said: str | None, subjects: Sequence[Subject]) -> tuple[Subject, ...]:
    """Return `subjects` with what each must agree with; `said` is the command's --reference.

    A run names its reference. An export names one by the digest of a file that it does not hold:
    that file has to be given. Raises UsageError.
    """
    functions = () if not subjects[0].exported else _functions(target)
    if not functions:
        if said is None:
            return tuple(subjects)
        kind = "an exported folder" if subjects[0].exported else "a run, which names its own"
        raise UsageError(
            f"--reference {said}: {target} is {kind} and needs none; leave --reference out"
        )
    wanted = functions[0]
    if len(functions) > 1:
        names = ", ".join(f.name for f in functions)
        raise UsageError(f"{target} computes several functions, {names}; export each run alone")
    if said is None:
        raise UsageError(
            f"{target} computes {wanted.name}, whose text is not in it; give that file with "
            f"--reference FILE.py:function, or verify the run it is from"
        )
    given = read_reference(said, ()).reference
    if given.function != wanted.name.rpartition(":")[2] or given.digest != wanted.file_sha256:
        raise UsageError(
            f"--reference {said}: {target} computes {wanted.name} of a file with SHA-256 "
            f"{wanted.file_sha256[:12]}, and this one's is {given.digest[:12]}; give the file that "
            f"it was made with"
        )
    reference = replace(given, scalars=wanted.scalars)
    return tuple(replace(s, reference=reference) for s in subjects)


def _functions(folder: Path) -> tuple[manifests.Function, ...]:
    try:
        return manifests.functions(folder)
    except manifests.ManifestError as error:
        raise UsageError(str(error)) from None


def _kind(key: manifests.ShapeKey) -> tuple[object, ...]:
    """What a kernel does not take at run time, head dims aside: it has one pair of them."""
    return key.dtype, key.causal, key.gpu, key.phase, key.page


def _shape(key: manifests.ShapeKey) -> Shape:
    return Shape(*key[:7], causal=key.causal)


def _variant(shapes: Sequence[Shape]) -> str:
    """How heads are shared: what the small problems of the judge take their heads from."""
    if any(s.latent for s in shapes):
        return "mla"
    ratios = {(s.heads == s.kv_heads, s.kv_heads == 1) for s in shapes}
    if ratios <= {(True, False), (True, True)}:
        return "mha"
    return "mqa" if ratios == {(False, True)} else "gqa"


def strange_files(target: Path) -> tuple[str, ...]:
    """Return the names of an exported folder's files that are not what they pass for.

    Those are Python files that this version would not write, and kernels' texts that are others
    than those compiled.
    """
    if not (target / "manifest.json").is_file():
        return ()
    code = [n for template, n in FILES.items() if not _same(target / n, TEMPLATES / template)]
    return (*code, *_strange_texts(target))


def _strange_texts(target: Path) -> list[str]:
    try:
        kernels = json.loads(read_regular(target / "manifest.json"))["kernels"].values()
        known = {str(k["source"]): k["source_sha256"] for k in kernels}
        names = sorted(f"kernels/{path.name}" for path in (target / "kernels").glob("*.cu"))
        found = {n: hashlib.sha256(read_regular(target / n)).hexdigest() for n in names}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ["kernels"]
    return [ascii(n)[1:-1] for n in names if known.get(n) != found[n]]


def _same(file: Path, template: Path) -> bool:
    try:
        return read_regular(file) == template.read_bytes()
    except OSError:
        return False
