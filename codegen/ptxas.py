"""What the assembler said about a kernel, read from NVRTC's log."""

from __future__ import annotations

import re
from collections.abc import Iterable

from codegen.kernel import Resources

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_SMEM = re.compile(r"(\d+) bytes smem")
_SERIALISED = re.compile(r"wgmma.*seriali[sz]|\bC75(?:0[89]|1\d)\b", re.IGNORECASE)


def parse_resources(log: str) -> tuple[Resources, ...]:
    """Return the resources of each `__global__` function, in the order of the log.

    Spills of functions that were not inlined count for their kernel; the stack is that of the
    deepest call.
    """
    found = []
    sections = _ENTRY.split(log)[1:]
    for entry, text in zip(sections[::2], sections[1::2], strict=True):
        frames = [tuple(map(int, m.groups())) for m in _FRAME.finditer(text)]
        stack = max((f[0] for f in frames), default=0)
        found.append(
            Resources(
                entry=entry,
                registers=_number(_USED, text),
                spill_store_bytes=sum(f[1] for f in frames),
                spill_load_bytes=sum(f[2] for f in frames),
                stack_bytes=max(stack, _number(_STACK, text)),
                static_smem_bytes=_number(_SMEM, text),
            )
        )
    return tuple(found)


def _number(pattern: re.Pattern[str], text: str) -> int:
    found = pattern.search(text)
    return int(found[1]) if found else 0


def local_memory(resources: Iterable[Resources]) -> str | None:
    """Return which kernel keeps values in local memory and how many bytes, or None.

    A stack without spills is an array that is indexed at run time; it is as slow as a spill.
    """
    for r in resources:
        spilled = max(r.spill_store_bytes, r.spill_load_bytes)
        if spilled or r.stack_bytes:
            return f"{r.entry}: {spilled} bytes spilled, {r.stack_bytes} bytes of stack"
    return None


def serialised_wgmma(log: str) -> str | None:
    """Return the log's line saying that wgmma instructions were serialised, or None."""
    return next((line for line in log.splitlines() if _SERIALISED.search(line)), None)
