"""Error rates of pairs by loops over their definitions. Shares no code with the package."""

import itertools
import math
from fractions import Fraction

import numpy as np

from oracles import metrics as oracle

STEPS = 2**32


def pair_scores(
    embeddings: np.ndarray, labels: list, gallery: np.ndarray | None = None, gallery_labels: list | None = None
) -> tuple[list[Fraction], list[Fraction]]:
    """The similarities of genuine and of impostor pairs, rounded to 32 binary places (half: up)."""
    if gallery is None:
        pairs = [
            (embeddings[i], labels[i], embeddings[j], labels[j])
            for i, j in itertools.combinations(range(len(labels)), 2)
        ]
    else:
        pairs = [(a, c, b, d) for a, c in zip(embeddings, labels) for b, d in zip(gallery, gallery_labels)]
    genuine: list[Fraction] = []
    impostor: list[Fraction] = []
    for a, c, b, d in pairs:
        value = Fraction(math.floor(oracle.similarity(a, b, "cosine") * STEPS + Fraction(1, 2)), STEPS)
        (genuine if c == d else impostor).append(value)
    return genuine, impostor


def rates(genuine: list[Fraction], impostor: list[Fraction], threshold: Fraction) -> tuple[Fraction, Fraction]:
    """FMR and FNMR if pairs above a threshold are accepted."""
    return (
        Fraction(sum(value > threshold for value in impostor), len(impostor)),
        Fraction(sum(value <= threshold for value in genuine), len(genuine)),
    )


def fnmr_at_fmr(genuine: list[Fraction], impostor: list[Fraction], fmr: float) -> tuple[Fraction, Fraction]:
    """FNMR at the lowest threshold whose FMR is at most `fmr`, and that threshold."""
    for threshold in [Fraction(-2), *sorted(set(impostor))]:
        found, missed = rates(genuine, impostor, threshold)
        if float(found) <= fmr:
            return missed, threshold
    raise AssertionError


def equal_error_rate(genuine: list[Fraction], impostor: list[Fraction]) -> Fraction:
    """Where the polygon through all points (FMR, FNMR) crosses the diagonal."""
    points = [rates(genuine, impostor, threshold) for threshold in [Fraction(-2), *sorted({*genuine, *impostor})]]
    for (fmr, fnmr), (next_fmr, next_fnmr) in itertools.pairwise(points):
        if fmr >= fnmr and next_fmr <= next_fnmr:
            if fmr == fnmr:
                return fmr
            share = (fmr - fnmr) / ((fmr - fnmr) - (next_fmr - next_fnmr))
            return fmr + share * (next_fmr - fmr)
    raise AssertionError
