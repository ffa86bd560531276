"""Changes that make a workload fit, each with the memory it leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from proxymetric.runs.planning.memory import memory_of
from proxymetric.runs.planning.workload import Workload

MAX_DEVICES = 4096
"""the largest number of devices that advice may propose"""


class Advice(NamedTuple):
    """A change to a workload, and the memory that the changed workload needs."""

    words: str
    """the change in words"""
    options: tuple[str, ...]
    """the change as options of the command line"""
    total: int
    """bytes on the device with the most classes, after the change"""
    fits: bool
    """whether the changed workload fits"""
    work: Workload
    """the changed workload"""


def advice_for(work: Workload, available: int) -> tuple[Advice, ...]:
    """Changes that lower the memory of a workload.

    If no single change of implementation, optimiser or dtype makes the workload fit, these changes are also tried
    together and, if that does not suffice, on more devices. A change that replaces the loss (`touched`) is tried only
    by itself.

    Args:
        work: the workload.
        available: bytes of a device.

    Returns:
        The changes; none if the workload fits already.

    Example:
        >>> first, *_ = advice_for(Workload(classes=10**7, dim=512, batch=4096, implementation="plain"), 10**11)
        >>> first.words, first.options, first.fits
        ('triton: no matrix of all queries by all proxies', ('--implementation', 'triton'), True)
    """
    if total(work) <= available:
        return ()
    single_changes = [_advise(words, work, available, **change) for words, change in _changes(work)]
    devices = _more_devices("more devices", work, available) if work.touched == "all" else None
    changes = [*single_changes, *([devices] if devices else []), *_fewer_dimensions(work, available)]
    combined_change = {
        key: value for words, change in _changes(work) for key, value in change.items() if key != "touched"
    }
    same_loss = [advice for advice in single_changes if advice.work.touched == work.touched]
    if len(combined_change) > 1 and not any(advice.fits for advice in same_loss):
        joint_change = _advise("together", work, available, **combined_change)
        joint_change_on_more = None
        if not joint_change.fits and work.touched == "all":
            joint_change_on_more = _more_devices("together, on more devices", work, available, **combined_change)
        changes += [joint_change, *([joint_change_on_more] if joint_change_on_more else [])]
    return tuple(advice for advice in changes if advice.total < total(work))


def total(work: Workload) -> int:
    """Bytes of all parts on the device with the most classes."""
    return sum(memory_of(work).values())


def most_classes(work: Workload, available: int) -> int | None:
    """The number of classes that would fit if nothing else changed; one more class would not fit.

    Args:
        work: the workload; its own number of classes is ignored.
        available: bytes of a device.

    Returns:
        The number of classes. None: not even one class for each device fits.

    Example:
        >>> most_classes(Workload(classes=1000, dim=500, batch=1, optimizer="sgd", implementation="plain"), 10**9)
        99640
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
        yield "sparse updates: compare with the batch's classes only, which is another loss", {"touched": "batch"}


def _advise(words: str, work: Workload, available: int, **change: str | int) -> Advice:
    changed_work = replace(work, **change)  # type: ignore[arg-type]
    options = tuple(word for key, value in change.items() for word in (f"--{key}", str(value)))
    needed_bytes = total(changed_work)
    return Advice(words, options, needed_bytes, needed_bytes <= available, changed_work)


def _more_devices(words: str, work: Workload, available: int, **change: str) -> Advice | None:
    """The change to the smallest number of devices on which the workload fits; None if no number suffices."""
    max_devices = min(MAX_DEVICES, work.classes, work.batch)
    for devices in range(work.devices + 1, max_devices + 1):
        advice = _advise(words, work, available, **change, devices=devices)
        if advice.fits:
            return advice
    return None


def _fewer_dimensions(work: Workload, available: int) -> Iterator[Advice]:
    """The change to the largest multiple of 8 dimensions with which the workload fits, if there is one."""
    low, high = 0, -(-work.dim // 8)
    while high - low > 1:
        middle = (low + high) // 2
        fits = total(replace(work, dim=8 * middle)) <= available
        low, high = (middle, high) if fits else (low, middle)
    if low:
        yield _advise("fewer dimensions", work, available, dim=8 * low)
