"""The verb serve."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.cli.images import check_served, index_of
from proxymetric.cli.root import Backbone, Device, app, example
from proxymetric.cli.searching import OtherRun

if TYPE_CHECKING:
    from proxymetric.serve.settings import Settings
    from proxymetric.system.terminal import Terminal

TOKEN_VARIABLE, WRITE_TOKEN_VARIABLE = "PROXYMETRIC_TOKEN", "PROXYMETRIC_WRITE_TOKEN"


@app.command(
    short_help="Serve an index or a folder of images as a search page.",
    epilog=example(
        "proxymetric serve IMAGES",
        "proxymetric serve birds.index",
        "proxymetric serve birds.index --workers 4 --token-file secret",
    ),
)
def serve(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="INDEX", help="Folder that `index` wrote; or a folder of images, which is indexed first, see --out."
        ),
    ],
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for other machines too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for any free one.")] = 8000,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    workers: Annotated[int, typer.Option(help="Processes; they share the memory of the index.")] = 1,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help=f"File with the token that requests must carry; or the variable {TOKEN_VARIABLE}. Default: no token."
        ),
    ] = None,
    writable: Annotated[
        bool,
        typer.Option(
            "--writable",
            help="Requests with the write token may add, change and remove items: /openapi.json says how. The token is "
            f"that of --write-token-file, or of the variable {WRITE_TOKEN_VARIABLE}.",
        ),
    ] = False,
    write_token_file: Annotated[
        Path | None, typer.Option(help="With --writable: file with the write token. Default: the variable.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Name by which browsers call the service; * for any. Repeatable. Default: this machine's."),
    ] = None,
    max_megabytes: Annotated[float, typer.Option(help="Largest image file.")] = 20.0,
    max_megapixels: Annotated[float, typer.Option(help="Largest image.")] = 50.0,
    max_pending: Annotated[int, typer.Option(help="Searches at a time in a process; further ones get 429.")] = 64,
    max_batch: Annotated[int, typer.Option(help="Searches in a forward pass.")] = 32,
    seconds: Annotated[float, typer.Option(help="Time limit of a search.")] = 30.0,
    run: OtherRun = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="For a folder of images: the folder of its index. Default: IMAGES.index."),
    ] = None,
    backbone: Backbone = None,
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights", help="For a folder of images: the backbone's weights (safetensors) instead of the hub's."
        ),
    ] = None,
    device: Device = None,
) -> None:
    """Serve an index: a web page to search by an image, and the same for programs (/openapi.json describes it).

    A folder of images needs neither classes nor training: a pre-trained backbone indexes it, as `proxymetric index`
    does. The next call embeds only new and changed images, and one that was stopped is continued.

    Needs the extra `serve`. It listens on this machine only, unless --host says otherwise. Ctrl-C stops it.
    """
    from proxymetric.serve import check_address
    from proxymetric.serve.settings import Settings
    from proxymetric.system.terminal import Terminal

    for option, limit in (("--max-megabytes", max_megabytes), ("--max-megapixels", max_megapixels)):
        if not 1 <= limit * 1e6 < float("inf"):
            raise ValueError(f"{option}: got {limit:g}, expected a number above 0, such as 20")
    settings = Settings(
        str(folder),
        run=run,
        device=device,
        host=host,
        port=port,
        hosts=tuple(allow_host or ()),
        token=_token("--token-file", token_file, TOKEN_VARIABLE),
        write_token=_write_token(writable, write_token_file),
        workers=workers,
        max_bytes=int(max_megabytes * 1e6),
        max_pixels=int(max_megapixels * 1e6),
        max_pending=max_pending,
        max_batch=max_batch,
        seconds=seconds,
    )
    terminal = Terminal()
    check_served(folder)
    terminal.say(f"opening {folder}")
    from proxymetric.search.manifest import is_index
    from proxymetric.serve.folder import index_folder

    if is_index(folder):
        given = {"--out": out, "--backbone": backbone, "--weights": weights}
        if names := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{names[0]}: got it with an index, expected it only with a folder of images")
    else:
        check_address(settings)  # before the images are embedded, which takes a while
        work = partial(terminal.work, "embedding")
        target = index_of(folder, out, terminal)
        index_folder(folder, target, backbone, weights, device, say=terminal.say, progress=work)
        settings = replace(settings, index=str(target))
    serve_and_say(settings, terminal, open_page)


def serve_and_say(settings: Settings, terminal: Terminal, open_page: bool) -> None:
    """Serve until the process is told to stop, and say where."""
    from proxymetric.search import Index
    from proxymetric.serve import serve as serve_index

    count = len(Index(settings.index))
    terminal.say(f"loading the model that made {settings.index}")

    def announce(address: str) -> None:
        typer.echo(f"serving {count:,} images of {settings.index} at {address} (Ctrl-C stops)", err=True)
        if open_page:
            _open_later(address)

    serve_index(settings, announce)


def serve_demo(out: Path, terminal: Terminal, device: str | None) -> None:
    """Index the images of a demo that it was not trained on, and open a search among them."""
    from proxymetric.serve.demo import index_demo
    from proxymetric.serve.settings import Settings

    index = index_demo(out, device, progress=partial(terminal.work, "indexing"))
    serve_and_say(Settings(str(index.folder), device=device), terminal, open_page=True)


def _write_token(writable: bool, file: Path | None) -> str:
    """The token with which the index may be changed; empty: it cannot be changed."""
    if not writable:
        if file is not None:
            raise ValueError("--write-token-file: got it without --writable, expected both")
        return ""
    if not (token := _token("--write-token-file", file, WRITE_TOKEN_VARIABLE)):
        raise ValueError(
            f"--writable: got no write token, expected one in the variable {WRITE_TOKEN_VARIABLE} or --write-token-file"
        )
    return token


def _token(option: str, file: Path | None, variable: str) -> str:
    """The token in a file, or else in a variable of the environment; empty without one."""
    if file is None:
        return os.environ.get(variable, "").strip()
    try:
        token = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        from proxymetric.arguments.signatures import neighbour

        reason = "does not exist" if isinstance(error, FileNotFoundError) else "cannot be read"
        raise ValueError(
            f"{option}: got {file}, which {reason}; expected a text file with a token{neighbour(file)}"
        ) from None
    if not token:
        raise ValueError(f"{option}: got {file}, which is empty; expected a token")
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
