"""Random numbers that several processes must agree on."""

from __future__ import annotations

import torch
from torch import Tensor


def shared_random(*shape: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1) in host memory, the same on every process; `device` is where a group of them can meet.

    >>> drawn(2, 3, device=torch.device("cpu")).shape
    torch.Size([2, 3])
    """
    numbers = torch.rand(shape, dtype=torch.float32, device="cpu")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        sent = numbers.to(device)
        torch.distributed.broadcast(sent, 0)
        numbers = sent.cpu()
    return numbers
