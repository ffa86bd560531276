"""A hub on this machine: it answers the Hugging Face client from a folder, over HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(NamedTuple):
    """Where the hub listens, and the requests that it has answered."""

    endpoint: str
    requests: list[str]


@contextlib.contextmanager
def hub(repository: str, folder: Path) -> Iterator[Hub]:
    """Serve the files of a folder as a repository with the branch `main` and one commit."""
    requests: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            requests.append(f"{self.command} {self.path}")
            path = self.path.partition("?")[0]
            api, files = f"/api/models/{repository}", f"/{repository}/resolve/{COMMIT}/"
            if path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}", api):
                siblings = [{"rfilename": file.name} for file in folder.iterdir()]
                self.answer(200, json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode())
            elif path.startswith(f"{api}/tree/"):
                listed = [
                    {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": etag(file.read_bytes())}
                    for file in folder.iterdir()
                ]
                self.answer(200, json.dumps(listed).encode())
            elif path.startswith(files) and (folder / path.removeprefix(files)).is_file():
                self.answer(200, (folder / path.removeprefix(files)).read_bytes())
            elif path.startswith(f"{api}/revision/"):
                self.answer(404, b"{}", **{"X-Error-Code": "RevisionNotFound"})
            else:
                self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})

        def answer(self, code: int, body: bytes, **headers: str) -> None:
            self.send_response(code)
            facts = {"Content-Length": str(len(body)), "ETag": f'"{etag(body)}"', "X-Repo-Commit": COMMIT}
            for name, value in (facts | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield Hub(f"http://127.0.0.1:{server.server_port}", requests)
    finally:
        server.shutdown()
        server.server_close()


def etag(content: bytes) -> str:
    """The name of a file's content, as git computes it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
