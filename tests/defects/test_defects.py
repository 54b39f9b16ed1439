"""Seeded defects: each changes one line of today's text and compiles; the judge catches each."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator

import pytest

from codegen.kernel import KernelSource
from runs.record import Broken, Measured, Rejected, Stage, TrialClass
from tests.defects.build import image_of, images_of, seeded
from tests.defects.defects import DEFECTS, Defect, NotFound
from tests.defects.held_up import LATE, held_up
from tests.defects.run import is_caught, job_of, told
from tests.defects.subjects import SUBJECTS, emitted
from tuner.devices import device_names
from tuner.worker import Supervisor, Worker

KEYS = [d.key for d in DEFECTS]
BY_KEY = dict(zip(KEYS, DEFECTS, strict=True))


def test_there_are_enough_for_each_back_end_and_no_two_alike() -> None:
    assert max(Counter(KEYS).values()) == 1
    counts = Counter(d.subject.split()[0] for d in DEFECTS)
    assert counts["mma_sync"] >= 12 and counts["hopper"] >= 12 and counts["decode"] >= 12
    assert len({seeded(d).text for d in DEFECTS}) == len(DEFECTS)


@pytest.mark.parametrize("key", KEYS)
def test_defect_changes_one_line_of_todays_text(key: str) -> None:
    defect = BY_KEY[key]
    right, wrong = emitted(defect.subject).text.split("\n"), seeded(defect).text.split("\n")
    assert len(right) == len(wrong)
    assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 1


@pytest.mark.parametrize("key", KEYS)
def test_defect_compiles(key: str) -> None:
    assert image_of(seeded(BY_KEY[key])).startswith(b"\x7fELF")


def test_defect_that_finds_no_line_raises() -> None:
    with pytest.raises(NotFound, match="0 lines match"):
        Defect("none", "hopper full", "no such line", ";").seed(emitted("hopper full").text)
    with pytest.raises(NotFound, match="stays as it is"):
        Defect("same", "hopper full", "int N", "int N").seed(emitted("hopper full").text)


def test_only_a_rejection_counts_as_caught() -> None:
    wrong = Rejected(TrialClass.WRONG_OUTPUT, Stage.VERIFY, "zeros\nand more")
    assert is_caught(wrong) and told(wrong) == "wrong_output: zeros and more"
    assert not is_caught(Broken(Stage.LAUNCH, "no device"))
    assert not is_caught(Measured((), 1.0)) and told(Measured((), 1.0)).startswith("ok: ")


@pytest.mark.parametrize("name", [n for n in SUBJECTS if not n.startswith("decode")])
def test_held_up_kernel_is_the_same_with_delays(name: str) -> None:
    source = emitted(name)
    late = held_up(source)
    assert image_of(late).startswith(b"\x7fELF")
    kept = late.text.replace(LATE, "")
    lines = [line for line in kept.split("\n") if line.strip() != "hold_up();"]
    assert [x for x in lines if x] == [x for x in source.text.split("\n") if x]
    assert late.launches == source.launches
    assert kept.count("hold_up();") >= 15


def test_warps_are_held_up_between_their_last_barrier_and_the_store() -> None:
    """What the missing barrier should have waited for comes late."""
    defect = BY_KEY["hopper causal: barrier missing before the store"]
    text = held_up(seeded(defect)).text
    last = text.rindex("named_sync(1 + consumer, 128);")
    store = text.index("SM90_TMA_STORE_4D", last)
    between = text[last:store]
    assert re.search(r"hold_up\(\);\s+SM90_U32x4_STSM_N", between)
    assert "named_sync" not in between[1:]


def test_kernel_without_shared_work_cannot_be_held_up() -> None:
    with pytest.raises(ValueError, match="touches what warps share"):
        held_up(KernelSource("__global__ void f() {\n}\n", "sm_80", (), ()))


hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not any(n in name for name in device_names() for n in ("H100", "H200")),
        reason="no Hopper card",
    ),
]


class TestOnDevice:
    pytestmark = hopper

    @pytest.fixture(scope="class")
    def supervisor(self) -> Iterator[Supervisor]:
        worker = Worker(0)
        yield Supervisor(worker)
        worker.close()

    @staticmethod
    @functools.cache
    def images() -> dict[str, bytes]:
        """All cubins by the digest of their text."""
        sources = [*map(emitted, SUBJECTS), *map(seeded, DEFECTS)]
        return dict(zip((s.digest for s in sources), images_of(sources), strict=True))

    @pytest.mark.parametrize("name", list(SUBJECTS))
    def test_kernel_as_emitted_is_right(self, supervisor: Supervisor, name: str) -> None:
        source: KernelSource = emitted(name)
        image = self.images()[source.digest]
        outcome = supervisor.judge(job_of(SUBJECTS[name], source, image))
        assert isinstance(outcome, Measured), told(outcome)

    @pytest.mark.parametrize("name", list(SUBJECTS))
    def test_right_kernel_is_right_when_warps_are_held_up(
        self, supervisor: Supervisor, name: str
    ) -> None:
        source = held_up(emitted(name))
        outcome = supervisor.judge(job_of(SUBJECTS[name], source, image_of(source)))
        assert isinstance(outcome, Measured), told(outcome)

    @pytest.mark.parametrize("key", [k for k in KEYS if "arrier missing" in k])
    def test_missing_barrier_is_caught_when_warps_are_held_up(
        self, supervisor: Supervisor, key: str
    ) -> None:
        defect = BY_KEY[key]
        source = held_up(seeded(defect))
        outcome = supervisor.judge(job_of(SUBJECTS[defect.subject], source, image_of(source)))
        assert is_caught(outcome), told(outcome)

    @pytest.mark.parametrize("key", KEYS)
    def test_defect_is_caught(self, supervisor: Supervisor, key: str) -> None:
        defect = BY_KEY[key]
        source = seeded(defect)
        image = self.images()[source.digest]
        outcome = supervisor.judge(job_of(SUBJECTS[defect.subject], source, image))
        assert is_caught(outcome), told(outcome)


def test_subject_text_is_what_the_digest_names() -> None:
    source = emitted("mma_sync causal")
    assert dataclasses.replace(source, text=source.text + " ").digest != source.digest
