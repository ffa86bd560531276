"""A pool from stored embeddings: random rows of each class, among which a scheme picks proxies."""

from __future__ import annotations

import torch
from torch import Tensor

from proxymetric.core.pieces import Pool


def pool_from(embeddings: Tensor, labels: Tensor) -> Pool:
    """A pool that draws new random rows from the embeddings of all training images at each call.

    Args:
        embeddings: (N, D).
        labels: (N,).

    Returns:
        A function (count) -> (embeddings, labels) of up to `count` random rows of each class, ordered by class.
    """

    def pool(count: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(labels)).to(labels.device)
        order = order[labels[order].argsort(stable=True)]
        sorted_labels = labels[order]
        class_starts = torch.searchsorted(sorted_labels, sorted_labels)
        rank_in_class = torch.arange(len(sorted_labels), device=labels.device) - class_starts
        rows = order[rank_in_class < count]
        return embeddings[rows], labels[rows]

    return pool
