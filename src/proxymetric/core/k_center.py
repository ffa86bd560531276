"""Greedy k-center: the members of a pool that, together with the current vectors of a class, cover the class best."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def k_center(pool: Tensor, converged: Tensor, picks: int) -> Tensor:
    """Pick members of each class's pool one by one, always the member farthest from the vectors and earlier picks.

    ``argmax_{u in pool, not picked} min_{v in converged or picked} |u - v|``: CCP's Algorithm 2, for G classes at once.
    The covering radius after k picks is at most twice the best possible.

    Args:
        pool: (G, n, D) the members to pick from.
        converged: (G, m, D) the vectors that each class has already.
        picks: how many to pick, at most n.

    Returns:
        (G, picks) places in the pool, in the order of picking. Among equally far members the first is picked.

    Example:
        >>> pool = torch.tensor([[[0.0], [1.0], [5.0], [9.0]]])
        >>> k_center(pool, torch.tensor([[[0.0]]]), picks=2)
        tensor([[3, 2]])
    """
    assert picks <= pool.shape[1], (picks, pool.shape)
    classes = torch.arange(len(pool), device=pool.device)
    distance = torch.cdist(pool, converged, compute_mode="donot_use_mm_for_euclid_dist").amin(2)
    picked = []
    for _ in range(picks):
        pick = distance.argmax(1)
        picked.append(pick)
        to_pick = torch.linalg.vector_norm(pool - pool[classes, pick][:, None], dim=2)
        distance = torch.minimum(distance, to_pick)
        distance[classes, pick] = -torch.inf  # a pick is not picked again, even if all others coincide with picks
    return torch.stack(picked, 1)
