"""What leaves a run: a Python package with the best kernel of each shape.

__init__.py, attention.py, ...         the code that runs them
manifest.json                          which, how fast, how measured
kernels/NAME.cu, kernels/NAME.cubin    one pair for each program
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from codegen.kernel import ArgKind
from runs import codec
from runs.errors import ExportError, NothingToExport, StoreError
from runs.files import private_folder, publish, read_regular, write_synced
from runs.kernels import StoredKernel
from runs.rebuild import kernel_of
from runs.record import (
    Basis,
    Finalist,
    Measured,
    Note,
    Reference,
    RunSpec,
    Timing,
    TrialRecord,
)
from runs.store import Replay, RunStore
from runs.templates import manifest as manifests
from space.gpu import gpu_named
from space.variant import Phase, Problem, Shape, flops

#: a folder with kernels that decode says so; one without is what version 1 was
FORMAT, VERSION, DECODE_VERSION = "tltune-export", 1, 2
TEMPLATES = Path(__file__).parent / "templates"
#: template -> its name in the exported package
FILES = {
    "package.py": "__init__.py",
    "attention.py": "attention.py",
    "cache.py": "cache.py",
    "checks.py": "checks.py",
    "choice.py": "choice.py",
    "description.py": "description.py",
    "launch.py": "launch.py",
    "lengths.py": "lengths.py",
    "tensor_map.py": "tensor_map.py",
    "manifest.py": "manifest.py",
    "workspace.py": "workspace.py",
}
PASSED = ("Q", "K", "V")  #: what `attention` gives to a kernel
SCALARS = ("scale",)


class Checked(StrEnum):
    """How much of a kernel's output on a shape was compared with the right one."""

    WHOLE = "every element"
    SAMPLE = "a sample"
    INTERPRETER = "none: no device ran it"


@dataclass(frozen=True, slots=True)
class Winner:
    """The kernel of one shape and the run that chose it."""

    store: RunStore
    shape: Shape
    record: TrialRecord
    timing: Timing
    #: whether the time comes from the final, interleaved timing, which checks every element
    final: bool
    peers: tuple[Finalist, ...]


def export(runs: RunStore | Sequence[RunStore], out: Path) -> dict[str, Any]:
    """Write the best kernel of each shape of one or more runs as the folder `out`.

    The folder appears whole or not at all; an earlier export in its place is replaced, anything
    else is refused. Returns the manifest. Raises ExportError, or StoreError when a run is damaged.
    """
    stores = [runs] if isinstance(runs, RunStore) else list(runs)
    _refuse_foreign(out)
    replays = [(store, store.replay()) for store in stores]
    _refuse_mixed([store for store, _ in replays])
    winners = _best([w for store, replay in replays for w in winners_of(store, replay)])
    if not winners:
        names = ", ".join(str(s.path) for s in stores)
        raise NothingToExport(f"nothing to export: no right kernel in {names}")
    kernels: dict[str, StoredKernel] = {}
    manifest = _manifest(replays, winners, kernels)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with private_folder(out.parent) as private:
            _write(private, manifest, kernels)
            _replace(private, out)
    except OSError as error:
        raise ExportError(f"cannot write {out}: {error.strerror}") from None
    return manifest


def winners_of(store: RunStore, replay: Replay) -> list[Winner]:
    """Return the kernel that a run chose for each of its shapes, where it has one.

    The choice of the final timing stands; a run stopped before that gives its best trial.
    """
    finalists, history = replay.finalists, replay.sound
    records = {r.index: r for r in history}
    found = []
    for shape in store.spec.shapes:
        here = [f for f in finalists if f.shape == shape]
        peers = tuple(f for f in here if f.trial is None)
        chosen = [f for f in here if f.chosen and f.trial is not None]
        if chosen:
            final = chosen[-1]
            record = records.get(-1 if final.trial is None else final.trial)
            if record is None or not isinstance(record.outcome, Measured):
                raise StoreError(f"{store.path}: {final.name} was chosen but is no right trial")
            # where no final timing could be had, its place is taken by the search's own times
            timed = final.timing not in record.outcome.timings
            found.append(Winner(store, shape, record, final.timing, timed, peers))
        elif (best := history.best(shape)) is not None:
            found.append(Winner(store, shape, best[0], best[1], False, peers))
    return found


def _refuse_mixed(stores: Sequence[RunStore]) -> None:
    """Raise ExportError unless all runs compute one function: `attention` cannot tell them apart.

    What the function is called and where its file lies does not matter, its text does.
    """
    kinds: dict[object, RunStore] = {}
    for store in stores:
        r = store.spec.reference
        kinds.setdefault(None if r is None else (r.digest, r.function, r.scalars), store)
    if len(kinds) > 1:
        a, b = list(kinds.values())[:2]
        said = [s.spec.reference.name if s.spec.reference else "plain attention" for s in (a, b)]
        raise ExportError(
            f"{a.path} computes {said[0]} and {b.path} {said[1]}, or one with other numbers; "
            f"export them into folders of their own"
        )


def _best(winners: Sequence[Winner]) -> list[Winner]:
    """Keep one winner of each shape, dtype, phase, page size and GPU.

    Measured before predicted, then faster.
    """
    kept: dict[tuple[Shape, str, str, int, str], Winner] = {}
    for w in winners:
        problem = w.record.problem
        key = (w.shape, problem.dtype, problem.phase, problem.page, w.store.spec.gpu)
        if key not in kept or _rank(w) < _rank(kept[key]):
            kept[key] = w
    return list(kept.values())


def _rank(winner: Winner) -> tuple[bool, bool, float]:
    predicted = winner.timing.basis is Basis.PREDICTED
    return predicted, not winner.final, winner.timing.median_us


# ---- the manifest ------------------------------------------------------------------------------


def _manifest(
    replays: Sequence[tuple[RunStore, Replay]],
    winners: Sequence[Winner],
    kernels: dict[str, StoredKernel],
) -> dict[str, Any]:
    """Return manifest.json's content; fills `kernels` by the names given to them."""
    entries: dict[str, dict[str, Any]] = {}
    shapes = []
    for w in winners:
        stored = kernel_of(w.store, w.record)
        name = f"{w.record.problem.key}-{stored.cubin.key[:12]}"
        if name not in entries:
            entries[name] = _kernel_entry(name, w, stored)
            kernels[name] = stored
        shapes.append(_shape_entry(w, name))
    gpus = dict.fromkeys(store.spec.gpu for store, _ in replays)
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "version": DECODE_VERSION if any(_decodes(w.record.problem) for w in winners) else VERSION,
        "gpus": {g: {"title": gpu_named(g).title, "arch": gpu_named(g).arch} for g in gpus},
        "kernels": entries,
        "shapes": shapes,
        "runs": [_run_entry(store.spec, replay.notes) for store, replay in replays],
    }
    return manifest | {"sha256": manifests.digest_of(manifest)}


def _decodes(problem: Problem) -> bool:
    return problem.phase is Phase.DECODE


def _shape_entry(w: Winner, kernel: str) -> dict[str, Any]:
    assert isinstance(w.record.outcome, Measured)
    us, problem = w.timing.median_us, w.record.problem
    entry = {
        **codec.to_json(w.shape),
        "dtype": problem.dtype.value,
        "gpu": w.store.spec.gpu,
        "kernel": kernel,
        "run": w.store.spec.run_id,
        "trial": w.record.index,
        "basis": w.timing.basis.value,
        "timed": "final" if w.final else "search",
        "checked": _checked(w).value,
        "median_us": us,
        "low_us": w.timing.low_us,
        "high_us": w.timing.high_us,
        "samples": w.timing.samples,
        "tflops": round(flops(w.shape) / us / 1e6, 1),
        "error_ratio": w.record.outcome.error_ratio,
        "peers_us": {f.name: f.timing.median_us for f in w.peers},
    }
    if _decodes(problem):
        entry |= {"phase": problem.phase.value, "page": problem.page, "splits": w.timing.splits}
    return entry


def _checked(w: Winner) -> Checked:
    if w.timing.basis is Basis.PREDICTED:
        return Checked.INTERPRETER
    return Checked.WHOLE if w.final else Checked.SAMPLE


def remarks(manifest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a line for each kind of check that some shapes of an export lack."""
    counts = Counter(s["checked"] for s in manifest["shapes"])
    found = []
    if count := counts[Checked.SAMPLE]:
        found.append(
            f"{count} of these shapes come from a run without its final checks: a sample of their "
            "outputs was compared; tune verify looks at every element"
        )
    if count := counts[Checked.INTERPRETER]:
        found.append(
            f"{count} of these shapes are predicted: no device has run their kernels; "
            "tune verify does, where the card is"
        )
    return tuple(found)


def _kernel_entry(name: str, w: Winner, stored: StoredKernel) -> dict[str, Any]:
    source, cubin = stored.source, stored.cubin
    _check_callable(w, stored)
    reference = w.store.spec.reference
    entry = {
        "variant": w.record.problem.variant,
        **({} if reference is None else {"computes": _function_entry(reference)}),
        "sketch": w.record.sketch,
        "parameters": w.record.point.as_dict(),
        "arch": cubin.arch,
        "source": f"kernels/{name}.cu",
        "source_sha256": source.digest,
        "cubin": f"kernels/{name}.cubin",
        "cubin_sha256": hashlib.sha256(cubin.image).hexdigest(),
        "nvrtc": cubin.nvrtc_version,
        "launches": codec.to_json(source.launches),
        "workspaces": codec.to_json(source.workspaces),
        "resources": codec.to_json(cubin.resources),
    }
    if source.splits is not None:
        entry["splits"] = codec.to_json(source.splits)
    return entry


def _function_entry(reference: Reference) -> dict[str, Any]:
    """What the kernel was checked against, in place of plain attention."""
    return {
        "function": reference.name,
        "file_sha256": reference.digest,
        "scalars": dict(reference.scalars),
    }


def _run_entry(spec: RunSpec, notes: Sequence[Note]) -> dict[str, Any]:
    return {
        "run_id": spec.run_id,
        "variant": spec.variant,
        "gpu": spec.gpu,
        "dtype": spec.dtype.value,
        "budget": spec.budget,
        "seed": spec.seed,
        "measure": spec.measure.value,
        "notes": [{"topic": n.topic, "values": n.as_dict()} for n in notes],
    }


def _check_callable(w: Winner, stored: StoredKernel) -> None:
    """Raise ExportError when a kernel wants more than `attention` has to give."""
    inputs = {name for name, role in stored.source.tensors if role == "in"}
    outputs = [name for name, role in stored.source.tensors if role == "out"]
    who = f"trial {w.record.index} of {w.store.path}"
    if extra := sorted(inputs - set(PASSED)):
        raise ExportError(f"{who} reads tensor {extra[0]!r}; attention(q, k, v) has none")
    if outputs != ["O"]:
        raise ExportError(f"{who} writes {', '.join(outputs)}; attention returns O alone")
    if _decodes(w.record.problem) and stored.source.splits is None:
        raise ExportError(f"{who} decodes, and its kernel does not say how to split the keys")
    for launch in stored.source.launches:
        for arg in launch.args:
            if arg.kind is ArgKind.FLOAT and arg.name not in SCALARS:
                raise ExportError(f"{who} takes {arg.name!r}; attention has only a scale")


# ---- files -------------------------------------------------------------------------------------


def _write(folder: Path, manifest: dict[str, Any], kernels: Mapping[str, StoredKernel]) -> None:
    for template, name in FILES.items():
        write_synced(folder / name, (TEMPLATES / template).read_bytes())
    (folder / "kernels").mkdir()
    for name, stored in kernels.items():
        write_synced(folder / "kernels" / f"{name}.cu", stored.source.text.encode())
        write_synced(folder / "kernels" / f"{name}.cubin", stored.cubin.image)
    text = json.dumps(manifest, indent=1, allow_nan=False)
    write_synced(folder / "manifest.json", text.encode() + b"\n")


def _refuse_foreign(out: Path) -> None:
    """Raise ExportError when `out` holds something that is no export of ours."""
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise ExportError(f"{out} is a file; name a new folder")
    if any(out.iterdir()) and not _is_export(out):
        raise ExportError(f"{out} is not empty and is no earlier export; name a new folder")


def _is_export(folder: Path) -> bool:
    try:
        head = json.loads(read_regular(folder / "manifest.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT


def _replace(private: Path, out: Path) -> None:
    """Publish a finished folder as `out`; an earlier export there is taken away first."""
    if publish(private, out):
        return
    old = Path(tempfile.mkdtemp(prefix=".old-", dir=out.parent))
    out.rename(old / "export")
    try:
        if not publish(private, out):
            raise FileExistsError(errno.EEXIST, "another export is being written there")
    except OSError:
        with contextlib.suppress(OSError):  # what came in between stands; ours stays in `old`
            (old / "export").rename(out)
            old.rmdir()
        raise
    shutil.rmtree(old, ignore_errors=True)
