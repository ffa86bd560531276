"""The definition of the exact search: the k nearest items by float64 scores.

Items whose exact scores differ by less than the rounding error of float64 come in arbitrary order; `search` ranks these
exactly. Euclidean distances need (block, G, D) numbers in memory.
"""

import torch
from torch import Tensor


def plain_topk(queries: Tensor, items: Tensor | None, k: int, distance: str = "cosine", *, block: int = 256) -> Tensor:
    """Find the k nearest items of each query; items with equal scores keep their order.

    Args:
        queries: (N, D).
        items: (G, D); None: the items of a query are all other queries.
        k: the number of items, from 1 to the number that can be found.
        distance: "cosine" or "euclidean". The cosine of a zero vector with any vector is 0.
        block: queries whose scores are computed at a time.

    Returns:
        (N, k) indices of the items, nearest first.
    """
    gallery = (queries if items is None else items).double()
    nearest = []
    for start in range(0, len(queries), block):
        rows = queries[start : start + block].double()
        if distance == "cosine":
            unit = torch.nn.functional.normalize
            scores = unit(rows, eps=0.0).nan_to_num() @ unit(gallery, eps=0.0).nan_to_num().T
        else:
            scores = -(rows[:, None] - gallery).square().sum(dim=2)
        if items is None:
            scores[torch.arange(len(rows)), torch.arange(start, start + len(rows))] = -torch.inf
        nearest.append(scores.sort(dim=1, descending=True, stable=True).indices[:, :k])
    return torch.cat(nearest)
