"""The service on a free port in a thread of this process, and a client for it."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import uvicorn
from PIL import Image

from proxymetric.serve.app import create_app
from proxymetric.serve.server import options_of
from proxymetric.serve.settings import Settings

BOUNDARY = "a-boundary-of-the-tests"
WAIT = 60.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error, which has the form of all errors."""
        assert self.headers["content-type"] == "application/json", self
        assert self.json.keys() == {"error"}
        assert self.json["error"].keys() == {"code", "message"}
        return self.json["error"]["code"]


class Client:
    """Asks a service."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.port, self.host = port, host

    def __call__(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=WAIT)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, names, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self("GET", path, headers=headers)

    def upload(self, image: bytes, headers: Mapping[str, str] | None = None, **fields: Any) -> Answer:
        kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        return self("POST", "/search", form(image, **fields), kind | dict(headers or {}))

    def ask(self, **content: Any) -> Answer:
        return self("POST", "/search", json.dumps(content), {"content-type": "application/json"})


def form(image: bytes, filename: str = "photo.jpg", **fields: Any) -> bytes:
    """The body of a form with an image."""
    parts = [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in fields.items()]
    parts.append(f'name="image"; filename="{filename}"\r\ncontent-type: image/jpeg\r\n\r\n'.encode() + image)
    lines = [b"--%b\r\ncontent-disposition: form-data; %b\r\n" % (BOUNDARY.encode(), part) for part in parts]
    return b"".join(lines) + f"--{BOUNDARY}--\r\n".encode()


@contextlib.contextmanager
def serving(settings: Settings) -> Iterator[Client]:
    """Serve in a thread until the block ends; nothing may be running or waiting then."""
    server = uvicorn.Server(uvicorn.Config(create_app(settings), **options_of(settings)))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + WAIT
    while not server.started:
        assert thread.is_alive(), "the service did not start"
        assert time.monotonic() < end
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Client(port)
    finally:
        server.should_exit = True
        thread.join(WAIT)
        assert not thread.is_alive()


def jpeg(width: int = 40, height: int = 30, seed: int = 0) -> bytes:
    """A photo of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "jpeg")
    return buffer.getvalue()
