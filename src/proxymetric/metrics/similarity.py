"""Scores of queries against a gallery, and the best k of each row with ties in the gallery's order."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

DISTANCES = ("cosine", "euclidean")


class Gallery(NamedTuple):
    """What queries are multiplied with: one row per distinct item, so that duplicates score exactly the same."""

    rows: Tensor  # (U, D) distinct rows, doubled for the Euclidean distance
    offset: Tensor | None  # (U,) squared norms, for the Euclidean distance
    row_of: Tensor | None  # (G,) the distinct row of each item; None when all items are distinct


def prepare(vectors: Tensor, distance: str) -> Tensor:
    """Vectors (N, D) in the form and precision in which `distance` is computed.

    Cosine: unit length, a zero vector stays zero and so has similarity 0 with everything. Dividing by the largest
    entry first avoids overflow, and makes an exact multiple of a vector bit for bit the same direction.
    Euclidean: float64, because |q|^2 - 2qg + |g|^2 cancels where vectors lie far from the origin.
    """
    if distance == "euclidean":
        return vectors.to(torch.float64)
    vectors = vectors if vectors.dtype == torch.float64 else vectors.to(torch.float32)
    largest = vectors.abs().amax(dim=1, keepdim=True)
    vectors = vectors / torch.where(largest > 0, largest, 1)
    length = vectors.norm(dim=1, keepdim=True)
    return vectors / torch.where(length > 0, length, 1)


def as_gallery(items: Tensor, distance: str) -> Gallery:
    """The gallery of prepared items (G, D)."""
    row_of = None
    first, group = _distinct(items)
    if len(first) < len(items):
        items, row_of = items[first], group
    if distance == "euclidean":
        return Gallery(2 * items, items.square().sum(dim=1), row_of)
    return Gallery(items, None, row_of)


def _distinct(items: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of each distinct row, and for every row the number of its distinct one.

    Equal columns of a matrix product need not be equal to the last bit (its edges are summed in another order), so
    duplicates have to be found in the items themselves. A 64-bit hash of the rows is compared, then checked.
    """
    width = torch.int64 if items.dtype == torch.float64 else torch.int32
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (items.shape[1],), generator=generator).to(items.device) * 2 + 1
    hashes = torch.cat([((part + 0.0).view(width) * odd).sum(dim=1) for part in items.split(4096)])  # -0 becomes 0
    first, group = _grouped(hashes)
    same = all(torch.equal(part, items[first[at]]) for part, at in zip(items.split(4096), group.split(4096)))
    # Two different rows of one hash are next to impossible; then do without it.
    return (first, group) if same else _grouped(torch.unique(items, dim=0, return_inverse=True)[1])


def _grouped(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The first index of each distinct key, and for every key the number of its distinct one."""
    ascending, order = keys.sort(stable=True)
    new = torch.cat([ascending.new_ones(1, dtype=torch.bool), ascending[1:] != ascending[:-1]])
    group = torch.empty_like(order)
    group[order] = new.cumsum(dim=0) - 1
    return order[new], group


@contextmanager
def full_precision() -> Iterator[None]:
    """Matrix products in the full precision of their inputs, whatever the training around has switched on."""
    backends = (getattr(module, "matmul", None) for module in (torch.backends.cuda, torch.backends.mkldnn))
    switches: list[Any] = [backend for backend in backends if hasattr(backend, "fp32_precision")]
    before = [switch.fp32_precision for switch in switches]
    legacy = None if switches else torch.get_float32_matmul_precision()  # refused by a torch that has the switches
    for switch in switches:
        switch.fp32_precision = "ieee"
    if legacy is not None:
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        for switch, value in zip(switches, before):
            switch.fp32_precision = value
        if legacy is not None:
            torch.set_float32_matmul_precision(legacy)


def products(queries: Tensor, gallery: Gallery, tile: int) -> Tensor:
    """Scores (B, G) of prepared queries (B, D): the cosine, or |q|^2 - |q - g|^2 for the Euclidean distance.

    Always `tile` rows at a time, the last ones filled up with zeros: the rounding of a matrix product depends on its
    shape, and the ranking must not depend on how many queries are handled at once.
    """
    out = queries.new_empty(-(-len(queries) // tile) * tile, len(gallery.rows))
    for start in range(0, len(queries), tile):
        part = queries[start : start + tile]
        if len(part) < tile:
            part = torch.cat([part, part.new_zeros(tile - len(part), part.shape[1])])
        # With `out` autocast leaves the product alone.
        torch.mm(part, gallery.rows.T, out=out[start : start + tile])
    out = out[: len(queries)]
    if gallery.offset is not None:
        out -= gallery.offset
    return out if gallery.row_of is None else out.index_select(1, gallery.row_of)


def best(scores: Tensor, k: int) -> Tensor:
    """Columns (B, k) of the k largest entries of each row, equal ones by smaller column first, also at the cut.

    >>> best(torch.tensor([[0.5, 0.9, 0.5, 0.9, 0.5]]), 3)
    tensor([[1, 3, 0]])
    """
    # One more than wanted shows whether a tie crosses the cut.
    values, columns = scores.topk(min(k + 1, scores.shape[1]), dim=1)
    cut, columns = values[:, k - 1 : k], columns[:, :k].contiguous()
    rows = (values[:, 1:] == values[:, :-1]).any(dim=1).nonzero().flatten()
    # The masks below cost several times the scores: some millions of them at a time.
    for part in rows.split(max(1, 2**22 // scores.shape[1])):
        line, least = scores[part], cut[part]
        above = line > least
        level = line == least
        room = k - above.sum(dim=1, keepdim=True)
        keep = above | (level & (level.cumsum(dim=1, dtype=torch.int32) <= room))
        ascending = keep.nonzero()[:, 1].view(len(part), k)
        order = (line.gather(1, ascending) + 0.0).sort(dim=1, descending=True, stable=True).indices
        columns[part] = ascending.gather(1, order)
    return columns
