"""Equal rows: which there are, and how many came before each."""

import torch
from torch import Tensor

ROWS = 512  # hashed at once


def distinct(items: Tensor) -> Tensor | None:
    """For every row of (N, D) the number of its distinct row, or None where all rows differ.

    Rows are equal when all their numbers are, so that -0 is 0. A 64-bit hash of the rows is compared, then checked.

    >>> distinct(torch.tensor([[2.0, 1.0], [1.0, 1.0], [2.0, 1.0]]))
    tensor([0, 1, 0])
    >>> distinct(torch.eye(3)) is None
    True
    """
    width = torch.int64 if items.dtype == torch.float64 else torch.int32
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (items.shape[1],), generator=generator).to(items.device) * 2 + 1
    hashes = torch.empty(len(items), dtype=torch.int64, device=items.device)
    for part, out in zip(items.split(ROWS), hashes.split(ROWS)):
        out.copy_(((part + 0.0).view(width) * odd).sum(dim=1))  # -0 becomes 0
    first, group = _grouped(hashes)
    if len(first) == len(items):
        return None
    copies = (first[group] != torch.arange(len(items), device=items.device)).nonzero().flatten()
    if all(torch.equal(items[part], items[first[group[part]]]) for part in copies.split(ROWS)):
        return group
    # Two different rows of one hash are next to impossible; then do without it.
    first, group = _grouped(torch.unique(items, dim=0, return_inverse=True)[1])
    return group if len(first) < len(items) else None


def copies_before(group: Tensor) -> Tensor:
    """How many rows of the same group have a smaller index.

    >>> copies_before(torch.tensor([1, 0, 1, 1, 0]))
    tensor([0, 0, 1, 2, 1])
    """
    ascending, order = group.sort(stable=True)
    place = torch.arange(len(group), device=group.device)
    before = torch.empty_like(group)
    before[order] = place - torch.searchsorted(ascending, ascending)
    return before


def _grouped(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of each distinct key, and for every key the number of its distinct one."""
    ascending, order = keys.sort(stable=True)
    new = torch.cat([ascending.new_ones(1, dtype=torch.bool), ascending[1:] != ascending[:-1]])
    group = torch.empty_like(order)
    group[order] = new.cumsum(dim=0) - 1
    return order[new], group
