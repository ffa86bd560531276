"""Clients of Milvus databases (needs the extra `milvus`), whose errors are sentences."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxymetric.search.array_files import load_array

PREFIX = "proxymetric"
"""with which the names of collections begin"""
TOKEN_VARIABLE = "PROXYMETRIC_MILVUS_TOKEN"
"""environment variable with the token of a server; a token is never stored in an index"""


@contextlib.contextmanager
def asking(uri: str) -> Iterator[Any]:
    """A client for a database, whose errors are sentences."""
    client = connect(uri)
    from pymilvus.exceptions import MilvusException

    try:
        yield client
    except MilvusException as error:
        raise ConnectionError(f"uri: got {uri}, which failed ({_reason(error)}); expected a Milvus database") from None


def _reason(error: Exception) -> str:
    return " ".join(getattr(error, "message", str(error)).split())


@functools.cache
def connect(uri: str) -> Any:
    """A client for a database; one for each, because a file can be opened only once."""
    try:
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException
    except ImportError:
        raise ValueError(
            "engine: pymilvus is not installed; expected the extra `milvus`: pip install 'proxymetric[milvus]'"
        ) from None
    for name in ("pymilvus", "milvus_lite"):  # they also log the errors that they raise
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if "://" not in uri and not _is_open_elsewhere(uri):
        _remove_cut_files(Path(uri))
    try:
        return MilvusClient(uri, token=os.environ.get(TOKEN_VARIABLE, ""))
    except (MilvusException, OSError, ImportError) as error:
        if _is_open_elsewhere(uri):
            raise ValueError(
                f"uri: got {uri}, which another process has open; expected a file that no other process uses, or a "
                "server, which many use: `milvus-lite server`"
            ) from None
        raise ValueError(
            f"uri: got {uri}, which does not answer ({_reason(error)}); expected a Milvus database"
        ) from None


def _remove_cut_files(database: Path) -> None:
    """Remove files of milvus-lite that a killed process has written in part; it makes them anew from its other files.

    milvus-lite keeps the vectors of a segment once more, as an array to search in. It does not write these arrays
    atomically, and does not open a collection that has a part of one.
    """
    for file in database.glob(f"collections/{PREFIX}_*/partitions/*/indexes/*.flat.idx"):
        try:
            load_array(file, mmap_mode="r")
        except (ValueError, EOFError):
            file.unlink()


def _is_open_elsewhere(uri: str) -> bool:
    """Whether another process has the file of milvus-lite open; it holds a lock on it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return False
    try:
        with open(Path(uri) / "LOCK") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
