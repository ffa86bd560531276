"""Abuse: every attack is refused with an error of the usual form, and afterwards the service answers as before."""

from __future__ import annotations

import io
import re
import socket
import struct
import time
import zlib
from dataclasses import replace
from functools import partial

import pytest
from PIL import Image

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from bombs import BOMBS
from proxymetric.serve import server
from proxymetric.serve.reception import Reception
from service import BOUNDARY, form, jpeg, serving


@pytest.fixture(autouse=True)
def lives(client):
    """After each attack the service answers, and no search hangs."""
    yield
    assert client.upload(jpeg(), k=3).status == 200
    assert "proxymetric_pending_searches 0" in client.get("/metrics").body.decode()


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG of any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def encoded(kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(buffer, kind, **options)
    return buffer.getvalue()


def test_a_header_of_a_huge_image(client):
    answer = client.upload(png_header(50_000, 50_000))
    assert (answer.status, answer.code) == (413, "too_many_pixels")
    assert "got 50000 x 50000 = 2,500,000,000 pixels, expected at most 2,000,000" in answer.json["error"]["message"]
    large = io.BytesIO()
    Image.new("1", (2000, 1001)).save(large, "png")
    assert client.upload(large.getvalue()).code == "too_many_pixels"
    exact = io.BytesIO()
    Image.new("1", (2000, 1000)).save(exact, "png")
    assert client.upload(exact.getvalue()).status == 200


@pytest.mark.parametrize("kind", ["jpeg", "png", "webp", "gif", "bmp", "tiff"])
def test_truncated_files(client, kind):
    whole = encoded(kind)
    assert client.upload(whole).status == 200
    for size in (1, 8, 20, len(whole) // 2):
        answer = client.upload(whole[:size])
        assert (answer.status, answer.code) == (422, "bad_image"), size


@pytest.mark.parametrize(
    "content",
    [
        b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) (r) file\n",
        b"%PDF-1.7\n",
        b"\x1f\x8b\x08\x00",
        b"push graphic-context\nfill 'url(https://example.org/\"|ls)'\n",
        b"",
        b"\0" * 1000,
        b"GIF89a",
    ],
    ids=["svg", "postscript", "pdf", "gzip", "mvg", "empty", "zeros", "gif head"],
)
def test_what_is_no_image(client, content):
    answer = client.upload(content)
    assert (answer.status, answer.code) == (422, "bad_image")
    assert b"/etc" not in answer.body


def test_an_upload_of_200_megabytes(client):
    answer = client.upload(bytes(200_000_000))
    assert (answer.status, answer.code) == (413, "too_large")


def test_an_upload_that_does_not_announce_its_size(client):
    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    body = form(bytes(3_000_000))
    chunks = (body[start : start + 65_536] for start in range(0, len(body), 65_536))
    answer = client("POST", "/search", chunks, kind)
    assert (answer.status, answer.code) == (413, "too_large")
    assert client.ask(image="A" * 3_000_000).code == "too_large"
    # An image between the limit of the image and the limit of the body
    assert client.upload(bytes(1_100_000)).code == "too_large"
    assert client("GET", "/items/x", bytes(100_000)).status in (404, 413)


def test_forms_with_too_many_parts(client):
    kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    many = "".join(f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="where"\r\n\r\na=b\r\n' for _ in range(5000))
    assert client("POST", "/search", f"{many}--{BOUNDARY}--\r\n", kind).status == 400
    long = f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="where"\r\n\r\n{"a" * 200_000}\r\n--{BOUNDARY}--\r\n'
    assert client("POST", "/search", long, kind).status == 400
    files = "".join(
        f'--{BOUNDARY}\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\nx\r\n' for _ in range(9)
    )
    assert client("POST", "/search", f"{files}--{BOUNDARY}--\r\n", kind).status == 400


TRAVERSALS = ["../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "/etc/passwd", "%2e%2e/%2e%2e/etc/passwd",
              "....//....//etc/passwd", "..\\..\\windows\\win.ini", "%00", "class0/../../manifest.json",
              "file:///etc/passwd", "..;/manifest.json"]  # fmt: skip


@pytest.mark.parametrize("path", TRAVERSALS)
def test_traversal_in_every_field(client, path):
    for place in ("/", "/items/", "/thumbnails/", "/rows/", "/map/", "/search/", "/page/"):
        answer = client.get(f"{place}{path.lstrip('/') if place == '/' else path}")
        assert answer.status in (400, 404, 422), (place, answer)
        assert b"root:" not in answer.body
        assert b"generation" not in answer.body
    assert client.ask(id=path).code == "not_found"
    assert client.ask(id="class0/0.png", where={path: path}).code == "bad_value"
    assert client.ask(id="class0/0.png", where={"class": path}).json["results"] == []
    assert client.upload(jpeg(), where=f"class={path}").json["results"] == []
    assert client("POST", "/search", form(jpeg(), filename=path), {
        "content-type": f"multipart/form-data; boundary={BOUNDARY}"
    }).status == 200  # fmt: skip


def test_addresses_are_never_fetched(client):
    with socket.socket() as trap:
        trap.bind(("127.0.0.1", 0))
        trap.listen()
        trap.settimeout(0.3)
        address = f"http://127.0.0.1:{trap.getsockname()[1]}/a.jpg"
        assert client.ask(image=address).status == 422
        assert client.ask(url=address).status == 422
        assert client.ask(id=address).status == 404
        assert client.upload(address.encode()).status == 422
        with pytest.raises(TimeoutError):
            trap.accept()


def test_lines_that_are_no_http(client):
    for content in (b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 200_000, b"\0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", client.port), timeout=20) as connection:
            connection.sendall(content + b"\r\n\r\n")
            try:
                answer = connection.recv(1000)
            except ConnectionResetError:
                answer = b""
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 421", b"HTTP/1.1 4")), content[:20]


def test_a_thousand_half_open_connections(client, monkeypatch):
    """Heads that never end: the service goes on, and closes them after a while."""
    monkeypatch.setattr(server, "HEADER_SECONDS", 3.0)
    server._allow_many_connections()
    connections = [socket.create_connection(("127.0.0.1", client.port), timeout=30) for _ in range(1000)]
    try:
        for connection in connections:
            connection.sendall(b"POST /search HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert client.upload(jpeg(), k=2).status == 200
        closed = 0
        for connection in connections:
            try:
                closed += connection.recv(1) == b""
            except ConnectionResetError:
                closed += 1
        assert closed == 1000
    finally:
        for connection in connections:
            connection.close()


def test_a_body_that_never_ends(settings):
    with serving(replace(settings, receive_seconds=0.5)) as client:
        head = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n"
        with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
            connection.sendall(head + b'Content-Type: application/json\r\n\r\n{"id"')
            answer = b""
            while b"}}" not in answer and (more := connection.recv(10_000)):
                answer += more
        assert answer.startswith(b"HTTP/1.1 408")
        assert b'"too_slow"' in answer
        assert client.get("/healthz").status == 200
        end = time.monotonic() + 30
        while "proxymetric_pending_searches 0" not in client.get("/metrics").body.decode():
            assert time.monotonic() < end, "the search that was given up still counts"
            time.sleep(0.1)


STALLED = b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\nContent-Type: application/json\r\n\r\n{"


def receiving(client) -> int:
    """How many bodies are arriving."""
    return int(client.get("/metrics").body.decode().partition("\nproxymetric_receiving_bodies ")[2].split()[0])


@pytest.mark.parametrize("count", [70, 300])
def test_stalled_bodies_keep_no_search_out(client, count):
    """More bodies than there may be searches never end; every search meanwhile is answered."""
    server._allow_many_connections()
    connections = [socket.create_connection(("127.0.0.1", client.port), timeout=30) for _ in range(count)]
    try:
        for connection in connections:
            connection.sendall(STALLED)
        end = time.monotonic() + 30
        while receiving(client) < min(count, 128):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert "proxymetric_pending_searches 0" in client.get("/metrics").body.decode()
        for seed in range(5):
            assert client.upload(jpeg(seed=seed), k=3).status == 200
        assert client.upload(jpeg(500, 500), k=3).status == 200, "a body of several parts"
    finally:
        for connection in connections:
            connection.close()


def test_of_too_many_bodies_the_one_that_stands_still_is_told(settings, monkeypatch):
    monkeypatch.setattr("proxymetric.serve.guard.Reception", partial(Reception, most_of_an_address=2))
    monkeypatch.setattr("proxymetric.serve.reception.STILL_SECONDS", 0.0)
    with serving(settings) as client:
        connections = [socket.create_connection(("127.0.0.1", client.port), timeout=30) for _ in range(3)]
        for number, connection in enumerate(connections, 1):
            connection.sendall(STALLED)
            end = time.monotonic() + 30
            while f"receiving_bodies {min(number, 2)}" not in client.get("/metrics").body.decode():
                assert time.monotonic() < end
        answer = b""
        while b"}}" not in answer and (more := connections[0].recv(10_000)):
            answer += more
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"got no whole request while others wait" in answer
        for connection in connections:
            connection.close()


@pytest.fixture(scope="module")
def roomy_client(settings):
    """A service that takes the largest of the bombs."""
    with serving(replace(settings, max_bytes=20_000_000)) as client:
        yield client


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_with_its_reason(roomy_client, name):
    make, reason = BOMBS[name]
    answer = roomy_client.upload(make())
    assert (answer.status, answer.code) == (422, "bad_image")
    assert re.search(reason, answer.json["error"]["message"])


def test_pages_of_other_sites_are_refused(client):
    cross = {"sec-fetch-site": "cross-site", "origin": "https://evil.example"}
    answer = client.upload(jpeg(), cross, k=3)
    assert (answer.status, answer.code) == (403, "cross_site")
    assert "sec-fetch-site: got 'cross-site'" in answer.json["error"]["message"]
    assert client("POST", "/identify", "{}", cross | {"content-type": "application/json"}).status == 403
    assert client.get("/", **cross).status == 200, "a link to the page"
    for value in ("same-origin", "none"):
        assert client.upload(jpeg(), {"sec-fetch-site": value}, k=3).status == 200


def test_clients_that_leave(client):
    body = form(jpeg(), k=3)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", client.port), timeout=30) as connection:
            head = f"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
            kind = f"Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n\r\n"
            connection.sendall((head + kind).encode() + body[: len(body) // 2])
    end = time.monotonic() + 30
    while "proxymetric_pending_searches 0" not in client.get("/metrics").body.decode():
        assert time.monotonic() < end
        time.sleep(0.05)
