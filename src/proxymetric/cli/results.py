"""What `query`, `search` and `identify` ask with, and how results are shown: a table, lines, JSON, or a page."""

from __future__ import annotations

import json
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from proxymetric.system.text import visible

if TYPE_CHECKING:
    from torch import Tensor

    from proxymetric.models.model import Model
    from proxymetric.search.result_page import Found

ImageArgument = Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image to find similar images for.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OpenPage = Annotated[bool, typer.Option("--open", help="Show the results as a page in the browser.")]


class Queries(NamedTuple):
    """The images of a question that could be read, and the others.

    Attributes:
        files: the images that could be read.
        vectors: (N, D) their embeddings.
        bad: the other images, each with the reason.
    """

    files: list[Path]
    vectors: Tensor
    bad: dict[Path, str]

    @classmethod
    def embed(cls, model: Model, images: Sequence[Path]) -> Queries:
        """Embed the images of a question; say which of them cannot be read.

        Raises:
            ValueError: no image can be read.
        """
        reasons: list[str] = []
        vectors, kept = model.embed(images, errors="skip", on_bad=lambda title, reason: reasons.append(reason))
        if not kept:
            model.embed(images)  # says what is wrong with the first image
        others = sorted(set(range(len(images))) - set(kept))
        bad = {images[i]: reason for i, reason in zip(others, reasons, strict=True)}
        for file, reason in bad.items():
            typer.echo(f"left out, cannot be read: {visible(file)} ({reason})", err=True)
        return cls([images[i] for i in kept], vectors, bad)

    def errors(self, key: str = "query") -> list[dict[str, Any]]:
        """The entries of a JSON answer for the images that could not be read; `key` names the image."""
        return [{key: str(file), "error": reason} for file, reason in self.bad.items()]

    def end(self) -> None:
        """End the command with exit code 1 if an image could not be read."""
        if self.bad:
            raise typer.Exit(1)


def print_results(
    results: Sequence[tuple[Path, Sequence[Found]]], as_json: bool, open_page: bool, bad: Sequence[dict[str, Any]] = ()
) -> None:
    """Print the results of each query.

    In a terminal each query gets a table; elsewhere each result is a line of query, rank, similarity, class and file.

    Args:
        results: for each query its file, and what was found.
        as_json: print JSON instead.
        open_page: also write a page and open it in the browser; without a browser, say where the page is.
        bad: entries of the JSON for images without results.
    """
    from rich.console import Console

    from proxymetric.cli.tables import hits_table

    console = Console()
    if as_json:
        content = [
            {
                "query": str(file),
                "results": [
                    {"rank": rank, "similarity": hit.similarity, "class": hit.label or "", "file": hit.name}
                    | ({} if hit.metadata is None else {"metadata": dict(hit.metadata)})
                    for rank, hit in enumerate(hits, 1)
                ],
            }
            for file, hits in results
        ]
        typer.echo(json.dumps([*content, *bad], indent=1))
    elif not open_page:
        for file, hits in results:
            if console.is_terminal:
                rows = [(hit.name, hit.label or "", hit.similarity) for hit in hits]
                console.print(hits_table(f"most similar to {file}", rows))
                continue
            for rank, hit in enumerate(hits, 1):
                cells = (visible(file), str(rank), f"{hit.similarity:.3f}", visible(hit.label or ""), visible(hit.name))
                typer.echo("\t".join(cells))
    if open_page:
        page = _write(results)
        opened = webbrowser.open(page.as_uri())
        typer.echo(f"{'opened' if opened else 'open in a browser:'} {page}", err=True)


def _write(results: Sequence[tuple[Path, Sequence[Found]]]) -> Path:
    from proxymetric.data.decoding import read_image
    from proxymetric.search.result_page import write_page

    page = Path(tempfile.mkdtemp(prefix="proxymetric-")) / "results.html"
    return write_page(page, [(str(file), read_image(file), hits) for file, hits in results])
