"""Engines of the suite of behaviour, and the servers that some of them need."""

from __future__ import annotations

import atexit
import functools
import os
from pathlib import Path
from typing import Any

import pytest

KINDS = [
    "exact",
    "faiss",
    pytest.param("milvus-lite", marks=pytest.mark.slow),
    pytest.param("pgvector", marks=pytest.mark.server),
    pytest.param("milvus", marks=pytest.mark.server),
]
"""engines; those with a server are marked so"""


@functools.cache
def postgres(folder: Path) -> str:
    """The address of a PostgreSQL of its own, which ends with the tests; the test is skipped where it cannot run."""
    pytest.importorskip("psycopg", reason="the extra `pgvector` is not installed")
    pgserver = pytest.importorskip("pgserver", reason="no wheel of PostgreSQL for this machine")
    return pgserver.get_server(folder, cleanup_mode="stop").get_uri()


@functools.cache
def milvus(folder: Path) -> str:
    """The address of a Milvus, which ends with the tests; it listens on all interfaces of this machine or namespace.

    It is the one of the variable PROXYMETRIC_TEST_MILVUS, or that of the wheel `milvus`.
    """
    pytest.importorskip("pymilvus", reason="the extra `milvus` is not installed")
    if given := os.environ.get("PROXYMETRIC_TEST_MILVUS"):
        return given
    server = pytest.importorskip("milvus", reason="the wheel `milvus`, which has the server, is not installed")
    server.default_server.set_base_dir(str(folder))
    server.default_server.start()
    atexit.register(server.default_server.stop)
    return f"http://127.0.0.1:{server.default_server.listen_port}"


def engine_settings(kind: str, folders: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of an engine; what it needs is started, or the test is skipped with the reason."""
    if kind == "faiss":
        pytest.importorskip("faiss", reason="the extra `index` is not installed")
    if kind == "pgvector":
        return {"name": kind, "uri": postgres(folders.getbasetemp() / "postgres")}
    if kind == "milvus-lite":
        pytest.importorskip("milvus_lite", reason="the extra `milvus` is not installed")
        return {"name": "milvus", "uri": str(folders.mktemp("milvus") / "shop.db")}
    if kind == "milvus":
        return {"name": "milvus", "uri": milvus(folders.getbasetemp() / "milvus")}
    return {"name": kind}
