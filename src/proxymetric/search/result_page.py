"""A page that shows images and what is similar to them: one HTML file without scripts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from proxymetric.plots.escaping import escaped
from proxymetric.plots.gallery import data_uri
from proxymetric.plots.report import PAGE_MARK
from proxymetric.plots.style import CSS
from proxymetric.system.files import replacing

PIXELS = 160


class Found(NamedTuple):
    """A result: the name, class and similarity that are shown, and a function that reads its image."""

    name: str
    label: str | None
    similarity: float
    image: Callable[[], Image.Image | None]
    """returns the image, or None if it cannot be shown"""
    metadata: Mapping[str, Any] | None = None
    """None for a file of vectors, which has no metadata"""


def write_page(path: str | Path, results: Sequence[tuple[str, Image.Image, Sequence[Found]]]) -> Path:
    """Write the page. It replaces an existing file only when it is complete.

    Args:
        path: the HTML file.
        results: for each query its name, its image, and what was found.

    Returns:
        The path.

    Example:
        >>> import tempfile
        >>> grey = Image.new("RGB", (8, 8), "grey")
        >>> hits = [Found("a", "cat", 1.0, grey.copy)]
        >>> page = write_page(Path(tempfile.mkdtemp()) / "a.html", [("q.jpg", grey, hits)])
        >>> "cat" in page.read_text()
        True
    """
    sections = "\n".join(_section(name, image, hits) for name, image, hits in results)
    with replacing(path) as temporary:
        temporary.write_text(
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{PAGE_MARK}'
            '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Similar images</title>'
            f"<style>{CSS}</style></head><body><header><h1>Similar images</h1></header>"
            f"<main>{sections}</main></body></html>\n",
            encoding="utf-8",
        )
    return Path(path)


def _section(name: str, image: Image.Image, hits: Sequence[Found]) -> str:
    items = "".join(_hit(rank, hit) for rank, hit in enumerate(hits, 1))
    return (
        f'<section><h2>{escaped(name)}</h2><div class="find"><figure class="query"><div class="frame">'
        f'<img src="{data_uri(image, PIXELS)}" alt="query"></div><figcaption>query</figcaption></figure>'
        f'<ol class="hits">{items}</ol></div></section>'
    )


def _hit(rank: int, hit: Found) -> str:
    image, name = hit.image(), escaped(hit.label or hit.name)
    picture = "" if image is None else f'<img src="{data_uri(image, PIXELS)}" alt="result {rank}: {escaped(hit.name)}">'
    return (
        f'<li><figure><div class="frame" title="{escaped(hit.name)}">{picture}</div><figcaption>'
        f'<span class="name">{name}</span><span class="score">{hit.similarity:.3f}</span></figcaption></figure></li>'
    )
