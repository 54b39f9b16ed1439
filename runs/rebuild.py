"""A kernel of a run whose folder came without it, built again from the sketch and the point.

Published runs are kept without kernels: the translator is deterministic, so the text that ran is
the text that is emitted again, which the recorded digest proves.
"""

from __future__ import annotations

from codegen import nvrtc
from codegen.cute import translate
from codegen.errors import CodegenError
from codegen.tl.bind import bind
from codegen.tl.parser import parse
from runs.errors import StoreError
from runs.kernels import StoredKernel
from runs.record import TrialRecord
from runs.store import RunStore
from space.gpu import gpu_named


def kernel_of(store: RunStore, record: TrialRecord) -> StoredKernel:
    """Return a right trial's kernel as it was stored, or built again where none was kept.

    Raises StoreError when the stored one is damaged, or when this version does not emit the text
    that ran, or cannot build it.
    """
    if store.has_kernel(record.cubin_key):
        return store.kernel(record.cubin_key)
    gpu, sketches = gpu_named(store.spec.gpu), dict(store.spec.sketches)
    what = f"{store.path}: trial {record.index}, whose kernel was not kept,"
    if record.sketch not in sketches:
        raise StoreError(f"{what} is of a sketch {record.sketch!r} that the run does not hold")
    try:
        program = bind(parse(sketches[record.sketch]), record.problem, record.point)
        source = translate(program, record.problem, gpu)
        if source.digest != record.source_digest:
            raise StoreError(f"{what} is another text in this version; export with that of the run")
        return StoredKernel(source, nvrtc.compile_source(source, gpu.arch))
    except CodegenError as error:
        raise StoreError(f"{what} cannot be built again: {error}") from None
