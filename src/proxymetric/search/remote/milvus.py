"""Milvus (extra `milvus`): a file of milvus-lite, a server or a cluster; clients, and errors that are sentences."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proxymetric.search.array_files import load_array
from proxymetric.search.remote.database import Facts
from proxymetric.search.remote.milvus_session import (
    PREFIX,
    MilvusSession,
    create_facts,
    facts_collection,
    items_collection,
    read_facts,
)
from proxymetric.system.lock import locked

TOKEN_VARIABLE = "PROXYMETRIC_MILVUS_TOKEN"
"""environment variable with the token of a server; a token is never stored in an index"""
FACTS_SECONDS = 1.0
"""a search may take facts, such as the rows of items, that are so old: a consistent look at them takes 0.2 s"""
RECONNECT = {
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1_000,
    "grpc.use_local_subchannel_pool": 1,
}
"""so that a server that is back is asked within a second; by default the pauses grow to minutes"""
LOST = ("can't find collection", "collection not found", "not exist", "does not exist", "CollectionNotExists")
"""what the versions of Milvus say about a collection that is gone"""


class Milvus:
    """A Milvus; see `Database`.

    Args:
        settings: as `settings.checked` returns them.
        folder: of the index; its lock keeps other processes of this machine, and of those that share it, from changes.
    """

    def __init__(self, settings: dict[str, Any], folder: Path) -> None:
        self.settings, self.folder, self.address = settings, folder, settings["uri"]
        self._facts: tuple[float, Facts] | None = None
        self._client: Any = None
        self._loaded: set[str] = set()
        self._process = os.getpid()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, identity: str, whole: bool = False, fresh: bool = True) -> Iterator[MilvusSession]:
        """See `Database`; a search sees the items that are there when it arrives."""
        with self._asking() as client:
            known = self._facts
            if fresh or known is None or time.monotonic() > known[0] + FACTS_SECONDS:
                known = self._facts = time.monotonic(), self._known_facts(client, identity)
            yield MilvusSession(client, identity, known[1], self.settings)

    @contextlib.contextmanager
    def changing(self, identity: str, first: Facts | None = None) -> Iterator[MilvusSession]:
        """See `Database`: item by item; see `milvus_session`."""
        with self._asking() as client:
            if first is not None:
                create_facts(client, identity, first, self.settings)
            session = MilvusSession(client, identity, self._known_facts(client, identity), self.settings)
            session.repair()
            try:
                yield session
            finally:
                self._facts = None

    @contextlib.contextmanager
    def locked(self, identity: str) -> Iterator[None]:
        """See `Database`: the lock of the folder, since Milvus has none."""
        with locked(self.folder):
            yield

    def _known_facts(self, client: Any, identity: str) -> Facts:
        self._load(client, facts_collection(identity))
        facts = read_facts(client, identity, self.settings)
        if facts is None:
            raise self._lost()
        if facts.store:
            self._load(client, items_collection(identity, facts))
        return facts

    def _load(self, client: Any, name: str) -> None:
        """Load a collection once for each connection: a database that was started again may have none loaded."""
        if name not in self._loaded:
            replicas = self.settings["replicas"] if "://" in self.address else 1
            client.load_collection(name, **({"replica_number": replicas} if replicas > 1 else {}))
            self._loaded.add(name)

    def _lost(self) -> ValueError:
        return ValueError(
            f"index: got {self.address}, which does not have the items of this index; expected the database that it "
            "was made with, or a backup of it; `proxymetric index --rebuild` writes them anew"
        )

    @contextlib.contextmanager
    def _asking(self) -> Iterator[Any]:
        """A client, whose errors are sentences."""
        client = self._connected()
        import grpc
        from pymilvus.exceptions import MilvusException

        try:
            yield client
        except (MilvusException, grpc.RpcError) as error:
            reason = _reason(error)
            if any(words in reason for words in LOST):
                raise self._lost() from None
            self._disconnect(client)
            raise ConnectionError(
                f"uri: got {self.address}, which does not answer ({reason}); expected a Milvus that runs"
            ) from None

    def _disconnect(self, client: Any) -> None:
        """Let the next request connect again; a file of milvus-lite stays open."""
        if "://" not in self.address:
            return
        with self._lock:
            if self._client is client:
                self._client = None
        with contextlib.suppress(Exception):
            client.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None or self._process != os.getpid():
                self._client, self._process = connect(self.address, self.settings["timeout"]), os.getpid()
                self._loaded, self._facts = set(), None
            return self._client


def connect(uri: str, seconds: float) -> Any:
    """A client for a database.

    Raises:
        ValueError: the extra is not installed, or another process has the file open.
        ConnectionError: the server does not answer.
    """
    try:
        import grpc
        from pymilvus import MilvusClient
        from pymilvus.exceptions import MilvusException
    except ImportError:
        raise ValueError(
            "engine: pymilvus is not installed; expected the extra `milvus`: pip install 'proxymetric[milvus]'"
        ) from None
    for name in ("pymilvus", "milvus_lite"):  # they also log the errors that they raise
        logging.getLogger(name).setLevel(logging.CRITICAL)
    is_file = "://" not in uri
    if is_file and not _is_open_elsewhere(uri):
        _remove_cut_files(Path(uri))
    try:
        options: dict[str, Any] = {} if is_file else {"grpc_options": RECONNECT}
        return MilvusClient(uri, token=os.environ.get(TOKEN_VARIABLE, ""), timeout=min(seconds, 10), **options)
    except (MilvusException, grpc.RpcError, OSError, ImportError) as error:
        if is_file and _is_open_elsewhere(uri):
            raise ValueError(
                f"uri: got {uri}, which another process has open; expected a file that no other process uses, or a "
                "server, which many use: `milvus-lite server`"
            ) from None
        raise ConnectionError(
            f"uri: got {uri}, which does not answer ({_reason(error)}); expected a Milvus database"
        ) from None


def _reason(error: Exception) -> str:
    details = getattr(error, "details", None)
    text = details() if callable(details) else getattr(error, "message", "") or str(error)
    return " ".join(str(text).split())[:300] or type(error).__name__


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
