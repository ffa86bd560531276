"""The databases that this process has asked, each with its connections."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from proxymetric.search.remote.database import Database
from proxymetric.search.remote.milvus import Milvus
from proxymetric.search.remote.postgres import Postgres
from proxymetric.search.remote.settings import MEASURED, checked

EMBEDDED = "engine-postgres"
"""the folder of the embedded PostgreSQL, in that of the index"""


def database_of(folder: Path, settings: dict[str, Any]) -> Database:
    """The database that has the items of an index.

    Args:
        folder: the folder of the index.
        settings: the settings of its engine.
    """
    chosen = checked({key: value for key, value in settings.items() if key not in MEASURED})
    if chosen["name"] == "milvus":
        place = str(folder.absolute())
    else:
        place = "" if chosen["uri"] else str((folder / EMBEDDED).absolute())
    return _opened(place, tuple(sorted(chosen.items())))


@functools.cache
def _opened(place: str, settings: tuple[tuple[str, Any], ...]) -> Database:
    """A database with its connections, one for all indexes with the same settings."""
    chosen = dict(settings)
    if chosen["name"] == "milvus":
        return Milvus(chosen, Path(place))
    return Postgres(chosen, Path(place) if place else None)
