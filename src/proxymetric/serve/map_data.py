"""The map of an index as the page draws it: points and proxies in the square from -1 to 1."""

from __future__ import annotations

import functools

import numpy as np

from proxymetric.models.proxies import RunProxies
from proxymetric.search import Index
from proxymetric.search.atlas import place_proxies
from proxymetric.serve import schemas

MAX_PROXIES = 5_000
"""proxies on the map; of more, evenly chosen ones are drawn"""


class MapData:
    """The map of one state of an index.

    Args:
        index: an index with a map.
    """

    def __init__(self, index: Index) -> None:
        assert index.points is not None
        self.index = index
        labels = index.labels
        self.classes = sorted({label for label in labels if label is not None})
        number = {label: float(code) for code, label in enumerate(self.classes)}
        codes = np.array([-1.0 if label is None else number[label] for label in labels], np.float32)
        self.centre, self.scale = _fit(index.points.numpy())
        points = (index.points.numpy() - self.centre) / self.scale
        self.table = np.column_stack([points, codes]).astype("<f4").tobytes()
        """for each point x, y and the number of its class (-1: none)"""

    @functools.cached_property
    def info(self) -> schemas.MapInfo:
        """Facts about the map."""
        manifest = self.index.manifest
        return schemas.MapInfo(
            method=manifest.map["method"],
            count=len(self.index),
            classes=self.classes,
            generation=manifest.generation,
        )

    def with_proxies(self, proxies: RunProxies | None) -> schemas.MapProxies:
        """Place the proxies of the run that made the index on the map; this may take seconds."""
        total = 0 if proxies is None else len(proxies.names)
        shown: list[schemas.Proxy] = []
        if proxies is not None and self.index.points is not None:
            rows = np.unique(np.linspace(0, total - 1, min(total, MAX_PROXIES)).astype(int)).tolist()
            sigma = None if proxies.sigma is None else proxies.sigma[rows]
            placed = place_proxies(proxies.vectors[rows], sigma, self.index.vectors.numpy(), self.index.points.numpy())
            placed = (placed - [*self.centre, 0]) / self.scale
            shown = [
                schemas.Proxy(label=proxies.names[row], x=x, y=y, radius=radius)
                for row, (x, y, radius) in zip(rows, placed.tolist())
            ]
        return schemas.MapProxies(proxies=shown, total=total, generation=self.index.manifest.generation)


def _fit(points: np.ndarray) -> tuple[np.ndarray, float]:
    """The middle of a map, and half its larger side."""
    if not len(points):
        return np.zeros(2, np.float32), 1.0
    low, high = points.min(axis=0), points.max(axis=0)
    return (low + high) / 2, max(float((high - low).max()) / 2, 1e-9)
