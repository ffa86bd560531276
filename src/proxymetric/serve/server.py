"""Run the service: one or several processes behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from proxymetric.serve.app import create_app
from proxymetric.serve.counters import FOLDER_VARIABLE
from proxymetric.serve.guard import App
from proxymetric.serve.settings import Settings

HEADER_SECONDS = 10.0
"""time that a client has to send the head of a request; a connection that does not is closed"""
IDLE_SECONDS = 5
STOP_SECONDS = 15
"""time that requests have to end when the service stops"""
START_SECONDS = 300
"""time that one of several processes has to load its model; one that needs longer is started again"""
MAX_OPEN_FILES = 65_536


class PatientProtocol(H11Protocol):
    """HTTP by uvicorn, which also closes connections that never send a whole head."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time of a new connection."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Stop the time when a request has arrived, start it when a part of the next one has."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time."""
        super().connection_lost(exc)
        self._stop_timer()

    def _is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._is_waiting():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._close_if_waiting)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close_if_waiting(self) -> None:
        self._timer = None
        if self._is_waiting() and not self.transport.is_closing():
            self.transport.close()


def serve(settings: Settings, announce: Callable[[], None] = lambda: None) -> None:
    """Serve an index until the process is told to stop (Ctrl-C or SIGTERM); running requests are finished.

    Args:
        settings: the settings.
        announce: called before the first request is taken; with one process, after the model has been loaded.

    Raises:
        ValueError: the index or its model cannot be opened.
    """
    _allow_many_connections()
    options = options_of(settings)
    if settings.workers == 1:
        app = create_app(settings)
        announce()
        uvicorn.run(app, **options)
        return
    announce()
    with tempfile.TemporaryDirectory(prefix="proxymetric-serve-") as folder:
        settings.to_environment()
        os.environ[FOLDER_VARIABLE] = folder
        uvicorn.run("proxymetric.serve.server:worker_app", factory=True, workers=settings.workers, **options)


def options_of(settings: Settings) -> dict[str, Any]:
    """Return the options of uvicorn for these settings."""
    return {
        "host": settings.host,
        "port": settings.port,
        "http": PatientProtocol,
        "ws": "none",
        "log_level": "warning",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": IDLE_SECONDS,
        "timeout_graceful_shutdown": STOP_SECONDS,
        "timeout_worker_healthcheck": START_SECONDS,
        "lifespan": "on",
    }


def worker_app() -> App:
    """Make the service in one of several processes."""
    return create_app(Settings.from_environment())


def _allow_many_connections() -> None:
    """Raise the limit on open files: each connection is one."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
