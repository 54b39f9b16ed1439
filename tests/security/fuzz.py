"""Fuzzers of everything that reads what others wrote.

`python -m tests.security.fuzz --minutes 10` runs all of them in turn, each with new seeds, and
exits with 1 when one has found a fault; the test suite runs a few seconds of each. A fuzzer holds
that a reader gives its answer or its own error, soon, and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("runs", "tuner", "security")]

from decode_runs import FEW, ONE, exported, problem_of, spec_of  # noqa: E402
from exported import make_run, sealed  # noqa: E402
from fake_decode import PAGE  # noqa: E402
from fake_machine import A100, FULL, FakeMachine  # noqa: E402
from mutations import LINES, ODD, WORDS, mutated_document, mutated_text  # noqa: E402
from records import EVENTS, SPEC  # noqa: E402

from codegen.cute import translate  # noqa: E402
from codegen.errors import PlanError, TLError  # noqa: E402
from codegen.tl.bind import bind, sketch_choices  # noqa: E402
from codegen.tl.checker import check, repaired  # noqa: E402
from codegen.tl.parser import parse, read  # noqa: E402
from codegen.tl.printer import to_text  # noqa: E402
from llm_proposer.reply import read_program  # noqa: E402
from llm_proposer.seed_reply import read_seeds  # noqa: E402
from llm_proposer.seeds import seeds  # noqa: E402
from runs import codec  # noqa: E402
from runs.errors import CodecError, StoreError  # noqa: E402
from runs.export import export  # noqa: E402
from runs.record import RunSpec  # noqa: E402
from runs.store import JOURNAL, RunStore  # noqa: E402
from runs.store import SPEC as SPEC_FILE  # noqa: E402
from runs.templates.lengths import problem_lengths, split_count  # noqa: E402
from runs.templates.manifest import ManifestError  # noqa: E402
from runs.templates.manifest import read as read_manifest  # noqa: E402
from space.constraints import space_for  # noqa: E402
from space.gpu import gpu_named  # noqa: E402
from space.params import Point  # noqa: E402
from space.variant import DType, Problem  # noqa: E402
from tuner.cli import main as tune  # noqa: E402

ROUND = 50  #: examples of a seed
TURN_S = 5.0  #: before the next fuzzer has its turn
SLOW_S = 4.0  #: CPU seconds after which a reader counts as hung
PROBLEM = Problem("mha", DType.FP16, 64, 64, False)
POINT = Point.of({"BM": 64, "BN": 32, "warps": 4, "stages": 2, "swizzle": 128})
GPU = gpu_named("a100")
SPACE = space_for(PROBLEM, GPU)
BASE = seeds(PROBLEM, GPU, SPACE)[0]
LINE = re.compile(r"[ -~]*[^\\]|")


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """Hold that what is done inside takes no longer than SLOW_S of this process's time."""
    started = time.process_time()
    yield
    assert time.process_time() - started < SLOW_S, "too slow"


# ---- the fuzzers -------------------------------------------------------------------------------


def front_end(text: str, lower: bool = False) -> None:
    """Parse, check, print, and with `lower` bind and translate: an answer or a TLError, soon."""
    with soon():
        reading = read(text)
        for diagnostic in reading.diagnostics:
            assert diagnostic.message and diagnostic.hint and str(diagnostic).isprintable()
        try:
            sketch = parse(text)
        except TLError as error:
            assert error.diagnostics and len(error.diagnostics) < 2000
            return
        if sketch.statements:
            assert parse(to_text(sketch)).statements == sketch.statements
        check(sketch, PROBLEM, GPU, POINT)
        sketch_choices(sketch)
        repaired(sketch)
    if lower:
        try:
            source = translate(bind(sketch, PROBLEM, POINT), PROBLEM, GPU).text
        except (TLError, PlanError):
            return
        assert all(LINE.fullmatch(line) for line in source.split("\n"))


arbitrary = st.one_of(
    st.text(),
    st.lists(st.sampled_from([*WORDS, *ODD, "\n", " "]), max_size=80).map("".join),
    st.lists(st.sampled_from([*LINES, *ODD]), max_size=30).map("\n".join),
    st.tuples(st.sampled_from([*ODD, *WORDS]), st.integers(1, 3000)).map(lambda x: x[0] * x[1]),
)


def fuzz_text(text: str) -> None:
    """Any text through the front end."""
    front_end(text)


def fuzz_replies(number: int) -> None:
    """Damaged replies of models through the front end, to C++ where they are still programs."""
    front_end(mutated_text(random.Random(number)), lower=True)


def fuzz_proposals(number: int) -> None:
    """Damaged replies through the readers that feed a search."""
    rng = random.Random(number)
    text = mutated_text(rng)
    if rng.random() < 0.5:
        answer = [{"BM": 128, "BN": 64, "why": "fits"}, {"stages": 3}]
        text = mutated_document(rng, answer).decode("latin-1")
    with soon():
        read_program(text, PROBLEM, GPU)
        read_seeds(text, PROBLEM, GPU, SPACE, BASE)


DECODE_LENGTHS = problem_lengths(4, 32, 8, 1, 4096)
DECODE_SPEC = spec_of((ONE, FEW), PAGE)
DECODED = codec.to_json(EVENTS[0]) | {
    "problem": codec.to_json(problem_of(ONE, PAGE)),
    "outcome": {"outcome": "measured", "error_ratio": 0.9, "timings": []},
}
LINES_OF_A_JOURNAL = [json.loads(codec.encode_event(e, "2026-11-30T12:00:00")) for e in EVENTS]
LINES_OF_A_JOURNAL.append(LINES_OF_A_JOURNAL[0] | {"data": DECODED})


def fuzz_codec(number: int) -> None:
    """Damaged journal lines and specifications: a record that can be written, or CodecError."""
    rng = random.Random(number)
    with soon():
        text = mutated_document(rng, rng.choice(LINES_OF_A_JOURNAL)).decode("utf-8", "replace")
        with contextlib.suppress(CodecError):
            event = codec.decode_event(text)
            assert codec.decode_event(codec.encode_event(event, "")) == event
        text = mutated_document(rng, codec.to_json(rng.choice((SPEC, DECODE_SPEC)))).decode(
            "utf-8", "replace"
        )
        with contextlib.suppress(CodecError):
            spec = codec.from_text(RunSpec, text)
            assert codec.from_text(RunSpec, codec.to_text(spec)) == spec


def mutated_journal(rng: random.Random, data: bytes) -> bytes:
    """A journal with lines damaged, dropped, repeated, moved or cut."""
    lines = data.split(b"\n")[:-1]
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not lines:
            break
        at = rng.randrange(len(lines))
        match rng.randrange(7):
            case 0:
                del lines[at]
            case 1:
                lines.insert(rng.randrange(len(lines)), lines[at])
            case 2:
                rng.shuffle(lines)
            case _:
                with contextlib.suppress(ValueError, RecursionError):
                    lines[at] = mutated_document(rng, json.loads(lines[at]))
    whole = b"\n".join([*lines, b""])
    return whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.3 else whole


def fuzz_store(number: int) -> None:
    """A damaged journal: replayed or refused; opened to write it can be gone on with."""
    rng = random.Random(number)
    with tempfile.TemporaryDirectory() as root:
        with RunStore.create(Path(root), SPEC) as store:
            for event in EVENTS:
                store.append(event)
        journal = store.path / JOURNAL
        damaged = mutated_journal(rng, journal.read_bytes())
        journal.write_bytes(damaged)
        with soon():
            try:
                replay = RunStore.open(store.path).replay()
                assert replay.history is not None and replay.sound is not None
                assert len(replay.finalists) <= len(replay.events)
            except StoreError as error:
                assert str(error).isprintable()
            try:
                store = RunStore.open(store.path, write=True)
            except StoreError:
                assert journal.read_bytes() == damaged  # what is refused is not touched
                return
            with store:
                known = store.replay()
                assert not known.torn
                store.append(EVENTS[-1])
                assert store.replay().events == (*known.events, EVENTS[-1])


class Folders:
    """Folders that fuzzers start from, made once."""

    root: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def path(cls) -> Path:
        """A folder that holds an export and a short finished run."""
        if cls.root is None:
            cls.root = tempfile.TemporaryDirectory()
            root = Path(cls.root.name)
            export(make_run(root / "made"), root / "out")
            exported(root / "decode", (ONE, FEW), (0, PAGE))
            (root / "sketch.tl").write_text(FULL)
            words = ["--variant", "mha", "--gpu", "a100", "--shapes", "1,16,16,4096,4096,128,128"]
            words += ["--sketch", str(root / "sketch.tl"), "--budget", "3"]
            with contextlib.redirect_stdout(io.StringIO()):
                tune([*words, "--runs-dir", str(root / "runs")], FakeMachine(A100).machine())
        return Path(cls.root.name)


def sealed_text(text: bytes) -> bytes:
    """Give a changed manifest its own digest, so that the changes are read; else as it is."""
    try:
        data = json.loads(text)
        return json.dumps(sealed(data)).encode()
    except (ValueError, AttributeError, RecursionError):  # no object, or no JSON
        return text


def fuzz_manifest(number: int) -> None:
    """A damaged manifest: read within its bounds, or ManifestError."""
    rng = random.Random(number)
    folder = Folders.path() / rng.choice(("out", "decode/out"))
    manifest = folder / "manifest.json"
    good = manifest.read_bytes()
    try:
        manifest.write_bytes(sealed_text(mutated_document(rng, json.loads(good))))
        with soon(), contextlib.suppress(ManifestError):
            found = read_manifest(folder)
            for kernel in found.kernels.values():
                assert kernel.cubin.resolve().parent == folder.resolve() / "kernels"
                kernel.runs_on(9, 0)
                kernel.image()
                if kernel.splits is not None:
                    split_count(kernel.splits, DECODE_LENGTHS, 132)
    finally:
        manifest.write_bytes(good)


def fuzz_resume(number: int) -> None:
    """`tune --resume` on a damaged run folder: an exit code and clean lines, no traceback."""
    rng = random.Random(number)
    (run,) = (Folders.path() / "runs").iterdir()
    files = {name: (run / name).read_bytes() for name in (SPEC_FILE, JOURNAL)}
    try:
        if rng.random() < 0.5:
            (run / SPEC_FILE).write_bytes(mutated_document(rng, json.loads(files[SPEC_FILE])))
        if rng.random() < 0.7:
            (run / JOURNAL).write_bytes(mutated_journal(rng, files[JOURNAL]))
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            code = tune(["--resume", str(run), "--minutes", "0.02"], FakeMachine(A100).machine())
        assert code in (0, 1, 2, 3)
        assert all(line.isprintable() for line in said.getvalue().splitlines())
    finally:
        for name, data in files.items():
            (run / name).write_bytes(data)


numbers = st.integers(0, 2**63)  #: of a random state
#: name -> the property and what it is given
FUZZERS: dict[str, tuple[Callable[[Any], None], st.SearchStrategy[Any]]] = {
    "text": (fuzz_text, arbitrary),
    "replies": (fuzz_replies, numbers),
    "proposals": (fuzz_proposals, numbers),
    "codec": (fuzz_codec, numbers),
    "store": (fuzz_store, numbers),
    "manifest": (fuzz_manifest, numbers),
    "resume": (fuzz_resume, numbers),
}


def run(name: str, examples: int, number: int) -> None:
    """Run a fuzzer with so many examples from a seed; raises what it finds, shrunk."""
    check, strategy = FUZZERS[name]
    limits = settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=[*HealthCheck],
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )  # fmt: skip

    @limits
    @seed(number)
    @given(strategy)
    def fuzzer(value: Any) -> None:
        check(value)

    fuzzer()


def main(argv: list[str] | None = None) -> int:
    """Run every fuzzer for its share of the time, round after round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", default="", help="part of a fuzzer's name")
    args = parser.parse_args(argv)
    first = random.SystemRandom().randrange(2**32) if args.seed is None else args.seed
    counts = {name: 0 for name in FUZZERS if args.only in name}
    faults: set[str] = set()
    deadline = time.monotonic() + args.minutes * 60
    number = first
    while time.monotonic() < deadline and len(faults) < len(counts):
        for name in sorted(counts.keys() - faults):
            turn = min(deadline, time.monotonic() + TURN_S)
            while time.monotonic() < turn and name not in faults:
                number += 1
                counts[name] += ROUND
                try:
                    run(name, ROUND, number)
                except Exception as error:  # whatever a reader lets through is the finding
                    faults.add(name)
                    lines = traceback.format_exception(error, limit=-6)
                    notes = getattr(error, "__notes__", [])
                    print(f"{name}, seed {number}:\n{''.join([*lines, *notes])}", flush=True)
    for name, count in counts.items():
        print(f"{name:10} {count:8} examples  {'FAULT' if name in faults else 'clean'}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
