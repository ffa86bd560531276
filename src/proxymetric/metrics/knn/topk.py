"""Picking entries of score matrices: NumPy where it shares the memory and is several times faster, torch on a GPU."""

import numpy as np
import torch
from torch import Tensor


def in_numpy(values: Tensor) -> bool:
    """NumPy can work on the memory of these values."""
    return values.device.type == "cpu"


def above(scores: Tensor, bar: Tensor) -> Tensor:
    """Flat indices, ascending, of the entries of (R, C) above a bar (R, 1) or (1, C).

    >>> above(torch.tensor([[1.0, 5.0], [4.0, 2.0]]), torch.tensor([[2.0], [2.0]]))
    tensor([1, 2])
    """
    if in_numpy(scores):
        return torch.from_numpy(np.flatnonzero(scores.numpy() > bar.numpy()))
    return (scores > bar).flatten().nonzero().flatten()


def places(mask: Tensor) -> Tensor:
    """Indices, ascending, of what is true in (M,).

    >>> places(torch.tensor([False, True, True]))
    tensor([1, 2])
    """
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if in_numpy(mask) else mask.nonzero().flatten()


def kth_largest(scores: Tensor, k: Tensor) -> Tensor:
    """The k-th largest entry of each row of (R, C), k (R,) from 1; -inf where a row is shorter than that.

    >>> kth_largest(torch.tensor([[1.0, 5.0, 3.0], [4.0, 2.0, 0.0]]), torch.tensor([2, 4]))
    tensor([3., -inf])
    """
    width = scores.shape[1]
    place = k.clamp(1, width)
    if in_numpy(scores):
        ascending = torch.from_numpy(np.sort(scores.numpy(), axis=1))
        found = ascending.gather(1, width - place[:, None])
    else:
        found = scores.topk(int(place.max()), dim=1).values.gather(1, place[:, None] - 1)
    return torch.where(k <= width, found.flatten(), -torch.inf)


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries (R, k) of each row, largest first, and their columns; equal ones in any order.

    >>> largest(torch.tensor([[1.0, 5.0, 3.0]]), 2)[1]
    tensor([[1, 2]])
    """
    if not in_numpy(scores):
        values, columns = scores.topk(k, dim=1)
        return values, columns
    negative = np.negative(scores.numpy())
    if k * 4 > negative.shape[1]:
        picked = np.argsort(negative, axis=1)[:, :k]
    else:
        some = np.argpartition(negative, k - 1, axis=1)[:, :k]
        picked = np.take_along_axis(some, np.argsort(np.take_along_axis(negative, some, axis=1), axis=1), axis=1)
    columns = torch.from_numpy(np.ascontiguousarray(picked))
    return scores.gather(1, columns), columns


def argsort(keys: Tensor) -> Tensor:
    """The order that sorts whole numbers, equal ones in any order."""
    return torch.from_numpy(np.argsort(keys.numpy())) if in_numpy(keys) else keys.argsort()


def lexsort(*keys: Tensor) -> Tensor:
    """The order that sorts by the first key, then the second, and so on, all ascending.

    >>> lexsort(torch.tensor([1, 0, 1]), torch.tensor([0.5, 0.0, 0.2]))
    tensor([1, 2, 0])
    """
    order = torch.arange(len(keys[0]), device=keys[0].device)
    for key in reversed(keys):
        order = order[key[order].argsort(stable=True)]
    return order
