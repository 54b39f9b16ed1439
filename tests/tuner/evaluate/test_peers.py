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


# ---- decode ------------------------------------------------------------------------------------


class FakeFlash:
    """A package with both entries, which keep what they are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[torch.Tensor, ...], dict[str, object]]] = []

    def flash_attn_func(self, *tensors: torch.Tensor, **more: object) -> torch.Tensor:
        self.calls.append(("prefill", tensors, more))
        return tensors[0]

    def flash_attn_with_kvcache(self, *tensors: torch.Tensor, **more: object) -> torch.Tensor:
        self.calls.append(("decode", tensors, more))
        return tensors[0]


def flash(monkeypatch: pytest.MonkeyPatch, check: Check) -> FakeFlash:
    """Call the peer that such a package is."""
    package = FakeFlash()
    loader = SimpleNamespace(import_module=lambda name: package)
    monkeypatch.setattr("tuner.evaluate.peers.importlib", loader)
    start(peers()["fa3"], make(check, DType.BF16, CPU))
    return package


def test_few_queries_go_to_the_decode_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    for queries, entry in ((1, "decode"), (8, "decode"), (9, "prefill")):
        shape = Shape(1, 4, 2, queries, 32, 16, 16, True)
        ((called, _, more),) = flash(monkeypatch, Check("x", shape)).calls
        assert called == entry
        assert more["causal"] is (queries > 1)


def test_latent_cache_is_given_as_its_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check("x", Shape(1, 16, 1, 1, 32, 576, 512))
    ((_, (q, k, v), more),) = flash(monkeypatch, check).calls
    assert (q.shape[3], k.shape[3], v.shape[3]) == (64, 64, 512)
    assert k.data_ptr() == v.data_ptr() + 512 * 2
    assert isinstance(more["qv"], torch.Tensor) and more["qv"].shape[3] == 512
    assert more["softmax_scale"] == pytest.approx(192**-0.5)


def test_pages_and_lengths_are_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check("x", Shape(2, 4, 2, 1, 40, 16, 16), counts=(40, 7), page=16)
    ((_, _, more),) = flash(monkeypatch, check).calls
    assert isinstance(more["cache_seqlens"], torch.Tensor)
    assert more["cache_seqlens"].tolist() == [40, 7]
    assert isinstance(more["page_table"], torch.Tensor) and more["page_table"].shape == (2, 3)


@pytest.mark.parametrize("name", ["fa2", "cudnn", "efficient"])
def test_peer_without_pages_says_so(name: str) -> None:
    check = Check("x", Shape(2, 4, 2, 1, 40, 16, 16), counts=(40, 7), page=16)
    with pytest.raises(PeerAbsent, match="no paged cache"):
        start(peers()[name], make(check, DType.FP16, CPU))


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
