"""How long an embedding is, compared with others: a sign of the quality of its image."""

from __future__ import annotations

import torch
from torch import Tensor

from proxymetric.arguments.checks import above_zero, within
from proxymetric.core.pair_weights import PairWeights, equal_pairs
from proxymetric.core.pieces import Commit, Context, References, Weighting, nothing
from proxymetric.core.surrogate import held

MIN_LENGTH, MAX_LENGTH = 1e-3, 100.0
"""lengths outside this range count as its ends (released code of AdaFace)"""
EPSILON = 1e-3
"""added to the deviation (released code)"""


class EmbeddingLengths(Weighting):
    """Score the length of each embedding by the running mean and deviation of lengths (Kim et al. 2022, Eqs. 13 to 15).

    ``z_i = h (|x_i| - mu) / sigma``, cut to [-1, 1]

    ``mu <- (1 - rate) mu + rate mean_i |x_i|``, and likewise sigma with the standard deviation of the batch

    The scores of a training step include its own batch in mu and sigma, as in the released code; `commit` keeps them.
    Evaluation uses what is kept. The scores count as constants in the gradient. All pairs have the weight 1.

    Args:
        classes: C.
        h: > 0; how fast the score changes with the length; 0.333 in the paper: about two thirds of the scores lie
            between -0.333 and 0.333.
        rate: in (0, 1]; share of a batch in the running mean mu and deviation sigma; 0.01 in the paper.

    Example:
        >>> EmbeddingLengths(classes=3).mean
        tensor(20.)
    """

    mean: Tensor
    deviation: Tensor
    asks = "has_length_scores"
    classes: int
    changed_by_commit = ("mean", "deviation")

    def __init__(self, classes: int, h: float = 0.333, rate: float = 0.01) -> None:
        super().__init__()
        above_zero(h=h, rate=rate)
        within(0, 1, "it is a share", rate=rate)
        self.classes, self.h, self.rate = classes, h, rate
        # The first values are those of the released code.
        self.register_buffer("mean", torch.tensor(20.0))
        self.register_buffer("deviation", torch.tensor(100.0))

    def forward(self, ctx: Context, queries: Tensor, refs: References) -> tuple[PairWeights, Commit]:
        lengths = torch.linalg.vector_norm(ctx.embeddings.detach(), dim=1).clamp(MIN_LENGTH, MAX_LENGTH)
        mean, deviation = self.mean.to(lengths), self.deviation.to(lengths)
        commit: Commit = nothing
        # A single length has no deviation.
        if self.training and torch.is_grad_enabled() and len(lengths) > 1:
            batch_mean, batch_deviation = lengths.mean(), lengths.std()
            mean = mean.lerp(batch_mean, self.rate)
            deviation = deviation.lerp(batch_deviation, self.rate)

            def commit() -> None:
                self.mean.lerp_(batch_mean.to(self.mean), self.rate)
                self.deviation.lerp_(batch_deviation.to(self.deviation), self.rate)

        scores = held((self.h * (lengths - mean) / (deviation + EPSILON)).clamp(-1, 1))
        equal = equal_pairs(self.classes, lengths)
        return PairWeights(equal, equal, scores, are_equal=True), commit
