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
"""an answer is used for so long, if the request is far below it: asking torch takes as long as several launches"""
FAR_BELOW = 4
"""a request for the budget divided by this number, or less, is far below it"""


class _Budget(NamedTuple):
    """A budget in bytes, and when it was computed."""

    size: int
    seconds: float


_budgets: dict[int, _Budget] = {}
"""the last budget of each device"""


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
    known = _budgets.get(index)
    if known is not None and now - known.seconds <= SECONDS and FAR_BELOW * size <= known.size:
        return known.size
    free, _ = torch.cuda.mem_get_info(index)
    unused = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    budget = _budgets[index] = _Budget(int(SHARE * (free + unused)), now)
    return budget.size
