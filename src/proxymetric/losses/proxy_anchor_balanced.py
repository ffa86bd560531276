"""Proxy-Anchor with a weight and a margin for each class, and for queries that have several labels."""

from __future__ import annotations

import torch
from torch import Tensor

from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.ops import NONE, log1p_exp
from proxymetric.ops.problem import MIN_WEIGHT_SUM


def on_all_pairs(
    queries: Tensor,
    labels: Tensor,
    refs: References,
    weight: PairWeights | None,
    scale: float,
    margin: float,
    positive_norm: str,
) -> Tensor:
    """The loss on the matrix of all pairs, not in chunks and not sharded.

    ``sum_{c in C+} w_c log(1 + sum_{i in c} exp(-scale (s_ic - m_c))) / sum_{c in C+} w_c
    + sum_c w_c log(1 + sum_{i not in c} exp(scale (s_ic + m_c))) / sum_c w_c``

    w_c and m_c are the weight and the margin of class c (`ClassBalance`). A query with several labels is a positive of
    each of these classes, and a negative of the others.

    Args:
        queries: (B, D), normalised.
        labels: (B,), or a mask (B, C).
        refs: the references.
        weight: the numbers of the classes; None: all have the weight 1 and `margin`.
        scale: see `ProxyAnchor`.
        margin: see `ProxyAnchor`.
        positive_norm: see `ProxyAnchor`.

    Raises:
        ValueError: the pairs are weighted, too.
    """
    if weight is not None and weight.of_pairs is not None:
        raise ValueError(
            "weighting: got weights of pairs beside several labels of a query or numbers of classes, expected only "
            "one of them"
        )
    queries = queries.float() if queries.dtype in (torch.half, torch.bfloat16) else queries
    s = queries @ refs.normalised(queries).T
    positive, negative = refs.positives(labels) if labels.ndim == 1 else _of_several(labels, refs)
    given = (None, None) if weight is None else (weight.class_weights, weight.class_margins)
    weights = s.new_ones(s.shape[1]) if given[0] is None else given[0].to(s)[refs.labels]
    margins = s.new_full((), margin) if given[1] is None else given[1].to(s)[refs.labels]
    pulled = torch.logsumexp((scale * (margins - s)).masked_fill(~positive, NONE), 0)
    pushed = torch.logsumexp((scale * (s + margins)).masked_fill(~negative, NONE), 0)
    present = weights if positive_norm == "all" else weights * positive.any(0)
    attraction = (weights * log1p_exp(pulled)).sum() / present.sum().clamp(min=MIN_WEIGHT_SUM)
    return attraction + (weights * log1p_exp(pushed)).sum() / weights.sum()


def _of_several(labels: Tensor, refs: References) -> tuple[Tensor, Tensor]:
    """The masks (B, R) of positive and negative pairs of queries with several labels (B, C)."""
    positive = labels[:, refs.labels]
    return positive, ~positive
