"""The names of the metrics: a kind and a cutoff (``MAP@R``, ``nDCG@8``), or a metric of a whole set (``NMI``)."""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_SHOWN_CHARACTERS = 40
"""maximum number of characters of a name in an error"""
WHOLE = ("NMI", "covering_radius", "inter_class_distance")
_ALIASES = {
    "recall": "R",
    "r": "R",
    "precision": "P",
    "p": "P",
    "map": "MAP",
    "mean average precision": "MAP",
    "ap": "AP",
    "average precision": "AP",
    "ndcg": "nDCG",
    "dcg": "nDCG",
    "nmi": "NMI",
    "normalized mutual information": "NMI",
    "covering radius": "covering_radius",
    "inter class distance": "inter_class_distance",
}
MAX_CUTOFF = 2**31 - 1
"""the largest K"""
_FORMS = f"R@K, P@K, P@R, MAP@R, MAP@K, AP@K or nDCG@K with a whole number K of at least 1, or {', '.join(WHOLE)}"


class Metric(NamedTuple):
    """A checked name, its kind, and its cutoff K.

    `cutoff` is None for a cutoff at R, the number of relevant items of each query, and for metrics without a cutoff.
    """

    name: str
    kind: str
    cutoff: int | None

    @property
    def whole(self) -> bool:
        """Whether the metric describes a whole set of embeddings; others are means over queries."""
        return self.kind in WHOLE


def parse(name: str) -> Metric:
    """Parse the name of a metric.

    Args:
        name: such as "R@1", "MAP@R" or "NMI".

    Returns:
        The name with its kind and cutoff.

    Raises:
        ValueError: the name is unknown; the message names the nearest metric.

    Example:
        >>> parse("nDCG@8")
        Metric(name='nDCG@8', kind='nDCG', cutoff=8)
        >>> parse("map@r")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: metrics: got 'map@r', expected R@K, ..., inter_class_distance; did you mean 'MAP@R'?
    """
    if name in WHOLE:
        return Metric(name, name, None)
    match = re.fullmatch(r"(R|P|MAP|AP|nDCG)@([1-9][0-9]*)|(P|MAP)@R", name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"metrics: got {name!r}, expected {_FORMS}; did you mean {_nearest(str(name))!r}?")
    if match[3]:
        return Metric(name, match[3], None)
    if len(match[2]) > len(str(MAX_CUTOFF)) or int(match[2]) > MAX_CUTOFF:
        shown = name if len(name) <= MAX_SHOWN_CHARACTERS else f"{name[:MAX_SHOWN_CHARACTERS]}..."
        raise ValueError(f"metrics: got {shown!r}, expected a cutoff K of at most {MAX_CUTOFF:,}")
    return Metric(name, match[1], int(match[2]))


def names(metrics: str | Sequence[str]) -> tuple[str, ...]:
    """Check metric names.

    Args:
        metrics: a name, or several.

    Returns:
        The names as a tuple.

    Raises:
        ValueError: no name is given, or a name is unknown.

    Example:
        >>> names(["R@1", "MAP@R"])
        ('R@1', 'MAP@R')
        >>> names("P@R")
        ('P@R',)
    """
    metric_names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    if not metric_names:
        raise ValueError(f"metrics: got no name, expected at least one of {_FORMS}")
    return tuple(parse(name).name for name in metric_names)


def _nearest(name: str) -> str:
    """The metric whose name is most like an unknown name."""
    kind, _, cutoff = name.partition("@")
    normalised_kind = re.sub(r"[\s_-]+", " ", kind.strip().lower())
    aliases = difflib.get_close_matches(normalised_kind, _ALIASES, n=1, cutoff=0.0)
    nearest_kind = _ALIASES[aliases[0]] if aliases else "MAP"
    if nearest_kind in WHOLE:
        return nearest_kind
    digits = re.sub(r"\D", "", cutoff).lstrip("0")
    if nearest_kind in ("P", "MAP") and not digits:
        return f"{nearest_kind}@R"
    return f"{nearest_kind}@{digits or 1}"
