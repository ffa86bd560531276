"""The map of an index whose items lie in a database: points by number, in the folder of the index."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from proxymetric.search.array_files import load_array
from proxymetric.search.atlas import landmarks_of, place, update_map
from proxymetric.search.manifest import Manifest, sync_file
from proxymetric.search.remote.database import Session
from proxymetric.search.storage.blocks import facts_of


def make_map(folder: Path, manifest: Manifest, session: Session) -> Manifest:
    """Make the map of all items, or extend the earlier one; return the manifest that names its files."""
    numbers, earlier = np.array(session.texts("number"), np.int64), _stored(folder, manifest)
    known = np.full(len(numbers), -1)
    if earlier is not None and manifest.map.get("store") == session.facts.store:
        places = np.searchsorted(earlier[0], numbers).clip(max=max(0, len(earlier[0]) - 1))
        is_known = earlier[0][places] == numbers if len(earlier[0]) else np.zeros(len(numbers), bool)
        known = np.where(is_known, places, -1)
    points, facts = update_map(manifest.map, session.vectors(None), known, None if earlier is None else earlier[1])
    assert points is not None
    stem, derived = f"map-{session.facts.generation:08d}", {}
    for name, array in ((f"{stem}.npy", points), (f"{stem}.numbers.npy", numbers)):
        np.save(folder / name, array)
        sync_file(folder / name)
        derived[name] = facts_of(folder / name)
    return replace(manifest, map=facts | {"store": session.facts.store}, derived=derived)


def map_of(folder: Path, manifest: Manifest, session: Session) -> np.ndarray:
    """The points of all items, (count, 2); items that are newer than the map are placed on it."""
    numbers, stored = np.array(session.texts("number"), np.int64), _stored(folder, manifest)
    if stored is None or manifest.map.get("store") != session.facts.store or not len(stored[0]):
        return _made(manifest, session, len(numbers))
    places = np.searchsorted(stored[0], numbers).clip(max=len(stored[0]) - 1)
    is_new = stored[0][places] != numbers
    if is_new.all():
        return _made(manifest, session, len(numbers))
    points = np.empty((len(numbers), 2), np.float32)
    points[~is_new] = stored[1][places[~is_new]]
    if is_new.any():
        landmarks = landmarks_of(np.flatnonzero(~is_new))
        vectors = session.vectors(numbers[is_new]), session.vectors(numbers[landmarks])
        points[is_new] = place(*vectors, points[landmarks])
    return points


def _made(manifest: Manifest, session: Session, count: int) -> np.ndarray:
    points = update_map({"method": manifest.map["method"]}, session.vectors(None), np.full(count, -1), None)[0]
    assert points is not None
    return points


def _stored(folder: Path, manifest: Manifest) -> tuple[np.ndarray, np.ndarray] | None:
    """The numbers of the items of a map, sorted, and their points; None without a map."""
    names = sorted(name for name in manifest.derived if name.startswith("map-"))
    if len(names) != 2:
        return None
    points, numbers = (load_array(folder / name) for name in names)
    return numbers, points
