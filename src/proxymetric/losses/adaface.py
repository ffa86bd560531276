"""AdaFace: a margin that depends on the quality of each image, seen in the length of its embedding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from proxymetric.arguments.checks import within
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import NOT_LINEAR, refuse_weights
from proxymetric.losses.ranges import check_scale
from proxymetric.ops import Line, QueryArc, cross_entropy


@dataclass(frozen=True)
class AdaFace:
    """Softmax cross entropy with a margin for each image, by the length of its embedding (Kim et al. 2022, Eq. 16).

    ``1/B sum_i log(1 + sum_{c != y} e^{scale (s_ic - cos(theta_i - margin z_i) + margin (z_i + 1))})``

    with ``theta_i = arccos s_iy``, and z_i in [-1, 1] the score of the length (`weightings.EmbeddingLengths`), which
    counts as a constant in the gradient. The angle ``theta_i - margin z_i`` is held in [0, pi]. The loss needs one
    reference per class.

    Relations: z = -1 (a short embedding, a bad image) gives `ArcFace`, z = 0 and no score give `CosFace`; z = 1 gives a
    negative margin on the angle and a double one on the cosine, which stresses hard samples.

    Args:
        scale: > 0; 64 in the paper.
        margin: in [0, 1]; 0.4 in the paper.

    Example:
        >>> import torch
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> AdaFace(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
        tensor(0.3133)
    """

    scale: float = 64.0
    margin: float = 0.4
    has_length_scores: ClassVar[bool] = True
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scale(scale=self.scale)
        within(0, 1, "twice the margin is subtracted from a cosine", margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        if refs.per_class != 1:
            raise ValueError(
                f"references: got {refs.per_class} per class, expected 1: AdaFace adds its margin to one angle"
            )
        scores = None if weight is None else weight.length_scores
        refuse_weights(self, weight if scores is None else None, NOT_LINEAR)
        angles = queries.new_zeros(len(queries)) if scores is None else -self.margin * scores
        own_class = QueryArc(self.scale, angles, self.margin - angles)
        return cross_entropy(queries, labels, refs, own_class, Line(self.scale))
