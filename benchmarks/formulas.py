"""The formulas of losses on a matrix of all pairs, in plain torch, with the arguments that `pairs.py` compares.

Each takes embeddings (B, D), labels (B,) and proxies (rows, D), not normalised, and returns the loss. Pair losses
compare the embeddings with each other and ignore the proxies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]
PER_CLASS = 10
"""centres of a class in SoftTriple"""


def cosines(x: Tensor, p: Tensor) -> Tensor:
    return (functional.normalize(x) @ functional.normalize(p).T).float()


def proxy_anchor(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    s = cosines(x, p)
    own = y[:, None] == torch.arange(len(p), device=p.device)
    pull = torch.where(own, torch.exp(-32 * (s - 0.1)), 0.0).sum(0)
    push = torch.where(own, 0.0, torch.exp(32 * (s + 0.1))).sum(0)
    return pull.log1p().sum() / own.any(0).sum() + push.log1p().mean()


def softmax(scale: float) -> Formula:
    return lambda x, y, p: functional.cross_entropy(scale * cosines(x, p), y)


def cosface(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    s = cosines(x, p)
    own = y[:, None] == torch.arange(len(p), device=p.device)
    return functional.cross_entropy(64 * torch.where(own, s - 0.35, s), y)


def arcface(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    s = cosines(x, p)
    own = s.gather(1, y[:, None])
    theta = own.clamp(-1 + 1e-6, 1 - 1e-6).arccos()
    with_margin = torch.where(theta + 0.5 <= math.pi, (theta + 0.5).cos(), own - 0.5 * math.sin(0.5))
    return functional.cross_entropy(64 * s.scatter(1, y[:, None], with_margin), y)


def soft_triple(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    s = cosines(x, p).unflatten(1, (-1, PER_CLASS))
    s = ((10 * s).softmax(2) * s).sum(2)
    own = y[:, None] == torch.arange(s.shape[1], device=s.device)
    return functional.cross_entropy(20 * torch.where(own, s - 0.01, s), y)


def masks(y: Tensor) -> tuple[Tensor, Tensor]:
    same = y[:, None] == y
    return same & ~torch.eye(len(y), dtype=torch.bool, device=y.device), ~same


def distances(x: Tensor) -> Tensor:
    s = cosines(x, x)
    return (2 - 2 * s).clamp(min=1e-12).sqrt()


def mean_where(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum() / where.sum().clamp(min=1)


def triplet(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    d = distances(x)
    positive, negative = masks(y)
    violation = d[:, :, None] - d[:, None, :] + 0.0961
    return mean_where(violation, positive[:, :, None] & negative[:, None, :] & (violation > 0))


def margin_contrastive(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    d = distances(x)
    positive, negative = masks(y)
    return mean_where(d, positive & (d > 0)) + mean_where(1 - d, negative & (d < 1))


def contrastive(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    s = cosines(x, x)
    positive, negative = masks(y)
    return (torch.where(positive, 1 - s, 0.0).sum() + torch.where(negative & (s > 0), s, 0.0).sum()) / len(x)


def log1p_sum_exp(values: Tensor, where: Tensor) -> Tensor:
    return functional.softplus(values.masked_fill(~where, -1e30).logsumexp(1))


def multi_similarity(mined: bool) -> Formula:
    def formula(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
        s = cosines(x, x)
        positive, negative = masks(y)
        if mined:
            fixed = s.detach()
            farthest = fixed.masked_fill(~positive, math.inf).amin(1, keepdim=True)
            nearest = fixed.masked_fill(~negative, -math.inf).amax(1, keepdim=True)
            positive, negative = positive & (fixed - 0.1 < nearest), negative & (fixed + 0.1 > farthest)
        pulled = log1p_sum_exp(-2 * (s - 0.5), positive) / 2
        return (pulled + log1p_sum_exp(40 * (s - 0.5), negative) / 40).mean()

    return formula


def supcon(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    s = 10 * cosines(x, x)
    positive, negative = masks(y)
    log_shares = s - s.masked_fill(~(positive | negative), -1e30).logsumexp(1, keepdim=True)
    return -((log_shares * positive).sum(1) / positive.sum(1)).mean()


def circle(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
    s = cosines(x, x)
    positive, negative = masks(y)
    pull = -80 * (1.4 - s.detach()).clamp(min=0) * (s - 0.6)
    push = 80 * (s.detach() + 0.4).clamp(min=0) * (s - 0.4)
    pulled, pushed = pull.masked_fill(~positive, -1e30).logsumexp(1), push.masked_fill(~negative, -1e30).logsumexp(1)
    return functional.softplus(pulled + pushed).mean()
