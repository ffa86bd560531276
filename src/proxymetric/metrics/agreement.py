"""The agreement of two labellings of the same items, such as classes and clusters."""

import torch
from torch import Tensor

from proxymetric.arguments.vectors import Labels, as_labels


def mutual_information(a: Labels, b: Labels) -> float:
    """Compute the normalised mutual information 2 I(a; b) / (H(a) + H(b)) of two labellings (N,).

    It is 1 if both have a single label.

    Args:
        a: the first labelling.
        b: the second labelling.

    Example:
        >>> mutual_information([0, 0, 1, 1], [5, 5, 7, 7])
        1.0
        >>> round(mutual_information([0, 0, 1, 1], [0, 1, 0, 1]), 6)
        0.0
    """
    h_a, h_b, h_pairs = (_entropy(counts) for counts in _counts(a, b))
    if h_a + h_b == 0:
        return 1.0
    return min(1.0, max(0.0, 2 * (h_a + h_b - h_pairs) / (h_a + h_b)))


def adjusted_mutual_information(a: Labels, b: Labels) -> float:
    """Compute the adjusted mutual information of two labellings (N,): see `ami`.

    It is 1 if both divide the items in the same way, and may be below 0.

    Args:
        a: the first labelling.
        b: the second labelling.

    Example:
        >>> adjusted_mutual_information([0, 0, 1, 1], [5, 5, 7, 7])
        1.0
        >>> round(adjusted_mutual_information([0, 0, 1, 1], [0, 1, 0, 1]), 6)
        -0.5
    """
    counts_a, counts_b, counts_pairs = _counts(a, b)
    if len(counts_a) == len(counts_b) == len(counts_pairs):
        return 1.0
    h_a, h_b, h_pairs = (_entropy(counts) for counts in (counts_a, counts_b, counts_pairs))
    expected = _expected_information(counts_a.cpu(), counts_b.cpu())
    return min(1.0, (h_a + h_b - h_pairs - expected) / ((h_a + h_b) / 2 - expected))


def _counts(a: Labels, b: Labels) -> tuple[Tensor, Tensor, Tensor]:
    """How many items have each label of a, each label of b, and each pair of labels that occurs."""
    first, second = as_labels("a", a), as_labels("b", b)
    if len(first) != len(second):
        raise ValueError(f"b: got {len(second)} labels, expected {len(first)}, as many as in a")
    a_index, b_index = (labels.unique(return_inverse=True)[1] for labels in (first, second.to(first.device)))
    pair_counts = (a_index * (int(b_index.max()) + 1) + b_index).unique(return_counts=True)[1]
    return torch.bincount(a_index), torch.bincount(b_index), pair_counts


def _expected_information(counts_a: Tensor, counts_b: Tensor) -> float:
    """The mean of I(a; b) over all permutations of the items of b (Vinh et al. 2010, Eq. 24a).

    A class of size p and a cluster of size q share n of N items with the hypergeometric probability, and then add
    n/N log(N n / (p q)). Equal sizes are computed once: N items have fewer than sqrt(2 N) different sizes.
    """
    total = int(counts_a.sum())
    log_factorial = torch.lgamma(torch.arange(1, total + 2, dtype=torch.float64))
    sizes, repeats = counts_b.unique(return_counts=True)
    expected = 0.0
    for size, repeat in zip(*(each.tolist() for each in counts_a.unique(return_counts=True))):
        shared = torch.arange(1, min(size, int(sizes[-1])) + 1)[None]
        q = sizes[:, None]
        possible = (shared <= q) & (shared >= size + q - total)
        in_none = (total - size - q + shared).clamp(min=0)
        log_chance = log_factorial[size] + log_factorial[total - size] - log_factorial[total]
        log_chance = log_chance + log_factorial[q] + log_factorial[total - q] - log_factorial[shared]
        log_chance = log_chance - log_factorial[size - shared] - log_factorial[(q - shared).clamp(min=0)]
        chance = (log_chance - log_factorial[in_none]).exp().where(possible, 0.0)
        information = shared.double() / total * (total * shared.double() / (size * q)).log()
        expected += repeat * float(((chance * information).sum(dim=1) * repeats).sum())
    return expected


def _entropy(counts: Tensor) -> float:
    shares = counts.double() / counts.sum()
    return float(-(shares * shares.log()).sum()) + 0.0
