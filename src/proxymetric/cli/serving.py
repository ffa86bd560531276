"""The verb serve."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from proxymetric.cli.root import Device, app, example
from proxymetric.cli.searching import IndexFolder, OtherRun

TOKEN_VARIABLE = "PROXYMETRIC_TOKEN"


@app.command(
    short_help="Serve an index: a web page and an HTTP interface for searches.",
    epilog=example("proxymetric serve birds.index", "proxymetric serve birds.index --workers 4 --token-file secret"),
)
def serve(
    folder: IndexFolder,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for other machines too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    workers: Annotated[int, typer.Option(help="Processes; they share the memory of the index.")] = 1,
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the token that requests must carry; or the variable {TOKEN_VARIABLE}."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Name by which browsers call the service; * for any. Repeatable.")
    ] = None,
    max_megabytes: Annotated[float, typer.Option(help="Largest image file.")] = 20.0,
    max_megapixels: Annotated[float, typer.Option(help="Largest image.")] = 50.0,
    max_pending: Annotated[int, typer.Option(help="Searches at a time in a process; further ones get 429.")] = 64,
    max_batch: Annotated[int, typer.Option(help="Searches in a forward pass.")] = 32,
    seconds: Annotated[float, typer.Option(help="Time limit of a search.")] = 30.0,
    run: OtherRun = None,
    device: Device = None,
) -> None:
    """Serve an index: a web page to search by an image, and the same for programs (/openapi.json describes it).

    Needs the extra `serve`. It listens on this machine only, unless --host says otherwise. Ctrl-C stops it.
    """
    from proxymetric.search import Index
    from proxymetric.serve.settings import Settings

    try:
        from proxymetric.serve.server import serve as serve_forever
    except ImportError as error:
        raise ValueError(
            f"serve: {error.name} is not installed; expected the extra `serve`: pip install 'proxymetric[serve]'"
        ) from None
    settings = Settings(
        str(folder),
        run=None if run is None else str(run),
        device=device,
        host=host,
        port=port,
        hosts=tuple(allow_host or ()),
        token=_token(token_file),
        workers=workers,
        max_bytes=int(max_megabytes * 1e6),
        max_pixels=int(max_megapixels * 1e6),
        max_pending=max_pending,
        max_batch=max_batch,
        seconds=seconds,
    )
    count = len(Index(folder))
    address = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}/"
    typer.echo(f"serving {count:,} images of {folder} at {address} (Ctrl-C stops)", err=True)
    if open_page:
        _open_later(address)
    serve_forever(settings)


def _token(file: Path | None) -> str:
    if file is None:
        return os.environ.get(TOKEN_VARIABLE, "").strip()
    token = file.read_text(encoding="utf-8").strip()
    if not token:
        raise ValueError(f"--token-file: got {file}, which is empty; expected a token")
    return token


def _open_later(address: str) -> None:
    """Open a page in the browser as soon as the service answers."""
    import threading
    import time
    import urllib.request
    import webbrowser

    def wait() -> None:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}healthz", timeout=2)
                webbrowser.open(address)
                return
            except OSError:
                time.sleep(0.5)

    threading.Thread(target=wait, daemon=True).start()
