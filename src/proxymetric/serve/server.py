"""Run the service: one or several processes behind one port."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from proxymetric.search import Index
from proxymetric.serve.app import create_app
from proxymetric.serve.counters import FOLDER_VARIABLE
from proxymetric.serve.guard import App
from proxymetric.serve.searcher import model_of
from proxymetric.serve.settings import Settings

HEADER_SECONDS = 10.0
"""time that a client has to send the head of a request; a connection that does not is closed"""
IDLE_SECONDS = 5
STOP_SECONDS = 15
"""time after which the service has stopped, whatever it is doing"""
CLOSE_SECONDS = 1
"""the part of it that is left for the service itself when requests have not ended"""
START_SECONDS = 300
"""time that one of several processes has to load its model; one that needs longer is started again"""
MAX_OPEN_FILES = 65_536
MALLOC_ARENA_MAX = -8
"""number of the setting in malloc.h of glibc"""


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


def serve(settings: Settings, announce: Callable[[str], None] = lambda address: None) -> None:
    """Serve an index until the process is told to stop (Ctrl-C or SIGTERM); running requests are finished.

    Args:
        settings: the settings.
        announce: called with the address of the page as soon as the service listens there.

    Raises:
        ValueError: the service cannot listen at its address, or the index or its model cannot be opened.
    """
    uri = Index(settings.index).manifest.engine.get("uri") or "://"
    if settings.workers > 1 and "://" not in uri:
        raise ValueError(
            f"workers: got {settings.workers}, expected 1 for vectors in {uri}, which one process opens at a time; "
            "several use a server: `milvus-lite server`"
        )
    _allow_many_connections()
    _share_free_memory()
    place = bind(settings)  # before the model is loaded, which takes a while
    port = place.getsockname()[1]
    address = address_of(settings, port)
    with place:
        if settings.workers == 1:
            config = uvicorn.Config(create_app(settings), **options_of(settings))
            with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is how it ends
                _AnnouncingServer(config, lambda: announce(address)).run(sockets=[place])
            return
        # The processes could refuse a model only with tracebacks, and would be started again and again.
        model_of(Index(settings.index), settings.run, settings.device)
        with tempfile.TemporaryDirectory(prefix="proxymetric-serve-") as folder:
            settings.to_environment()
            os.environ[FOLDER_VARIABLE] = folder
            host = place.getsockname()[0]
            threading.Thread(target=_announce_later, args=(host, port, partial(announce, address)), daemon=True).start()
            place.close()  # the processes share a socket that uvicorn binds
            run_processes(settings, port)


def address_of(settings: Settings, port: int) -> str:
    """Return the address of the page, as a browser on this machine opens it.

    Example:
        >>> address_of(Settings("shop.index", host="0.0.0.0"), 8000), address_of(Settings("shop.index", host="::1"), 80)
        ('http://127.0.0.1:8000/', 'http://[::1]:80/')
    """
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def run_processes(settings: Settings, port: int) -> None:
    """Serve in several processes until this process is told to stop."""
    options = options_of(settings) | {"port": port, "workers": settings.workers}
    uvicorn.run("proxymetric.serve.server:worker_app", factory=True, **options)


def bind(settings: Settings) -> socket.socket:
    """Return a socket that is bound to the address of the service, and does not listen yet.

    Raises:
        ValueError: the address cannot be used.
    """
    place = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        place = socket.socket(family, kind, protocol)
        if os.name == "posix":  # a port that was in use a moment ago is free
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one of a host
        if place is not None:
            place.close()
        raise ValueError(bind_error(settings, error)) from None
    return place


def bind_error(settings: Settings, error: Exception) -> str:
    """Say in a sentence why the service cannot listen at its address.

    Example:
        >>> bind_error(Settings("shop.index", port=80), PermissionError(errno.EACCES, "Permission denied"))
        '--port: got 80, which needs the rights of an administrator; expected a port of at least 1024, such as --port
        8000'
    """
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return (
            f"--port: got {settings.port}, which another program uses at {settings.host}; expected a free port; "
            "--port 0 takes one"
        )
    if number == errno.EACCES:
        return (
            f"--port: got {settings.port}, which needs the rights of an administrator; expected a port of at least "
            "1024, such as --port 8000"
        )
    return (
        f"--host: got {settings.host!r}, at which this machine cannot listen "
        f"({getattr(error, 'strerror', None) or error}); "
        "expected an address of this machine: 127.0.0.1 for itself only, 0.0.0.0 for other machines too"
    )


class _AnnouncingServer(uvicorn.Server):
    """A server that says when it listens."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen."""
        await super().startup(sockets)
        self._announce()


def _announce_later(host: str, port: int, announce: Callable[[], None]) -> None:
    """Announce the service as soon as one of several processes listens."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            socket.create_connection((here, port), timeout=2).close()
            announce()
            return
        time.sleep(0.2)


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
        "timeout_graceful_shutdown": STOP_SECONDS - CLOSE_SECONDS,
        "timeout_worker_healthcheck": START_SECONDS,
        "lifespan": "on",
    }


def worker_app() -> App:
    """Make the service in one of several processes."""
    _share_free_memory()
    return create_app(Settings.from_environment())


def _allow_many_connections() -> None:
    """Raise the limit on open files: each connection is one."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _share_free_memory() -> None:
    """Let all threads allocate from one arena of the C library, where it has several: what one thread frees, the others
    use. With an arena for each thread, the memory of a service under load grew by half within two minutes.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).mallopt(MALLOC_ARENA_MAX, 1)
