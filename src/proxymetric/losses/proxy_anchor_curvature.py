"""The curvature of Proxy-Anchor in closed form, for Newton steps on proxies."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from proxymetric.core.pieces import References
from proxymetric.ops import NONE


def closed_forms(
    queries: Tensor, labels: Tensor, refs: References, scale: float, margin: float, positive_norm: str
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Gradient and diagonal of the Hessian in the vectors, in closed form (VCPA, Eqs. 24 and 25).

    The similarities are linear in the vectors. The gradient of a logarithm of summed exponentials is the mean of
    the gradients of the exponents, and its curvature is their variance; the softmax of the exponents gives the
    shares for both. One more query of zeros stands for the 1 in the logarithm.

    Args:
        queries: (B, D), normalised.
        labels: (B,).
        refs: the references; their rows are not used.
        scale: see `ProxyAnchor`.
        margin: see `ProxyAnchor`.
        positive_norm: see `ProxyAnchor`.

    Returns:
        A function of normalised vectors (R, D) that returns the gradient and the diagonal, (R, D) each.
        Everything that does not depend on the vectors is computed here, once for the batch.
    """
    is_pair = torch.stack(refs.positives(labels))
    offset = queries.new_full((), scale * margin).where(is_pair, queries.new_full((), NONE))
    offset = functional.pad(offset, (0, 0, 0, 1))
    padded = functional.pad(queries, (0, 0, 0, 1))
    slope = torch.stack([-scale * padded, scale * padded])
    moments = torch.cat([padded, padded.square()], 1).expand(2, -1, -1)
    count = queries.new_full((), len(refs.labels))
    positive_count = count if positive_norm == "all" else is_pair[0].any(0).sum().clamp(min=1).to(queries)
    gradient_factor = scale / torch.stack([-positive_count, count])[:, None, None]
    curvature_factor = scale * gradient_factor.abs()

    def gradient_and_curvature(vectors: Tensor) -> tuple[Tensor, Tensor]:
        shares = torch.softmax(torch.baddbmm(offset, slope, vectors.T.expand(2, -1, -1)), 1)
        mean, square = torch.bmm(shares.mT, moments).chunk(2, 2)
        variance = torch.addcmul(square, mean, mean, value=-1).clamp(min=0)
        return (gradient_factor * mean).sum(0), (curvature_factor * variance).sum(0)

    return gradient_and_curvature
