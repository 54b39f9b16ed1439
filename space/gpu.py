"""The GPUs the planner knows: limits that decide legality, rates that decide the roofline."""

from __future__ import annotations

import re
from dataclasses import dataclass

from space.variant import DType, SpaceError

KIB = 1024


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One GPU model. Rates are the vendor's datasheet figures at boost clock."""

    name: str
    title: str
    sm: int  #: compute capability times ten: 75, 80, 89, 90
    num_sms: int
    smem_per_block_bytes: int  #: dynamic shared memory a block may ask for
    smem_per_sm_bytes: int
    threads_per_sm: int
    tensor_tflops: float  #: dense fp16/bf16 products with f32 accumulation
    bandwidth_gbs: float
    l2_bytes: int
    clock_ghz: float
    #: share of `tensor_tflops` that warp-level mma.sync reaches; below 1 where wgmma is faster
    mma_sync_fraction: float = 1.0
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    mufu_per_clock_per_sm: int = 16
    #: shared memory the driver reserves per resident block
    smem_reserved_bytes: int = 1024

    @property
    def arch(self) -> str:
        """The NVRTC target, e.g. `sm_90a`."""
        return "sm_90a" if self.sm == 90 else f"sm_{self.sm}"

    @property
    def dtypes(self) -> tuple[DType, ...]:
        """Element types with tensor-core products on this GPU."""
        return (DType.FP16,) if self.sm < 80 else (DType.FP16, DType.BF16)

    @property
    def has_cp_async(self) -> bool:
        """Whether global memory can be copied to shared memory without registers."""
        return self.sm >= 80


GPUS: dict[str, GpuSpec] = {
    g.name: g
    for g in (
        GpuSpec("t4", "Tesla T4", 75, 40, 64 * KIB, 64 * KIB, 1024, 65.0, 320.0,
                4 << 20, 1.59, smem_reserved_bytes=0),
        GpuSpec("rtx8000", "Quadro RTX 8000", 75, 72, 64 * KIB, 64 * KIB, 1024, 130.5, 672.0,
                6 << 20, 1.77, smem_reserved_bytes=0),
        GpuSpec("a100", "A100", 80, 108, 163 * KIB, 164 * KIB, 2048, 312.0, 2039.0,
                40 << 20, 1.41),
        GpuSpec("l40s", "L40S", 89, 142, 99 * KIB, 100 * KIB, 1536, 362.0, 864.0,
                96 << 20, 2.52),
        GpuSpec("h100", "H100", 90, 132, 227 * KIB, 228 * KIB, 2048, 989.0, 3350.0,
                50 << 20, 1.83, mma_sync_fraction=0.62),
        GpuSpec("h200", "H200", 90, 132, 227 * KIB, 228 * KIB, 2048, 989.0, 4800.0,
                60 << 20, 1.83, mma_sync_fraction=0.62),
    )
}  # fmt: skip


def gpu_named(name: str) -> GpuSpec:
    """Return the GPU called `name`. Raises SpaceError naming the known ones."""
    try:
        return GPUS[name.lower()]
    except KeyError:
        raise SpaceError(f"unknown GPU {name!r}; known GPUs: {', '.join(GPUS)}") from None


def gpu_of_device_name(device_name: str) -> GpuSpec | None:
    """Return the spec whose title stands in a CUDA device name as words of its own, or None."""
    for gpu in GPUS.values():
        # whole words: a "GH200" is no H200, and its rates are others
        if re.search(rf"(?<!\w){re.escape(gpu.title)}(?!\w)", device_name, re.IGNORECASE):
            return gpu
    return None


def check_dtype(gpu: GpuSpec, dtype: DType) -> None:
    """Raise SpaceError when `gpu` has no tensor cores for `dtype`, with what to use instead."""
    if dtype not in gpu.dtypes:
        raise SpaceError(f"{gpu.name} (sm_{gpu.sm}) has no {dtype} tensor cores; use --dtype fp16")
