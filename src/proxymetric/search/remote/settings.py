"""The settings of the engines that ask a database, checked before any of them is asked."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import parse_qs, urlsplit

from proxymetric.arguments.signatures import fit, one_of

HNSW: dict[str, Any] = {"m": 16, "ef_construction": 64, "ef": 100}
"""links of a vector in the graph, candidates when it is built, candidates when it is searched"""
DEFAULTS: dict[str, dict[str, Any]] = {
    "pgvector": {"uri": "", **HNSW, "partitions": 1, "timeout": 30},
    "milvus": {
        "uri": "",
        **HNSW,
        "partitions": 1,
        "replicas": 1,
        "consistency": "Strong",
        "batch": 1_000,
        "timeout": 30,
    },
}
"""engine -> its settings; `timeout` is in seconds, of a search"""
CONSISTENCIES = ("Strong", "Bounded", "Session", "Eventually")
MEASURED = ("recall", "built_for", "graph")
"""what a database adds to the settings"""
PLACES = {"pgvector": "postgresql://user@host/database", "milvus": "a file such as shop.db, or http://host:19530"}
SECRETS = {
    "pgvector": "the variable PGPASSWORD, or the file ~/.pgpass",
    "milvus": "the variable PROXYMETRIC_MILVUS_TOKEN",
}
"""where a password or a token comes from"""


def is_remote(settings: dict[str, Any]) -> bool:
    """Whether the items of an index with this engine lie in a database."""
    return settings.get("name") in DEFAULTS


def place_of(settings: dict[str, Any]) -> tuple[str, str] | None:
    """Where the items lie: engine and address; None: in the folder of the index.

    Example:
        >>> place_of({"name": "faiss"}), place_of({"name": "milvus", "uri": "http://host:19530"})
        (None, ('milvus', 'http://host:19530'))
    """
    return (str(settings["name"]), str(settings.get("uri", ""))) if is_remote(settings) else None


def checked(settings: dict[str, Any]) -> dict[str, Any]:
    """Check settings and complete them by their defaults.

    Raises:
        ValueError: a setting is unknown or wrong, or an address has a password.

    Example:
        >>> checked({"name": "milvus", "uri": "http://host:19530", "replicas": 2})["consistency"]
        'Strong'
    """
    name = settings["name"]
    defaults = DEFAULTS[name]
    given = {key: value for key, value in settings.items() if key != "name" and key not in MEASURED}
    for key, value in given.items():
        one_of(f"setting of the engine {name!r}", key, defaults)
        fit(key, value, type(defaults[key]))
    chosen = {"name": name, **defaults, **given}
    for key, value in chosen.items():
        if isinstance(defaults.get(key), int) and value < 1:
            raise ValueError(f"{key}: got {value}, expected at least 1")
    if chosen["ef_construction"] < 2 * chosen["m"]:
        raise ValueError(
            f"ef_construction: got {chosen['ef_construction']} with m {chosen['m']}, expected at least twice as many"
        )
    if "consistency" in chosen:
        one_of("consistency", chosen["consistency"], CONSISTENCIES)
    chosen["uri"] = _checked_uri(name, chosen["uri"])
    return chosen


def _checked_uri(name: str, uri: str) -> str:
    """An address that may be written down."""
    parts = urlsplit(uri)
    if parts.password or {"password", "token"} & parse_qs(parts.query).keys():
        raise ValueError(f"uri: got an address with a password, which the index would keep; expected {SECRETS[name]}")
    if name == "pgvector":
        if uri and parts.scheme not in ("postgresql", "postgres"):
            raise ValueError(f"uri: got {uri!r}, expected {PLACES[name]}")
        return uri
    if not uri:
        raise ValueError(f"uri: got none, expected {PLACES[name]}")
    if parts.username:
        raise ValueError(
            f"uri: got an address with the user {parts.username!r}; expected {SECRETS[name]}, which holds user:password"
        )
    if "://" not in uri:
        if not uri.endswith(".db"):
            raise ValueError(f"uri: got {uri!r}, expected a file that ends in .db, or http://host:19530")
        return os.path.abspath(uri)
    return uri
