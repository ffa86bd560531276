"""The names of the metrics: a kind and a cutoff, such as ``MAP@R`` or ``nDCG@8``, or one of a whole set, ``NMI``."""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

WHOLE = ("NMI", "covering_radius", "inter_class_distance")
_ALIASES = {
    "recall": "R",
    "r": "R",
    "precision": "P",
    "p": "P",
    "map": "MAP",
    "mean average precision": "MAP",
    "ndcg": "nDCG",
    "dcg": "nDCG",
    "nmi": "NMI",
    "normalized mutual information": "NMI",
    "covering radius": "covering_radius",
    "inter class distance": "inter_class_distance",
}
_FORMS = f"R@K, P@K, P@R, MAP@R, MAP@K or nDCG@K with a whole number K from 1, {', '.join(WHOLE)}"


class Metric(NamedTuple):
    """A checked name: its kind and its cutoff, None for the number of relevant items of each query."""

    name: str
    kind: str
    cutoff: int | None

    @property
    def whole(self) -> bool:
        """Of a whole set of embeddings, not a mean over queries."""
        return self.kind in WHOLE


def parse(name: str) -> Metric:
    """Read one name.

    >>> parse("nDCG@8")
    Metric(name='nDCG@8', kind='nDCG', cutoff=8)
    >>> parse("map@r")
    Traceback (most recent call last):
    ...
    ValueError: metrics: unknown metric 'map@r'; did you mean 'MAP@R'? Known are R@K, P@K, P@R, MAP@R, MAP@K or nDCG@K with a whole number K from 1, NMI, covering_radius, inter_class_distance
    """  # noqa: E501
    if name in WHOLE:
        return Metric(name, name, None)
    found = re.fullmatch(r"(R|P|MAP|nDCG)@([1-9][0-9]*)|(P|MAP)@R", name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"metrics: unknown metric {name!r}; did you mean {_nearest(str(name))!r}? Known are {_FORMS}")
    if found[3]:
        return Metric(name, found[3], None)
    return Metric(name, found[1], int(found[2]))


def names(metrics: str | Sequence[str]) -> tuple[str, ...]:
    """Check metric names and return them as a tuple; a single name may come as a plain string.

    >>> names(["R@1", "MAP@R"])
    ('R@1', 'MAP@R')
    >>> names("P@R")
    ('P@R',)
    """
    listed = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    if not listed:
        raise ValueError(f"metrics: got no name; expected at least one of {_FORMS}")
    return tuple(parse(name).name for name in listed)


def _nearest(name: str) -> str:
    kind, _, cutoff = name.partition("@")
    plain = re.sub(r"[\s_-]+", " ", kind.strip().lower())
    known = difflib.get_close_matches(plain, _ALIASES, n=1, cutoff=0.0)
    right = _ALIASES[known[0]] if known else "MAP"
    if right in WHOLE:
        return right
    digits = re.sub(r"\D", "", cutoff).lstrip("0")
    if right in ("P", "MAP") and not digits:
        return f"{right}@R"
    return f"{right}@{digits or 1}"
