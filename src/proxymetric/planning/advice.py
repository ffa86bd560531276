"""Changes that make a workload fit, each with the memory it leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from proxymetric.planning.memory import memory_of
from proxymetric.planning.workload import Workload

MAX_DEVICES = 4096
"""the largest number of devices that is advised"""


class Advice(NamedTuple):
    """A change, in words and as options of the command line, and the memory it leads to."""

    words: str
    options: tuple[str, ...]
    total: int
    """bytes on the fullest device"""
    fits: bool
    work: Workload


def advice_for(work: Workload, available: int) -> tuple[Advice, ...]:
    """Changes that lower the memory of `work`, for devices of so many bytes; none if it fits.

    Where none of the changes of one device alone suffices, all that leave the loss what it is are tried together, on
    more devices if need be.

    >>> first, *_ = advice_for(Workload(classes=10**7, dim=512, batch=4096, implementation="plain"), 10**11)
    >>> first.words, first.options, first.fits
    ('triton: no matrix of all queries by all proxies', ('--implementation', 'triton'), True)
    """
    if total(work) <= available:
        return ()
    alone = [_changed(words, work, available, **change) for words, change in _changes(work)]
    devices = _more_devices("more devices", work, available) if work.touched == "all" else None
    changes = [*alone, *([devices] if devices else []), *_fewer_dimensions(work, available)]
    together = {key: value for words, change in _changes(work) for key, value in change.items() if key != "touched"}
    exact = [each for each in alone if each.work.touched == work.touched]
    if len(together) > 1 and not any(each.fits for each in exact):
        joined = _changed("together", work, available, **together)
        more = None
        if not joined.fits and work.touched == "all":
            more = _more_devices("together, on more devices", work, available, **together)
        changes += [joined, *([more] if more else [])]
    return tuple(each for each in changes if each.total < total(work))


def total(work: Workload) -> int:
    """Bytes of all parts on the fullest device."""
    return sum(memory_of(work).values())


def most_classes(work: Workload, available: int) -> int | None:
    """A number of classes with which the same would fit and with one more would not; None where not even few do.

    >>> most_classes(Workload(classes=1000, dim=500, batch=1, optimizer="sgd", implementation="plain"), 10**9)
    71245
    """

    def fits(classes: int) -> bool:
        return total(replace(work, classes=classes)) <= available

    low, high = work.devices, work.devices + 1
    if not fits(low):
        return None
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _changes(work: Workload) -> Iterator[tuple[str, dict[str, str]]]:
    if work.implementation == "plain":
        name = "chunked" if work.on_cpu else "triton"
        yield f"{name}: no matrix of all queries by all proxies", {"implementation": name}
    if work.optimizer != "rowwise-adagrad":
        yield "row-wise optimiser state (train.proxy_optimizer)", {"optimizer": "rowwise-adagrad"}
    if work.dtype == "float32":
        yield "proxies in half precision", {"dtype": "bfloat16"}
    if work.touched == "all" and work.devices == 1:
        yield "sparse updates: compare with the batch's classes alone, which is another loss", {"touched": "batch"}


def _changed(words: str, work: Workload, available: int, **change: str | int) -> Advice:
    changed = replace(work, **change)  # type: ignore[arg-type]
    options = tuple(word for key, value in change.items() for word in (f"--{key}", str(value)))
    needed = total(changed)
    return Advice(words, options, needed, needed <= available, changed)


def _more_devices(words: str, work: Workload, available: int, **change: str) -> Advice | None:
    """With the smallest number of devices that suffices; None if no number does."""
    most = min(MAX_DEVICES, work.classes, work.batch)
    for devices in range(work.devices + 1, most + 1):
        advice = _changed(words, work, available, **change, devices=devices)
        if advice.fits:
            return advice
    return None


def _fewer_dimensions(work: Workload, available: int) -> Iterator[Advice]:
    """With the largest multiple of 8 that suffices, if there is one."""
    low, high = 0, -(-work.dim // 8)
    while high - low > 1:
        middle = (low + high) // 2
        fits = total(replace(work, dim=8 * middle)) <= available
        low, high = (middle, high) if fits else (low, middle)
    if low:
        yield _changed("fewer dimensions", work, available, dim=8 * low)
