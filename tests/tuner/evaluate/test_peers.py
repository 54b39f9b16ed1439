"""Peers on a CPU: absent ones say why; NVML readings come through a fake."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from space.variant import DType, Shape
from tuner.evaluate.conditions import Conditions, Meter
from tuner.evaluate.inputs import Check, make
from tuner.evaluate.peers import PeerAbsent, peers, sees_all, start, versions

CPU = torch.device("cpu")


def test_package_that_is_not_installed() -> None:
    inputs = make(Check("x", Shape(1, 2, 2, 8, 8, 16, 16)), DType.FP16, CPU)
    with pytest.raises(PeerAbsent, match="not installed"):
        start(peers()["fa3"], inputs)


@pytest.mark.parametrize("name", ["fa2", "cudnn", "efficient"])
def test_other_alignment_of_the_causal_mask_is_no_peer(name: str) -> None:
    inputs = make(Check("x", Shape(1, 2, 2, 8, 16, 16, 16, True)), DType.FP16, CPU)
    with pytest.raises(PeerAbsent, match="top-left"):
        start(peers()[name], inputs)


def test_backend_without_a_kernel_is_absent_with_the_first_line() -> None:
    inputs = make(Check("x", Shape(1, 2, 2, 8, 8, 16, 16)), DType.FP16, CPU)
    with pytest.raises(PeerAbsent) as absent:
        start(peers()["cudnn"], inputs)
    assert str(absent.value)
    assert "\n" not in str(absent.value)


@pytest.mark.parametrize(
    ("seqlen_q", "causal", "expected"), [(1, True, True), (2, True, False), (2, False, True)]
)
def test_one_query_sees_all(seqlen_q: int, causal: bool, expected: bool) -> None:
    inputs = make(Check("x", Shape(1, 2, 2, seqlen_q, 8, 16, 16, causal)), DType.FP16, CPU)
    assert sees_all(inputs) is expected


def test_versions_name_torch() -> None:
    assert versions()["torch"] == torch.__version__


class FakeNvml:
    """NVML as the bindings give it."""

    class NvmlError(Exception):
        pass

    ClockType = SimpleNamespace(CLOCK_SM=1, CLOCK_MEM=2)
    TemperatureSensors = SimpleNamespace(TEMPERATURE_GPU=0)

    def __init__(self, reasons: int = 0, fail: str = "") -> None:
        self.reasons = reasons
        self.fail = fail

    def __getattr__(self, name: str) -> object:
        if name == self.fail:
            raise self.NvmlError(name)
        answers = {
            "device_get_handle_by_uuid": lambda uuid: uuid,
            "device_get_current_clocks_event_reasons": lambda h: self.reasons,
            "device_get_clock_info": lambda h, kind: 1000 * kind,
            "device_get_temperature_v": lambda h, sensor: 51,
            "device_get_power_usage": lambda h: 512_300,
        }
        return answers[name]


def test_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid="aa-bb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: properties)
    reading = Meter(CPU, FakeNvml(reasons=0x44)).read()
    assert reading == Conditions(1000, 2000, 51, 512.3, ("power cap", "thermal (hardware)"))
    assert str(reading) == "1000 MHz, memory 2000 MHz, 51 C, 512 W, power cap, thermal (hardware)"
    for call in ("device_get_handle_by_uuid", "device_get_power_usage"):
        assert Meter(CPU, FakeNvml(fail=call)).read() is None


def test_no_nvml_is_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.evaluate.conditions.nvml", lambda: None)
    assert Meter(CPU).read() is None
