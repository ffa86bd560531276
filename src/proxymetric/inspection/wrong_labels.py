"""Labels that are more likely wrong than right, by the class centres of all other images.

An image is compared with the centre of every class in the space in which classes spread alike (linear discriminant
analysis with a shrunk covariance). Its own vector, and those of its copies, are taken out of the centres and of the
covariance first, so that an image never speaks for its own label. The distances d_k give the chances of the classes

    p_k  =  softmax(-s d_k / 2)

and a label y is assumed to be wrong with the chance e, and then any other of the C classes alike:

    P(y)  =  (1 - e) p_y  +  e (1 - p_y) / (C - 1).

The two numbers s and e are those that make the given labels most likely. So the data itself says how far the distances
can be trusted and how many labels are wrong, and the second term's share of P(y) is the probability that y is wrong.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

SHRINKAGE = 0.5
"""the part of the covariance that is replaced by that of a sphere; chosen on the training half of CUB"""
LISTED_FROM = 0.5
"""labels are listed from this probability on: they are more likely wrong than right"""
RIGHT_BEFORE, WRONG_BEFORE = 19, 1
"""e is estimated as if this many right and wrong labels had been seen before: few images make it neither 0 nor large"""
CLASSES_COMPARED = 256
"""nearest classes of an image that p is computed from; others have no chance worth the memory"""
SCALES, SCALES_TRIED, SCALE_PRECISION = (1e-3, 30.0), 24, 1e-2
"""the range of s, the values that are tried first, and the precision of its logarithm"""
NUMBERS_PER_BLOCK = 2**23
"""distances that are computed at a time"""


class WrongLabel(NamedTuple):
    """An image whose label is likely wrong.

    Attributes:
        row: the image.
        probability: that the label is wrong.
        suggestion: the most likely other label.
        nearest_of_label: the most similar other image of its label.
        nearest_of_suggestion: the most similar image of the suggested label.
    """

    row: int
    probability: float
    suggestion: int
    nearest_of_label: int
    nearest_of_suggestion: int


class WrongLabels(NamedTuple):
    """The list, and what it was made from.

    Attributes:
        listed: the labels that are likely wrong, most likely first.
        probability: (N,) of each label to be wrong; NaN for an image that no other picture shares the label of.
        suggestion: (N,) the most likely other label of each image.
        share: the estimated share e of wrong labels.
        limit: labels are listed from this probability on.
    """

    listed: list[WrongLabel]
    probability: Tensor
    suggestion: Tensor
    share: float
    limit: float = LISTED_FROM


def find_wrong_labels(
    vectors: Tensor, labels: Tensor, pictures: Tensor | None = None, listed_from: float = LISTED_FROM
) -> WrongLabels:
    """Find labels that are likely wrong.

    Args:
        vectors: (N, D) of unit length.
        labels: (N,) whole numbers from 0.
        pictures: (N,) the picture that each image shows; copies of a picture do not speak for each other's labels, and
            count once in a class, unless the class has twice as many images as pictures. None: all differ.
        listed_from: the probability from which a label is listed.

    Example:
        >>> random = torch.Generator().manual_seed(0)
        >>> labels = torch.arange(4).repeat_interleave(30)
        >>> vectors = torch.nn.functional.normalize(torch.eye(4)[labels] + 0.2 * torch.randn(120, 4, generator=random))
        >>> labels[[3, 70]] = torch.tensor([2, 1])
        >>> wrong_labels = find_wrong_labels(vectors, labels)
        >>> [(each.row, each.suggestion) for each in wrong_labels.listed], round(wrong_labels.share, 2)
        ([(3, 0), (70, 2)], 0.02)
    """
    pictures = torch.arange(len(labels)) if pictures is None else _independent(labels, pictures)
    own_distances, others, classes = _distances(vectors.double(), labels, pictures)
    judged = own_distances.isfinite() & others.isfinite().any(dim=1)
    probability = torch.full((len(labels),), torch.nan, dtype=torch.float64)
    share, count = 0.0, len(labels.unique())
    if judged.any():
        scale, share = _most_likely(own_distances[judged], others[judged], count)
        probability[judged] = _wrong(_chance(own_distances[judged], others[judged], scale), share, count)
    suggestion = classes[torch.arange(len(labels)), others.argmin(dim=1)]
    order = probability.nan_to_num(-1.0).argsort(descending=True, stable=True)
    listed = [
        WrongLabel(
            row,
            float(probability[row]),
            int(suggestion[row]),
            _nearest(vectors, row, (labels == labels[row]) & (pictures != pictures[row])),
            _nearest(vectors, row, (labels == suggestion[row]) & (pictures != pictures[row])),
        )
        for row in order[probability[order] >= listed_from].tolist()
    ]
    return WrongLabels(listed, probability, suggestion, share, listed_from)


def _independent(labels: Tensor, pictures: Tensor) -> Tensor:
    """The pictures, but in a class that consists mostly of copies each image counts for itself.

    There, such as where every part is photographed in the same place, copies are no accident but what the class is.
    """
    shown = torch.unique(torch.stack([labels, pictures], dim=1), dim=0)[:, 0]
    count = int(labels.max()) + 1
    mostly_copies = 2 * torch.bincount(shown, minlength=count) < torch.bincount(labels, minlength=count)
    return torch.where(mostly_copies[labels], torch.arange(len(labels)) + int(pictures.max()) + 1, pictures)


def _distances(vectors: Tensor, labels: Tensor, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared distances to the centres without the image and its copies.

    Returns:
        (N,) the distance to the centre of the own class, (N, K) those to the nearest other classes, and (N, K) these
        classes. A class without another picture is infinitely far away.
    """
    count, dim = int(labels.max()) + 1, vectors.shape[1]
    shown, place = torch.unique(torch.stack([labels, pictures], dim=1), dim=0, return_inverse=True)
    weights = 1.0 / torch.bincount(place).double()[place]  # a picture counts once in a class
    sizes = torch.bincount(shown[:, 0], minlength=count).double()
    sums = torch.zeros(count, dim, dtype=torch.float64).index_add_(0, labels, weights[:, None] * vectors)
    centres = sums / sizes.clamp(min=1.0)[:, None]
    residuals = vectors - centres[labels]
    covariance = (residuals * weights[:, None]).T @ residuals / len(shown)
    sphere = (torch.trace(covariance) / dim).clamp(min=1e-12) * torch.eye(dim, dtype=torch.float64)
    factor = torch.linalg.cholesky((1 - SHRINKAGE) * covariance + SHRINKAGE * sphere)
    points, centres = (torch.linalg.solve_triangular(factor, each.T, upper=False).T for each in (vectors, centres))
    gram, present = centres @ centres.T, sizes > 0
    inflation = (sizes / (sizes - 1).clamp(min=1e-9)).where(sizes > 1, torch.inf)
    labels_of_picture = shown[shown[:, 1].argsort(stable=True)]
    kept = min(CLASSES_COMPARED, max(1, int(present.sum()) - 1))
    own_distances, others, classes = [], [], []
    for rows in torch.arange(len(labels)).split(max(1, NUMBERS_PER_BLOCK // count)):
        z, y, each = points[rows], labels[rows], torch.arange(len(rows))
        products, squares = z @ centres.T, z.square().sum(dim=1)
        to_own = squares - 2 * products[each, y] + gram[y, y]
        # The inner products of (z - centre of each class) with (z - own centre), for the change of the covariance.
        cross = (squares - products[each, y])[:, None] - products + gram[y]
        distances = squares[:, None] - 2 * products + gram.diagonal()
        where, at = _labels_of(pictures[rows], labels_of_picture)
        distances[where, at] *= inflation[at].square()
        cross[where, at] *= inflation[at]
        removed = (1 - SHRINKAGE) * inflation[y] / len(shown)
        removed = (removed / (1 - removed * to_own).clamp(min=1e-3)).nan_to_num(0.0, posinf=0.0)
        distances = distances + removed[:, None] * cross.square()
        distances = distances.nan_to_num(torch.inf).where(present, torch.inf)
        own_distances.append(distances[each, y].clone())
        distances[each, y] = torch.inf
        nearest = distances.topk(kept, dim=1, largest=False)
        others.append(nearest.values)
        classes.append(nearest.indices)
    return torch.cat(own_distances), torch.cat(others), torch.cat(classes)


def _labels_of(pictures: Tensor, labels_of_picture: Tensor) -> tuple[Tensor, Tensor]:
    """Every label of the picture of every row: positions of rows, and labels."""
    labels, sorted_pictures = labels_of_picture.T
    starts = torch.searchsorted(sorted_pictures.contiguous(), pictures.contiguous())
    ends = torch.searchsorted(sorted_pictures.contiguous(), pictures.contiguous(), right=True)
    where = torch.arange(len(pictures)).repeat_interleave(ends - starts)
    offsets = torch.arange(len(where)) - (ends - starts).cumsum(0).sub(ends - starts)[where]
    return where, labels[starts[where] + offsets]


def _chance(own_distances: Tensor, others: Tensor, scale: Tensor | float) -> Tensor:
    """p of the own label."""
    return torch.cat([own_distances[:, None], others], dim=1).mul(-scale / 2).softmax(dim=1)[:, 0]


def _wrong(chance: Tensor, share: Tensor | float, count: int) -> Tensor:
    """The probability that a label is wrong, from p of the label."""
    wrong = share * (1 - chance) / max(1, count - 1)
    return wrong / ((1 - share) * chance + wrong).clamp(min=1e-300)


def _most_likely(own_distances: Tensor, others: Tensor, count: int) -> tuple[float, float]:
    """The scale s and the share e that make the labels most likely: a search over log s, with the best e for each s."""
    nearest = torch.minimum(own_distances, others.amin(dim=1))
    # The same p, with 0 as the largest exponent.
    own_distances, others = own_distances - nearest, others - nearest[:, None]

    def loss(log_scale: float) -> float:
        chance = _chance(own_distances, others, math.exp(log_scale))
        share = _best_share(chance, count)
        return -float(_log_likelihood(chance, share, count))

    grid = torch.linspace(math.log(SCALES[0]), math.log(SCALES[1]), SCALES_TRIED).tolist()
    best = min(range(1, SCALES_TRIED - 1), key=lambda place: loss(grid[place]))
    low, high = grid[best - 1], grid[best + 1]  # golden section between the neighbours of the best
    golden = (math.sqrt(5) - 1) / 2
    left, right = high - golden * (high - low), low + golden * (high - low)
    loss_left, loss_right = loss(left), loss(right)
    while high - low > SCALE_PRECISION:
        if loss_left <= loss_right:
            high, right, loss_right = right, left, loss_left
            left = high - golden * (high - low)
            loss_left = loss(left)
        else:
            low, left, loss_left = left, right, loss_right
            right = low + golden * (high - low)
            loss_right = loss(right)
    scale = math.exp((low + high) / 2)
    return scale, _best_share(_chance(own_distances, others, scale), count)


def _log_likelihood(chance: Tensor, share: float, count: int) -> Tensor:
    likelihood = (1 - share) * chance + share * (1 - chance) / max(1, count - 1)
    before = RIGHT_BEFORE * math.log(1 - share) + WRONG_BEFORE * math.log(share)
    return likelihood.clamp(min=1e-300).log().sum() + before


def _best_share(chance: Tensor, count: int) -> float:
    """The share e that makes the labels most likely, by bisection: the log-likelihood is concave in e."""
    right, wrong = chance, (1 - chance) / max(1, count - 1)
    low, high = 0.0, 1.0
    for _ in range(30):
        share = (low + high) / 2
        slope = ((wrong - right) / ((1 - share) * right + share * wrong).clamp(min=1e-300)).sum()
        if float(slope) + WRONG_BEFORE / share > RIGHT_BEFORE / (1 - share):
            low = share
        else:
            high = share
    return (low + high) / 2


def _nearest(vectors: Tensor, row: int, allowed: Tensor) -> int:
    """The row most similar to a row among those allowed; -1 if there is none."""
    rows = allowed.nonzero().flatten()
    return int(rows[(vectors[rows] @ vectors[row]).argmax()]) if len(rows) else -1
