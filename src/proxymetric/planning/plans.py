"""A plan: memory, time, whether the workload fits, and changes that would help."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from proxymetric.checks import above_zero
from proxymetric.planning.advice import Advice, advice_for, most_classes
from proxymetric.planning.duration import Duration, duration_of, less_than_measured, loss_rates
from proxymetric.planning.memory import memory_of
from proxymetric.planning.rates import Machine, Rate
from proxymetric.planning.workload import Workload


@dataclass(frozen=True)
class Plan:
    """The memory and time of a workload on each device, without the encoder."""

    work: Workload
    memory: dict[str, int]
    """bytes of each part on the fullest device, see `memory_of`"""
    available: int
    """bytes of a device"""
    machine: Machine
    """whose rates were taken"""
    duration: Duration
    advice: tuple[Advice, ...]
    """what would help; none where it fits"""
    most_classes: int | None
    """how many classes would fit, all else being as it is"""
    notes: tuple[str, ...]
    """what to know about the numbers"""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
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
                {"change": each.words, "options": list(each.options), "total": each.total, "fits": each.fits}
                for each in self.advice
            ],
            "notes": list(self.notes),
        }


def plan(work: Workload, available: int, machine: Machine) -> Plan:
    """What `work` takes on devices of `available` bytes, in time by the rates of `machine`.

    >>> from proxymetric.planning import Workload, machine
    >>> made = plan(Workload(classes=5_000_000, dim=512, batch=4096, devices=8), 80 * 10**9, machine("H200"))
    >>> made.fits, round(made.total / 1e9, 1)
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


def _about_rates(work: Workload, machine: Machine) -> list[str]:
    if work.implementation not in machine.implementations:
        return []
    used = loss_rates(work, machine)
    notes = [f"{_about(name, rate)}: {rate.origin()}" for name, rate in dict.fromkeys(used)]
    if not used:
        notes = [f"{_about('matrix units', machine.matrix)}: {machine.matrix.origin()}"]
    elif [name for name, _ in used].count(work.implementation) == 1:
        reasons = less_than_measured(work, used[0][1])
        notes.append(f"the rate of {work.implementation} may not be reached: measured with {'; '.join(reasons)}")
    return notes


def _about(name: str, rate: Rate) -> str:
    size = "" if rate.classes is None else f" with batches of {rate.batch:,} and {rate.classes:,} proxies"
    return f"{rate.value:g} {rate.unit} of {name}{size}"


def _notes(work: Workload, machine: Machine) -> list[str]:
    notes = _about_rates(work, machine)
    if work.kind.over == "classes" and work.implementation != "plain":
        kept = "kept from the forward pass" if work.cached else "computed again in the backward pass"
        notes.append(f"similarities are {kept} (a budget of 1 GiB decides)")
    if work.touched != "all":
        notes.append("not compared with all classes: cheaper, and another loss")
    return notes
