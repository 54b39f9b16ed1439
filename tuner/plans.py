"""Folders of several runs: each begins with one file that says what is to be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from runs import codec
from runs.errors import StoreError
from runs.files import private_folder, publish, write_synced
from runs.record import RunSpec

PLAN = "plan.json"


def begin_folder(
    root: Path, base: RunSpec, body: Callable[[RunSpec], dict[str, Any]]
) -> tuple[Path, RunSpec]:
    """Make a folder under `root` that is called by the run id of `base` and holds its plan.

    Where the name is taken it gets a number. `body` gives the plan of the specification as it is
    called then. Returns the folder and that specification. Raises StoreError.
    """
    number, named = 1, base
    try:
        root.mkdir(parents=True, exist_ok=True)
        while True:
            with private_folder(root) as private:
                write_synced(private / PLAN, codec.to_text(body(named)).encode() + b"\n")
                if publish(private, root / named.run_id):
                    return root / named.run_id, named
            number += 1
            named = replace(base, run_id=f"{base.run_id}-{number}")
    except OSError as error:
        raise StoreError(f"cannot write into {root}: {error.strerror}") from None
