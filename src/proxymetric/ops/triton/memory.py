"""How much memory of the GPU a reduction may use, from what is free."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from proxymetric.ops.problem import DEFAULT_BUDGET

ALWAYS_KEPT = 2**26
"""bytes that are kept without asking how much is free"""
SHARE = 0.5
"""the part of the free memory that may be used; the gradient and the buffers of a chunk need some of the rest"""
SECONDS = 1.0
"""the driver's answer, which can change only if another process allocates, is used for so long"""


class _Obtainable(NamedTuple):
    """The bytes that torch holds or could still get from the driver, and when they were asked for."""

    size: int
    seconds: float


_obtainable: dict[int, _Obtainable] = {}


def default_budget(device: torch.device, size: int) -> int:
    """The bytes of similarities that may be kept for the backward pass, if the user sets no budget.

    Does not synchronise with the GPU.

    Args:
        device: the device of the similarities.
        size: the bytes that are to be kept; below `ALWAYS_KEPT` the free memory is not asked for.

    Returns:
        `SHARE` of the free memory of the GPU, including what torch has reserved and does not use; `DEFAULT_BUDGET` on
        other devices, and while a CUDA graph is recorded.
    """
    if size <= ALWAYS_KEPT:
        return ALWAYS_KEPT
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return DEFAULT_BUDGET
    index, now = device.index if device.index is not None else torch.cuda.current_device(), time.monotonic()
    obtainable = _obtainable.get(index)
    if obtainable is None or now - obtainable.seconds > SECONDS:
        free, _ = torch.cuda.mem_get_info(index)
        obtainable = _obtainable[index] = _Obtainable(free + torch.cuda.memory_reserved(index), now)
    return int(SHARE * (obtainable.size - torch.cuda.memory_allocated(index)))
