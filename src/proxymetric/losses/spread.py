"""The regulariser of SoftTriple and the MPA family: it merges proxies of a class that are not needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from proxymetric.arguments.checks import at_least_zero
from proxymetric.core.class_shards import all_reduce_sum
from proxymetric.core.pieces import References
from proxymetric.core.products import products_in_groups


@dataclass(frozen=True)
class Spread:
    """Half the mean distance among the K proxies of a class (Eq. 3 of the MPA paper, which counts each pair once).

    ``tau sum_c sum_{s < t} sqrt(2 - 2 w_cs . w_ct) / (C K (K - 1))``, on a (C, K, K) Gram matrix.

    1e-5 is added under the root, which gives coinciding proxies a finite gradient. K = 1 gives 0. 16-bit proxies
    are compared in float32, because in bfloat16 the products of nearly equal proxies round to more than 1. The term is
    not a reduction of `ops`: all proxies are normalised and multiplied at once, whatever `ops.using` sets.

    Relations: add this term to `SoftTriple` or a loss of the MPA family if some classes need fewer than K proxies.

    Args:
        tau: >= 0; weight of the regulariser; 0.2 in both papers.

    Example:
        >>> refs = References(torch.eye(2), torch.tensor([0, 0]), per_class=2)
        >>> Spread(tau=1.0)(refs)
        tensor(0.7071)
    """

    tau: float = 0.2
    can_shard: ClassVar[bool] = True

    def __post_init__(self) -> None:
        at_least_zero(tau=self.tau)

    def __call__(self, refs: References) -> Tensor:
        if refs.per_class is None:
            raise ValueError(
                "references: got rows that are not grouped by class, expected a source with K proxies for each class"
            )
        k = refs.per_class
        if k == 1 or not self.tau:
            return refs.rows.new_zeros(())
        rows = refs.rows.float() if refs.rows.dtype in (torch.half, torch.bfloat16) else refs.rows
        w = refs._replace(rows=rows, shard=None, dtype=None).vectors.unflatten(0, (-1, k))
        s, t = torch.triu_indices(k, k, 1, device=w.device)
        gram = products_in_groups(w)[:, s, t]
        squared = (2 - 2 * gram).clamp(min=0)  # rounding makes it negative where proxies coincide
        spread = self.tau * (squared + 1e-5).sqrt().sum() / max(refs.all_rows * (k - 1), 1)
        return spread if refs.shard is None else all_reduce_sum(spread, refs.shard)
