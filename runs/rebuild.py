"""A kernel of a run whose folder came without it, built again from the sketch and the point.

Published runs are kept without kernels: the translator is deterministic, so the text that ran is
the text that is emitted again, which the recorded digest proves.
"""

from __future__ import annotations

from codegen import nvrtc
from codegen.cute import translate
from codegen.errors import CodegenError
from codegen.kernel import KernelSource
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from runs.errors import StoreError
from runs.kernels import StoredKernel
from runs.record import TrialRecord
from runs.store import RunStore
from space.gpu import gpu_named


def kernel_of(store: RunStore, record: TrialRecord) -> StoredKernel:
    """Return a right trial's kernel as it was stored, or built again where none was kept.

    Raises StoreError when the stored one is damaged or another's, or when this version does not
    emit the text that ran, or cannot build it.
    """
    if store.has_kernel(record.cubin_key):
        return stored_kernel(store, record)
    source = source_of(store, record)
    try:
        return StoredKernel(source, nvrtc.compile_source(source, gpu_named(store.spec.gpu).arch))
    except CodegenError as error:
        raise StoreError(f"{_called(store, record)} cannot be built again: {error}") from None


def stored_kernel(store: RunStore, record: TrialRecord) -> StoredKernel:
    """Return the kernel that a trial was judged by, as it was stored.

    Raises StoreError when it is absent or damaged, or when its text is not the trial's.
    """
    stored = store.kernel(record.cubin_key)
    if stored.source.digest != record.source_digest:
        raise StoreError(
            f"{store.path}: trial {record.index} names kernel {record.cubin_key[:12]}, whose text "
            f"is not the one that it was judged by; the journal or the kernel was changed"
        )
    return stored


def source_of(store: RunStore, record: TrialRecord) -> KernelSource:
    """Return the text of a trial's kernel, stored or emitted again; nothing is compiled.

    Raises StoreError when the stored one is damaged or this version does not emit the text that
    ran.
    """
    if store.has_kernel(record.cubin_key):
        return stored_kernel(store, record).source
    sketches, what = dict(store.spec.sketches), _called(store, record)
    if record.sketch not in sketches:  # a model gave it to the run
        told = [n.as_dict() for n in store.replay().notes if n.topic == "sketch"]
        sketches |= {str(v.get("name")): str(v.get("text")) for v in told}
    if record.sketch not in sketches:
        raise StoreError(f"{what} is of a sketch {record.sketch!r} that the run does not hold")
    try:
        program = bind(parse(sketches[record.sketch]), record.problem, record.point)
        source = translate(program, record.problem, gpu_named(store.spec.gpu))
    except CodegenError as error:
        raise StoreError(f"{what} cannot be built again: {error}") from None
    if source.digest != record.source_digest:
        raise StoreError(f"{what} is another text in this version; export with that of the run")
    return source


def _called(store: RunStore, record: TrialRecord) -> str:
    return f"{store.path}: trial {record.index}, whose kernel was not kept,"
