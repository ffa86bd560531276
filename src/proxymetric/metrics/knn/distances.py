"""The scores of queries against items, each with a bound on its rounding error.

An exact score s(q, g) is higher for nearer items. It is computed in three precisions:

    coarse   float32 matrix product, |error| <= `coarse_slack`; selects few candidates
    fine     float64 matrix product or single pairs, |error| <= their slack; orders what float32 cannot separate
    exact    single pairs, s without rounding error, then rounded to 2^-72; decides which items tie

The bounds are the classical ones: a sum of D products of vectors a and b, in any order, has an error of at most
g |a| |b| with g = D u / (1 - D u) and u = 2^-24 or 2^-53. The scores of one query in two precisions may differ by a
constant.

Where it reduces the error, products are taken of z = (x - centre) scale: z_q.z_g - |z_g|^2 / 2 replaces -|q - g|^2 / 2,
so that errors are relative to the spread of the vectors, not to their distance from the origin.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.metrics.knn import exact_sums

Index = slice | Tensor
ROWS_PER_BLOCK = 512
NUMBERS_PER_PAIR_BLOCK = 2**15
"""numbers of the queries, or of the items, in one block of pairs: they fit into the cache and need no threads"""
UNIT_LENGTH_TOLERANCE = 1e-6
"""a length this close to 1 counts as 1"""
CENTRING_RADIUS = 0.125
"""unit vectors are centred if all are this close to their mean"""
FLOAT32_UNIT, FLOAT64_UNIT = 2.0**-24, 2.0**-53
"""unit roundoff"""
EXACT_RESOLUTION = 2.0**-72
"""exact scores are rounded to multiples of this number"""


class BoundedScores(NamedTuple):
    """Scores (M,) and the error bound of each."""

    values: Tensor
    slack: Tensor


@dataclass(frozen=True)
class VectorSet:
    """The queries or the items as given, with float64 properties of each row.

    Attributes:
        vectors: (N, D).
        shift: (N,) a power of two that keeps squares in the range of float64.
        inverse: (N,) 1 / length of the shifted row, 0 for a zero row; Euclidean does not use it.
    """

    vectors: Tensor
    shift: Tensor
    inverse: Tensor


def rounding_bound(terms: int, unit: float) -> float:
    """The bound g for this number of products, with a margin for its own rounding; infinite if there is no bound."""
    part = terms * unit
    return 1.01 * part / (1 - part) if part < 0.1 else float("inf")


def row_slices(count: int, size: int) -> list[slice]:
    """Slices of length `size` that cover 0..count.

    >>> row_slices(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def select_rows(values: Tensor, index: Index) -> Tensor:
    """Return `values[index]`; for a tensor of indices, several times faster than indexing."""
    return values.index_select(0, index) if isinstance(index, Tensor) else values[index]


def map_rows(count: int, number: Callable[[slice], Tensor], device: torch.device) -> Tensor:
    """Apply `number` to blocks of rows, and return its float64 result (count,) for each row."""
    out = torch.empty(count, dtype=torch.float64, device=device)
    for part in row_slices(count, ROWS_PER_BLOCK):
        out[part] = number(part)
    return out


class Space(ABC):
    """Queries (N, D) and items (G, D) with a score; both are the same `VectorSet` if there is no gallery.

    Attributes:
        queries: the queries.
        items: the items.
        offset: (G,) float64, subtracted from the product of a query with each item; None: no offset.
        centre: (D,) float64; None: products are not centred.
        scale: the factor of centred rows.
        unit_of_rows: distances between `rows` are this many times those between the vectors.
        reach: (N,) |z| of the queries, if centred.
        farthest: the largest |z| of an item, if centred.
    """

    queries: VectorSet
    items: VectorSet
    offset: Tensor | None = None
    centre: Tensor | None = None
    scale: float = 1.0
    unit_of_rows: float = 1.0
    reach: Tensor
    farthest: float

    @abstractmethod
    def __init__(self, queries: Tensor, items: Tensor) -> None: ...

    @abstractmethod
    def rows(self, side: VectorSet, index: Index) -> Tensor:
        """Rows in float64 whose products or differences are the scores."""

    @abstractmethod
    def pairs(self, queries: Tensor, items: Tensor) -> BoundedScores:
        """Fine scores of single pairs (M,)."""

    @abstractmethod
    def exact(self, queries: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        """Exact scores of single pairs (M,), as high and low part; pairs of one query must be adjacent."""

    def coarse(self, side: VectorSet, index: Index) -> Tensor:
        """Rows in float32 whose products are the coarse scores."""
        return self.fine(side, index).float()

    def fine(self, side: VectorSet, index: Index) -> Tensor:
        """Rows in float64 whose products are the fine scores."""
        rows = self.rows(side, index)
        return rows if self.centre is None else (rows - self.centre) * self.scale

    def coarse_slack(self, queries: Tensor) -> Tensor:
        """The error bound (n,) of the coarse scores of these queries."""
        return self._slack(queries, FLOAT32_UNIT).float()

    def fine_slack(self, queries: Tensor) -> Tensor:
        """The error bound (n,) of the fine scores of these queries."""
        return self._slack(queries, FLOAT64_UNIT)

    def _slack(self, queries: Tensor, unit: float) -> Tensor:
        # The 8 and the 4 cover the rounding of z, the offset, the difference and the threshold, and underflow.
        reach = self.reach[queries]
        rounding = rounding_bound(self.dim + 8, unit) * reach * self.farthest + 1.01 * 4 * unit * self.farthest**2
        return rounding + self.dim * 2.0**-120

    @property
    def dim(self) -> int:
        return self.queries.vectors.shape[1]

    def _centre_on(self, centre: Tensor, radius: float) -> None:
        """Take products of (row - centre) scale; no entry may be farther than `radius` from the centre."""
        self.centre, self.scale = centre, float(exact_sums.power_of_two(torch.tensor(radius)))
        self.reach = self._map_rows(self.queries, lambda rows: (rows - centre).norm(dim=1) * self.scale)
        lengths = self.reach
        if self.items is not self.queries:
            lengths = self._map_rows(self.items, lambda rows: (rows - centre).norm(dim=1) * self.scale)
        self.offset, self.farthest = lengths.square() / 2, float(lengths.max())

    def _map_rows(self, side: VectorSet, number: Callable[[Tensor], Tensor]) -> Tensor:
        device = side.vectors.device
        return map_rows(len(side.vectors), lambda part: number(self.rows(side, part)), device)

    def _mean(self, side: VectorSet) -> Tensor:
        total = torch.zeros(self.dim, dtype=torch.float64, device=side.vectors.device)
        for part in row_slices(len(side.vectors), ROWS_PER_BLOCK):
            total += self.rows(side, part).sum(dim=0) / len(side.vectors)
        return total

    def _chunks(self, queries: Tensor, items: Tensor) -> list[tuple[Tensor, Tensor]]:
        size = max(1, NUMBERS_PER_PAIR_BLOCK // self.dim)
        return list(zip(queries.split(size), items.split(size)))


class Euclidean(Space):
    """s(q, g) = -|q - g|^2."""

    def __init__(self, queries: Tensor, items: Tensor) -> None:
        sets = [queries] if items is queries else [queries, items]
        largest = [part.abs().max() for vectors in sets for part in vectors.split(ROWS_PER_BLOCK)]
        self.shift = exact_sums.power_of_two(torch.stack(largest).max())
        self.unit_of_rows = float(self.shift)
        self.queries = self._side(queries)
        self.items = self.queries if items is queries else self._side(items)
        centre = self._mean(self.items)
        sides = {id(side): side for side in (self.queries, self.items)}.values()
        radius = [self._map_rows(side, lambda rows: (rows - centre).abs().amax(dim=1)).max() for side in sides]
        self._centre_on(centre, float(torch.stack(radius).max()))

    def _side(self, vectors: Tensor) -> VectorSet:
        shift = self.shift.expand(len(vectors))
        return VectorSet(vectors, shift, shift)

    def rows(self, side: VectorSet, index: Index) -> Tensor:
        return select_rows(side.vectors, index).double() * self.shift

    def pairs(self, queries: Tensor, items: Tensor) -> BoundedScores:
        differences = (self.rows(self.queries, q) - self.rows(self.items, g) for q, g in self._chunks(queries, items))
        values = torch.cat([-exact_sums.dot(rows, rows) for rows in differences])
        return BoundedScores(values, values.abs() * rounding_bound(self.dim + 4, FLOAT64_UNIT))

    def exact(self, queries: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        sums = [
            exact_sums.squared_distance(self.rows(self.queries, q), self.rows(self.items, g))
            for q, g in self._chunks(queries, items)
        ]
        high, low = (torch.cat(parts) for parts in zip(*sums))
        resolution = EXACT_RESOLUTION / exact_sums.power_of_two(high)
        return -high, -torch.round(low / resolution) * resolution


class Cosine(Space):
    """s(q, g) = q.g / (|q| |g|); a zero vector has similarity 0 with every vector.

    If all directions are close to each other, they are centred: 1 - s = |q/|q| - g/|g||^2 / 2.
    """

    def __init__(self, queries: Tensor, items: Tensor) -> None:
        self.queries = self._side(queries)
        self.items = self.queries if items is queries else self._side(items)
        inverse = torch.cat([self.queries.inverse, self.items.inverse])
        nonzero = inverse[inverse > 0] if bool(inverse.any()) else torch.ones_like(inverse)
        both_float32 = queries.dtype == items.dtype == torch.float32
        off_unit = float((1 / nonzero - 1).abs().max())
        self.unit = both_float32 and off_unit <= UNIT_LENGTH_TOLERANCE
        self.off_unit = off_unit if self.unit else 0.0
        self.in_range = both_float32 and bool(nonzero.min() > 2.0**-60 and nonzero.max() < 2.0**60)
        self.length_error = rounding_bound(self.dim // 2 + 4, FLOAT64_UNIT)  # relative error of the length of a row
        centre = self._mean(self.items)
        if float(centre.norm()) > 1 - CENTRING_RADIUS:
            sides = {id(side): side for side in (self.queries, self.items)}.values()
            radius = [self._map_rows(side, lambda rows: (rows - centre).norm(dim=1)).max() for side in sides]
            farthest = float(torch.stack(radius).max())
            if farthest < CENTRING_RADIUS:
                self._centre_on(centre, farthest)

    @staticmethod
    def _side(vectors: Tensor) -> VectorSet:
        shift = torch.ones(len(vectors), dtype=torch.float64, device=vectors.device)
        if vectors.dtype == torch.float64:
            largest = map_rows(len(vectors), lambda part: vectors[part].abs().amax(dim=1), vectors.device)
            shift = exact_sums.power_of_two(largest)
        unscaled = VectorSet(vectors, shift, shift)
        length = map_rows(len(vectors), lambda part: _shifted(unscaled, part).norm(dim=1), vectors.device)
        return VectorSet(vectors, shift, torch.where(length > 0, 1 / length, 0))

    def rows(self, side: VectorSet, index: Index) -> Tensor:
        # Float32 rows need no shift: one product with float64 factors converts and scales them.
        rows = select_rows(side.vectors, index) if side.vectors.dtype == torch.float32 else _shifted(side, index)
        return rows * select_rows(side.inverse, index)[:, None]

    def coarse(self, side: VectorSet, index: Index) -> Tensor:
        if self.centre is None and self.unit:
            return select_rows(side.vectors, index)
        if self.centre is None and self.in_range:
            return select_rows(side.vectors, index) * select_rows(side.inverse, index)[:, None].float()
        return super().coarse(side, index)

    def _slack(self, queries: Tensor, unit: float) -> Tensor:
        if self.centre is not None:
            differences = self.reach[queries] + self.farthest
            unit_error = self._unit_vector_error(differences / self.scale) + 2 * EXACT_RESOLUTION
            return super()._slack(queries, unit) + unit_error * self.scale**2
        # The 8 covers two roundings of each vector, the rounding of the threshold, and underflow in float32.
        slack = rounding_bound(self.dim + 8, unit) + 2.1 * (
            self.off_unit if unit == FLOAT32_UNIT else self.length_error
        )
        return torch.full((len(queries),), slack, dtype=torch.float64, device=queries.device)

    def _unit_vector_error(self, differences: Tensor) -> Tensor:
        """The error of |q - g|^2 / 2 for float64 unit vectors with |q - g| <= differences.

        An error e of a length moves a unit vector along itself, which changes |q - g|^2 only by e |q - g|^2 and by e^2.
        The rounding of the entries adds u |q - g|.
        """
        return self.length_error * differences.square() + 2.1 * self.length_error**2 + 2.1 * FLOAT64_UNIT * differences

    def pairs(self, queries: Tensor, items: Tensor) -> BoundedScores:
        differences = (self.rows(self.queries, q) - self.rows(self.items, g) for q, g in self._chunks(queries, items))
        squared = torch.cat([exact_sums.dot(rows, rows) for rows in differences])
        slack = (
            self._unit_vector_error(squared.sqrt())
            + rounding_bound(self.dim + 4, FLOAT64_UNIT) * squared
            + 2 * EXACT_RESOLUTION
        )
        # The values are s - 1: -1 for a zero item, and 0 for all items of a zero query.
        values = torch.where(self.items.inverse[items] == 0, -1, -squared / 2)
        return BoundedScores(torch.where(self.queries.inverse[queries] == 0, 0, values), slack)

    def exact(self, queries: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        cosines = []
        for q, g in self._chunks(queries, items):
            a, b = _sliced(self.queries, q), _sliced(self.items, g)
            sums = [exact_sums.sum_of_products(x, y, exact_sums.dot) for x, y in ((a, b), (a, a), (b, b))]
            cosines.append(exact_sums.cosine(*sums))
        high, low = (torch.cat(parts) for parts in zip(*cosines))
        return high, torch.round(low / EXACT_RESOLUTION) * EXACT_RESOLUTION


def _shifted(side: VectorSet, index: Index) -> Tensor:
    rows = select_rows(side.vectors, index).double()
    return rows if side.vectors.dtype == torch.float32 else rows * select_rows(side.shift, index)[:, None]


def _sliced(side: VectorSet, index: Index) -> list[Tensor]:
    rows = _shifted(side, index)
    return exact_sums.slices(rows * exact_sums.power_of_two(rows.abs().amax(dim=1))[:, None], rows.shape[1])


SPACES: dict[str, type[Space]] = {"cosine": Cosine, "euclidean": Euclidean}


def check_distance(name: str) -> None:
    """Refuse an unknown distance."""
    one_of("distance", name, SPACES)
