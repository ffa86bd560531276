"""Engines of the suite of behaviour, and the servers that some of them need."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

KINDS = ["exact", "faiss", pytest.param("pgvector", marks=pytest.mark.server)]
"""engines; those with a server are marked so"""


@functools.cache
def postgres(folder: Path) -> str:
    """The address of a PostgreSQL of its own, which ends with the tests; the test is skipped where it cannot run."""
    pytest.importorskip("psycopg", reason="the extra `pgvector` is not installed")
    pgserver = pytest.importorskip("pgserver", reason="no wheel of PostgreSQL for this machine")
    return pgserver.get_server(folder, cleanup_mode="stop").get_uri()


def engine_settings(kind: str, folders: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of an engine; what it needs is started, or the test is skipped with the reason."""
    if kind == "faiss":
        pytest.importorskip("faiss", reason="the extra `index` is not installed")
    if kind == "pgvector":
        return {"name": kind, "uri": postgres(folders.getbasetemp() / "postgres")}
    return {"name": kind}
