"""The ranges of a study's search, and quasi-random draws from them."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from proxymetric.arguments.signatures import did_you_mean

KINDS = {
    "linear": "numbers between the two ends",
    "log": "numbers between the two ends, as many below ten times a number as above it",
    "integer": "whole numbers from the first to the second one",
    "choice": "one of a list",
}
"""kind of a range -> what is drawn from it"""
SEARCH_KEYS = ("draws", "epochs", "seed", "data", "ranges")
FIXED = {
    "seed": "`seeds` of the study", "protocol": "`protocols` of the study", "data.path": "`data` of the study",
    "train.epochs": "`epochs` of [search]",
}  # fmt: skip
"""keys of a recipe that are not searched -> where they are set"""
MAX_DRAWS = 1024
DIGITS = 4
"""digits of a drawn number: the same on any machine, and short enough to read"""
BITS = 30
"""bits of a coordinate of a Sobol point"""
SEARCH = "search"
"""what stands for the protocol in the names of draws"""
Group = tuple[str, str, str]
"""row as printed, data set and backbone: what has its own best draw"""


@dataclass(frozen=True)
class Range:
    """The values that a number of a row may have in a search.

    Args:
        kind: a key of `KINDS`.
        ends: the two ends, or the list of "choice".

    Example:
        >>> tau = Range("log", (1e-5, 0.1))
        >>> str(tau), tau.value(0.25), Range("integer", (1, 4)).value(0.99)
        ('1e-05 to 0.1 (log)', 0.0001, 4)
    """

    kind: str
    ends: tuple[Any, ...]

    def value(self, place: float) -> Any:
        """The value at a place in [0, 1)."""
        if self.kind == "choice":
            return self.ends[int(place * len(self.ends))]
        low, high = self.ends
        if self.kind == "integer":
            return low + int(place * (high - low + 1))
        number = low * (high / low) ** place if self.kind == "log" else low + place * (high - low)
        return min(high, max(low, float(f"{number:.{DIGITS}g}")))

    def __str__(self) -> str:
        if self.kind == "choice":
            return ", ".join(f"{end:g}" if isinstance(end, float) else str(end) for end in self.ends)
        words = {"log": " (log)", "integer": " (whole numbers)"}.get(self.kind, "")
        return f"{self.ends[0]:g} to {self.ends[1]:g}{words}"


@dataclass(frozen=True)
class Search:
    """How a study searches.

    Args:
        draws: draws of each row, the same number for all rows.
        epochs: length of the run of a draw.
        seed: seed of the draws, and of their runs.
        data: the data set of the draws, whose best draw is used on all data sets; None: each data set has its own.
    """

    draws: int
    epochs: int
    seed: int
    data: str | None


@dataclass(frozen=True)
class Draw:
    """One draw and what came of it: a line of `draws.jsonl`.

    Args:
        run: name of its run.
        row: the row as printed.
        data: the data set.
        backbone: the backbone.
        draw: its number.
        values: key of the recipe -> drawn value.
        score: `metric` on the held-out classes, negative for an error rate; None: the run failed.
        metric: what chooses the best draw.
        validation: all metrics on the held-out classes.
        epoch: the best epoch.
        seconds: time of the run.
        identity: hash of the images.
        commit: commit of the package.
        error: why the run failed.
    """

    run: str
    row: str
    data: str
    backbone: str
    draw: int
    values: dict[str, Any]
    score: float | None
    metric: str = ""
    validation: dict[str, float] = dataclasses.field(default_factory=dict)
    epoch: float = 0
    seconds: float = 0.0
    identity: str | None = None
    commit: str | None = None
    error: str = ""

    @property
    def group(self) -> Group:
        """What the draw is compared in."""
        return self.row, self.data, self.backbone


# Read the study's file


def read_search(content: Mapping[str, Any], data: Collection[str]) -> tuple[Search | None, dict[str, Range]]:
    """Check the table `[search]`.

    Args:
        content: the tables of the study's file.
        data: the names of its data sets.

    Returns:
        How to search, and the ranges that all searched rows share; None and none without the table.

    Raises:
        ValueError: a key is unknown or a value is out of range.
    """
    if "search" not in content:
        return None, {}
    table = content["search"]
    if not isinstance(table, Mapping):
        raise ValueError(f"search: got {table!r}, expected a table with draws and epochs")
    for key in table:
        if key not in SEARCH_KEYS:
            raise ValueError(
                f"search.{key}: got an unknown key, expected one of {', '.join(SEARCH_KEYS)}"
                f"{did_you_mean(key, SEARCH_KEYS)}"
            )
    numbers = {
        key: _whole_number(f"search.{key}", table.get(key, default), least, most)
        for key, default, least, most in (
            ("draws", None, 2, MAX_DRAWS), ("epochs", None, 1, None), ("seed", 0, 0, 2**31 - 1)
        )
    }  # fmt: skip
    of = table.get("data")
    if of is not None and of not in data:
        raise ValueError(
            f"search.data: got {of!r}, expected a data set of the study ({', '.join(data)}){did_you_mean(of, data)}"
        )
    shared = read_ranges("search.ranges", table.get("ranges", {}), {})
    return Search(numbers["draws"], numbers["epochs"], numbers["seed"], of), shared


def _whole_number(where: str, value: Any, least: int, most: int | None) -> int:
    if type(value) is not int or value < least or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most:,}"
        raise ValueError(f"{where}: got {value!r}, expected a whole number of at least {least}{limit}")
    return value


def read_ranges(where: str, table: Any, shared: Mapping[str, Range]) -> dict[str, Range]:
    """Check a table of ranges; the ranges of the row itself come after the shared ones, and replace them.

    Args:
        where: place of the table, for errors.
        table: key of the recipe -> range, such as `{log = [1e-5, 0.1]}`; false leaves a shared range out.
        shared: the ranges of `[search.ranges]`.

    Raises:
        ValueError: a range is empty or wrong.

    Example:
        >>> {key: str(each) for key, each in read_ranges("search", {"loss.tau": {"linear": [0, 1]}}, {}).items()}
        {'loss.tau': '0 to 1'}
        >>> read_ranges("search", {"loss.tau": {"log": [0, 1]}}, {})
        Traceback (most recent call last):
        ValueError: search.loss.tau: got log = [0, 1], expected two numbers above 0; `linear` may start at 0
    """
    if not isinstance(table, Mapping):
        raise ValueError(f'{where}: got {table!r}, expected ranges such as {{"loss.margin" = {{linear = [0, 0.5]}}}}')
    ranges = dict(shared)
    for key, value in _flat(table).items():
        if key in FIXED:
            raise ValueError(f"{where}.{key}: got a range, expected it in {FIXED[key]}")
        if key in SEARCH_KEYS:
            raise ValueError(
                f"{where}.{key}: got {value!r}, expected it in [search]: it is the same for all rows, so that a row "
                "and its baseline are searched with equal effort"
            )
        if value is False:
            if key not in shared:
                raise ValueError(
                    f"{where}.{key}: got false, which leaves a range of [search.ranges] out, expected one of "
                    f"{', '.join(shared) or 'its ranges (there are none)'}{did_you_mean(key, shared)}"
                )
            del ranges[key]
            continue
        ranges[key] = _range(f"{where}.{key}", value)
    return ranges


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Ranges with dotted keys: `{loss = {tau = {log = [1, 2]}}}` becomes `{"loss.tau" = {log = [1, 2]}}`."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        is_table = isinstance(value, Mapping) and "." not in key and not KINDS.keys() & value.keys()
        flat |= {f"{key}.{inner}": each for inner, each in value.items()} if is_table else {key: value}
    return flat


def _range(where: str, value: Any) -> Range:
    if not isinstance(value, Mapping) or len(value) != 1:
        kinds = ", ".join(KINDS)
        raise ValueError(f"{where}: got {value!r}, expected a table with one of {kinds}, such as {{log = [1e-5, 0.1]}}")
    ((kind, ends),) = value.items()
    if kind not in KINDS:
        raise ValueError(f"{where}: got {kind!r}, expected one of {', '.join(KINDS)}{did_you_mean(kind, KINDS)}")
    refusal = f"{where}: got {kind} = {list(ends) if isinstance(ends, list | tuple) else ends!r}"
    if not isinstance(ends, list | tuple):
        raise ValueError(f"{refusal}, expected a list")
    if kind == "choice":
        if not all(isinstance(end, str | bool | int | float) for end in ends):
            raise ValueError(f"{refusal}, expected names, numbers, true or false")
        if len(ends) < 2 or len({(type(end), end) for end in ends}) < len(ends):
            raise ValueError(
                f"{refusal}, expected two different entries or more; a fixed value belongs into `settings`"
            )
        return Range(kind, tuple(ends))
    wanted = int if kind == "integer" else (int, float)
    are_numbers = all(isinstance(end, wanted) and not isinstance(end, bool) and math.isfinite(end) for end in ends)
    if len(ends) != 2 or not are_numbers:
        raise ValueError(f"{refusal}, expected two {'whole ' if kind == 'integer' else ''}numbers, the lower one first")
    low, high = ends
    if low == high:
        raise ValueError(
            f"{refusal}, a range of one point, expected two numbers; a fixed value belongs into `settings`"
        )
    if low > high:
        raise ValueError(f"{refusal}, expected the lower number first: [{high}, {low}]")
    if kind == "log" and low <= 0:
        raise ValueError(f"{refusal}, expected two numbers above 0; `linear` may start at 0")
    return Range(kind, (low, high) if kind == "integer" else (float(low), float(high)))


# Draw


def points(dimensions: int, count: int, name: str) -> np.ndarray:
    """The first points of a Sobol sequence in [0, 1), scrambled by a random linear map and shift (LMS + shift).

    The random bits are a hash of the name, so that the points are the same on any machine and with any version. More
    points of the same name begin with the same ones.

    Args:
        dimensions: D.
        count: N.
        name: what the scrambling depends on.

    Returns:
        (N, D) points.

    Example:
        >>> few, more = points(3, 4, "a"), points(3, 16, "a")
        >>> more.shape, bool((few == more[:4]).all()), bool((few == points(3, 4, "b")).any())
        ((16, 3), True, False)
        >>> sorted((16 * more[:, 0]).astype(int).tolist()) == list(range(16))
        True
    """
    from scipy.stats import qmc

    sequence = qmc.Sobol(dimensions, scramble=False, bits=BITS).random_base2(math.ceil(math.log2(count)))[:count]
    exponents = np.arange(BITS)[::-1]
    digits = (sequence * 2**BITS).astype(np.int64)[:, :, None] >> exponents & 1
    size = dimensions * BITS * (BITS + 1)
    hashed = np.frombuffer(hashlib.shake_256(name.encode()).digest(math.ceil(size / 8)), np.uint8)
    random = np.unpackbits(hashed)[:size].reshape(dimensions, BITS, BITS + 1).astype(np.int64)
    maps, shifts = np.tril(random[:, :, :BITS], -1) + np.eye(BITS, dtype=np.int64), random[:, :, BITS]
    scrambled = (np.einsum("dij,ndj->ndi", maps, digits) + shifts) % 2
    return np.asarray((scrambled @ (1 << exponents) + 0.5) / 2**BITS)


def drawn(study: str, row: str, ranges: Mapping[str, Range], search: Search) -> list[dict[str, Any]]:
    """The values of each draw of a row, a pure function of the names, the ranges, and the number and seed of draws.

    Example:
        >>> tau = {"loss.tau": Range("log", (1e-5, 0.1))}
        >>> first = drawn("mine", "vcpa", tau, Search(4, 1, 0, None))
        >>> first == drawn("mine", "vcpa", tau, Search(8, 1, 0, None))[:4], len(first)
        (True, 4)
    """
    places = points(len(ranges), search.draws, f"{study}/{row}/{search.seed}")
    return [{key: each.value(place) for (key, each), place in zip(ranges.items(), line)} for line in places.tolist()]


def in_words(values: Mapping[str, Any]) -> str:
    """Drawn numbers in one line.

    >>> in_words({"loss.tau": 0.01, "train.batch": 32})
    'loss.tau=0.01 train.batch=32'
    """
    return " ".join(f"{key}={value}" for key, value in values.items())
