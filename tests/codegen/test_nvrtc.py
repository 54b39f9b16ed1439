"""Real compiles: resources, errors, the cache and the precompiled header."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from codegen import nvrtc, pch
from codegen.errors import CompileError, ToolchainMissing
from codegen.kernel import GridAxis, KernelSource, Launch
from codegen.ptxas import local_memory, parse_resources, serialised_wgmma

try:
    nvrtc.nvrtc_version()
    nvrtc.find_headers()
except ToolchainMissing as missing:
    pytest.skip(str(missing), allow_module_level=True)

PLAIN = """#include <cute/arch/mma_sm80.hpp>
extern "C" __global__ void __launch_bounds__(128) scale(float* x, float a) {
  __shared__ float line[128];
  line[threadIdx.x] = x[threadIdx.x] * a;
  __syncthreads();
  x[threadIdx.x] = line[127 - threadIdx.x];
}
"""
INDEXED = """
extern "C" __global__ void pick(float* x, int n) {
  float line[100];
  for (int i = 0; i < 100; ++i) line[i] = x[i * threadIdx.x];
  x[threadIdx.x] = line[n];
}
"""


def source(text: str) -> KernelSource:
    return KernelSource(text, "sm_80", (Launch("scale", 128, 0, (GridAxis("M", 1),), ()),), ())


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_89", "sm_90a"])
def test_builds_for_every_generation(arch: str) -> None:
    cubin = nvrtc.compile_source(source(PLAIN), arch)
    assert cubin.image.startswith(b"\x7fELF")
    (scale,) = cubin.resources
    assert (scale.entry, scale.static_smem_bytes, scale.spill_store_bytes) == ("scale", 512, 0)
    assert 0 < scale.registers < 64
    assert local_memory(cubin.resources) is None


def test_an_array_indexed_at_run_time_is_local_memory() -> None:
    cubin = nvrtc.compile_source(source(INDEXED), "sm_80")
    assert local_memory(cubin.resources) == "pick: 0 bytes spilled, 400 bytes of stack"


def test_an_error_keeps_its_log_and_crosses_a_process_pool() -> None:
    bad = source(PLAIN.replace("* a", "* b"))
    with pytest.raises(CompileError, match=r'kernel.cu\(4\): error: identifier "b" is undef') as e:
        nvrtc.compile_source(bad, "sm_80")
    again = pickle.loads(pickle.dumps(e.value))
    assert (str(again), again.log, again.source) == (str(e.value), e.value.log, bad)


def test_an_unknown_target_is_told_the_known_ones() -> None:
    with pytest.raises(CompileError, match=r"does not build sm_42; it builds sm_75, .*sm_90a"):
        nvrtc.compile_source(source(PLAIN), "sm_42")


def test_a_cached_cubin_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = nvrtc.compile_source(source(PLAIN), "sm_80", tmp_path)
    monkeypatch.setattr(nvrtc, "_build", lambda *_: pytest.fail("built again"))
    assert nvrtc.compile_source(source(PLAIN), "sm_80", tmp_path) == built


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other"])
def test_a_damaged_cache_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    built = nvrtc.compile_source(source(PLAIN), "sm_80", tmp_path)
    (entry,) = tmp_path.rglob("*.cubin")
    data = bytearray(entry.read_bytes())
    if damage == "flip":
        data[-100] ^= 1
    elif damage == "cut":
        del data[-100:]
    elif damage == "empty":
        data.clear()
    else:
        other = nvrtc.compile_source(source(INDEXED), "sm_80", tmp_path / "elsewhere")
        shutil.copy(next((tmp_path / "elsewhere").rglob(f"{other.key}.cubin")), entry)
        data = bytearray(entry.read_bytes())
    entry.write_bytes(data)
    again = nvrtc.compile_source(source(PLAIN), "sm_80", tmp_path)
    assert replace(again, compile_s=0, log="") == replace(built, compile_s=0, log="")
    assert entry.read_bytes() != bytes(data)


def test_the_key_covers_what_changes_the_cubin(monkeypatch: pytest.MonkeyPatch) -> None:
    base = source(PLAIN)
    keys = {
        nvrtc.cache_key(base, "sm_80"),
        nvrtc.cache_key(base, "sm_89"),
        nvrtc.cache_key(replace(base, text=PLAIN + "\n"), "sm_80"),
        nvrtc.cache_key(replace(base, launches=()), "sm_80"),
    }
    monkeypatch.setattr(nvrtc, "OPTIONS", (*nvrtc.OPTIONS, "--maxrregcount=64"))
    keys.add(nvrtc.cache_key(base, "sm_80"))
    monkeypatch.setattr(nvrtc, "nvrtc_version", lambda: "13.0.1")
    keys.add(nvrtc.cache_key(base, "sm_80"))
    headers = nvrtc.find_headers()
    changed = replace(headers, versions=(("cutlass", "9"), *headers.versions[1:]))
    monkeypatch.setattr(nvrtc, "find_headers", lambda: changed)
    keys.add(nvrtc.cache_key(base, "sm_80"))
    assert len(keys) == 7


def test_a_precompiled_header_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pch, "options", lambda: ())
    plain = nvrtc.compile_source(source(PLAIN), "sm_80").image
    monkeypatch.undo()
    nvrtc.compile_source(source(PLAIN), "sm_80")  # makes the header, or finds it made
    assert pch.options()[0] == "-pch"
    assert nvrtc.compile_source(source(PLAIN), "sm_80").image == plain


def test_a_precompiled_header_that_fails_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = ("-pch", f"-pch-dir={tmp_path / 'absent'}")
    monkeypatch.setattr(pch, "options", lambda: broken)
    assert nvrtc.compile_source(source(PLAIN), "sm_80").image.startswith(b"\x7fELF")


def test_precompiled_headers_of_dead_processes_are_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f"tltune-pch-{dead.pid}-x").mkdir()
    (tmp_path / "tltune-pch-1-x").mkdir()
    monkeypatch.setattr(pch, "_folder", None)
    monkeypatch.setattr(pch, "_compiles", 1)
    monkeypatch.setattr(pch.tempfile, "gettempdir", lambda: str(tmp_path))
    assert pch.options()[1].startswith(f"-pch-dir={tmp_path}/tltune-pch-")
    names = sorted(p.name.rsplit("-", 1)[0] for p in tmp_path.iterdir())
    assert f"tltune-pch-{dead.pid}" not in names and "tltune-pch-1" in names
    monkeypatch.setattr(pch, "_ROOM_BYTES", 1 << 62)
    monkeypatch.setattr(pch, "_folder", None)
    assert pch.options() == ()


LOG = """ptxas info    : 1891 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     376 bytes stack frame, 352 bytes spill stores, 360 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 376 bytes cumulative stack size
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for callee
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 24 bytes cumulative stack size, 256 bytes smem
"""


def test_reads_each_entry_of_the_log() -> None:
    one, two = parse_resources(LOG)
    assert (one.entry, one.registers, one.stack_bytes) == ("one", 32, 376)
    assert (one.spill_store_bytes, one.spill_load_bytes) == (352, 360)
    assert (two.registers, two.static_smem_bytes) == (168, 256)
    assert (two.spill_store_bytes, two.stack_bytes) == (8, 24)
    assert parse_resources("") == ()
    assert local_memory((one,)) == "one: 360 bytes spilled, 376 bytes of stack"


def test_serialised_wgmma_is_seen() -> None:
    line = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x"  # noqa: E501
    assert serialised_wgmma(f"{LOG}{line}\n") == line
    assert serialised_wgmma(LOG) is None


def test_serialised_wgmma_is_a_compile_error(monkeypatch: pytest.MonkeyPatch) -> None:
    log = LOG + "ptxas warning : C7511 wgmma serialised\n"
    monkeypatch.setattr(nvrtc, "_run", lambda *_: (b"\x7fELF", log))
    with pytest.raises(CompileError) as caught:
        nvrtc.compile_source(source(PLAIN), "sm_90a")
    assert caught.value.log.startswith("ptxas warning : C7511")
