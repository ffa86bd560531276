"""Measured rates of machines and their origin; the numbers are in `rates.json`."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import NamedTuple

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.runs.planning.numbers import nearest


class Rate(NamedTuple):
    """One measured number of a machine, and its origin."""

    value: float
    unit: str
    kind: str
    """"measured" or "data sheet\""""
    file: str | None
    """the file of this repository that records the measurement; None: no file"""
    date: str | None
    note: str
    dtype: str | None = None
    """the type of the multiplied matrices"""
    batch: int | None = None
    dim: int | None = None
    classes: int | None = None
    method: str | None = None
    """the method that was measured; losses that sum over another axis may be slower"""

    def origin(self) -> str:
        """Where the number comes from, in words."""
        if self.kind != "measured":
            return self.kind
        return f"measured, {self.date}: {self.file or self.note}"


class Machine(NamedTuple):
    """The rates of a machine."""

    name: str
    short: str
    memory: Rate | None
    """GB (10^9 bytes) of a device; None: not known"""
    bandwidth: Rate | None
    """TB/s of its memory; None: not known"""
    matrix: Rate
    """TFLOP/s of matrix products alone, in its matrix units if it has any"""
    implementations: dict[str, tuple[Rate, ...]]
    """TFLOP/s of a loss at the measured sizes. An empty tuple: not measured; no key: it does not run on this machine"""

    @property
    def is_cpu(self) -> bool:
        return self.short == "cpu"


@cache
def machines() -> dict[str, Machine]:
    """All machines with rates, by name.

    >>> machines()["NVIDIA H200"].matrix.unit
    'TFLOP/s'
    """
    text = resources.files("proxymetric.runs.planning").joinpath("rates.json").read_text(encoding="utf-8")
    return {
        name: Machine(
            name,
            row["short"],
            memory=row["memory"] and Rate(**row["memory"]),
            bandwidth=row["bandwidth"] and Rate(**row["bandwidth"]),
            matrix=Rate(**row["matrix"]),
            implementations={
                key: tuple(Rate(**rate) for rate in rates) for key, rates in row["implementations"].items()
            },
        )
        for name, row in json.loads(text).items()
    }


def machine(name: str) -> Machine:
    """The machine with this name or short name, in upper or lower case.

    Raises:
        ValueError: there is no such machine.

    Example:
        >>> machine("h200").name, machine("cpu").name
        ('NVIDIA H200', 'Intel Xeon, 1 thread')
    """
    for row in machines().values():
        if name.lower() in (row.name.lower(), row.short.lower()):
            return row
    short_names = [row.short for row in machines().values()]
    suggestion = did_you_mean(name, [*machines(), *short_names])
    raise ValueError(f"device: got {name!r}, expected one of {', '.join(short_names)}{suggestion}")


def similar(name: str | None) -> Machine:
    """The measured GPU whose name is most similar.

    Args:
        name: the name of a GPU; None: the first measured GPU is returned.

    Example:
        >>> similar("NVIDIA H100 80GB HBM3").name
        'NVIDIA H200'
    """
    gpu_names = [row.name for row in machines().values() if not row.is_cpu]
    return machines()[gpu_names[0] if name is None else nearest(name, gpu_names)]
