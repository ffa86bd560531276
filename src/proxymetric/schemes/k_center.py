"""Greedy k-center: which members of a pool cover a class best beside those that are there already."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def k_center(pool: Tensor, converged: Tensor, picks: int) -> Tensor:
    """Of each class, the pool members (G, picks) picked one after the other, each farthest from all before it.

    ``argmax_{u in pool, not picked} min_{v in converged or picked} |u - v|``: CCP's Algorithm 2, for G classes at once.
    The covering radius that k picks leave is at most twice the best possible.

    pool (G, n, D), converged (G, m, D), picks <= n. Of equally far members the first is taken.

    >>> pool = torch.tensor([[[0.0], [1.0], [5.0], [9.0]]])
    >>> k_center(pool, torch.tensor([[[0.0]]]), picks=2)
    tensor([[3, 2]])
    """
    assert picks <= pool.shape[1], (picks, pool.shape)
    each = torch.arange(len(pool), device=pool.device)
    nearest = torch.cdist(pool, converged, compute_mode="donot_use_mm_for_euclid_dist").amin(2)
    chosen = []
    for _ in range(picks):
        pick = nearest.argmax(1)
        chosen.append(pick)
        to_pick = torch.linalg.vector_norm(pool - pool[each, pick][:, None], dim=2)
        nearest = torch.minimum(nearest, to_pick)
        nearest[each, pick] = -torch.inf  # also where all that is left coincides with a pick
    return torch.stack(chosen, 1)
