"""The time of a proxy loss in a step, from measured rates; unmeasured times are reported as unknown."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from proxymetric.runs.planning.memory import FLOAT32_BYTES, state_numbers
from proxymetric.runs.planning.numbers import figure
from proxymetric.runs.planning.rates import Machine, Rate
from proxymetric.runs.planning.workload import BYTES, Workload, kind_of


class Span(NamedTuple):
    """A lower and an upper bound of a time in seconds, and the reason for them."""

    low: float | None
    """None: not known"""
    high: float | None
    """None: there is no upper bound"""
    why: str
    """the rates that the bounds come from, in words"""

    def __str__(self) -> str:
        if self.low is None:
            return "not known"
        if self.high is None:
            return f"at least {_milliseconds(self.low)}"
        if self.low == self.high:
            return _milliseconds(self.low)
        return f"{_milliseconds(self.low)} to {_milliseconds(self.high)}"


class Duration(NamedTuple):
    """The operations, bytes and time of a step, without those of the encoder."""

    flops: int
    """floating-point operations of the loss and its gradients on one device"""
    traffic: int
    """bytes that the optimiser reads and writes on one device"""
    exchanged: int
    """bytes that one device receives from the others"""
    loss: Span
    optimizer: Span

    @property
    def low(self) -> float | None:
        """A lower bound of the seconds of loss and optimiser together; None: not known."""
        if self.loss.low is None or self.optimizer.low is None:
            return None
        return self.loss.low + self.optimizer.low


def flops(work: Workload) -> int:
    """Multiplications and additions of the loss and both gradients on the device with the most classes.

    These are three matrix products of 2 B R D operations each. A loss that sums over the classes needs a fourth product
    unless its similarities are kept for the backward pass.

    Example:
        >>> flops(Workload(classes=1000, dim=64, batch=32)) == 6 * 32 * 1000 * 64
        True
    """
    recomputes = work.kind.over == "classes" and not work.cached
    return (8 if recomputes else 6) * work.batch * work.compared * work.dim


def traffic(work: Workload) -> int:
    """Bytes that the optimiser moves: it reads and writes proxies and state, and reads gradients.

    Example:
        >>> traffic(Workload(classes=1000, dim=64, batch=32, optimizer="adam")) == 7 * 1000 * 64 * 4
        True
    """
    return round((3 + 2 * state_numbers(work)) * work.compared * work.dim * BYTES[work.dtype])


def exchanged(work: Workload) -> int:
    """Bytes that one device receives from the other devices in a step.

    These are the embeddings of the other devices, and from each of them a gradient of this device's embeddings. A loss
    that sums over the classes also exchanges two numbers for each query.

    Example:
        >>> exchanged(Workload(classes=1000, dim=64, batch=32, devices=2)) == 2 * 16 * 64 * 4
        True
    """
    remote_embeddings = work.batch - work.batch // work.devices
    if work.devices == 1:
        return 0
    sums = 2 * work.batch if work.kind.over == "classes" else 0
    return FLOAT32_BYTES * (2 * remote_embeddings * work.dim + sums)


def duration_of(work: Workload, machine: Machine) -> Duration:
    """Estimate the time of the loss and of the optimiser's step on a machine.

    Example:
        >>> from proxymetric.runs.planning import machine
        >>> loss = duration_of(Workload(classes=10**6, dim=512, batch=4096, dtype="bfloat16"), machine("H200")).loss
        >>> 0.02 < loss.low < 0.04, loss.low == loss.high  # this size was measured
        (True, True)
    """
    loss, optimizer = _loss_span(work, machine), _optimizer_span(work, machine)
    return Duration(flops(work), traffic(work), exchanged(work), loss, optimizer)


def _optimizer_span(work: Workload, machine: Machine) -> Span:
    amount, rate = f"{figure(traffic(work) / 1e9)} GB", machine.bandwidth
    if rate is None:
        return Span(None, None, f"{amount}; the memory bandwidth is not measured")
    return Span(traffic(work) / (rate.value * 1e12), None, f"{amount} at {rate.value:g} TB/s ({rate.kind})")


def _loss_span(work: Workload, machine: Machine) -> Span:
    tflop = flops(work) / 1e12
    amount = f"{figure(tflop)} TFLOP"
    if work.implementation not in machine.implementations:
        return Span(None, None, f"{work.implementation} does not run on {machine.name}")
    if not machine.implementations[work.implementation]:
        peak = machine.matrix.value
        why = f"{amount}; {work.implementation} is not measured: the matrix units reach {peak:g} TFLOP/s at most"
        return Span(tflop / peak, None, why)
    (_, upper_rate), *lower_rates = loss_rates(work, machine)
    why = f"{amount} at {upper_rate.value:g} TFLOP/s ({upper_rate.kind})"
    if not lower_rates:
        return Span(tflop / upper_rate.value, None, f"{why} at best")
    ((name, lower_rate),) = lower_rates
    if name != work.implementation:
        why += f" at best, at {lower_rate.value:g} TFLOP/s (that of {name}) at worst"
    elif lower_rate != upper_rate:
        why = f"{amount} at {lower_rate.value:g} to {upper_rate.value:g} TFLOP/s ({upper_rate.kind})"
    low, high = sorted((tflop / upper_rate.value, tflop / lower_rate.value))
    return Span(low, high, why)


def loss_rates(work: Workload, machine: Machine) -> list[tuple[str, Rate]]:
    """The measured rates that bound the rate of a loss from above and, if known, from below.

    Rates were measured at a few sizes only. The rate of a loss lies between that of the next larger measured size and
    that of the next smaller one. If no measured size of triton is smaller, the rate of chunked is the lower bound:
    chunked computes the same products in float32 and takes longer between them.

    Returns:
        One or two pairs of an implementation and its rate: the upper bound, then the lower bound. Empty: nothing was
        measured.

    Example:
        >>> from proxymetric.runs.planning import machine
        >>> [(name, rate.batch) for name, rate in loss_rates(Workload(10**6, 512, 4096), machine("H200"))]
        [('triton', 4096), ('chunked', 4096)]
        >>> work = Workload(10**6, 512, 1024, dtype="bfloat16")
        >>> [(name, rate.batch) for name, rate in loss_rates(work, machine("H200"))]
        [('triton', 4096), ('triton', 512)]
    """
    rates = machine.implementations.get(work.implementation)
    if not rates:
        return []
    upper_bound = (work.implementation, _next_larger(work, rates))
    names = ("triton", "chunked") if work.implementation == "triton" else (work.implementation,)
    for name in names:
        same_work = replace(work, implementation=name)
        smaller_rates = [rate for rate in machine.implementations[name] if not less_than_measured(same_work, rate)]
        if smaller_rates:
            return [upper_bound, (name, max(smaller_rates, key=_size))]
    return [upper_bound]


def _next_larger(work: Workload, rates: tuple[Rate, ...]) -> Rate:
    """The rate of the smallest measured size that is not smaller than the workload, or of the largest measured size."""
    batches, proxies = zip(*map(_size, rates), strict=True)
    batch, count = min(work.batch, max(batches)), min(work.compared, max(proxies))
    return min((rate for rate in rates if _size(rate)[0] >= batch and _size(rate)[1] >= count), key=_size)


def _size(rate: Rate) -> tuple[int, int]:
    return rate.batch or 0, rate.classes or 0


def less_than_measured(work: Workload, rate: Rate) -> list[str]:
    """The ways in which `work` is smaller than the measured workload or differs from it, so that it may be slower.

    Example:
        >>> work = Workload(classes=1000, dim=64, batch=4096, dtype="bfloat16")
        >>> less_than_measured(work, Rate(109, "TFLOP/s", "measured", None, None, "", "bfloat16", 4096, 512))
        ['512 dimensions, not 64']
    """
    reasons = []
    if rate.dtype not in (None, work.products):
        reasons.append(f"{rate.dtype} products, not {work.products} products")
    for words, size, measured_size in (
        ("batches of {}", work.batch, rate.batch),
        ("{} dimensions", work.dim, rate.dim),
        ("{} proxies", work.compared, rate.classes),
    ):
        if measured_size is not None and size < measured_size:
            reasons.append(f"{words.format(f'{measured_size:,}')}, not {size:,}")
    if rate.method is not None and (work.several or work.kind.over != kind_of(rate.method).over):
        reasons.append(f"{rate.method}, not {work.method}")
    return reasons


def _milliseconds(seconds: float) -> str:
    return f"{figure(1e3 * seconds)} ms" if seconds < 0.9995 else f"{figure(seconds)} s"
