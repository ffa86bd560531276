"""Measured rates of machines, each with where it comes from: `rates.json` beside this file."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import NamedTuple

from proxymetric.planning.numbers import nearest


class Rate(NamedTuple):
    """One number about a machine, and where it comes from."""

    value: float
    unit: str
    kind: str
    """"measured" or "data sheet\""""
    file: str | None
    """of this repository, that records the measurement; None: there is none"""
    date: str | None
    note: str
    dtype: str | None = None
    """of the products' sides"""
    batch: int | None = None
    dim: int | None = None
    classes: int | None = None
    method: str | None = None
    """whose loss it was, where losses that sum in another way may be slower"""

    def origin(self) -> str:
        """Where the number comes from, in words."""
        if self.kind != "measured":
            return self.kind
        return f"measured, {self.date}: {self.file or self.note}"


class Machine(NamedTuple):
    """What is known of a machine."""

    name: str
    short: str
    memory: Rate | None
    """GB (10^9 bytes) of a device; None: not known"""
    bandwidth: Rate | None
    """TB/s of its memory; None: not known"""
    matrix: Rate
    """TFLOP/s of products alone, by its matrix units if it has some"""
    implementations: dict[str, tuple[Rate, ...]]
    """TFLOP/s that a loss reaches, at some sizes; none: not measured; one that is not there does not run on it"""

    @property
    def is_cpu(self) -> bool:
        return self.short == "cpu"


@cache
def machines() -> dict[str, Machine]:
    """All machines with rates, by name.

    >>> machines()["NVIDIA H200"].matrix.unit
    'TFLOP/s'
    """
    text = resources.files("proxymetric.planning").joinpath("rates.json").read_text(encoding="utf-8")
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
    """The machine of that name or short name, in any case.

    >>> machine("h200").name, machine("cpu").name
    ('NVIDIA H200', 'Intel Xeon, 1 thread')
    """
    for row in machines().values():
        if name.lower() in (row.name.lower(), row.short.lower()):
            return row
    names = [*machines(), *(row.short for row in machines().values())]
    raise ValueError(
        f"device: got {name!r}, expected one of {', '.join(row.short for row in machines().values())}; "
        f"nearest is {nearest(name, names)!r}"
    )


def similar(name: str | None) -> Machine:
    """The known accelerator whose name is most like that of another; without a name, the first.

    >>> similar("NVIDIA H100 80GB HBM3").name
    'NVIDIA H200'
    """
    known = [row.name for row in machines().values() if not row.is_cpu]
    return machines()[known[0] if name is None else nearest(name, known)]
