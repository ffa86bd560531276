"""Groups of equal rows."""

import torch
from torch import Tensor

ROWS_PER_BLOCK = 512
"""rows hashed at a time"""


def distinct(items: Tensor) -> Tensor | None:
    """Number the distinct rows of (N, D), and return the number of each row; None if all rows differ.

    Rows are equal if all their entries are; -0 equals 0. Rows with the same 64-bit hash are compared entry by entry.

    >>> distinct(torch.tensor([[2.0, 1.0], [1.0, 1.0], [2.0, 1.0]]))
    tensor([0, 1, 0])
    >>> distinct(torch.eye(3)) is None
    True
    """
    width = torch.int64 if items.dtype == torch.float64 else torch.int32
    generator = torch.Generator().manual_seed(0)
    odd_factors = torch.randint(-(2**62), 2**62, (items.shape[1],), generator=generator).to(items.device) * 2 + 1
    hashes = torch.empty(len(items), dtype=torch.int64, device=items.device)
    for part, block_hashes in zip(items.split(ROWS_PER_BLOCK), hashes.split(ROWS_PER_BLOCK)):
        block_hashes.copy_(((part + 0.0).view(width) * odd_factors).sum(dim=1))  # -0 becomes 0
    first_rows, group = _group(hashes)
    if len(first_rows) == len(items):
        return None
    copies = (first_rows[group] != torch.arange(len(items), device=items.device)).nonzero().flatten()
    if all(torch.equal(items[part], items[first_rows[group[part]]]) for part in copies.split(ROWS_PER_BLOCK)):
        return group
    # Different rows have the same hash, which is very unlikely: group by the rows themselves.
    first_rows, group = _group(torch.unique(items, dim=0, return_inverse=True)[1])
    return group if len(first_rows) < len(items) else None


def copies_before(group: Tensor) -> Tensor:
    """The number of rows of the same group that have a smaller index.

    >>> copies_before(torch.tensor([1, 0, 1, 1, 0]))
    tensor([0, 0, 1, 2, 1])
    """
    ascending, order = group.sort(stable=True)
    positions = torch.arange(len(group), device=group.device)
    counts = torch.empty_like(group)
    counts[order] = positions - torch.searchsorted(ascending, ascending)
    return counts


def _group(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of each distinct key, and for every key the number of its group."""
    ascending, order = keys.sort(stable=True)
    starts_group = torch.cat([ascending.new_ones(1, dtype=torch.bool), ascending[1:] != ascending[:-1]])
    group = torch.empty_like(order)
    group[order] = starts_group.cumsum(dim=0) - 1
    return order[starts_group], group
