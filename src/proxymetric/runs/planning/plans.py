"""A plan: memory, time, whether the workload fits, and changes that would help."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from proxymetric.arguments.checks import above_zero
from proxymetric.runs.planning.advice import Advice, advice_for, most_classes
from proxymetric.runs.planning.duration import Duration, duration_of, less_than_measured, loss_rates
from proxymetric.runs.planning.memory import memory_of
from proxymetric.runs.planning.rates import Machine, Rate
from proxymetric.runs.planning.workload import Workload


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
        }


def plan(work: Workload, available: int, machine: Machine) -> Plan:
    """Estimate the memory and the time of a workload.

    Args:
        work: the workload.
        available: bytes of a device, above 0.
        machine: the machine whose rates are used.

    Raises:
        ValueError: `available` is not above 0.

    Example:
        >>> from proxymetric.runs.planning import Workload, machine
        >>> estimate = plan(Workload(classes=5_000_000, dim=512, batch=4096, devices=8), 80 * 10**9, machine("H200"))
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
