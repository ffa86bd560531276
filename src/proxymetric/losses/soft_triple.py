"""SoftTriple: a softmax over classes, each with several centres."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.ranges import check_cosine_margin, check_scale
from proxymetric.ops import Line, Similarity, cross_entropy


@dataclass(frozen=True)
class SoftTriple:
    """Softmax cross entropy on the soft similarity to classes of K centres (Qian et al. 2019, Eq. 8).

    ``-1/B sum_i log( e^{scale (S_iy - margin)} / (e^{scale (S_iy - margin)} + sum_{c != y} e^{scale S_ic}) )``

    S is the soft similarity to a class (`Similarity`). The regulariser on the centres is a separate term: `Spread`.

    Relations: `MPAAP` has the same structure with a margin on both sides and a 1 in the logarithm. Its gradient does
    not vanish when the similarities to the sample's class and to another class are both high.

    Args:
        scale: > 0; lambda in the paper, 20.
        margin: in [-1, 1]; 0.01 in the paper. A negative margin gets a warning.
        of_class: how the K centres of a class are combined into one similarity.
        reduction: "mean" over the batch, or "sum" as in the paper.

    Example:
        >>> import torch
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> SoftTriple(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
        tensor(0.3133)
    """

    scale: float = 20.0
    margin: float = 0.01
    of_class: Similarity = field(default_factory=Similarity)
    reduction: str = "mean"
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.of_class.check()
        check_scale(scale=self.scale)
        check_cosine_margin(margin=self.margin)
        one_of("reduction", self.reduction, ("mean", "sum"))

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        own_class = Line(self.scale, -self.scale * self.margin)
        others = Line(self.scale)
        return cross_entropy(queries, labels, refs, own_class, others, self.of_class, weight, reduction=self.reduction)
