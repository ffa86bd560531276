"""The classes of an index, each described by a few centres."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.core.k_center import k_center

CENTRES_PER_CLASS = 2
"""centres of a class; `benchmarks/none_of_these.py` compares several numbers"""


@dataclass(frozen=True)
class ClassCentres:
    """Classes and their centres; a centre is the mean of the members that are closest to one pick of k-center.

    Attributes:
        names: the C classes.
        sums: (K, D) the sum of the members of each centre.
        counts: (K,) the number of members of each centre.
        owner: (K,) the class of each centre.
        centre_of: (N,) the centre of each vector that the centres were made of; -1 for one without a class.
    """

    names: list[str]
    sums: Tensor
    counts: Tensor
    owner: Tensor
    centre_of: Tensor

    @classmethod
    def of(cls, vectors: Tensor, labels: Sequence[str | None], per_class: int = CENTRES_PER_CLASS) -> ClassCentres:
        """Make the centres of the classes of some vectors.

        The first pick of a class is its member that is most similar to its mean, the others are those that k-center
        picks: always the member that is farthest from the picks before.

        Args:
            vectors: (N, D) of unit length.
            labels: N classes; vectors without one are left out.
            per_class: the largest number of centres of a class.

        Example:
            >>> vectors = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [1.0, 1.0]]))
            >>> centres = ClassCentres.of(vectors, ["a", "a", "a", None], per_class=2)
            >>> centres.names, centres.counts.tolist(), centres.centre_of.tolist()
            (['a'], [2, 1], [0, 0, 1, -1])
        """
        names = sorted({label for label in labels if label is not None})
        members: dict[str, list[int]] = {name: [] for name in names}
        for row, label in enumerate(labels):
            if label is not None:
                members[label].append(row)
        sums: list[Tensor] = []
        counts: list[Tensor] = []
        owner: list[int] = []
        centre_of = torch.full((len(labels),), -1)
        for code, name in enumerate(names):
            rows = torch.tensor(members[name])
            group = vectors[rows].float()
            assigned = _assign(group, min(per_class, len(rows)))
            centre_of[rows] = len(owner) + assigned
            number = int(assigned.max()) + 1
            sums.append(torch.zeros(number, vectors.shape[1]).index_add_(0, assigned, group))
            counts.append(assigned.bincount())
            owner += [code] * number
        dim = vectors.shape[1]
        return cls(
            names,
            torch.cat(sums) if sums else torch.empty(0, dim),
            torch.cat(counts) if counts else torch.empty(0, dtype=torch.long),
            torch.tensor(owner, dtype=torch.long),
            centre_of,
        )

    def followed(self, vectors: Callable[[Tensor], Tensor], labels: Sequence[str | None]) -> ClassCentres:
        """The centres after some changes: members that went are taken out of their centre, new ones join the closest.

        Args:
            vectors: rows (M,) -> their vectors (M, D), also of members that went.
            labels: N classes now; None for a row without one, or that is gone.
        """
        names = [*self.names, *sorted({label for label in labels if label is not None}.difference(self.names))]
        code = {name: number for number, name in enumerate(names)}
        codes = torch.tensor([-1 if label is None else code[label] for label in labels], dtype=torch.long)
        centre_of = torch.cat([self.centre_of, self.centre_of.new_full((len(labels) - len(self.centre_of),), -1)])
        codes_then = torch.where(centre_of >= 0, self.owner[centre_of.clamp_min(0)], -1)
        sums, counts, owner = self.sums.clone(), self.counts.clone(), self.owner
        gone = ((codes_then >= 0) & (codes_then != codes)).nonzero().flatten()
        sums.index_add_(0, centre_of[gone], -vectors(gone).float())
        counts.index_add_(0, centre_of[gone], -torch.ones_like(gone))
        sums[counts == 0] = 0.0
        centre_of[gone] = -1
        came = ((codes >= 0) & (centre_of < 0)).nonzero().flatten()
        for row, vector in zip(came.tolist(), vectors(came).float(), strict=True):
            candidates = ((owner == codes[row]) & (counts > 0)).nonzero().flatten()
            if len(candidates):
                similarities = torch.nn.functional.normalize(sums[candidates], dim=1) @ vector
                centre = int(candidates[similarities.argmax()])
                sums[centre] += vector
                counts[centre] += 1
            else:
                centre = len(owner)
                sums, counts = torch.cat([sums, vector[None]]), torch.cat([counts, counts.new_ones(1)])
                owner = torch.cat([owner, codes[row : row + 1]])
            centre_of[row] = centre
        return ClassCentres(names, sums, counts, owner, centre_of)

    def scores(self, queries: Tensor, own_rows: Tensor | None = None, members: Tensor | None = None) -> Tensor:
        """Return the similarity of each query to each class: that to the closest centre of the class.

        Args:
            queries: (Q, D) of unit length.
            own_rows: (Q,) rows among the vectors of the centres, for queries that are among them: they are left out of
                their own centre. -1 leaves nothing out. None: no query is among them.
            members: (Q, D) the vectors of these rows, where they may differ from the queries; None: the queries.

        Returns:
            (Q, C); -2 for a class without a centre, such as that of a query that is its only member.
        """
        lengths = self.sums.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        products = queries.float() @ self.sums.T
        similarities = torch.where(self.counts > 0, products / lengths, -2.0)
        if own_rows is not None:
            rows = (own_rows >= 0).nonzero().flatten()
            rows = rows[self.centre_of[own_rows[rows]] >= 0]
            centre = self.centre_of[own_rows[rows]]
            member = (queries if members is None else members)[rows].float()
            in_sum = (self.sums[centre] * member).sum(1)
            squared = lengths[centre].square() - 2 * in_sum + member.square().sum(1)
            product = products[rows, centre] - (queries[rows].float() * member).sum(1)
            without = product / squared.clamp_min(1e-12).sqrt()
            similarities[rows, centre] = torch.where(self.counts[centre] > 1, without.clamp(-1, 1), -2.0)
        best = torch.full((len(queries), len(self.names)), -2.0)
        return best.scatter_reduce_(1, self.owner.expand(len(queries), -1), similarities, "amax")


def _assign(group: Tensor, number: int) -> Tensor:
    """The centre (n,) of each member of a class: that of the most similar pick; centres are numbered from 0."""
    first = (group @ group.mean(dim=0)).argmax()
    picks = first[None]
    if number > 1:
        picks = torch.cat([picks, k_center(group[None], group[first][None, None], number - 1)[0]])
    nearest = (group @ group[picks].T).argmax(dim=1)
    return nearest.unique(return_inverse=True)[1]  # copies of one image may leave a pick without members
