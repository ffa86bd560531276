"""Engines of the suite of behaviour, and the servers that some of them need."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
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


class OwnPostgres:
    """A PostgreSQL that a test stops and starts.

    Args:
        folder: its data.
    """

    def __init__(self, folder: Path) -> None:
        pgserver = pytest.importorskip("pgserver", reason="no wheel of PostgreSQL for this machine")
        self._server = pgserver.get_server(folder, cleanup_mode="stop")
        self._control = pgserver.pg_ctl
        self.uri = self._server.get_uri()

    def stop(self) -> None:
        """End it at once."""
        self._control(["-w", "-m", "fast", "stop"], pgdata=self._server.pgdata, user=self._server.system_user)

    def start(self) -> None:
        """Start it again."""
        self._server.ensure_postgres_running()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """None of its processes runs."""
        import psutil

        parent = psutil.Process(self._server.get_pid())
        processes = [parent, *parent.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()


def own_postgres(folder: Path) -> OwnPostgres:
    """Start a PostgreSQL that no other test uses."""
    pytest.importorskip("psycopg", reason="the extra `pgvector` is not installed")
    return OwnPostgres(folder)


@contextlib.contextmanager
def milvus_lite_server(folder: Path, uri: str = "") -> Iterator[str]:
    """The address of a server of milvus-lite, which speaks the protocol of Milvus."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(uri.rpartition(":")[2] or free.getsockname()[1])
    words = [sys.executable, "-m", "milvus_lite", "server", "--host", "127.0.0.1", "--port", port]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([*map(str, words), "--data-dir", folder / "data"], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"the server does not answer: {(folder / 'log').read_text()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


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
