"""Say where each quantization of a model fits, how fast it would be, and which one a chat takes.

`minillm models`, the chat's list and the chat itself use this module; arithmetic and ranking are those of `minillm
fit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from minillm.config import EngineConfig
from minillm.fit.budget import CPU_PROCESS_BYTES, GPU_PROCESS_BYTES, Budget, Fit
from minillm.fit.sizes import SizedModel, in_low_bits, ranked

# The model fits the CPU only with an option --weights that saves memory. The text is part of `minillm models --json`.
IN_LOW_BITS: Final = "CPU in few bits"
Where = Literal["GPU", "CPU", "CPU in few bits", "no", "?"]


@dataclass(frozen=True)
class DeviceMemory:
    """A device of this machine. ``bandwidth`` is in bytes per second, and None if it was never measured."""

    name: Literal["GPU", "CPU"]
    budget: Budget
    bandwidth: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The result for one quantization of a model.

    Attributes:
        where: the device on which the quantization fits. "no": it fits on no device. "?": its size is unknown.
        tokens_per_second: expected speed on that device; None if unknown.
        taken: a chat with the model takes this quantization.
    """

    where: Where
    tokens_per_second: float | None = None
    taken: bool = False


def budget_before_start(config: EngineConfig, free: int, total: int, on_gpu: bool) -> Budget:
    """Return the budget of an engine process before the process is started.

    ``free`` and ``total`` are in bytes. The memory that torch or CUDA's context will take is subtracted from ``free``.
    """
    element_size = {"auto": 2 if on_gpu else 4, "float32": 4}.get(config.dtype, 2)
    free -= GPU_PROCESS_BYTES if on_gpu else CPU_PROCESS_BYTES
    return Budget(max(0, free), total, on_gpu, element_size, config)


def devices_of(
    config: EngineConfig,
    memory: tuple[int, int],
    gpu: int = 0,
    cpu_bandwidth: float | None = None,
    gpu_bandwidth: float | None = None,
) -> list[DeviceMemory]:
    """Return the devices that a model may be loaded on, the preferred one first.

    Args:
        memory: the free and the total bytes of this machine.
        gpu: the total bytes of the GPU; 0 without one.
        cpu_bandwidth, gpu_bandwidth: bytes per second; None if unknown.
    """
    devices = []
    if gpu and config.device != "cpu":
        devices.append(DeviceMemory("GPU", budget_before_start(config, gpu, gpu, True), gpu_bandwidth))
    return [*devices, DeviceMemory("CPU", budget_before_start(config, *memory, False), cpu_bandwidth)]


def order_of_choice(
    forms: Iterable[SizedModel], budget: Budget, bandwidth: float | None
) -> tuple[list[tuple[SizedModel, Fit]], list[tuple[SizedModel, Fit]]]:
    """Return the quantizations that fit, as two lists of (model, fit) pairs in different orders.

    The first list has the order in which a chat tries them: downloaded quantizations first, then all others, and the
    best first within both groups. The second list has the order of `ranked`: the best first.
    """
    fitting = ranked(forms, budget, bandwidth)
    return sorted(fitting, key=lambda each: not each[0].downloaded), fitting


def verdicts(forms: Sequence[SizedModel | None], devices: Sequence[DeviceMemory]) -> list[Verdict]:
    """Return a verdict for each of ``forms``, in the same order.

    Args:
        forms: the quantizations of one model. None stands for a quantization of unknown size.
        devices: the devices, the preferred one first.
    """
    known = [form for form in forms if form is not None]
    orders = (order_of_choice(known, device.budget, device.bandwidth)[0] for device in devices)
    taken = next((order[0][0] for order in orders if order), None)
    return [_verdict(form, form is taken, devices) for form in forms]


def _verdict(model: SizedModel | None, taken: bool, devices: Sequence[DeviceMemory]) -> Verdict:
    if model is None:
        return Verdict("?")
    for device in devices:
        if (fit := model.fit(device.budget)).fits:
            return Verdict(device.name, _speed(model, fit, device), taken)
    for device in devices:
        for way in in_low_bits(model, device.budget):
            if (fit := way.fit(device.budget)).fits:
                return Verdict(IN_LOW_BITS, _speed(way, fit, device))
    return Verdict("no")


def _speed(model: SizedModel, fit: Fit, device: DeviceMemory) -> float | None:
    return device.bandwidth and device.budget.tokens_per_second(fit, model.shape, device.bandwidth)
