"""Emitted kernels with warp-level MMA on a CPU, so that their text is tried where no GPU is."""

from __future__ import annotations

import ctypes
import functools
import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from codegen.kernel import ArgKind, KernelSource, Launch
from runs.templates.launch import STRIDE_AXES
from space.variant import DType

HEADER = Path(__file__).with_name("block.hpp")
COMPILER = shutil.which("g++")


@functools.cache
def _library(kernels: str, entries: tuple[str, ...], dtype: DType) -> ctypes.CDLL:
    """Build the kernels' text with a host compiler, its prelude replaced."""
    lines = ["#define BF16"] if dtype is DType.BF16 else []
    lines += [f'#include "{HEADER}"', kernels]
    for entry in entries:
        lines += [
            f'extern "C" char const* run_{entry}(',
            "    int grid, int block, void** args, bool late, bool backwards) {",
            f"  return launch({entry}, grid, block, args, late, backwards);",
            "}",
        ]
    folder = Path(tempfile.mkdtemp(prefix="emulated-"))
    try:
        path, built = folder / "kernels.cpp", folder / "kernels.so"
        path.write_text("\n".join(lines))
        flags = ["-std=c++20", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
        assert COMPILER is not None
        subprocess.run([COMPILER, *flags, "-o", str(built), str(path)], check=True)
        return ctypes.CDLL(str(built))
    finally:
        shutil.rmtree(folder)


class Emulator:
    """The kernels of one program. `late` and `backwards` say in which order things happen."""

    def __init__(
        self, source: KernelSource, dtype: DType, late: bool = False, backwards: bool = False
    ) -> None:
        text = source.text[source.text.index('extern "C" __global__') :]
        # what concerns the kernels around this one has no meaning here
        kept = [line for line in text.splitlines() if "griddepcontrol" not in line]
        self.source = source
        self.order = (late, backwards)
        entries = tuple(x.entry for x in source.launches)
        self.library = _library("\n".join(kept), entries, dtype)

    def run(
        self,
        tensors: Mapping[str, torch.Tensor],
        lengths: Mapping[str, int],
        scalars: Mapping[str, float],
    ) -> None:
        """Run every launch on CPU tensors, [batch, rows, heads, columns]; workspaces are made."""
        given = dict(tensors)
        for w in self.source.workspaces:
            shape = [int(a) if a.isdecimal() else lengths[a] for a in w.shape]
            given[w.name] = torch.full(shape, math.nan)
        for x in self.source.launches:
            if not (x.if_split and lengths["splits"] == 1):
                self._start(x, given, lengths, scalars)

    def _start(
        self,
        x: Launch,
        tensors: Mapping[str, torch.Tensor],
        lengths: Mapping[str, int],
        scalars: Mapping[str, float],
    ) -> None:
        held: list[ctypes._SimpleCData[object]] = []
        for arg in x.args:
            match arg.kind:
                case ArgKind.POINTER | ArgKind.PAGES | ArgKind.KEY_COUNTS:
                    t = tensors.get(arg.name)
                    held.append(ctypes.c_void_p(None if t is None else t.data_ptr()))
                case ArgKind.STRIDE:
                    name, axis = arg.name.split(".")
                    held.append(ctypes.c_int64(tensors[name].stride(STRIDE_AXES[axis])))
                case ArgKind.PAGE_STRIDE:
                    held.append(ctypes.c_int64(tensors[arg.name].stride(0)))
                case ArgKind.INT:
                    held.append(ctypes.c_int(lengths[arg.name]))
                case ArgKind.FLOAT:
                    held.append(ctypes.c_float(scalars[arg.name]))
                case _:
                    raise AssertionError(f"no emulation of a {arg.kind}")
        grid = math.prod(-(-lengths[a.length] // a.tile) for a in x.grid)
        args = (ctypes.c_void_p * len(held))(*(ctypes.addressof(v) for v in held))
        run = getattr(self.library, f"run_{x.entry}")
        run.restype = ctypes.c_char_p
        fault = run(grid, x.threads, args, *self.order)
        assert fault is None, f"{x.entry}: {fault.decode()}"
