"""Launches of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

POINTER_ALIGNMENT = 16
"""bytes; Triton compiles a faster kernel for pointers that are multiples of it"""


@cache
def kernels() -> Any:
    """The package of kernels. The first call imports triton."""
    from proxymetric.ops.triton import kernels

    return kernels


INTERFACE = ("run", "function", "packed_metadata")
"""attributes of a compiled kernel that a direct launch needs; they are private to Triton"""
_NO_INTERFACE = object()
_compiled: dict[tuple[Any, ...], Any] = {}
"""compiled kernels, or `_NO_INTERFACE`, by everything that the kernels were specialised for"""


def launch(
    name: str,
    grid: tuple[int, ...],
    warps: int,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    constants: dict[str, Any],
) -> None:
    """Start a kernel.

    Triton inspects all arguments at every launch and asks the driver about every pointer, which takes longer than most
    kernels here run. This function compares only what can differ, and passes addresses to the compiled kernel itself.
    The interface of a compiled kernel is private to Triton: if it is missing or differs, the public call is used.

    Args:
        name: of the kernel, in `kernels`.
        grid: programs along each axis.
        warps: warps of a program.
        tensors: the first arguments of the kernel.
        numbers: the arguments after the tensors.
        constants: the constexpr arguments by name, in the order of the kernel's signature.
    """
    kernel = getattr(kernels(), name)
    addresses, all_bits = [tensor.data_ptr() for tensor in tensors], 0
    for address in addresses:
        all_bits |= address
    # A kernel compiled for aligned tensors reads several numbers at once, so it is wrong for other tensors.
    if all_bits % POINTER_ALIGNMENT or interpreting() or not direct_launch():
        kernel[grid](*tensors, *numbers, **constants, num_warps=warps)
        return
    values, device = constants.values(), tensors[0].get_device()
    key = (name, warps, device, *[tensor.dtype for tensor in tensors], *map(_specialisation, numbers), *values)
    compiled = _compiled.get(key)
    if compiled is not None and compiled is not _NO_INTERFACE:
        metadata = (_current_stream()(device), compiled.function, compiled.packed_metadata, None, None, None)
        try:
            compiled.run(*(*grid, 1, 1)[:3], *metadata, *addresses, *numbers, *values)
        except TypeError:  # other arguments than expected; raised before anything is launched
            compiled = _compiled[key] = _NO_INTERFACE
        else:
            return
    launched = kernel[grid](*tensors, *numbers, **constants, num_warps=warps)
    if compiled is None:
        _compiled[key] = launched if all(hasattr(launched, attribute) for attribute in INTERFACE) else _NO_INTERFACE


@cache
def direct_launch() -> bool:
    """Whether this version of Triton has the private interface that `launch` uses.

    From 3.3, compiled kernels take all arguments, constants included. The major version 4 is not known and may differ.
    """
    import triton

    try:
        major, minor = (int(part) for part in triton.__version__.split(".")[:2])
        _current_stream()
    except (ValueError, ImportError, AttributeError):
        return False
    return (3, 3) <= (major, minor) < (4, 0)


@cache
def _current_stream() -> Callable[[int], int]:
    """A function that returns the current CUDA stream of a device."""
    from triton.runtime import driver

    return driver.active.get_current_stream


def _specialisation(number: float) -> Any:
    """What Triton specialises a kernel for; for an integer: whether it is 1, divisible by 16, or large."""
    return None if isinstance(number, float) else (number == 1, number % 16, number >= 2**31)


def aligned_pair(like: Tensor, size: int) -> Tensor:
    """An empty float32 tensor (2, size) whose two rows are both aligned to `POINTER_ALIGNMENT`."""
    return like.new_empty((2, -(-size // 4) * 4), dtype=torch.float32)[:, :size]


@cache
def installed() -> bool:
    """Whether triton can be imported."""
    return find_spec("triton") is not None


@cache
def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET was 1 when triton was imported."""
    import triton

    return not isinstance(kernels().row_gradients, triton.JITFunction)
