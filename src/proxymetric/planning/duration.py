"""Time that a proxy loss takes in a step, from measured rates; what is not known is said to be so."""

from __future__ import annotations

from typing import NamedTuple

from proxymetric.planning.memory import FLOAT, state_numbers
from proxymetric.planning.numbers import figure
from proxymetric.planning.rates import Machine, Rate
from proxymetric.planning.workload import BYTES, Workload


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
    >>> str(duration_of(Workload(classes=10**6, dim=512, batch=4096, dtype="bfloat16"), machine("H200")).loss)
    '115 ms'
    """
    return Duration(flops(work), traffic(work), exchanged(work), _loss(work, machine), _moved(work, machine))


def _moved(work: Workload, machine: Machine) -> Span:
    amount, rate = f"{figure(traffic(work) / 1e9)} GB", machine.bandwidth
    if rate is None:
        return Span(None, None, f"{amount}; the memory's rate is not measured")
    return Span(traffic(work) / (rate.value * 1e12), None, f"{amount} at {rate.value:g} TB/s ({rate.kind})")


def _loss(work: Workload, machine: Machine) -> Span:
    if work.implementation not in machine.implementations:
        return Span(None, None, f"{work.implementation} does not run there")
    rate, top = machine.implementations[work.implementation], machine.matrix
    beside = machine.implementations["chunked"] if work.implementation == "triton" else None
    work_done = f"{figure(flops(work) / 1e12)} TFLOP"
    fastest, slowest = rate or top, rate or beside
    if rate is not None:
        why = f"{work_done} at {rate.value:g} TFLOP/s ({rate.kind})"
    elif beside is not None:
        why = (
            f"{work_done}; {work.implementation} is not measured: between the matrix units' {top.value:g} and "
            f"chunked's {beside.value:g} TFLOP/s"
        )
    else:
        why = f"{work_done}; {work.implementation} is not measured: the matrix units do {top.value:g} TFLOP/s at most"
    low = flops(work) / (fastest.value * 1e12)
    high = None if slowest is None or less_than_measured(work, slowest) else flops(work) / (slowest.value * 1e12)
    return Span(low, high, why)


def less_than_measured(work: Workload, rate: Rate) -> list[str]:
    """Why a rate may not be reached, in words: nothing where it was measured for such a load.

    >>> work = Workload(classes=1000, dim=64, batch=4096, dtype="bfloat16")
    >>> less_than_measured(work, Rate(109, "TFLOP/s", "measured", None, None, "", "bfloat16", 4096, 512))
    ['dim 64 is below the 512 it was measured with']
    """
    reasons = []
    if rate.dtype not in (None, work.dtype):
        reasons.append(f"it was measured with {rate.dtype} products, not with {work.dtype} ones")
    for name, here, there in (("batch", work.batch, rate.batch), ("dim", work.dim, rate.dim)):
        if there is not None and here < there:
            reasons.append(f"{name} {here} is below the {there} it was measured with")
    return reasons


def _milliseconds(seconds: float) -> str:
    return f"{figure(1e3 * seconds)} ms" if seconds < 0.9995 else f"{figure(seconds)} s"
