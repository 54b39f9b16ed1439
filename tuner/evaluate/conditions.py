"""Clocks, temperature, power and throttle flags of a GPU, as NVML tells them.

NVML comes with the driver and its bindings with cuda-bindings; where either is missing, or a
container hides the device, a reading is None and nothing else changes.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

#: Event reasons that say a measurement was not taken at the clocks the card can hold.
THROTTLE_BITS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "thermal (software)",
    0x0000000000000040: "thermal (hardware)",
    0x0000000000000080: "power brake",
}
#: Those that heat or a failing supply cause; a power cap is how a card of this class works.
HEAT_BITS = 0x08 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True, slots=True)
class Conditions:
    """One reading of a GPU."""

    sm_clock_mhz: int
    memory_clock_mhz: int
    temperature_c: int
    power_w: float
    throttle: tuple[str, ...]

    def __str__(self) -> str:
        flags = ", ".join(self.throttle) or "no throttling"
        return (
            f"{self.sm_clock_mhz} MHz, memory {self.memory_clock_mhz} MHz, "
            f"{self.temperature_c} C, {self.power_w:.0f} W, {flags}"
        )


def nvml() -> Any | None:
    """Return initialised NVML bindings, or None where there are none."""
    try:
        module = importlib.import_module("cuda.bindings.nvml")
    except ImportError:
        return None
    try:
        module.init_v2()
    except (module.NvmlError, RuntimeError, OSError):  # no driver library, or no right to it
        return None
    return module


class Meter:
    """Reads one torch device through NVML."""

    def __init__(self, device: torch.device, bindings: Any | None = None) -> None:
        self._nvml = bindings if bindings is not None else nvml()
        self._handle: Any | None = None
        if self._nvml is None:
            return
        try:
            uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
            self._handle = self._nvml.device_get_handle_by_uuid(uuid)
        except self._nvml.NvmlError:
            self._handle = None

    def overheated(self) -> bool:
        """Whether heat or the supply holds the clocks down now; False where NVML is silent."""
        n, handle = self._nvml, self._handle
        if n is None or handle is None:
            return False
        try:
            return bool(int(n.device_get_current_clocks_event_reasons(handle)) & HEAT_BITS)
        except n.NvmlError:
            return False

    def read(self) -> Conditions | None:
        """Return a reading, or None where NVML does not answer."""
        n, handle = self._nvml, self._handle
        if n is None or handle is None:
            return None
        try:
            reasons = int(n.device_get_current_clocks_event_reasons(handle))
            return Conditions(
                int(n.device_get_clock_info(handle, n.ClockType.CLOCK_SM)),
                int(n.device_get_clock_info(handle, n.ClockType.CLOCK_MEM)),
                int(n.device_get_temperature_v(handle, n.TemperatureSensors.TEMPERATURE_GPU)),
                n.device_get_power_usage(handle) / 1000,
                tuple(text for bit, text in THROTTLE_BITS.items() if reasons & bit),
            )
        except n.NvmlError:
            return None
