"""The names of the metrics.

A name is a kind and a cutoff (``MAP@R``, ``nDCG@8``), a metric of the whole ranking (``AP``, ``MRR``), one of a whole
set (``NMI``), or one of all pairs (``EER``, ``FNMR@FMR=0.001``).
"""

import difflib
import re
from collections.abc import Sequence
from typing import NamedTuple

MAX_SHOWN_CHARACTERS = 40
"""maximum number of characters of a name in an error"""
WHOLE = ("NMI", "AMI", "covering_radius", "inter_class_distance")
UNCUT = ("AP", "MRR")
"""kinds that without a cutoff are of the whole ranking"""
ERRORS = ("EER", "FNMR")
"""kinds of error rates of pairs, where lower is better"""
_ALIASES = {
    "recall": "R",
    "r": "R",
    "precision": "P",
    "p": "P",
    "map": "MAP",
    "mean average precision": "MAP",
    "ap": "AP",
    "average precision": "AP",
    "mrr": "MRR",
    "mean reciprocal rank": "MRR",
    "reciprocal rank": "MRR",
    "ndcg": "nDCG",
    "dcg": "nDCG",
    "nmi": "NMI",
    "normalized mutual information": "NMI",
    "ami": "AMI",
    "adjusted mutual information": "AMI",
    "covering radius": "covering_radius",
    "inter class distance": "inter_class_distance",
    "eer": "EER",
    "equal error rate": "EER",
    "fnmr": "FNMR",
    "false non match rate": "FNMR",
}
MAX_CUTOFF = 2**31 - 1
"""the largest K"""
_FORMS = (
    "R@K, P@K, P@R, MAP@R, MAP@K, AP@K, MRR@K or nDCG@K with a whole number K of at least 1, AP or MRR of the whole "
    f"ranking, {', '.join(WHOLE)}, EER, or FNMR@FMR=F with a false-match rate F from 0 to 1"
)


class Metric(NamedTuple):
    """A checked name, its kind, its cutoff K, and its false-match rate.

    `cutoff` is None for a cutoff at R, the number of relevant items of each query, and for metrics of a whole set; it
    is `MAX_CUTOFF` for AP and MRR, which look at the whole ranking. `fmr` is None for all metrics but FNMR@FMR=F.
    """

    name: str
    kind: str
    cutoff: int | None = None
    fmr: float | None = None

    @property
    def whole(self) -> bool:
        """Whether the metric describes a whole set of embeddings; others are means over queries."""
        return self.kind in WHOLE or self.of_pairs

    @property
    def uncut(self) -> bool:
        """Whether the metric looks at the whole ranking of each query."""
        return self.cutoff == MAX_CUTOFF

    @property
    def of_pairs(self) -> bool:
        """Whether the metric is an error rate of pairs, see `verification`."""
        return self.kind in ERRORS

    @property
    def lower_is_better(self) -> bool:
        """Whether the metric is an error rate."""
        return self.of_pairs


def parse(name: str) -> Metric:
    """Parse the name of a metric.

    Args:
        name: such as "R@1", "MAP@R", "AP" or "NMI".

    Returns:
        The name with its kind and cutoff.

    Raises:
        ValueError: the name is unknown; the message names the nearest metric.

    Example:
        >>> parse("nDCG@8")
        Metric(name='nDCG@8', kind='nDCG', cutoff=8, fmr=None)
        >>> parse("FNMR@FMR=0.001").lower_is_better
        True
        >>> parse("map@r")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: metrics: got 'map@r', expected R@K, ... from 0 to 1; did you mean 'MAP@R'?
    """
    if name in WHOLE or name == "EER":
        return Metric(name, name)
    if name in UNCUT:
        return Metric(name, name, MAX_CUTOFF)
    if isinstance(name, str) and (rate := re.fullmatch(r"FNMR@FMR=([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)", name)):
        if not float(rate[1]) <= 1:
            raise ValueError(f"metrics: got {_shown(name)!r}, expected a false-match rate from 0 to 1")
        return Metric(name, "FNMR", fmr=float(rate[1]))
    match = re.fullmatch(r"(R|P|MAP|AP|MRR|nDCG)@([1-9][0-9]*)|(P|MAP)@R", name) if isinstance(name, str) else None
    if match is None:
        raise ValueError(f"metrics: got {name!r}, expected {_FORMS}; did you mean {_nearest(str(name))!r}?")
    if match[3]:
        return Metric(name, match[3])
    if len(match[2]) > len(str(MAX_CUTOFF)) or int(match[2]) > MAX_CUTOFF:
        raise ValueError(f"metrics: got {_shown(name)!r}, expected a cutoff K of at most {MAX_CUTOFF:,}")
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


def lower_is_better(name: str) -> bool:
    """Whether a column of a table of scores is an error rate; False for a name that is no metric.

    Example:
        >>> lower_is_better("EER"), lower_is_better("MAP@R"), lower_is_better("loss")
        (True, False, False)
    """
    try:
        return parse(name).lower_is_better
    except ValueError:
        return False


def _shown(name: str) -> str:
    return name if len(name) <= MAX_SHOWN_CHARACTERS else f"{name[:MAX_SHOWN_CHARACTERS]}..."


def _nearest(name: str) -> str:
    """The metric whose name is most like an unknown name; a number alone is taken for the cutoff of R@K."""
    kind, _, cutoff = name.partition("@")
    if kind.isdigit():
        return f"R@{int(kind) or 1}"
    normalised_kind = re.sub(r"[\s_-]+", " ", kind.strip().lower())
    aliases = difflib.get_close_matches(normalised_kind, _ALIASES, n=1, cutoff=0.0)
    nearest_kind = _ALIASES[aliases[0]] if aliases else "MAP"
    if nearest_kind in WHOLE or nearest_kind == "EER" or (nearest_kind in UNCUT and not cutoff):
        return nearest_kind
    if nearest_kind == "FNMR":
        rate = re.search(r"0?\.[0-9]+|1e-[0-9]+", cutoff)
        return f"FNMR@FMR={rate[0] if rate else 0.001}"
    digits = re.sub(r"\D", "", cutoff).lstrip("0")
    if nearest_kind in ("P", "MAP") and not digits:
        return f"{nearest_kind}@R"
    return f"{nearest_kind}@{digits or 1}"
