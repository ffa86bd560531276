"""Starting Triton's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@cache
def kernels() -> Any:
    """The module of kernels: triton is imported here, and nowhere before."""
    from proxymetric.ops.triton import kernels

    return kernels


_made: dict[tuple[Any, ...], Any] = {}
"""what a kernel was compiled for -> the compiled one"""


def launch(
    name: str,
    grid: tuple[int, ...],
    warps: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
) -> None:
    """Start a kernel; its signature has tensors, numbers and constants in this order.

    Triton looks at all arguments of every launch for what it has compiled, and asks the driver about every pointer,
    which takes longer than most kernels here run. This looks at what can differ, and passes addresses.
    """
    kernel = getattr(kernels(), name)
    addresses, odd = [each.data_ptr() for each in tensors], 0
    for each in addresses:
        odd |= each
    # A kernel for tensors at multiples of 16 bytes reads several numbers at once: not for others.
    if odd & 15 or interpreting() or not _direct():
        kernel[grid](*tensors, *numbers, **constants, num_warps=warps)
        return
    values, device = constants.values(), tensors[0].get_device()
    key = (name, warps, device, *[each.dtype for each in tensors], *map(_kind, numbers), *values)
    made = _made.get(key)
    if made is None:
        _made[key] = kernel[grid](*tensors, *numbers, **constants, num_warps=warps)
        return
    about = (_stream()(device), made.function, made.packed_metadata, None, None, None)
    made.run(*(*grid, 1, 1)[:3], *about, *addresses, *numbers, *values)


@cache
def _direct() -> bool:
    """Whether compiled kernels take all arguments as they are called with: from Triton 3.3."""
    import triton

    major, minor, *_ = triton.__version__.split(".")
    return (int(major), int(minor)) >= (3, 3)


@cache
def _stream() -> Callable[[int], int]:
    """What tells the stream of a device that work goes to now."""
    from triton.runtime import driver

    return driver.active.get_current_stream


def pair(like: Tensor, size: int) -> Tensor:
    """(2, size) numbers in float32, both at multiples of 16 bytes."""
    return like.new_empty((2, -(-size // 4) * 4), dtype=torch.float32)[:, :size]


def _kind(number: float) -> Any:
    """What Triton compiles for: nothing about a float; of a whole number whether it is 1, divisible or large."""
    return None if isinstance(number, float) else (number == 1, number % 16, number >= 2**31)


@cache
def installed() -> bool:
    """Whether there is a triton to import."""
    return find_spec("triton") is not None


@cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET=1 when they were imported."""
    import triton

    return not isinstance(kernels().finish, triton.JITFunction)
