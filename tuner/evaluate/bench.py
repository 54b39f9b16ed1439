"""What a GPU worker keeps between jobs: the device, the judge with its caches, the meter."""

from __future__ import annotations

import functools
from importlib import metadata

import torch

from runs.record import Note, Reference, Scalar
from space.gpu import gpu_of_device_name
from space.variant import Problem
from tuner.evaluate import freshness, timing, verify
from tuner.evaluate.clock import FLUSH_BYTES, CudaClock
from tuner.evaluate.conditions import Meter
from tuner.evaluate.finals import ROUNDS
from tuner.evaluate.function import Function
from tuner.evaluate.judge import COOL_S, COOL_TRIES, Judge
from tuner.evaluate.launch import LoadedKernel
from tuner.evaluate.peers import versions


class Bench:
    """One CUDA device. Nothing touches it before a job does."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", 0)
        self._of_function: tuple[tuple[Reference, Problem], Judge] | None = None

    @functools.cached_property
    def judge(self) -> Judge:
        """The judge of this device."""
        gpu = gpu_of_device_name(torch.cuda.get_device_name(self.device))
        return Judge(self.device, CudaClock(self.device), LoadedKernel, gpu, meter=self.meter)

    def judge_of(self, reference: Reference | None, problem: Problem) -> Judge:
        """The judge of kernels that must agree with `reference`, plain attention for None.

        Raises FunctionRefused when the function cannot be loaded.
        """
        if reference is None:
            return self.judge
        key = reference, problem
        if self._of_function is None or self._of_function[0] != key:
            plain = self.judge
            function = Function.load(reference, problem)
            judge = Judge(self.device, plain.clock, LoadedKernel, plain.gpu, meter=self.meter,
                          function=function)  # fmt: skip
            self._of_function = key, judge
        return self._of_function[1]

    @functools.cached_property
    def meter(self) -> Meter:
        """Reads clocks and temperature."""
        return Meter(self.device)

    def sum_of_ones(self) -> int:
        """Return what the device makes of a sum whose value is known: 1024."""
        return int(torch.ones(1024, device=self.device, dtype=torch.int32).sum())

    def facts(self) -> tuple[Note, ...]:
        """Return versions, conditions and protocol, for the record."""
        properties = torch.cuda.get_device_properties(self.device)
        reading = self.meter.read()
        environment: dict[str, Scalar] = {
            "device": properties.name,
            "sm": properties.major * 10 + properties.minor,
            "sms": properties.multi_processor_count,
            **versions(),
            **{p: _version(p) for p in ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cutlass")},
            "driver": _driver_version(),
            "conditions": str(reading) if reading is not None else "NVML does not answer",
        }
        plan = timing.TRIAL_PLAN
        protocol: dict[str, Scalar] = {
            "error_factor": verify.ERROR_FACTOR,
            "error_floor": verify.ERROR_FLOOR,
            "cosine_min": verify.COSINE_MIN,
            "l2_flush_bytes": FLUSH_BYTES,
            "warmup_us": plan.warmup_us,
            "trial_samples": f"{plan.min_samples} to {plan.max_samples}",
            "final_rounds": ROUNDS,
            "l2_set_aside": "least that the device allows, asked after each timing",
            "stream": f"events must be at least {1 / timing.WALL_FACTOR:.0%} of the wall clock",
            "new_data": f"after the timing, at most {freshness.FRESH_FACTOR:g} times the median "
            f"and {freshness.FRESH_SLACK_US:g} us, in one of {freshness.FRESH_TRIES} windows",
            "too_hot": f"taken again after {COOL_S:g} s, at most {COOL_TRIES} times",
            "interval": "95% of the median, order statistics",
            "flops": "2*B*H*pairs*(D+Dv), pairs = visible (query, key) pairs, causal bottom-right",
        }
        return Note("environment", tuple(environment.items())), Note(
            "protocol", tuple(protocol.items())
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver_version() -> str:
    from cuda.bindings import driver

    status, number = driver.cuDriverGetVersion()
    return f"CUDA {number // 1000}.{number % 1000 // 10}" if int(status) == 0 else "unknown"
