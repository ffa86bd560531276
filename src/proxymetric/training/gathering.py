"""Gather the batch of all processes, so that a loss equals that of one process with the whole batch."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_batch(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings and labels of all processes, for a loss in your own loop with DistributedDataParallel.

    Every process computes the loss of the whole batch. Gradients flow to the embeddings of this process, scaled so that
    the average of DistributedDataParallel is the gradient of one process with the whole batch. The gradients of the
    proxies are equal in all processes: do not wrap the criterion, but create it with the same seed everywhere.
    Processes may have different numbers of rows. Without a process group, the arguments are returned.

    Args:
        embeddings: (B, D), those of this process.
        labels: (B,), their labels.

    Returns:
        The rows of all processes, in the order of their ranks.

    Example:
        >>> embeddings, labels = gather_batch(torch.zeros(4, 8), torch.zeros(4))
        >>> embeddings.shape
        torch.Size([4, 8])
    """
    if len(embeddings) != len(labels):
        raise ValueError(f"labels: got {len(labels)} labels, expected {len(embeddings)}, one for each embedding")
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return embeddings, labels
    counts = row_counts(len(embeddings), embeddings.device)
    return gather_rows(embeddings, counts), gather_rows(labels.to(embeddings.device), counts)


def row_counts(rows: int, device: torch.device) -> list[int]:
    """Return the number of rows in each process; a process has fewer if it could not read some images.

    Args:
        rows: the number of rows in this process.
        device: the device on which the processes communicate.
    """
    counts = torch.zeros(torch.distributed.get_world_size(), dtype=torch.int64, device=device)
    counts[torch.distributed.get_rank()] = rows
    torch.distributed.all_reduce(counts)
    return counts.tolist()


def gather_rows(part: Tensor, counts: list[int]) -> Tensor:
    """Return the rows of all processes in the order of their ranks; gradients flow to the rows of this process.

    All processes compute the same loss from the gathered rows, and their gradients are averaged afterwards. Only this
    process has the gradient through its own rows, so this gradient is multiplied by the number of processes.

    Args:
        part: the rows of this process.
        counts: the number of rows in each process, from `row_counts`.
    """
    world = len(counts)
    padded = part.new_zeros((max(counts), *part.shape[1:]))
    padded[: len(part)] = part.detach()
    gathered = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(gathered, padded)
    parts = [rows[:count] for rows, count in zip(gathered, counts, strict=True)]
    if part.requires_grad:
        local_rows = part.view_as(part)
        local_rows.register_hook(lambda grad: grad * world)
        parts[torch.distributed.get_rank()] = local_rows
    return torch.cat(parts)
