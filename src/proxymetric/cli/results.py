"""How results of `search` and facts of an index are shown: a table, lines, JSON, or a page."""

from __future__ import annotations

import json
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.system.text import visible

if TYPE_CHECKING:
    from proxymetric.search import Answer, Index, VectorFile
    from proxymetric.search.embedding_blocks import EmbeddedBlocks
    from proxymetric.search.questions import Identified, Queries, Results

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
OpenPage = Annotated[bool, typer.Option("--open", help="Show the results as a page in the browser.")]


def print_results(results: Results, as_json: bool, open_page: bool) -> None:
    """Print the results of each query; end with exit code 1 if an image could not be read.

    In a terminal each query gets a table; elsewhere each result is a line of query, rank, similarity, class and file.

    Args:
        results: what was found.
        as_json: print JSON instead.
        open_page: also write a page and open it in the browser; without a browser, say where the page is.
    """
    from rich.console import Console

    from proxymetric.cli.tables import hits_table

    _say_unreadable(results.queries)
    console, pairs = Console(), list(zip(results.titles, results.hits, strict=True))
    if as_json:
        content = [
            {
                "query": title,
                "results": [
                    {"rank": rank, "similarity": hit.similarity, "class": hit.label or "", "file": hit.name}
                    | ({} if hit.metadata is None else {"metadata": dict(hit.metadata)})
                    for rank, hit in enumerate(hits, results.offset + 1)
                ],
            }
            for title, hits in pairs
        ]
        typer.echo(json.dumps([*content, *_errors(results.queries, "query")], indent=1))
    elif not open_page:
        for title, hits in pairs:
            if console.is_terminal:
                rows = [(hit.name, hit.label or "", hit.similarity) for hit in hits]
                console.print(hits_table(f"most similar to {title}", rows))
                continue
            for rank, hit in enumerate(hits, results.offset + 1):
                cells = (
                    visible(title),
                    str(rank),
                    f"{hit.similarity:.3f}",
                    visible(hit.label or ""),
                    visible(hit.name),
                )
                typer.echo("\t".join(cells))
    if open_page:
        page = _write(results)
        opened = webbrowser.open(page.as_uri())
        typer.echo(f"{'opened' if opened else 'open in a browser:'} {page}", err=True)
    _end(results.queries)


def print_answers(identified: Identified, far: float, as_json: bool) -> None:
    """Print which class each image shows; end with exit code 1 if an image could not be read."""
    from proxymetric.system.terminal import Terminal

    queries, answers, identifier = identified.queries, identified.answers, identified.identifier
    _say_unreadable(queries)
    if as_json:
        content = [
            {"image": str(file)} | answer_as_dict(answer, far) | {"in_index": is_own}
            for file, answer, is_own in zip(queries.files, answers, identified.in_index, strict=True)
        ]
        typer.echo(json.dumps(content + _errors(queries, "image"), indent=1))
        _end(queries)
        return
    for file, answer in zip(queries.files, answers, strict=True):
        typer.echo("\t".join([visible(str(file)), *_cells(answer)]))
    terminal = Terminal()
    terminal.say(identifier.summary(far))
    terminal.say(identifier.note)
    if any(identified.in_index):
        items = [file for file, is_own in zip(queries.files, identified.in_index, strict=True) if is_own]
        terminal.say(f"in the index, and left out of the own class: {', '.join(map(visible, items))}")
    _end(queries)


def answer_as_dict(answer: Answer, far: float) -> dict[str, Any]:
    """The answer for one image as JSON; `class` is null for none of these."""
    return {
        "class": answer.label,
        "score": answer.score,
        "threshold": answer.threshold,
        "far": far,
        "best": answer.best,
        "similarity": answer.similarity,
        "runner_up": answer.runner_up,
        "runner_up_similarity": answer.runner_up_similarity,
        "uncertainty": answer.uncertainty,
        "has_uncertainty": answer.has_uncertainty,
    }


def index_as_json(index: Index) -> dict[str, Any]:
    """What `Index.build` did, and what the index holds now, as JSON."""
    from dataclasses import asdict

    from proxymetric.search.storage.state import stored_bytes

    kind = index.manifest.vectors["kind"]
    content = {
        "index": str(index.folder),
        "images": len(index),
        "classes": len(index.classes),
        "dim": index.dim,
        "vectors": kind,
        "bytes_per_vector": stored_bytes(kind, index.dim),
        "engine": index.engine.name,
    }
    return content | ({} if index.changed is None else asdict(index.changed))


def vectors_as_json(file: Path, stored: VectorFile) -> dict[str, Any]:
    """What `embed` wrote, as JSON."""
    from proxymetric.search.storage.state import stored_bytes

    return {
        "file": str(file),
        "images": len(stored),
        "dim": stored.dim,
        "vectors": stored.kind,
        "bytes_per_vector": stored_bytes(stored.kind, stored.dim),
        "bad": stored.bad,
    }


def blocks_as_json(done: EmbeddedBlocks) -> dict[str, Any]:
    """What `embed --parquet` did, as JSON."""
    from dataclasses import asdict

    return asdict(done) | {"folder": str(done.folder)}


def _say_unreadable(queries: Queries) -> None:
    for file, reason in queries.bad.items():
        typer.echo(f"left out, cannot be read: {visible(file)} ({reason})", err=True)


def _errors(queries: Queries, key: str) -> list[dict[str, Any]]:
    """The entries of a JSON answer for the images that could not be read; `key` names the image."""
    return [{key: str(file), "error": reason} for file, reason in queries.bad.items()]


def _end(queries: Queries) -> None:
    """End the command with exit code 1 if an image could not be read."""
    if queries.bad:
        raise typer.Exit(1)


def _write(results: Results) -> Path:
    from proxymetric.data.decoding import read_image
    from proxymetric.search.result_page import write_page

    page = Path(tempfile.mkdtemp(prefix="proxymetric-")) / "results.html"
    # Of images that were searched together, the first one is shown.
    queries = zip(results.titles, results.queries.files, results.hits)
    return write_page(page, [(title, read_image(file), hits) for title, file, hits in queries])


def _cells(answer: Answer) -> list[str]:
    if answer.label is None:
        cells = ["none of these", f"{answer.score:.3f}", f"closest {visible(answer.best)}"]
    else:
        cells = [visible(answer.label), f"{answer.score:.3f}", f"runner-up {visible(answer.runner_up or 'none')}"]
    if answer.has_uncertainty:
        value = answer.uncertainty
        cells.append("no uncertainty: a new class" if value is None else f"uncertainty {value:.3g}")
    return cells
