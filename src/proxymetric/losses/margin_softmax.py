"""Softmax losses on the unit sphere: normalised softmax, CosFace, ArcFace, sub-centre ArcFace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from proxymetric.arguments.checks import at_least_zero, within
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.pairs import NOT_LINEAR, refuse_weights
from proxymetric.losses.ranges import check_scale
from proxymetric.ops import Arc, ArcOfQuery, Line, Similarity, cross_entropy


@dataclass(frozen=True)
class CosFace:
    """Softmax cross entropy with a margin on the cosine to the query's class (Wang et al. 2018, Eq. 4).

    ``-1/B sum_i log( e^{scale (s_iy - margin)} / (e^{scale (s_iy - margin)} + sum_{c != y} e^{scale s_ic}) )``

    With a `ClassBalance`, the mean over i is weighted by the weight of class y, and the margin is that of class y.

    Relations: `ProxyNCAPlusPlus` is this loss without a margin; `SoftTriple` is this loss with several centres per
    class.

    Args:
        scale: > 0; 64 for faces.
        margin: in [0, 2]; 0.35 in the paper. 0 gives the normalised softmax (Zhai & Wu 2019).

    Example:
        >>> import torch
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> CosFace(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
        tensor(0.3133)
    """

    scale: float = 64.0
    margin: float = 0.35
    has_class_balance: ClassVar[bool] = True
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scale(scale=self.scale)
        within(0, 2, "two cosines are at most 2 apart", margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        others, of_pairs, (weights, margins) = Line(self.scale), weight and weight.of_pairs, of_labels(weight, labels)
        own_class = Line(self.scale, -self.scale * self.margin if margins is None else 0.0)
        offsets = None if margins is None else -self.scale * margins
        return cross_entropy(
            queries, labels, refs, own_class, others, weight=of_pairs, own_offsets=offsets, query_weights=weights
        )


@dataclass(frozen=True)
class ArcFace:
    """Softmax cross entropy with a margin on the angle to the query's class (Deng et al. 2019, Eq. 3).

    The equation is that of `CosFace` with ``cos(theta + margin)`` instead of ``s - margin``, where
    ``theta = arccos s_iy``. If theta + margin exceeds pi, ``s - margin sin(margin)`` replaces the cosine, which keeps
    the function monotonic. The loss needs one reference per class. A `ClassBalance` acts as in `CosFace`.

    Relations: the margin is the same angle everywhere. The margin of `CosFace`, seen as an angle, grows towards 0 and
    pi.

    Args:
        scale: > 0; 64 for faces.
        margin: radians in [0, pi); 0.5 in the paper.

    Example:
        >>> import torch
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> ArcFace(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
        tensor(0.3133)
    """

    scale: float = 64.0
    margin: float = 0.5
    has_class_balance: ClassVar[bool] = True
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scale(scale=self.scale)
        check_angle(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        if refs.per_class != 1:
            raise ValueError(
                f"references: got {refs.per_class} per class, expected 1: ArcFace adds its margin to one angle"
            )
        refuse_weights(self, weight and weight.of_pairs, NOT_LINEAR)
        weights, margins = of_labels(weight, labels)
        own_class = Arc(self.scale, self.margin) if margins is None else ArcOfQuery(self.scale, margins)
        return cross_entropy(queries, labels, refs, own_class, Line(self.scale), query_weights=weights)


@dataclass(frozen=True)
class SubCentreArcFace:
    """ArcFace on the similarity to the nearest of K centres of each class (Deng et al. 2020, Eqs. 4 and 5).

    ``1/B sum_i log(1 + sum_{c != y} e^{scale (S_ic - cos(theta_i + margin))})``

    S_ic is the largest similarity to one of the K centres of class c, and theta_i the arccos of S_iy; beyond pi as in
    `ArcFace`. The centre with the most images of its class becomes dominant; images with wrong labels and unusual ones
    gather at the others: `inspection.sub_centres` lists them.

    Relations: with one centre this is `ArcFace`. `SoftTriple` combines the centres of a class softly and has its margin
    on the cosine.

    Args:
        scale: > 0; 64 for faces.
        margin: radians in [0, pi); 0.5 in the paper.

    Example:
        >>> import torch
        >>> refs = References(torch.eye(4)[:, :2], torch.tensor([0, 0, 1, 1]), per_class=2)
        >>> SubCentreArcFace(scale=1.0, margin=0.0)(torch.eye(2), torch.tensor([0, 0]), refs)
        tensor(0.3133)
    """

    scale: float = 64.0
    margin: float = 0.5
    of_class: ClassVar[Similarity] = Similarity("max")
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_scale(scale=self.scale)
        check_angle(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        refuse_weights(self, weight, NOT_LINEAR)
        return cross_entropy(queries, labels, refs, Arc(self.scale, self.margin), Line(self.scale), self.of_class)


def of_labels(weight: PairWeights | None, labels: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The weights and the margins of the queries' classes, (B,) each; None for what is not given.

    Args:
        weight: the weights of the step, from a weighting; None without one.
        labels: (B,).
    """
    if weight is None:
        return None, None
    weights, margins = (each if each is None else each[labels] for each in (weight.class_weights, weight.class_margins))
    return weights, margins


def check_angle(**margins: float) -> None:
    """Refuse a margin that is not an angle in [0, pi).

    Args:
        **margins: argument name -> radians.

    Example:
        >>> check_angle(margin=4.0)
        Traceback (most recent call last):
        ValueError: margin: got 4.0, expected radians below pi
    """
    at_least_zero(**margins)
    for name, margin in margins.items():
        if margin >= math.pi:
            raise ValueError(f"{name}: got {margin}, expected radians below pi")
