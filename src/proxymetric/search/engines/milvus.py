"""The Milvus engine (needs the extra `milvus`): vectors in a database, in a file or on a cluster of machines.

Each state of an index is a collection of its own, so that readers see the state before or after a change. The index
keeps its vectors in its own folder too: it can be rebuilt from them, and searches among some rows use them.
"""

from __future__ import annotations

import functools
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxymetric.search.engines.earlier import Earlier
from proxymetric.search.engines.exact import Exact
from proxymetric.signatures import fit, one_of

DEFAULTS: dict[str, Any] = {"uri": "", "partitions": 1, "replicas": 1, "consistency": "Strong", "batch": 1_000}
"""the settings: where the database is, partitions and replicas (servers only), consistency level, vectors per insert"""
CONSISTENCIES = ("Strong", "Bounded", "Session", "Eventually")
MAX_K = 16_384
"""the largest k of Milvus"""
TOKEN_VARIABLE = "PROXYMETRIC_MILVUS_TOKEN"
"""environment variable with the token of a server; a token is never stored in an index"""
PREFIX = "proxymetric"


def check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Check settings and complete them by their defaults.

    Raises:
        ValueError: a setting is unknown or wrong.

    Example:
        >>> check_settings({"name": "milvus", "uri": "http://host:19530", "replicas": 2})["consistency"]
        'Strong'
    """
    kept = {name: value for name, value in settings.items() if name in ("index", "collection", "previous")}
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
    """Write vectors to a new collection.

    Args:
        settings: `uri` and other `DEFAULTS`.
        vectors: (N, D) of unit length.
        folder: not used; the vectors are in the database.
        earlier: not used; each state is a collection of its own.

    Returns:
        The settings with the name of the collection, and no files.

    Raises:
        ValueError: a setting is wrong, the extra is not installed, or the database does not answer.
    """
    chosen = check_settings(settings)
    client = _connect(chosen["uri"])
    from pymilvus import DataType

    name = chosen.get("index", uuid.uuid4().hex)
    collection = f"{PREFIX}_{name}_{uuid.uuid4().hex}"
    is_server = "://" in chosen["uri"]
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("row", DataType.INT64, is_primary=True)
    schema.add_field("vector", DataType.FLOAT_VECTOR, dim=vectors.shape[1])
    options: dict[str, Any] = {"consistency_level": chosen["consistency"]}
    if is_server and chosen["partitions"] > 1:
        schema.add_field("part", DataType.INT64, is_partition_key=True)
        options["num_partitions"] = chosen["partitions"]
    index = client.prepare_index_params()
    if is_server:
        index.add_index("vector", index_type="HNSW", metric_type="IP", params={"M": 32, "efConstruction": 80})
    else:
        index.add_index("vector", index_type="FLAT", metric_type="IP", params={})
    client.create_collection(collection, schema=schema, index_params=index, **options)
    for start in range(0, len(vectors), chosen["batch"]):
        rows = [
            {"row": start + n, "vector": vector} | ({"part": start + n} if "num_partitions" in options else {})
            for n, vector in enumerate(vectors[start : start + chosen["batch"]].tolist())
        ]
        client.insert(collection, rows)
    if is_server:
        client.flush(collection)
        if chosen["replicas"] > 1:
            client.release_collection(collection)
            client.load_collection(collection, replica_number=chosen["replicas"])
    facts = {"index": name, "collection": collection, "previous": chosen.get("collection", "")}
    return {**chosen, **facts}, []


def clean(settings: dict[str, Any]) -> None:
    """Drop the collections of earlier states of an index, but not of the last one, which a reader may have open."""
    client = _connect(settings["uri"])
    for name in client.list_collections():
        is_ours = name.startswith(f"{PREFIX}_{settings['index']}_")
        if is_ours and name not in (settings["collection"], settings["previous"]):
            client.drop_collection(name)


class Milvus:
    """Search by a Milvus database; searches among some rows are exact, in the vectors of the index.

    Args:
        settings: what `build` returned.
        vectors: (N, D) of unit length.

    Raises:
        ValueError: the extra is not installed, the database does not answer, or the collection is missing.
    """

    name = "milvus"

    def __init__(self, settings: dict[str, Any], vectors: Tensor) -> None:
        self.settings, self.vectors = settings, vectors
        self._exact = Exact(vectors)
        self._client = _connect(settings["uri"])
        if not self._client.has_collection(settings["collection"]):
            raise ValueError(
                f"index: {settings['uri']} does not have the vectors of this index; expected the database that it was "
                "made with; `proxymetric index --rebuild` writes them anew"
            )

    def search(self, queries: Tensor, k: int, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Find the nearest vectors of each query; see `Engine`."""
        k = min(k, len(self.vectors))
        if rows is not None or k == 0 or k > MAX_K:
            return self._exact.search(queries, k, rows)
        parameters = {"metric_type": "IP", "params": {"ef": max(96, 2 * k)} if "://" in self.settings["uri"] else {}}
        found = self._client.search(
            self.settings["collection"], data=queries.tolist(), limit=k, search_params=parameters, output_fields=["row"]
        )
        if any(len(hits) < k for hits in found):  # a server that has not loaded all of it yet
            return self._exact.search(queries, k)
        numbers = torch.tensor([[int(hit["entity"]["row"]) for hit in hits] for hits in found])
        similarities = torch.tensor([[float(hit["distance"]) for hit in hits] for hits in found])
        # Equal similarities come in the order of the rows, as from every engine.
        numbers, order = numbers.sort(dim=1)
        similarities, order = similarities.gather(1, order).sort(dim=1, descending=True, stable=True)
        return similarities, numbers.gather(1, order)


@functools.cache
def _connect(uri: str) -> Any:
    """A client for a database; one for each, because a file can be opened only once."""
    try:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException
    except ImportError:
        raise ValueError(
            "engine: pymilvus is not installed; expected the extra `milvus`: pip install 'proxymetric[milvus]'"
        ) from None
    try:
        return MilvusClient(uri, token=os.environ.get(TOKEN_VARIABLE, ""))
    except (MilvusException, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"uri: got {uri}, which does not answer ({reason}); expected a Milvus database") from None
