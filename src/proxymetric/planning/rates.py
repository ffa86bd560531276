"""Measured rates of machines, each with where it comes from: `rates.json` beside this file."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import NamedTuple

from proxymetric.planning.numbers import known, nearest


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

    def origin(self) -> str:
        """Where the number comes from, in words."""
        if self.kind != "measured":
            return self.kind
        return f"measured, {self.date}: {self.file or self.note}"


class Machine(NamedTuple):
    """What is known of a machine."""

    name: str
    memory: Rate
    """GB (10^9 bytes) of a device"""
    bandwidth: Rate
    """TB/s of its memory"""
    matrix: Rate
    """TFLOP/s of its matrix units"""
    implementations: dict[str, Rate | None]
    """TFLOP/s that a loss reaches; None: not measured"""


@cache
def machines() -> dict[str, Machine]:
    """All machines with rates, by name.

    >>> machines()["NVIDIA H200"].matrix.value
    790
    """
    text = resources.files("proxymetric.planning").joinpath("rates.json").read_text(encoding="utf-8")
    return {
        name: Machine(
            name,
            memory=Rate(**row["memory"]),
            bandwidth=Rate(**row["bandwidth"]),
            matrix=Rate(**row["matrix"]),
            implementations={key: rate and Rate(**rate) for key, rate in row["implementations"].items()},
        )
        for name, row in json.loads(text).items()
    }


def machine(name: str) -> Machine | None:
    """The machine of that name, or of which it is a word; None for "cpu", of which nothing is known.

    >>> machine("h200").name
    'NVIDIA H200'
    """
    if name.lower() == "cpu":
        return None
    for row in machines().values():
        if name.lower() in (row.name.lower(), *row.name.lower().split()[1:]):
            return row
    return machines()[known("device", name, (*machines(), "cpu"))]


def similar(name: str) -> Machine:
    """The known machine whose name is most like that of another.

    >>> similar("NVIDIA H100 80GB HBM3").name
    'NVIDIA H200'
    """
    return machines()[nearest(name, machines())]
