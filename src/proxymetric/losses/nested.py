"""Matryoshka training: a loss on several lengths of the same vectors, so that the vectors can be cut afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from proxymetric.arguments.checks import whole_number
from proxymetric.core.capabilities import traits
from proxymetric.core.normalisation import MIN_DIVISORS, NORMALISATIONS, cut
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.pieces import Compare, Loss, Objective, References


@dataclass(frozen=True)
class Nested:
    """The mean of a loss over the first m numbers of all vectors (Kusupati et al. 2022, Eq. 1, weights tied, c_m = 1).

    ``1/|M| sum_{m in M} loss(normal(q[:m]), normal(p[:m]))``, M the sizes

    q are the queries and p the references. All sizes share one set of references: the first m numbers of a proxy are
    the proxy for vectors that are cut to m numbers (the weight-tied variant, MRL-E; arXiv 2205.13147). With "ball", a
    vector is divided by the length of the whole vector, and its cut is not divided again.

    Weights of pairs are functions of the similarity. Each size reads them at its own similarity, while the weighting
    itself remembers similarities of the whole vectors. A regulariser of the references acts on the whole vectors only.

    Relations: with one size, the loss is the inner loss.

    Args:
        loss: any loss.
        sizes: M, ascending; the last one is the width of the vectors.

    Example:
        >>> from proxymetric.losses import CosFace
        >>> refs = References(torch.eye(2), torch.arange(2), per_class=1)
        >>> Nested(CosFace(scale=1.0, margin=0.0), (1, 2))(torch.eye(2), torch.arange(2), refs)
        tensor(0.4082)
    """

    loss: Loss
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        check_sizes(self.sizes)

    def __call__(self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None) -> Tensor:
        self._check_width(queries)
        normalise = refs.normalise or "l2"
        parts = [
            self.loss(cut(queries, size, normalise), labels, _cut_references(refs, size, normalise), weight)
            for size in self.sizes[:-1]
        ]
        return torch.stack([*parts, self.loss(queries, labels, refs, weight)]).mean()

    def __getattr__(self, name: str) -> Any:
        """What the inner loss states of itself (`has_several_labels` and others) is true of this loss, too."""
        if name.startswith("has_"):
            return getattr(self.loss, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def can_shard(self) -> bool:
        """Whether processes may divide the classes: as the inner loss declares."""
        return traits(self.loss).can_shard

    @property
    def of_class(self) -> Any:
        """How the inner loss combines the K references of a class; missing if the inner loss does not combine them."""
        return self.loss.of_class  # type: ignore[attr-defined]

    @property
    def closed_forms(self) -> Callable[[Tensor, Tensor, References], Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """Gradient and diagonal curvature in the vectors (VCPA, Eqs. 24, 25); missing if the inner loss has none.

        Both are linear in the loss: those of the mean are the means of those of the sizes. As in `Energy.closed_forms`,
        the length of each cut is held fixed, and the chain rule is a division by it.
        """
        of_loss = self.loss.closed_forms  # type: ignore[attr-defined]

        def closed_forms(
            queries: Tensor, labels: Tensor, refs: References
        ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
            self._check_width(queries)
            normalise = refs.normalise or "l2"
            parts = [of_loss(cut(queries, size, normalise), labels, refs) for size in self.sizes]

            def gradient_and_curvature(vectors: Tensor) -> tuple[Tensor, Tensor]:
                gradient, curvature = torch.zeros_like(vectors), torch.zeros_like(vectors)
                for size, part in zip(self.sizes, parts, strict=True):
                    first_numbers = vectors[:, :size]
                    shrink = first_numbers.norm(dim=1, keepdim=True).clamp(min=MIN_DIVISORS[normalise]).reciprocal()
                    if size == vectors.shape[1]:
                        shrink = torch.ones_like(shrink)  # the whole vectors are normalised already
                    first, second = part(first_numbers * shrink)
                    gradient[:, :size] += first * shrink
                    curvature[:, :size] += second * shrink.square()
                return gradient / len(self.sizes), curvature / len(self.sizes)

            return gradient_and_curvature

        return closed_forms

    def _check_width(self, queries: Tensor) -> None:
        if queries.shape[1] != self.sizes[-1]:
            raise ValueError(
                f"nested: got {list(self.sizes)} for vectors of {queries.shape[1]} dimensions, expected a last size of "
                f"{queries.shape[1]}"
            )


def check_sizes(sizes: Sequence[int], dim: int | None = None) -> None:
    """Refuse sizes that are not ascending whole numbers from 1, or that do not end with the width of the vectors.

    Args:
        sizes: the sizes.
        dim: the width of the vectors; None: not known yet.

    Raises:
        ValueError: the sizes are wrong.

    Example:
        >>> check_sizes([64, 128], dim=512)
        Traceback (most recent call last):
        ValueError: nested: got [64, 128] for vectors of 512 dimensions, expected a last size of 512
    """
    if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
        raise ValueError(f"nested: got {sizes!r}, expected a list of dimensions, such as [64, 128, 256, 512]")
    for size in sizes:
        whole_number(1, nested=size)
    if any(size >= following for size, following in itertools.pairwise(sizes)):
        raise ValueError(f"nested: got {list(sizes)}, expected ascending dimensions, such as [64, 128, 256, 512]")
    if dim is not None and sizes[-1] != dim:
        raise ValueError(f"nested: got {list(sizes)} for vectors of {dim} dimensions, expected a last size of {dim}")


def nest(objective: Objective, sizes: Sequence[int], dim: int) -> Objective:
    """Make every comparison of an objective a nested one; return the objective.

    Args:
        objective: what a method minimises; its comparisons change in place.
        sizes: the sizes that vectors may be cut to, ascending; the last one is `dim`.
        dim: the width of the embeddings.

    Raises:
        ValueError: the sizes are wrong, or the objective compares nothing with references.

    Example:
        >>> from proxymetric import losses, sources
        >>> nest(Compare(losses.Triplet(), sources.InBatch()), [2, 4], dim=4)
        Compare(Nested(loss=Triplet(margin=0.0961), sizes=(2, 4)), InBatch())
    """
    check_sizes(sizes, dim)
    comparisons = [module for module in objective.modules() if isinstance(module, Compare)]
    if not comparisons:
        raise ValueError(
            f"nested: got {type(objective).__name__}, which has no `Compare` whose loss could be nested; expected a "
            "method that compares queries with references"
        )
    for comparison in comparisons:
        comparison.loss = Nested(comparison.loss, tuple(sizes))
    return objective


def _cut_references(refs: References, size: int, normalise: str) -> References:
    """The references cut to a size; the reductions still normalise them."""
    rows = refs.rows
    if normalise == "ball" and refs.normalise is not None:
        rows = NORMALISATIONS[normalise](rows)
    return refs._replace(rows=rows[:, :size], normalise=normalise, nearest=None)
