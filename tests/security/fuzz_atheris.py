"""Coverage-guided fuzzing of the readers, where `atheris` is installed (it is no dependency).

`pip install atheris`, then `python tests/security/fuzz_atheris.py [codec|manifest|text] -runs=N`
from the project's root; further arguments go to libFuzzer.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

with atheris.instrument_imports(include=["codegen.tl", "runs", "space"]):
    import fuzz
    import mutations

    from codegen.errors import TLError
    from codegen.tl.parser import parse
    from runs import codec
    from runs.errors import CodecError
    from runs.templates.manifest import ManifestError
    from runs.templates.manifest import read as read_manifest

FOLDER = Path(tempfile.mkdtemp(prefix="fuzz-"))


def text(data: bytes) -> None:
    """Parse TL."""
    with contextlib.suppress(TLError):
        parse(data.decode("utf-8", "surrogateescape"))


def journal_line(data: bytes) -> None:
    """Read a journal line."""
    with contextlib.suppress(CodecError):
        codec.decode_event(data.decode("utf-8", "replace"))


def manifest(data: bytes) -> None:
    """Read a manifest."""
    (FOLDER / "manifest.json").write_bytes(data)
    with contextlib.suppress(ManifestError):
        read_manifest(FOLDER)


TARGETS: dict[str, Callable[[bytes], None]] = {
    "text": text, "codec": journal_line, "manifest": manifest,
}  # fmt: skip


def corpus(name: str) -> list[bytes]:
    """Real inputs of a target, to start from."""
    match name:
        case "codec":
            return [json.dumps(line).encode() for line in fuzz.LINES_OF_A_JOURNAL]
        case "manifest":
            return [(fuzz.Folders.path() / "out" / "manifest.json").read_bytes()]
    return [t.encode() for t in mutations.TEXTS]


def main() -> None:
    """Fuzz the target that is named first."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 and sys.argv[1] in TARGETS else "text"
    start = FOLDER / "corpus"
    start.mkdir()
    for number, data in enumerate(corpus(name)):
        (start / str(number)).write_bytes(data)
    atheris.Setup([*sys.argv, str(start)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
