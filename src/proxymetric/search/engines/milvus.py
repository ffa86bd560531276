"""The Milvus engine (needs the extra `milvus`): vectors in a database, in a file or on a cluster of machines.

A collection holds the vectors of several states of an index. Each vector says in which state it was born and in which
it died, and a search asks for those that live in its state. So readers see the state before or after a change, and a
change that was killed is seen by nobody. The index keeps its vectors in its own folder too: it can be rebuilt from
them, and searches among some rows use them.
"""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.arguments.signatures import fit, one_of
from proxymetric.search.array_files import load_array
from proxymetric.search.engines.earlier import Earlier
from proxymetric.search.engines.exact import Exact
from proxymetric.search.engines.milvus_client import PREFIX, asking

DEFAULTS: dict[str, Any] = {"uri": "", "partitions": 1, "replicas": 1, "consistency": "Strong", "batch": 1_000}
"""the settings: where the database is, partitions and replicas (servers only), consistency level, vectors per insert"""
CONSISTENCIES = ("Strong", "Bounded", "Session", "Eventually")
MAX_K = 16_384
"""the largest k of Milvus"""
ROWS_FILE = "engine-rows.npy"
"""for each vector of the index, its number in the database"""
NEVER = 2**62
"""the state in which a vector dies that was not deleted yet"""
MAX_CHANGED_SHARE = 0.5
"""everything is written to a new collection if more than this share of the vectors is new or gone"""
FACTS = ("index", "collection", "previous", "state", "seal")
"""what `build` adds to the settings"""
FIXED = ("name", "uri", "partitions", "replicas", "consistency")
"""settings that a collection keeps"""


def check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Check settings and complete them by their defaults.

    Raises:
        ValueError: a setting is unknown or wrong.

    Example:
        >>> check_settings({"name": "milvus", "uri": "http://host:19530", "replicas": 2})["consistency"]
        'Strong'
    """
    kept = {name: value for name, value in settings.items() if name in FACTS}
    given = {name: value for name, value in settings.items() if name not in ("name", *kept)}
    for name, value in given.items():
        one_of("engine", name, DEFAULTS)
        fit(name, value, type(DEFAULTS[name]))
    chosen = {**DEFAULTS, **given}
    one_of("consistency", chosen["consistency"], CONSISTENCIES)
    for name in ("partitions", "replicas", "batch"):
        if chosen[name] < 1:
            raise ValueError(f"{name}: got {chosen[name]}, expected at least 1")
    if not chosen["uri"]:
        raise ValueError("uri: got none, expected a file such as shop.db, or an address such as http://host:19530")
    if "://" not in chosen["uri"]:
        if not chosen["uri"].endswith(".db"):
            raise ValueError(f"uri: got {chosen['uri']!r}, expected a file that ends in .db, or http://host:19530")
        chosen["uri"] = os.path.abspath(chosen["uri"])
    return {"name": "milvus", **chosen, **kept}


def build(
    settings: dict[str, Any], vectors: np.ndarray, folder: Path, earlier: Earlier | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Bring the database to a new state; the state before can still be searched.

    Of an earlier state, only the vectors that are new or gone are written. Everything is written to a new collection
    where there is no earlier state, the settings differ, or more than `MAX_CHANGED_SHARE` of the vectors change.

    Args:
        settings: `uri` and other `DEFAULTS`.
        vectors: (N, D) of unit length.
        folder: where the numbers of the vectors in the database are written.
        earlier: the state before; None: there is none.

    Returns:
        The settings with the name of the collection and the state in it, and the names of the files.

    Raises:
        ValueError: a setting is wrong, the extra is not installed, or the database does not answer.
    """
    chosen = check_settings(settings)
    with asking(chosen["uri"]) as client:
        old_numbers = None if earlier is None else _numbers_before(client, chosen, earlier)
        if earlier is None or old_numbers is None:
            index = _index_of(chosen, earlier)
            collection, state = f"{PREFIX}_{index}_{uuid.uuid4().hex}", 1
            _create(client, chosen, collection, vectors.shape[1])
            numbers, added = np.empty(len(vectors), np.int64), np.arange(len(vectors))
        else:
            index, collection, state = (earlier.settings[key] for key in ("index", "collection", "state"))
            state += 1
            _undo(client, collection, state, chosen["batch"])
            numbers, added = old_numbers[earlier.rows], np.flatnonzero(earlier.rows < 0)
        numbers[added] = (state << 32) + np.arange(len(added))
        for start in range(0, len(added), chosen["batch"]):
            rows = added[start : start + chosen["batch"]]
            client.insert(collection, _entities(chosen, numbers[rows], vectors[rows], state, NEVER))
        if old_numbers is not None:
            _bury(client, chosen, collection, np.setdiff1d(old_numbers, numbers), state)
        seal = -1 - secrets.randbits(60)
        client.insert(collection, _entities(chosen, [seal], np.eye(1, vectors.shape[1], dtype="f4"), NEVER, state))
        # Until then, milvus-lite searches new vectors without NumPy, and a crash of the machine may lose them.
        client.flush(collection)
    np.save(folder / ROWS_FILE, numbers)
    previous = earlier.settings.get("collection", "") if earlier is not None else ""
    facts = {"index": index, "collection": collection, "previous": previous, "state": state, "seal": seal}
    return {**chosen, **facts}, [ROWS_FILE]


def _index_of(settings: dict[str, Any], earlier: Earlier | None) -> str:
    """The name of an index in its database, which its collections share."""
    if earlier is not None and earlier.settings.get("uri") == settings["uri"] and "index" in earlier.settings:
        return str(earlier.settings["index"])
    return str(settings.get("index", uuid.uuid4().hex))


def _create(client: Any, settings: dict[str, Any], collection: str, dim: int) -> None:
    """Make an empty collection, which is loaded."""
    from pymilvus import DataType

    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("number", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=dim)
    schema.add_field("born", DataType.INT64)
    schema.add_field("died", DataType.INT64)
    options: dict[str, Any] = {"consistency_level": settings["consistency"]}
    if _has_parts(settings):
        schema.add_field("part", DataType.INT64, is_partition_key=True)
        options["num_partitions"] = settings["partitions"]
    index = client.prepare_index_params()
    if _is_server(settings):
        index.add_index("vector", index_type="HNSW", metric_type="IP", params={"M": 32, "efConstruction": 80})
    else:
        index.add_index("vector", index_type="FLAT", metric_type="IP", params={})
    client.create_collection(collection, schema=schema, index_params=index, **options)
    if _replicas(settings):
        client.release_collection(collection)
        client.load_collection(collection, **_replicas(settings))


def _entities(
    settings: dict[str, Any], numbers: Iterable[int], vectors: Iterable[np.ndarray], born: int, died: int
) -> list[dict[str, Any]]:
    """Vectors as the database takes them; they can be found in the states from `born` to before `died`."""
    has_parts = _has_parts(settings)
    return [
        {"number": int(number), "vector": vector, "born": born, "died": died}
        | ({"part": int(number)} if has_parts else {})
        for number, vector in zip(numbers, vectors, strict=True)
    ]


def _numbers_before(client: Any, settings: dict[str, Any], earlier: Earlier) -> np.ndarray | None:
    """The number of each vector of the earlier state in the database; None if everything has to be written anew."""
    if any(earlier.settings.get(key) != settings[key] for key in FIXED) or not _has_state(client, earlier.settings):
        return None
    numbers = load_array(earlier.folder / ROWS_FILE)
    new = int((earlier.rows < 0).sum())
    gone = len(numbers) - (len(earlier.rows) - new)
    return numbers if new + gone <= MAX_CHANGED_SHARE * len(numbers) else None


def _has_state(client: Any, settings: dict[str, Any]) -> bool:
    """Whether the database has a state as it was written; its seal is written last, and removed with it."""
    if "state" not in settings or not client.has_collection(settings["collection"]):
        return False
    client.load_collection(settings["collection"], **_replicas(settings))  # a file is opened with nothing loaded
    ids = [settings["seal"]]
    return len(client.get(settings["collection"], ids, output_fields=["number"], consistency_level="Strong")) == 1


def _undo(client: Any, collection: str, state: int, batch: int) -> None:
    """Take back what a killed process has written of a state."""
    written, fields = f"born == {state} or died == {state}", ["*"]
    while entities := client.query(
        collection, written, output_fields=fields, limit=min(batch, MAX_K), consistency_level="Strong"
    ):
        gone = [dict(entity) for entity in entities if entity["born"] < state]
        if gone:
            client.upsert(collection, [entity | {"died": NEVER} for entity in gone])
        if new := [entity["number"] for entity in entities if entity["born"] >= state]:
            client.delete(collection, ids=new)


def _bury(client: Any, settings: dict[str, Any], collection: str, numbers: np.ndarray, state: int) -> None:
    """Say that vectors are not found from this state on."""
    for start in range(0, len(numbers), settings["batch"]):
        ids = numbers[start : start + settings["batch"]].tolist()
        entities = client.get(collection, ids, output_fields=["*"], consistency_level="Strong")
        client.upsert(collection, [dict(entity) | {"died": state} for entity in entities])


def clean(settings: dict[str, Any]) -> None:
    """Remove earlier states of an index, but not the last one, which a reader may have open."""
    with asking(settings["uri"]) as client:
        last = settings["state"] - 1
        client.delete(settings["collection"], filter=f"died < {last} or (died == {last} and born < {NEVER})")
        for name in client.list_collections():
            is_ours = name.startswith(f"{PREFIX}_{settings['index']}_")
            if is_ours and name not in (settings["collection"], settings["previous"]):
                client.drop_collection(name)


def left_behind(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Say what an index leaves in a database that it does not use any more.

    It is not dropped: a copy of the index may still search there.

    Args:
        before: the settings with facts of an engine.
        after: those after the change.

    Example:
        >>> left_behind({"name": "milvus", "uri": "/a/shop.db", "index": "6f"}, {"name": "exact"})
        '/a/shop.db keeps the collections proxymetric_6f_* of this index; drop them if no copy of the index uses them'
        >>> left_behind({"name": "exact"}, {"name": "faiss"})
    """
    if before["name"] != "milvus" or "index" not in before or before["uri"] == after.get("uri"):
        return None
    names = f"{PREFIX}_{before['index']}_*"
    return f"{before['uri']} keeps the collections {names} of this index; drop them if no copy of the index uses them"


def _is_server(settings: dict[str, Any]) -> bool:
    return "://" in settings["uri"]


def _has_parts(settings: dict[str, Any]) -> bool:
    return _is_server(settings) and settings["partitions"] > 1


def _replicas(settings: dict[str, Any]) -> dict[str, int]:
    return {"replica_number": settings["replicas"]} if _is_server(settings) and settings["replicas"] > 1 else {}


class Milvus:
    """Search by a Milvus database; searches among some rows are exact, in the vectors of the index.

    Args:
        settings: what `build` returned.
        vectors: (N, D) of unit length.
        numbers: (N,) the numbers of the vectors in the database.

    Raises:
        ValueError: the extra is not installed, or the database does not have this state of the index.
        OSError: the database does not answer.
    """

    name = "milvus"

    def __init__(self, settings: dict[str, Any], vectors: Tensor, numbers: np.ndarray) -> None:
        self.settings, self.vectors = settings, vectors
        self._exact = Exact(vectors)
        self._sorted, self._order = torch.from_numpy(numbers).sort()
        state = settings.get("state")
        self._living = f"born <= {state} and died > {state}"
        with asking(settings["uri"]) as client:
            if not _has_state(client, settings):
                raise ValueError(
                    f"index: {settings['uri']} does not have the vectors of this index; expected the database that it "
                    "was made with; `proxymetric index --rebuild` writes them anew"
                )

    @classmethod
    def open(cls, settings: dict[str, Any], vectors: Tensor, folder: Path) -> Milvus:
        """Open the state of the database that `build` wrote."""
        return cls(settings, vectors, load_array(folder / ROWS_FILE) if "state" in settings else np.empty(0, np.int64))

    def search(self, queries: Tensor, k: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors of each query; see `Engine`."""
        k = min(k, len(self.vectors))
        if rows is not None or k == 0 or k > MAX_K:
            return self._exact.search(queries, k, rows)
        parameters = {"metric_type": "IP", "params": {"ef": max(96, 2 * k)} if _is_server(self.settings) else {}}
        with asking(self.settings["uri"]) as client:
            hit_lists = client.search(
                self.settings["collection"],
                data=queries.tolist(),
                filter=self._living,
                limit=k,
                search_params=parameters,
                output_fields=["number"],
            )
        if any(len(hits) < k for hits in hit_lists):  # a server that has not loaded all of it yet
            return self._exact.search(queries, k)
        numbers = self._rows(torch.tensor([[int(hit["entity"]["number"]) for hit in hits] for hits in hit_lists]))
        similarities = torch.tensor([[float(hit["distance"]) for hit in hits] for hits in hit_lists])
        # Equal similarities come in the order of the rows, as from every engine.
        numbers, order = numbers.sort(dim=1)
        similarities, order = similarities.gather(1, order).sort(dim=1, descending=True, stable=True)
        return similarities, numbers.gather(1, order)

    def _rows(self, numbers: Tensor) -> Tensor:
        """The rows of vectors, by their numbers in the database."""
        return self._order[torch.searchsorted(self._sorted, numbers)]
