"""A plan: memory, time, whether the workload fits, and changes that would help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proxymetric.arguments.checks import above_zero
from proxymetric.arguments.own_code import trusting
from proxymetric.runs.planning.advice import Advice, advice_for, most_classes
from proxymetric.runs.planning.duration import Duration, duration_of, less_than_measured, loss_rates
from proxymetric.runs.planning.memory import memory_of
from proxymetric.runs.planning.numbers import count, gigabytes, share
from proxymetric.runs.planning.rates import Machine, Rate, machine, similar
from proxymetric.runs.planning.workload import Workload

DEFAULT_GB = 80
"""memory of a device if neither the arguments nor this machine's GPU give it"""


@dataclass(frozen=True)
class Plan:
    """The memory and time of a workload on each device, without the encoder."""

    work: Workload
    memory: dict[str, int]
    """bytes of each part on the device with the most classes, see `memory_of`"""
    available: int
    """bytes of a device"""
    machine: Machine
    """the machine whose rates are used"""
    duration: Duration
    advice: tuple[Advice, ...]
    """changes that lower the memory; empty if the workload fits"""
    most_classes: int | None
    """the number of classes that would fit if nothing else changed, see `most_classes`"""
    notes: tuple[str, ...]
    """sentences about the origin and the limits of the numbers"""
    origins: tuple[str, ...] = ()
    """sentences about the machine and the memory that were taken"""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether all parts fit into the memory of a device."""
        return self.total <= self.available

    def as_dict(self) -> dict[str, Any]:
        """The plan in plain types, in bytes and seconds, for JSON."""
        rates = {
            "bandwidth": self.machine.bandwidth and self.machine.bandwidth._asdict(),
            "matrix": self.machine.matrix._asdict(),
            "implementations": {
                name: [rate._asdict() for rate in rates] for name, rates in self.machine.implementations.items()
            },
        }
        return {
            "asked": asdict(self.work),
            "rows": self.work.rows,
            "memory": {
                "parts": self.memory,
                "total": self.total,
                "available": self.available,
                "left": self.available - self.total,
            },
            "fits": self.fits,
            "most_classes": self.most_classes,
            "time": {
                "loss": self.duration.loss._asdict(),
                "optimizer": self.duration.optimizer._asdict(),
                "at_least": self.duration.low,
                "flops": self.duration.flops,
                "traffic": self.duration.traffic,
                "exchanged": self.duration.exchanged,
            },
            "device": self.machine.name,
            "rates": rates,
            "advice": [
                {"change": advice.words, "options": list(advice.options), "total": advice.total, "fits": advice.fits}
                for advice in self.advice
            ],
            "notes": list(self.notes),
            "taken": list(self.origins),
        }


def plan(
    classes: int | str,
    *,
    dim: int | str = 512,
    batch: int | str = 4096,
    devices: int | str = 1,
    per_class: int | str = 1,
    method: str = "proxy-anchor",
    dtype: str = "float32",
    optimizer: str = "adamw",
    implementation: str = "auto",
    touched: str | float = "all",
    memory: float | str | None = None,
    device: str | None = None,
) -> Plan:
    """Estimate the memory of each device, whether the classes fit, the time of a step, and which changes would help.

    Times are computed from measured rates. The encoder and its activations are not included: a smaller `memory` leaves
    room for them. 1 GB is 10^9 bytes.

    Args:
        classes: number of training classes. Numbers may be text as people type it: "5_000_000", "5e6" or "5M".
        dim: dimensions of the embedding.
        batch: number of embeddings in a step, on all devices together.
        devices: number of devices that share the classes.
        per_class: proxies per class.
        method: a method with learned proxies.
        dtype: type of the proxies, "float32" or "bfloat16".
        optimizer: optimiser of the proxies, "adamw", "adam", "sgd" or "rowwise-adagrad".
        implementation: of the loss: "plain", "chunked" or "triton"; "auto": triton on a GPU, chunked on a CPU.
        touched: the classes that a step compares with: "all", "batch" (those of the batch), or a share of the others.
        memory: GB of a device; None: that of `device`, or of this machine's GPU, or `DEFAULT_GB`.
        device: the device whose measured rates are used; None: the one most similar to this machine's.

    Returns:
        The plan; `as_dict` has its numbers.

    Raises:
        ValueError: an argument is wrong.

    Example:
        >>> estimate = plan("5M", devices=8, memory=80, device="H200")
        >>> estimate.fits, f"{estimate.total / 1e9:.1f} GB"
        (True, '5.8 GB')
    """
    with trusting(method):
        asked_bytes = None if memory is None else gigabytes("memory", str(memory))
        measured, available, origins = _resources(device, asked_bytes)
        work = Workload(
            classes=count("classes", classes),
            dim=count("dim", dim),
            batch=count("batch", batch),
            devices=count("devices", devices),
            per_class=count("per_class", per_class),
            method=method,
            dtype=dtype,
            optimizer=optimizer,
            implementation=implementation,
            touched=share("touched", str(touched)),
            on_cpu=measured.is_cpu,
        )
        return plan_of(work, available, measured, origins)


def _resources(device: str | None, available: int | None) -> tuple[Machine, int, list[str]]:
    """The machine whose rates are used, the memory of a device in bytes, and the origin of both in words."""
    gpu = None
    reason = ""
    if device is not None:
        measured = machine(device)
    else:
        from proxymetric.system.device import accelerator

        gpu = accelerator()
        measured = similar(gpu and gpu[0])
        if gpu is None:
            reason = ", because this machine has no GPU"
        elif gpu[0] != measured.name:
            reason = f", because none were measured on {gpu[0]}"
    origins = [f"rates: measured on {measured.name}{reason}"]
    if available is not None:
        origins.append("memory: from --memory")
    elif gpu is not None:
        available = gpu[1]
        origins.append(f"memory: of {gpu[0]}, the GPU of this machine")
    elif device is not None and measured.memory is not None:
        available = int(measured.memory.value * 10**9)
        origins.append(f"memory: of {measured.name} ({measured.memory.origin()})")
    else:
        available = DEFAULT_GB * 10**9
        origins.append(f"memory: {DEFAULT_GB} GB is assumed; --memory changes it")
    return measured, available, origins


def plan_of(work: Workload, available: int, machine: Machine, origins: Sequence[str] = ()) -> Plan:
    """Estimate the memory and the time of a workload on a known machine.

    Args:
        work: the workload.
        available: bytes of a device, above 0.
        machine: the machine whose rates are used.
        origins: sentences about where these came from.

    Raises:
        ValueError: `available` is not above 0.

    Example:
        >>> from proxymetric.runs.planning import Workload, machine
        >>> estimate = plan_of(Workload(classes=5_000_000, dim=512, batch=4096, devices=8), 80 * 10**9, machine("H200"))
        >>> estimate.fits, round(estimate.total / 1e9, 1)
        (True, 5.8)
    """
    above_zero(available=available)
    return Plan(
        work,
        memory_of(work),
        available,
        machine,
        duration_of(work, machine),
        advice_for(work, available),
        most_classes(work, available),
        tuple(_notes(work, machine)),
        tuple(origins),
    )


def _rate_notes(work: Workload, machine: Machine) -> list[str]:
    if work.implementation not in machine.implementations:
        return []
    used_rates = loss_rates(work, machine)
    notes = [f"{_description(name, rate)}: {rate.origin()}" for name, rate in dict.fromkeys(used_rates)]
    if not used_rates:
        notes = [f"{_description('matrix units', machine.matrix)}: {machine.matrix.origin()}"]
    elif [name for name, _ in used_rates].count(work.implementation) == 1:
        reasons = less_than_measured(work, used_rates[0][1])
        notes.append(f"the rate of {work.implementation} may not be reached: it was measured with {'; '.join(reasons)}")
    return notes


def _description(name: str, rate: Rate) -> str:
    size = "" if rate.classes is None else f" with batches of {rate.batch:,} and {rate.classes:,} proxies"
    return f"{rate.value:g} {rate.unit} of {name}{size}"


def _notes(work: Workload, machine: Machine) -> list[str]:
    notes = _rate_notes(work, machine)
    if work.kind.over == "classes" and work.implementation != "plain":
        handling = "kept from the forward pass" if work.cached else "computed again in the backward pass"
        notes.append(
            f"similarities are {handling} (a plan counts on 1 GiB for them; a GPU with free memory keeps more)"
        )
    if work.touched == "all":
        notes.append(
            "your own loop needs the same if it calls optimizer.zero_grad() before the forward pass, in which "
            "a loss may already make the gradient of the proxies"
            + ("" if work.on_cpu or "adam" not in work.optimizer else ", and if its optimizer has fused=True")
        )
    if work.batch % work.devices:
        notes.append(f"proxymetric train takes a batch that is a multiple of the {work.devices} processes")
    if work.touched != "all":
        notes.append("the batch is not compared with all classes: this costs less, and is another loss")
    return notes
