"""The softmax family on the unit sphere: normalised softmax, CosFace, ArcFace."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.checks import above_zero, at_least_zero
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import References
from proxymetric.losses.proxy_nca import cross_entropy
from proxymetric.ops import Line, over_classes


@dataclass(frozen=True)
class CosFace:
    """Softmax cross entropy on cosines, the own one lowered by a margin (Wang et al. 2018, Eq. 4).

    ``-1/B sum_i log( e^{scale (s_iy - margin)} / (e^{scale (s_iy - margin)} + sum_{c != y} e^{scale s_ic}) )``

    scale: > 0, 64 for faces. margin: >= 0, 0.35 in the paper; 0 is the normalised softmax (Zhai & Wu 2019).

    Relations: `ProxyNCAPlusPlus` is this without a margin; `SoftTriple` is this with several centres per class.

    >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
    >>> CosFace(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
    tensor(0.3133)
    """

    scale: float = 64.0
    margin: float = 0.35

    def __post_init__(self) -> None:
        above_zero(scale=self.scale)
        at_least_zero(margin=self.margin)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        own = Line(self.scale, -self.scale * self.margin)
        sums = over_classes(queries, labels, refs, own, Line(self.scale), weight=weight)
        return cross_entropy(sums.positive, sums.negative)


@dataclass(frozen=True)
class ArcFace:
    """Softmax cross entropy on cosines, the own angle widened by a margin (Deng et al. 2019, Eq. 3).

    `CosFace` with ``cos(theta + margin)`` in the place of ``s - margin``, ``theta = arccos s_iy``; where theta + margin
    passes pi the line ``s - margin sin(margin)`` goes on, so that it stays monotonic.

    scale: > 0, 64 for faces. margin: radians in [0, pi), 0.5 in the paper. Needs one reference per class.

    Relations: its margin is the same angle everywhere, that of `CosFace` shrinks as an angle near 0 or pi.

    >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
    >>> ArcFace(scale=1.0, margin=0.0)(torch.eye(2), torch.arange(2), refs)
    tensor(0.3133)
    """

    scale: float = 64.0
    margin: float = 0.5

    def __post_init__(self) -> None:
        above_zero(scale=self.scale)
        at_least_zero(margin=self.margin)
        if self.margin >= math.pi:
            raise ValueError(f"margin: got {self.margin}, expected radians below pi")

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        if refs.per_class != 1:
            raise ValueError(f"ArcFace widens ONE angle per query: it needs per_class=1, got {refs.per_class}")
        if weight is not None:
            raise ValueError("weighting: ArcFace's own exponent is no multiple of a line; use CosFace")
        sums = over_classes(queries, labels, refs, Line(1.0), Line(self.scale))
        own = sums.positive
        # arccos has no finite slope at 1: stay a hair inside.
        theta = own.clamp(-1 + 1e-6, 1 - 1e-6).arccos()
        widened = torch.where(
            theta + self.margin <= math.pi, (theta + self.margin).cos(), own - self.margin * math.sin(self.margin)
        )
        return cross_entropy(self.scale * widened, sums.negative)
