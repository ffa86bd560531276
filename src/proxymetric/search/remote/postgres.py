"""PostgreSQL with pgvector (extra `pgvector`): connections, locks, and errors that are sentences."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from proxymetric.search.remote.database import Facts
from proxymetric.search.remote.postgres_session import (
    PostgresSession,
    create_facts,
    insert_facts,
    read_facts,
)

CONNECT_SECONDS, LOCK_SECONDS = 5, 10
"""seconds to wait for a connection, and for the end of another change"""
WHOLE = 20
"""so many times the time of a search may be needed to read all items"""
MOST_IDLE = 8
"""connections that are kept open"""
BEGIN_READING = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"


class Postgres:
    """A PostgreSQL with pgvector; see `Database`.

    Args:
        settings: as `settings.checked` returns them.
        folder: of the embedded PostgreSQL, which is started; None: the settings have an address.
    """

    def __init__(self, settings: dict[str, Any], folder: Path | None) -> None:
        self.settings, self.folder = settings, folder
        self.address = f"the PostgreSQL in {folder}" if folder else shown(settings["uri"])
        self.version: tuple[int, ...] = ()
        """of pgvector"""
        self._idle: list[Any] = []
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._writer: Any = None
        self._writing_thread: int | None = None

    @contextlib.contextmanager
    def reading(self, identity: str, whole: bool = False, fresh: bool = True) -> Iterator[PostgresSession]:
        """See `Database`: one snapshot for all that is asked."""
        seconds = self.settings["timeout"] * (WHOLE if whole else 1)
        with self._asking(), self._connection(BEGIN_READING, seconds) as connection:
            facts = self._known_facts(connection, identity, "")
            yield PostgresSession(connection, identity, facts, self.settings, self.version)

    @contextlib.contextmanager
    def changing(self, identity: str, first: Facts | None = None) -> Iterator[PostgresSession]:
        """See `Database`: one transaction; another change waits for its end."""
        with self._asking(), self._connection("BEGIN") as connection:
            if first is not None:
                create_facts(connection)
                insert_facts(connection, identity, first)
            facts = self._known_facts(connection, identity, "FOR UPDATE")
            yield PostgresSession(connection, identity, facts, self.settings, self.version)

    @contextlib.contextmanager
    def locked(self, identity: str) -> Iterator[None]:
        """See `Database`: an advisory lock, which ends with its connection."""
        with self._asking(), self._connection(None) as connection:
            import psycopg

            key = int(identity[:15], 16)
            connection.execute("SELECT set_config('lock_timeout', %s, false)", [f"{LOCK_SECONDS}s"])
            try:
                connection.execute("SELECT pg_advisory_lock(%s)", [key])
            except psycopg.errors.LockNotAvailable:
                raise ValueError(
                    f"index: got {self.address}, where another process has been changing this index for more than "
                    f"{LOCK_SECONDS} seconds; expected one that no other process changes: try again when it has ended"
                ) from None
            finally:
                connection.execute("RESET lock_timeout")
            try:
                yield
            finally:
                if not connection.closed:
                    connection.execute("SELECT pg_advisory_unlock(%s)", [key])

    def _known_facts(self, connection: Any, identity: str, lock: str) -> Facts:
        facts = read_facts(connection, identity, lock)
        if facts is None:
            raise self._lost()
        return facts

    def _lost(self) -> ValueError:
        return ValueError(
            f"index: got {self.address}, which does not have the items of this index; expected the database that it "
            "was made with, or a backup of it; `proxymetric index --rebuild` writes them anew"
        )

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn errors of the database into sentences."""
        psycopg = _psycopg()
        try:
            yield
        except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidCatalogName):
            raise self._lost() from None
        except psycopg.errors.InsufficientPrivilege as error:
            raise ValueError(
                f"uri: got {self.address}, which refuses this user ({_reason(error)}); expected a user that may create "
                "tables, and the extension `vector` (an administrator runs: CREATE EXTENSION vector)"
            ) from None
        except psycopg.OperationalError as error:
            raise ConnectionError(
                f"uri: got {self.address}, which does not answer ({_reason(error)}); expected a PostgreSQL with "
                "pgvector that runs"
            ) from None
        except psycopg.Error as error:
            raise ConnectionError(
                f"uri: got {self.address}, which failed ({_reason(error)}); expected a PostgreSQL with pgvector"
            ) from None

    @contextlib.contextmanager
    def _connection(self, begin: str | None, seconds: float | None = None) -> Iterator[Any]:
        """A connection, in a transaction; it is cut if it takes longer."""
        connection = self._begun(begin, seconds)
        guard = None if seconds is None else _Guard(connection, seconds)
        is_whole = False
        try:
            yield connection
            if begin is not None:
                connection.execute("COMMIT")
            is_whole = True
        except BaseException:
            with contextlib.suppress(Exception):
                if begin is not None:
                    connection.execute("ROLLBACK")
                is_whole = not connection.closed
            if guard is not None and guard.has_cut:
                raise _psycopg().OperationalError(f"no answer in {seconds:g} seconds") from None
            raise
        finally:
            if guard is not None:
                guard.end()
            self._give_back(connection, is_whole)

    def _begun(self, begin: str | None, seconds: float | None) -> Any:
        """A connection whose transaction has begun; one that the server has closed meanwhile is replaced."""
        while True:
            with self._lock:
                if self._process != os.getpid():  # a forked process has connections of its own
                    self._idle, self._process = [], os.getpid()
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._connected()
                if begin is not None:
                    connection.execute(begin)
                return connection
            wait = seconds or CONNECT_SECONDS
            guard = _Guard(connection, wait)
            try:
                connection.execute(begin or "SELECT 1")
                return connection
            except _psycopg().OperationalError:
                connection.close()
                if guard.has_cut:
                    raise _psycopg().OperationalError(f"no answer in {wait:g} seconds") from None
            finally:
                guard.end()

    def _give_back(self, connection: Any, is_whole: bool) -> None:
        with self._lock:
            if is_whole and not connection.closed and len(self._idle) < MOST_IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def _connected(self) -> Any:
        psycopg = _psycopg()
        uri = self.settings["uri"] if self.folder is None else _embedded(self.folder)
        options = (
            {} if "connect_timeout" in uri else {"connect_timeout": min(CONNECT_SECONDS, self.settings["timeout"])}
        )
        # No prepared statements: poolers such as PgBouncer give each transaction another session.
        connection = psycopg.connect(uri, autocommit=True, prepare_threshold=None, **options)
        extension = "SELECT extversion FROM pg_extension WHERE extname = 'vector'"
        if (row := connection.execute(extension).fetchone()) is None:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            row = connection.execute(extension).fetchone()
        self.version = tuple(int(part) for part in row[0].split(".")[:2])
        info = psycopg.types.TypeInfo.fetch(connection, "vector")
        info.register(connection)
        dumper, loader = _vector_types(info.oid)
        connection.adapters.register_dumper(np.ndarray, dumper)
        connection.adapters.register_loader(info.oid, loader)
        return connection


def shown(uri: str) -> str:
    """An address as it is named in sentences.

    Example:
        >>> shown("postgresql://ada:secret@host:5433/shop?sslmode=require")
        'postgresql://ada@host:5433/shop'
    """
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2] or ",".join(parse_qs(parts.query).get("host", []))
    return f"postgresql://{parts.username + '@' if parts.username else ''}{host}{parts.path}"


class _Guard:
    """Cuts a connection that does not answer in time: it may wait for ever where a server has stopped to run."""

    def __init__(self, connection: Any, seconds: float) -> None:
        self.has_cut, self._connection = False, connection
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """The answer is there."""
        self._timer.cancel()

    def _cut(self) -> None:
        self.has_cut = True
        with (
            contextlib.suppress(Exception),
            socket.socket(fileno=os.dup(self._connection.pgconn.socket)) as copy,
        ):
            copy.shutdown(socket.SHUT_RDWR)


def _vector_types(oid: int) -> tuple[Any, Any]:
    """How the driver writes and reads vectors: as the server keeps them."""
    from psycopg.adapt import Dumper, Loader
    from psycopg.pq import Format

    class VectorDumper(Dumper):
        format = Format.BINARY

        def dump(self, obj: np.ndarray) -> bytes:
            return len(obj).to_bytes(2, "big") + b"\0\0" + obj.astype(">f4").tobytes()

    class VectorLoader(Loader):
        format = Format.BINARY

        def load(self, data: Any) -> np.ndarray:
            return np.frombuffer(bytes(data), ">f4", offset=4).astype(np.float32)

    VectorDumper.oid = oid
    return VectorDumper, VectorLoader


def _embedded(folder: Path) -> str:
    """Start the PostgreSQL of the wheel `pgserver`; it stops with the last process that uses it."""
    try:
        import pgserver
    except ImportError:
        raise ValueError(
            "engine: pgserver is not installed; expected the extra `pgvector` (pip install 'proxymetric[pgvector]'), "
            "which brings a PostgreSQL for Linux on x86_64, or the address of another: --uri postgresql://user@host/db"
        ) from None
    import subprocess

    folder.mkdir(parents=True, exist_ok=True)
    try:
        server = pgserver.get_server(folder, cleanup_mode="stop")
        if not _runs(server.get_postmaster_info().process):
            server.ensure_postgres_running()
    except (subprocess.SubprocessError, OSError, AssertionError) as error:
        raise ConnectionError(
            f"uri: got none, and the PostgreSQL in {folder} does not start ({error}); {folder}/log says why"
        ) from None
    uri: str = server.get_uri()
    return uri


def _runs(process: Any) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    return process.is_running() and process.status() != "zombie"


def _psycopg() -> Any:
    try:
        import psycopg
        import psycopg.types
    except ImportError:
        raise ValueError(
            "engine: psycopg is not installed; expected the extra `pgvector`: pip install 'proxymetric[pgvector]'"
        ) from None
    return psycopg


def _reason(error: Exception) -> str:
    """What the server says, in one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__
