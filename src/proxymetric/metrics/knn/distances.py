"""What "nearer" means: scores of queries against items, each with a bound of its rounding error.

Three precisions of one exact score s(q, g), which is larger for nearer items:

    coarse   float32 matrix product, |error| <= `coarse_slack`: leaves few candidates
    fine     float64 matrix product or single pairs, |error| <= their slack: orders what float32 cannot
    exact    single pairs, s without any rounding, then to 2^-72: decides what is a tie

The bounds are the classical ones: a sum of D products of vectors a and b, in whatever order, is off by at most
g |a| |b| with g = D u / (1 - D u), u = 2^-24 or 2^-53. The precisions of one query may differ by a constant.

Products are taken of z = (x - centre) scale where that helps: with z_q.z_g - |z_g|^2 / 2 in place of -|q - g|^2 / 2 the
errors are small against the spread of the vectors, not against their distance from the origin.
"""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.metrics.knn import exact_sums

Index = slice | Tensor
ROWS = 512  # read at once
PAIRS = 2**15  # numbers of one side read at once for single pairs: cached, and below what torch gives to threads
UNIT = 1e-6  # lengths this near to 1 need no division
CROWDED = 0.125  # directions all this near to their mean are centred
SINGLE, DOUBLE = 2.0**-24, 2.0**-53
FINEST = 2.0**-72


class Scored(NamedTuple):
    """Scores (M,) and the bound of the error of each."""

    values: Tensor
    slack: Tensor


@dataclass(frozen=True)
class Side:
    """The queries or the items as they were given, and what is known of each row, in float64."""

    vectors: Tensor  # (N, D)
    shift: Tensor  # (N,) a power of two that keeps squares in range
    inverse: Tensor  # (N,) 1 / length of the shifted row, 0 for a zero row; unused by Euclidean


def growth(terms: int, unit: float) -> float:
    """The bound g for so many products, with room for rounding in the bound itself; infinite where it says nothing."""
    part = terms * unit
    return 1.01 * part / (1 - part) if part < 0.1 else float("inf")


def parts(count: int, size: int) -> list[slice]:
    """0..count in slices of `size`.

    >>> parts(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def pick(values: Tensor, index: Index) -> Tensor:
    """values[index], which is several times slower for rows."""
    return values.index_select(0, index) if isinstance(index, Tensor) else values[index]


def each_row(count: int, number: Callable[[slice], Tensor], device: torch.device) -> Tensor:
    """A float64 number (count,) for each row, from a function of some rows; only these are held at once."""
    out = torch.empty(count, dtype=torch.float64, device=device)
    for part in parts(count, ROWS):
        out[part] = number(part)
    return out


class Space(ABC):
    """Queries (N, D) and items (G, D); one and the same side where items look for each other."""

    queries: Side
    items: Side
    offset: Tensor | None = None  # (G,) float64, to be taken off the product of a query with each item
    centre: Tensor | None = None  # (D,) float64
    scale: float = 1.0
    unit_of_rows: float = 1.0  # distances between rows are so many times those of the vectors
    reach: Tensor  # (N,) |z| of the queries, where centred
    farthest: float  # the largest |z| of an item, where centred

    @abstractmethod
    def __init__(self, queries: Tensor, items: Tensor) -> None: ...

    @abstractmethod
    def rows(self, side: Side, index: Index) -> Tensor:
        """Rows in float64 whose products or differences are the scores."""

    @abstractmethod
    def pairs(self, queries: Tensor, items: Tensor) -> Scored:
        """Fine scores of single pairs (M,)."""

    @abstractmethod
    def exact(self, queries: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """Exact scores of single pairs (M,), as high and low part; pairs of one query follow each other."""

    def coarse(self, side: Side, index: Index) -> Tensor:
        """Rows in float32, to be multiplied with each other."""
        return self.fine(side, index).float()

    def fine(self, side: Side, index: Index) -> Tensor:
        """Rows in float64, to be multiplied with each other."""
        rows = self.rows(side, index)
        return rows if self.centre is None else (rows - self.centre) * self.scale

    def coarse_slack(self, queries: Tensor) -> Tensor:
        """Bound (n,) of the error of the coarse scores of these queries."""
        return self._slack(queries, SINGLE).float()

    def fine_slack(self, queries: Tensor) -> Tensor:
        """Bound (n,) of the error of the fine scores of these queries."""
        return self._slack(queries, DOUBLE)

    def _slack(self, queries: Tensor, unit: float) -> Tensor:
        # 8 and 4 more: rounding of z, of the offset, of the difference and of the threshold; numbers too small.
        reach = self.reach[queries]
        rounding = growth(self.dim + 8, unit) * reach * self.farthest + 1.01 * 4 * unit * self.farthest**2
        return rounding + self.dim * 2.0**-120

    @property
    def dim(self) -> int:
        return self.queries.vectors.shape[1]

    def _centre_on(self, centre: Tensor, radius: float) -> None:
        """Take products of (row - centre) scale; no entry may be farther than `radius` from the centre."""
        self.centre, self.scale = centre, float(exact_sums.power_of_two(torch.tensor(radius)))
        self.reach = self._of_each(self.queries, lambda rows: (rows - centre).norm(dim=1) * self.scale)
        lengths = self.reach
        if self.items is not self.queries:
            lengths = self._of_each(self.items, lambda rows: (rows - centre).norm(dim=1) * self.scale)
        self.offset, self.farthest = lengths.square() / 2, float(lengths.max())

    def _of_each(self, side: Side, number: Callable[[Tensor], Tensor]) -> Tensor:
        device = side.vectors.device
        return each_row(len(side.vectors), lambda part: number(self.rows(side, part)), device)

    def _mean(self, side: Side) -> Tensor:
        total = torch.zeros(self.dim, dtype=torch.float64, device=side.vectors.device)
        for part in parts(len(side.vectors), ROWS):
            total += self.rows(side, part).sum(dim=0) / len(side.vectors)
        return total

    def _chunks(self, queries: Tensor, items: Tensor) -> list[tuple[Tensor, Tensor]]:
        size = max(1, PAIRS // self.dim)
        return list(zip(queries.split(size), items.split(size)))


class Euclidean(Space):
    """s(q, g) = -|q - g|^2."""

    def __init__(self, queries: Tensor, items: Tensor) -> None:
        together = [queries] if items is queries else [queries, items]
        largest = [part.abs().max() for vectors in together for part in vectors.split(ROWS)]
        self.shift = exact_sums.power_of_two(torch.stack(largest).max())
        self.unit_of_rows = float(self.shift)
        self.queries = self._side(queries)
        self.items = self.queries if items is queries else self._side(items)
        centre = self._mean(self.items)
        sides = {id(side): side for side in (self.queries, self.items)}.values()
        radius = [self._of_each(side, lambda rows: (rows - centre).abs().amax(dim=1)).max() for side in sides]
        self._centre_on(centre, float(torch.stack(radius).max()))

    def _side(self, vectors: Tensor) -> Side:
        shift = self.shift.expand(len(vectors))
        return Side(vectors, shift, shift)

    def rows(self, side: Side, index: Index) -> Tensor:
        return pick(side.vectors, index).double() * self.shift

    def pairs(self, queries: Tensor, items: Tensor) -> Scored:
        apart = (self.rows(self.queries, q) - self.rows(self.items, g) for q, g in self._chunks(queries, items))
        values = torch.cat([-exact_sums.dot(each, each) for each in apart])
        return Scored(values, values.abs() * growth(self.dim + 4, DOUBLE))

    def exact(self, queries: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        found = [
            exact_sums.squared_distance(self.rows(self.queries, q), self.rows(self.items, g))
            for q, g in self._chunks(queries, items)
        ]
        high, low = (torch.cat(each) for each in zip(*found))
        grain = FINEST / exact_sums.power_of_two(high)
        return -high, -torch.round(low / grain) * grain


class Cosine(Space):
    """s(q, g) = q.g / (|q| |g|); a zero vector has similarity 0 with everything.

    Where all directions are close to each other, they are centred: 1 - s = |q/|q| - g/|g||^2 / 2.
    """

    def __init__(self, queries: Tensor, items: Tensor) -> None:
        self.queries = self._side(queries)
        self.items = self.queries if items is queries else self._side(items)
        inverse = torch.cat([self.queries.inverse, self.items.inverse])
        known = inverse[inverse > 0] if bool(inverse.any()) else torch.ones_like(inverse)
        whole = queries.dtype == items.dtype == torch.float32
        off_unit = float((1 / known - 1).abs().max())
        self.unit = whole and off_unit <= UNIT
        self.off_unit = off_unit if self.unit else 0.0
        self.in_range = whole and bool(known.min() > 2.0**-60 and known.max() < 2.0**60)
        self.blur = growth(self.dim // 2 + 4, DOUBLE)  # relative error of the length of a row
        centre = self._mean(self.items)
        if float(centre.norm()) > 1 - CROWDED:
            sides = {id(side): side for side in (self.queries, self.items)}.values()
            radius = [self._of_each(side, lambda rows: (rows - centre).norm(dim=1)).max() for side in sides]
            farthest = float(torch.stack(radius).max())
            if farthest < CROWDED:
                self._centre_on(centre, farthest)

    @staticmethod
    def _side(vectors: Tensor) -> Side:
        shift = torch.ones(len(vectors), dtype=torch.float64, device=vectors.device)
        if vectors.dtype == torch.float64:
            largest = each_row(len(vectors), lambda part: vectors[part].abs().amax(dim=1), vectors.device)
            shift = exact_sums.power_of_two(largest)
        blank = Side(vectors, shift, shift)
        length = each_row(len(vectors), lambda part: _shifted(blank, part).norm(dim=1), vectors.device)
        return Side(vectors, shift, torch.where(length > 0, 1 / length, 0))

    def rows(self, side: Side, index: Index) -> Tensor:
        # Not shifted where that changes nothing: a product of float32 with float64 is one pass over the rows.
        rows = pick(side.vectors, index) if side.vectors.dtype == torch.float32 else _shifted(side, index)
        return rows * pick(side.inverse, index)[:, None]

    def coarse(self, side: Side, index: Index) -> Tensor:
        if self.centre is None and self.unit:
            return pick(side.vectors, index)
        if self.centre is None and self.in_range:
            return pick(side.vectors, index) * pick(side.inverse, index)[:, None].float()
        return super().coarse(side, index)

    def _slack(self, queries: Tensor, unit: float) -> Tensor:
        if self.centre is not None:
            apart = self.reach[queries] + self.farthest
            blurred = self._blurred(apart / self.scale) + 2 * FINEST
            return super()._slack(queries, unit) + blurred * self.scale**2
        # 8 more: two roundings of each vector, that of the threshold, and numbers too small for float32.
        slack = growth(self.dim + 8, unit) + 2.1 * (self.off_unit if unit == SINGLE else self.blur)
        return torch.full((len(queries),), slack, dtype=torch.float64, device=queries.device)

    def _blurred(self, apart: Tensor) -> Tensor:
        """Error of |q - g|^2 / 2 from unit vectors of float64, |q - g| <= apart.

        An error e of a length moves a unit vector along itself, which changes |q - g|^2 by e |q - g|^2 and e^2 only;
        rounding of the entries is u |q - g|.
        """
        return self.blur * apart.square() + 2.1 * self.blur**2 + 2.1 * DOUBLE * apart

    def pairs(self, queries: Tensor, items: Tensor) -> Scored:
        apart = (self.rows(self.queries, q) - self.rows(self.items, g) for q, g in self._chunks(queries, items))
        squared = torch.cat([exact_sums.dot(each, each) for each in apart])
        slack = self._blurred(squared.sqrt()) + growth(self.dim + 4, DOUBLE) * squared + 2 * FINEST
        # s - 1, which is -1 for a zero item; for a zero query all items are equal.
        values = torch.where(self.items.inverse[items] == 0, -1, -squared / 2)
        return Scored(torch.where(self.queries.inverse[queries] == 0, 0, values), slack)

    def exact(self, queries: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        found = []
        for q, g in self._chunks(queries, items):
            a, b = _sliced(self.queries, q), _sliced(self.items, g)
            sums = [exact_sums.sum_of_products(x, y, exact_sums.dot) for x, y in ((a, b), (a, a), (b, b))]
            found.append(exact_sums.cosine(*sums))
        high, low = (torch.cat(each) for each in zip(*found))
        return high, torch.round(low / FINEST) * FINEST


def _shifted(side: Side, index: Index) -> Tensor:
    rows = pick(side.vectors, index).double()
    return rows if side.vectors.dtype == torch.float32 else rows * pick(side.shift, index)[:, None]


def _sliced(side: Side, index: Index) -> list[Tensor]:
    rows = _shifted(side, index)
    return exact_sums.slices(rows * exact_sums.power_of_two(rows.abs().amax(dim=1))[:, None], rows.shape[1])


SPACES: dict[str, type[Space]] = {"cosine": Cosine, "euclidean": Euclidean}


def check_distance(name: str) -> None:
    """Refuse a distance there is not."""
    if name not in SPACES:
        near = difflib.get_close_matches(str(name), SPACES, n=1, cutoff=0.0)[0]
        raise ValueError(f"distance: got {name!r}, expected one of {', '.join(SPACES)}; did you mean {near!r}?")
