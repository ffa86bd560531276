"""Random numbers that are the same in all processes."""

from __future__ import annotations

import torch
from torch import Tensor


def shared_random(*shape: int, device: torch.device) -> Tensor:
    """Uniform random numbers in [0, 1), in host memory, the same in every process.

    Args:
        *shape: of the result.
        device: on which the processes can communicate.

    Example:
        >>> shared_random(2, 3, device=torch.device("cpu")).shape
        torch.Size([2, 3])
    """
    numbers = torch.rand(shape, dtype=torch.float32, device="cpu")
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        message = numbers.to(device)
        torch.distributed.broadcast(message, 0)
        numbers = message.cpu()
    return numbers
