"""Contrastive losses: C1 on cosines as in XBM, C2 on distances with two margins."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from proxymetric.arguments.checks import above_zero, at_least_zero
from proxymetric.arguments.signatures import one_of
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import distances, mean_where, refuse_weights
from proxymetric.losses.ranges import check_cosine, check_distance_margin


@dataclass(frozen=True)
class Contrastive:
    """C1: pull all positives to 1, push negatives above a threshold down (Wang et al. 2020, XBM).

    ``1/B [ sum_{positive pairs} (1 - s) + sum_{negative pairs, s > margin} s ]``, every ordered pair once.

    Relations: the loss gains from very many negatives, and so from a memory. `MarginContrastive` ignores easy positives
    as well.

    Args:
        margin: in [-1, 1]; 0.5 in the paper. Negatives with a lower similarity are ignored.

    Example:
        >>> import torch
        >>> refs = References(torch.eye(2), torch.tensor([0, 1]))
        >>> Contrastive()(torch.eye(2), torch.tensor([1, 1]), refs)
        tensor(1.)
    """

    margin: float = 0.5

    def __post_init__(self) -> None:
        check_cosine(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        refuse_weights(self, weight)
        s = queries @ refs.normalised(queries).T
        positive, negative = refs.positives(labels)
        return (((1 - s) * positive).sum() + (s * (negative & (s > self.margin))).sum()) / max(len(queries), 1)


@dataclass(frozen=True)
class MarginContrastive:
    """C2: hinges on the Euclidean distance, one margin for each kind of pair (Wu et al. 2017; CCP's study).

    ``mean_{positive pairs} [d - positive_margin]_+ + mean_{negative pairs} [margin - d]_+``

    CCP's study has (positive_margin, margin) = (0, 0.3841) on CUB, (0.2652, 0.5409) on Cars, (0.2858, 0.5130) on
    In-Shop and SOP.

    Relations: `Contrastive` works on cosines and pulls every positive; `Triplet` asks for an order, not for distances.

    Args:
        margin: > 0 and usually <= 2; distance that negatives should have.
        positive_margin: >= 0; distance that positives may have.
        averaging: "nonzero" takes each mean over its non-zero terms (released code of CCP). "all" divides both sums by
            the number of all pairs (CCP, Algorithm 1).

    Example:
        >>> import torch
        >>> refs = References(torch.eye(2), torch.tensor([0, 1]))
        >>> MarginContrastive()(torch.eye(2), torch.tensor([1, 1]), refs)
        tensor(1.7983)
    """

    margin: float = 0.3841
    positive_margin: float = 0.0
    averaging: str = "nonzero"

    def __post_init__(self) -> None:
        above_zero(margin=self.margin)
        at_least_zero(positive_margin=self.positive_margin)
        check_distance_margin(margin=self.margin, positive_margin=self.positive_margin)
        one_of("averaging", self.averaging, ("nonzero", "all"))

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        refuse_weights(self, weight)
        d = distances(queries, refs)
        positive, negative = refs.positives(labels)
        pull, push = (d - self.positive_margin).clamp(min=0), (self.margin - d).clamp(min=0)
        if self.averaging == "nonzero":
            return mean_where(pull, positive & (pull > 0)) + mean_where(push, negative & (push > 0))
        return mean_where(pull.where(positive, push), positive | negative)
