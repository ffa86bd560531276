"""The time of a proxy loss in a step, from measured rates; unmeasured times are reported as unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from proxymetric.planning.memory import FLOAT, state_numbers
from proxymetric.planning.numbers import figure
from proxymetric.planning.rates import Machine, Rate
from proxymetric.planning.workload import BYTES, Workload, kind_of


class Span(NamedTuple):
    """Seconds between two bounds, None where there is none, and why these."""

    low: float | None
    high: float | None
    why: str

    def __str__(self) -> str:
        if self.low is None:
            return "not known"
        if self.high is None:
            return f"at least {_milliseconds(self.low)}"
        if self.low == self.high:
            return _milliseconds(self.low)
        return f"{_milliseconds(self.low)} to {_milliseconds(self.high)}"


class Duration(NamedTuple):
    """What a step takes beside the encoder's."""

    flops: int
    """of the loss and its gradients, on one device"""
    traffic: int
    """bytes that the optimiser reads and writes on one device"""
    exchanged: int
    """bytes that one device receives from the others"""
    loss: Span
    optimizer: Span

    @property
    def low(self) -> float | None:
        """Seconds of loss and optimiser, at least."""
        if self.loss.low is None or self.optimizer.low is None:
            return None
        return self.loss.low + self.optimizer.low


def flops(work: Workload) -> int:
    """Multiplications and additions of the loss and both gradients on the fullest device.

    Three products of 2 B R D each; over the classes a fourth, unless similarities are kept.

    >>> flops(Workload(classes=1000, dim=64, batch=32)) == 6 * 32 * 1000 * 64
    True
    """
    again = work.kind.over == "classes" and not work.cached
    return (8 if again else 6) * work.batch * work.compared * work.dim


def traffic(work: Workload) -> int:
    """Bytes that the optimiser touches: proxies and state read and written, gradients read.

    >>> traffic(Workload(classes=1000, dim=64, batch=32, optimizer="adam")) == 7 * 1000 * 64 * 4
    True
    """
    return round((3 + 2 * state_numbers(work)) * work.compared * work.dim * BYTES[work.dtype])


def exchanged(work: Workload) -> int:
    """Bytes that one device receives in a step: the others' embeddings, and its own embeddings' gradient from each.

    Query-wise losses also combine 2 numbers for each query.

    >>> exchanged(Workload(classes=1000, dim=64, batch=32, devices=2)) == 2 * 16 * 64 * 4
    True
    """
    others = work.batch - work.batch // work.devices
    if work.devices == 1:
        return 0
    sums = 2 * work.batch if work.kind.over == "classes" else 0
    return FLOAT * (2 * others * work.dim + sums)


def duration_of(work: Workload, machine: Machine) -> Duration:
    """Time of the loss and of the optimiser's step on a machine.

    >>> from proxymetric.planning import machine
    >>> loss = duration_of(Workload(classes=10**6, dim=512, batch=4096, dtype="bfloat16"), machine("H200")).loss
    >>> 0.02 < loss.low < 0.04, loss.low == loss.high  # a size that was measured
    (True, True)
    """
    return Duration(flops(work), traffic(work), exchanged(work), _loss(work, machine), _moved(work, machine))


def _moved(work: Workload, machine: Machine) -> Span:
    amount, rate = f"{figure(traffic(work) / 1e9)} GB", machine.bandwidth
    if rate is None:
        return Span(None, None, f"{amount}; the memory's rate is not measured")
    return Span(traffic(work) / (rate.value * 1e12), None, f"{amount} at {rate.value:g} TB/s ({rate.kind})")


def _loss(work: Workload, machine: Machine) -> Span:
    done, products = f"{figure(flops(work) / 1e12)} TFLOP", flops(work) / 1e12
    if work.implementation not in machine.implementations:
        return Span(None, None, f"{work.implementation} does not run there")
    if not machine.implementations[work.implementation]:
        top = machine.matrix.value
        why = f"{done}; {work.implementation} is not measured: the matrix units do {top:g} TFLOP/s at most"
        return Span(products / top, None, why)
    (_, best), *slower = loss_rates(work, machine)
    why = f"{done} at {best.value:g} TFLOP/s ({best.kind})"
    if not slower:
        return Span(products / best.value, None, f"{why} at best")
    ((name, rate),) = slower
    if name != work.implementation:
        why += f" at best, at {rate.value:g} of {name} at worst"
    elif rate != best:
        why = f"{done} at {rate.value:g} to {best.value:g} TFLOP/s ({best.kind})"
    low, high = sorted((products / best.value, products / rate.value))
    return Span(low, high, why)


def loss_rates(work: Workload, machine: Machine) -> list[tuple[str, Rate]]:
    """Implementation and rate: one that the loss does not exceed, and one that it reaches, if that is known.

    Rates were measured at some sizes: it is between those of the next larger and the next smaller. What triton may not
    reach, chunked may: it makes the same products in float32, and takes longer between them.

    >>> from proxymetric.planning import machine
    >>> [(name, rate.batch) for name, rate in loss_rates(Workload(10**6, 512, 4096), machine("H200"))]
    [('triton', 4096), ('chunked', 4096)]
    >>> work = Workload(10**6, 512, 1024, dtype="bfloat16")
    >>> [(name, rate.batch) for name, rate in loss_rates(work, machine("H200"))]
    [('triton', 4096), ('triton', 512)]
    """
    rates = machine.implementations.get(work.implementation)
    if not rates:
        return []
    found = [(work.implementation, _next_larger(work, rates))]
    names = ("triton", "chunked") if work.implementation == "triton" else (work.implementation,)
    for name in names:
        asked = replace(work, implementation=name)
        reached = [rate for rate in machine.implementations[name] if not less_than_measured(asked, rate)]
        if reached:
            return [*found, (name, max(reached, key=_size))]
    return found


def _next_larger(work: Workload, rates: tuple[Rate, ...]) -> Rate:
    """Beyond the largest size that was measured, that one."""
    batches, proxies = zip(*map(_size, rates), strict=True)
    batch, count = min(work.batch, max(batches)), min(work.compared, max(proxies))
    return min((rate for rate in rates if _size(rate)[0] >= batch and _size(rate)[1] >= count), key=_size)


def _size(rate: Rate) -> tuple[int, int]:
    return rate.batch or 0, rate.classes or 0


def less_than_measured(work: Workload, rate: Rate) -> list[str]:
    """With what a rate was measured that `work` has not, so that it may not be reached; nothing where it has all.

    >>> work = Workload(classes=1000, dim=64, batch=4096, dtype="bfloat16")
    >>> less_than_measured(work, Rate(109, "TFLOP/s", "measured", None, None, "", "bfloat16", 4096, 512))
    ['512 dimensions, not 64']
    """
    reasons = []
    if rate.dtype not in (None, work.products):
        reasons.append(f"{rate.dtype} products, not {work.products} ones")
    for what, here, there in (
        ("batches of {}", work.batch, rate.batch),
        ("{} dimensions", work.dim, rate.dim),
        ("{} proxies", work.compared, rate.classes),
    ):
        if there is not None and here < there:
            reasons.append(f"{what.format(f'{there:,}')}, not {here:,}")
    if rate.method is not None and (work.several or work.kind.over != kind_of(rate.method).over):
        reasons.append(f"{rate.method}, not {work.method}")
    return reasons


def _milliseconds(seconds: float) -> str:
    return f"{figure(1e3 * seconds)} ms" if seconds < 0.9995 else f"{figure(seconds)} s"
