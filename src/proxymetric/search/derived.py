"""What is made of the vectors of an index, beside them: the map, and the graph of an engine.

They are made when the log is merged or an index is built, not at each change: points of newer items are placed when
the map is asked for, and newer vectors are compared one by one beside the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from proxymetric.search.array_files import load_array
from proxymetric.search.atlas import landmarks_of, place, update_map
from proxymetric.search.engines import Earlier, build_engine
from proxymetric.search.manifest import Manifest, sync_file
from proxymetric.search.storage.blocks import facts_of
from proxymetric.search.storage.state import State


def derive(
    state: State, before: State | None, old_rows: np.ndarray | None, say: Callable[[str], None] | None = None
) -> Manifest:
    """Make the map and the engine of a state that is not committed yet; see `storage.changes.Derive`."""
    tell = say or (lambda stage: None)
    names: list[str] = []
    manifest = state.manifest
    stem = f"{manifest.generation:08d}"
    living = state.living
    rows_before = living.copy() if old_rows is None else old_rows[living]
    if before is None:
        rows_before[:] = -1
    if manifest.map["method"] == "none":
        manifest = replace(manifest, map={"method": "none"})
    else:
        earlier = (
            None if before is None or before.manifest.map["method"] != manifest.map["method"] else stored_map(before)
        )
        known = np.where(rows_before < (0 if earlier is None else len(earlier)), rows_before, -1)
        tell(f"making the map ({manifest.map['method']})")
        points, facts = update_map(manifest.map, state.floats(living), known, earlier)
        if points is not None:
            placed = np.zeros((manifest.rows, 2), np.float32)
            placed[living] = points
            np.save(state.folder / f"map-{stem}.npy", placed)
            names.append(f"map-{stem}.npy")
        manifest = replace(manifest, map=facts | {"rows": manifest.rows})
    engine_before = (
        None
        if before is None
        else Earlier(before.manifest.engine, before.folder, list(before.manifest.derived), rows_before)
    )
    if manifest.engine["name"] != "exact":
        tell(f"building the engine {manifest.engine['name']}")
    settings, files = build_engine(manifest.engine, state, f"engine-{stem}", engine_before)
    names += files
    for name in names:
        if name not in manifest.derived:
            sync_file(state.folder / name)
    known_facts = {} if before is None else before.manifest.derived
    derived = {name: known_facts[name] if name in known_facts else facts_of(state.folder / name) for name in names}
    return replace(manifest, engine=settings, derived=derived)


def stored_map(state: State) -> np.ndarray | None:
    """The points of the rows that were there when the map was made, (M, 2); None without a map."""
    name = next((name for name in state.manifest.derived if name.startswith("map-")), None)
    return None if name is None else load_array(state.folder / name, mmap_mode="c")


def points_of(state: State) -> np.ndarray | None:
    """The points of all items, (count, 2); None without a map. Items that are newer than the map are placed on it."""
    if state.manifest.map["method"] == "none":
        return None
    stored, living = stored_map(state), state.living
    is_new = living >= (0 if stored is None else len(stored))
    if stored is None or is_new.all():
        return update_map(state.manifest.map, state.floats(living), np.full(len(living), -1), None)[0]
    points = np.empty((len(living), 2), np.float32)
    points[~is_new] = stored[living[~is_new]]
    if is_new.any():
        landmarks = landmarks_of(living[~is_new])
        points[is_new] = place(state.floats(living[is_new]), state.floats(landmarks), stored[landmarks])
    return points
