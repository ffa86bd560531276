"""Engines of the suite of behaviour, and the servers that some of them need."""

from __future__ import annotations

from typing import Any

import pytest

KINDS = ["exact", "faiss"]
"""engines; those with a server are marked so"""


def engine_settings(kind: str, folders: pytest.TempPathFactory) -> dict[str, Any]:
    """The settings of an engine; what it needs is started, or the test is skipped with the reason."""
    if kind == "faiss":
        pytest.importorskip("faiss", reason="the extra `index` is not installed")
    return {"name": kind}
