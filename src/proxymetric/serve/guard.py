"""The guard in front of the service: who may ask, how much, how fast; and what is counted."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from proxymetric.serve.counters import ROUTES, Counters
from proxymetric.serve.errors import Refused
from proxymetric.serve.reception import Arrival, Reception
from proxymetric.serve.settings import Settings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

FORM_BYTES = 65_536
"""bytes that a request may have besides its image"""
DRAIN_SECONDS, DRAIN_BYTES = 10.0, 2**29
"""how long and how much of a refused upload is read and thrown away, so that the client can read the refusal"""
SEARCH_PATHS = ("/search", "/identify")
"""paths that take an image, and for which the model computes"""
OPEN_PATHS = {"/", "/app.js", "/style.css", "/filters.js", "/map.js", "/proxies.js", "/icon.svg", "/healthz"}
"""paths without secrets, which need no token: the page must load before it can ask for one"""
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
}
log = logging.getLogger("proxymetric.serve")


class Guard:
    """Checks host, token, size and speed of each request before the service sees it, and counts the answers.

    Args:
        app: the service.
        settings: its limits.
        counters: what counts.
    """

    def __init__(self, app: App, settings: Settings, counters: Counters) -> None:
        self.app, self.settings, self.counters = app, settings, counters
        self.reception = Reception(on_change=counters.receiving)
        self._tokens = [_digest(token.encode()) for token in (settings.token, settings.write_token)]

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        most, work = self.settings.max_pending, None
        if is_write(scope):
            work = _Work("writes", self.counters.pending_writes, most)
        elif scope["path"] in SEARCH_PATHS and scope["method"] == "POST":
            work = _Work("searches", self.counters.pending, most)
        address = (scope.get("client") or ("", 0))[0]
        body = _Body(receive, self._max_body(scope), self.settings.receive_seconds, self.reception, address, work)
        answer = _Answer(send, body)
        started = time.monotonic()
        try:
            self._check(scope)
            try:
                async with asyncio.timeout(self.settings.seconds + self.settings.receive_seconds):
                    await self.app(scope, body, answer)
            except TimeoutError:
                raise Refused(
                    504, f"request: got no answer within {self.settings.seconds:g} s, expected one; try again"
                ) from None
        except Refused as refusal:
            await answer.refuse(refusal)
        except asyncio.CancelledError:  # the service stops, and this request has not ended in time
            body.is_whole = True  # what is still arriving is not waited for
            await answer.refuse(Refused(503, "service: is stopping, expected one that runs"))
        except Exception:
            log.exception("an error in the service")
            await answer.refuse(Refused(500, "service: got an error that is described in its log"))
        finally:
            body.leave()
            if work is not None:
                work.end()
            self.counters.answered(_route(scope), answer.status, time.monotonic() - started)

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        """Refuse a wrong host, pages of other sites, a wrong token, and a body that is announced to be too large."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if not self.settings.allows_host(host):
            raise Refused(421, f"host: got {host[:100]!r}, expected a name of this service (`serve --allow-host`)")
        if headers.get(b"sec-fetch-site") == b"cross-site" and scope["method"] not in ("GET", "HEAD"):
            raise Refused(403, "sec-fetch-site: got 'cross-site', a page of another site; expected the service's own")
        if is_write(scope):
            _check_own_page(headers, host)
        self._check_token(scope, headers)
        length = headers.get(b"content-length", b"0").decode("latin-1")
        if length.isdecimal() and int(length) > self._max_body(scope):
            raise _too_large(self._max_body(scope))

    def _check_token(self, scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
        """Refuse a request without the token that it needs; who may write may read, too."""
        needs_write = bool(self.settings.write_token) and is_write(scope)
        if not needs_write and (not self.settings.token or scope["path"] in OPEN_PATHS):
            return
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        # Digests have equal lengths, so that the time of the comparison says nothing about the token.
        given = _digest(token.strip())
        reads, writes = (hmac.compare_digest(given, right) for right in self._tokens)
        is_bearer = scheme.lower() == b"bearer"
        reads, writes = is_bearer and reads, is_bearer and writes and bool(self.settings.write_token)
        if writes or (reads and not needs_write):
            return
        if reads and self.settings.token:
            raise Refused(403, "authorization: got the token that reads, expected the one that writes", "read_only")
        kind = "token that writes" if needs_write else "right token"
        raise Refused(
            401,
            f"authorization: got no {kind}, expected the header 'Authorization: Bearer TOKEN'",
            headers={"www-authenticate": "Bearer"},
        )

    def _max_body(self, scope: MutableMapping[str, Any]) -> int:
        """The limit on the bytes of a body; base64 has four letters for three bytes."""
        if scope["path"] not in SEARCH_PATHS and not (self.settings.write_token and is_write(scope)):
            return FORM_BYTES
        return self.settings.max_bytes * 4 // 3 + FORM_BYTES


class _Work:
    """A search or a write that waits or runs, which counts from when its body is whole."""

    def __init__(self, name: str, count: Callable[[int], int], most: int) -> None:
        self.name, self.count, self.most, self.is_counted = name, count, most, False

    def begin(self) -> None:
        """Count it, or refuse it if there are too many."""
        self.is_counted = True
        if self.count(+1) > self.most:
            raise Refused(
                429,
                f"{self.name}: got more than {self.most} at a time, expected fewer; try again",
                headers={"retry-after": "1"},
            )

    def end(self) -> None:
        """Count it no more."""
        if self.is_counted:
            self.count(-1)
            self.is_counted = False


class _Body:
    """Reads the body of a request, up to a limit of bytes and of time; it may have to give way to others."""

    def __init__(
        self,
        receive: Receive,
        max_bytes: int,
        seconds: float,
        reception: Reception,
        address: str,
        work: _Work | None,
    ) -> None:
        self.receive, self.max_bytes, self.seconds = receive, max_bytes, seconds
        self.reception, self.address, self.work = reception, address, work
        self.end = time.monotonic() + seconds
        self.read, self.is_whole, self.gave_way = 0, False, False
        self._arrival: Arrival | None = None
        self._timeout: asyncio.Timeout | None = None

    async def __call__(self) -> Message:
        if self.is_whole:  # the service waits for the client to leave
            return await self.receive()
        if self._arrival is None:
            self._arrival = self.reception.begin(self.address, self._give_way)
        try:
            async with asyncio.timeout(max(0.0, self.end - time.monotonic())) as self._timeout:
                message = await self.receive()
        except TimeoutError:
            reason = "while others wait" if self.gave_way else f"within {self.seconds:g} s"
            raise Refused(408, f"body: got no whole request {reason}, expected a faster client") from None
        finally:
            self._timeout = None
        size = len(message.get("body", b""))
        self.read += size
        self.is_whole = message["type"] != "http.request" or not message.get("more_body", False)
        if self.read > self.max_bytes:
            raise _too_large(self.max_bytes)
        if not self.is_whole:
            self.reception.receive(self._arrival, size)
        else:
            self.leave()
            if self.work is not None and message["type"] == "http.request":
                self.work.begin()
        return message

    def leave(self) -> None:
        """The body arrives no more."""
        if self._arrival is not None:
            self.reception.finish(self._arrival)

    def _give_way(self) -> None:
        """End the reception, also while it waits."""
        self.gave_way, self.end = True, 0.0
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def drain(self) -> None:
        """Read what the client is still sending and throw it away, within limits."""
        drained = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                while not self.is_whole and drained < DRAIN_BYTES:
                    message = await self.receive()
                    drained += len(message.get("body", b""))
                    self.is_whole = message["type"] != "http.request" or not message.get("more_body", False)


class _Answer:
    """Sends an answer with the security headers, and remembers its status."""

    def __init__(self, send: Send, body: _Body) -> None:
        self.send, self.body = send, body
        self.status, self.is_started = 500, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.is_started = message["status"], True
            present = {name for name, _ in message.get("headers", ())}
            more = [(name.encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]
            message = {**message, "headers": [*message.get("headers", ()), *(h for h in more if h[0] not in present)]}
        elif not message.get("more_body", False) and self.status >= 400:
            # A client that is still sending could not read the answer if the connection were closed now.
            await self.send({**message, "more_body": True})
            await self.body.drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self.send(message)

    async def refuse(self, refusal: Refused) -> None:
        """Send an error."""
        if self.is_started:
            return
        body = refusal.body()
        headers = {"content-type": "application/json", "content-length": str(len(body)), **refusal.headers}
        encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self({"type": "http.response.start", "status": refusal.status, "headers": encoded})
        await self({"type": "http.response.body", "body": body})


def _too_large(limit: int) -> Refused:
    return Refused(413, f"body: got more than {limit:,} bytes, expected at most that many")


def is_write(scope: MutableMapping[str, Any]) -> bool:
    """Whether a request would change the index."""
    first = scope["path"].lstrip("/").split("/", 1)[0]
    return first == "items" and scope["method"] not in ("GET", "HEAD", "OPTIONS")


def _check_own_page(headers: Mapping[bytes, bytes], host: str) -> None:
    """Refuse a page of another site or of another port, in browsers of any age; programs say nothing about pages."""
    site, origin = headers.get(b"sec-fetch-site", b"none"), headers.get(b"origin")
    if site not in (b"none", b"same-origin"):
        raise Refused(403, f"sec-fetch-site: got {site.decode('latin-1')[:100]!r}, expected the service's own page")
    if origin is not None and origin.decode("latin-1").partition("://")[2].lower() != host.lower():
        raise Refused(403, f"origin: got {origin.decode('latin-1')[:100]!r}, expected the service's own page")


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def _route(scope: MutableMapping[str, Any]) -> str:
    path: str = scope["path"]
    first = path.lstrip("/").split("/", 1)[0]
    if is_write(scope):
        return "write"
    if path in OPEN_PATHS - {"/healthz"}:
        return "page"
    return "openapi" if first == "openapi.json" else first if first in ROUTES else "other"
