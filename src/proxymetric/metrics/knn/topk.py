"""Selections from score matrices: NumPy on a CPU, where it is several times faster than torch, and torch on a GPU."""

import numpy as np
import torch
from torch import Tensor


def use_numpy(values: Tensor) -> bool:
    """Whether NumPy can work on the memory of these values."""
    return values.device.type == "cpu"


def indices_above(scores: Tensor, threshold: Tensor) -> Tensor:
    """The flat indices, ascending, of the entries of `scores` (R, C) above `threshold` (R, 1) or (1, C).

    >>> indices_above(torch.tensor([[1.0, 5.0], [4.0, 2.0]]), torch.tensor([[2.0], [2.0]]))
    tensor([1, 2])
    """
    if use_numpy(scores):
        return torch.from_numpy(np.flatnonzero(scores.numpy() > threshold.numpy()))
    return (scores > threshold).flatten().nonzero().flatten()


def true_indices(mask: Tensor) -> Tensor:
    """The indices, ascending, of the true entries of a mask (M,).

    >>> true_indices(torch.tensor([False, True, True]))
    tensor([1, 2])
    """
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if use_numpy(mask) else mask.nonzero().flatten()


def kth_largest(scores: Tensor, k: Tensor) -> Tensor:
    """The k-th largest entry of each row of `scores` (R, C), for k (R,) from 1; -inf if a row has fewer entries.

    >>> kth_largest(torch.tensor([[1.0, 5.0, 3.0], [4.0, 2.0, 0.0]]), torch.tensor([2, 4]))
    tensor([3., -inf])
    """
    width = scores.shape[1]
    clipped_k = k.clamp(1, width)
    if use_numpy(scores):
        ascending = torch.from_numpy(np.sort(scores.numpy(), axis=1))
        values = ascending.gather(1, width - clipped_k[:, None])
    else:
        values = scores.topk(int(clipped_k.max()), dim=1).values.gather(1, clipped_k[:, None] - 1)
    return torch.where(k <= width, values.flatten(), -torch.inf)


def topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries (R, k) of each row, largest first, and their columns; equal entries are in any order.

    >>> topk(torch.tensor([[1.0, 5.0, 3.0]]), 2)[1]
    tensor([[1, 2]])
    """
    if not use_numpy(scores):
        values, columns = scores.topk(k, dim=1)
        return values, columns
    negative = np.negative(scores.numpy())
    if k * 4 > negative.shape[1]:
        picked_columns = np.argsort(negative, axis=1)[:, :k]
    else:
        top_columns = np.argpartition(negative, k - 1, axis=1)[:, :k]
        picked_columns = np.take_along_axis(
            top_columns, np.argsort(np.take_along_axis(negative, top_columns, axis=1), axis=1), axis=1
        )
    columns = torch.from_numpy(np.ascontiguousarray(picked_columns))
    return scores.gather(1, columns), columns


def argsort(keys: Tensor) -> Tensor:
    """The order that sorts whole numbers; the order of equal numbers is arbitrary."""
    return torch.from_numpy(np.argsort(keys.numpy())) if use_numpy(keys) else keys.argsort()


def lexsort(*keys: Tensor) -> Tensor:
    """The order that sorts by the first key, then by the second, and so on, all ascending.

    >>> lexsort(torch.tensor([1, 0, 1]), torch.tensor([0.5, 0.0, 0.2]))
    tensor([1, 2, 0])
    """
    order = torch.arange(len(keys[0]), device=keys[0].device)
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    return order
