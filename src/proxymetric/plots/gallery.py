"""Queries and their results, right and wrong."""

import base64
import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from proxymetric.metrics import Ranking, per_query
from proxymetric.plots.escaping import escaped

THUMBNAIL_PIXELS = 96
RESULTS_SHOWN = 8


class GalleryHit(NamedTuple):
    """One result: its image, its class, its similarity with the query, and whether it has the query's class."""

    image: Image.Image
    class_name: str
    score: float
    right: bool
    file: str = ""
    """name of the image's file, shown when the mouse rests on the image"""


class GalleryRow(NamedTuple):
    """A query and its results, nearest first."""

    query: Image.Image
    query_class: str
    results: list[GalleryHit]
    file: str = ""
    """name of the query's file"""


def pick_queries(ranking: Ranking, count: int, seed: int = 0) -> list[int]:
    """Choose queries to show, from best to worst, so that good and bad results appear in their true proportion.

    The queries are sorted by average precision and cut into `count` equal parts; one query is drawn from each.

    Args:
        ranking: from `proxymetric.metrics.rank`; precision is averaged over min(R, k) results.
        count: the number of queries, at least 1; there are fewer if the ranking has fewer.
        seed: seed of the draws.

    Returns:
        Rows of the ranking, the best first.

    Example:
        >>> hits = torch.tensor([[False], [True], [True], [False]])
        >>> ones = torch.ones(4, dtype=torch.long)
        >>> rows = pick_queries(Ranking(hits, ones, ones[:, None], torch.arange(4), left_out=0), count=2)
        >>> hits[rows].flatten().tolist()
        [True, False]
    """
    if count < 1:
        raise ValueError(f"count: got {count}, expected a number of at least 1")
    clipped_ranking = ranking._replace(relevant=ranking.relevant.clamp(max=ranking.hits.shape[1]))
    quality = per_query(clipped_ranking, "MAP@R")["MAP@R"].numpy()
    order = np.argsort(-quality, kind="stable")
    generator = np.random.default_rng(seed)
    parts = np.array_split(order, min(count, len(order))) if len(order) else []
    return [int(generator.choice(part)) for part in parts]


def gallery_rows(
    ranking: Ranking,
    rows: Sequence[int],
    embeddings: Tensor | np.ndarray,
    labels: Tensor | np.ndarray | Sequence[int],
    classes: Sequence[str],
    read: Callable[[int], Image.Image],
    top: int = RESULTS_SHOWN,
    file: Callable[[int], str] = lambda index: "",
) -> list[GalleryRow]:
    """Build gallery rows of a leave-one-out ranking, with cosine similarities.

    Args:
        ranking: a leave-one-out ranking with at least one result for each query.
        rows: rows of the ranking, for example from `pick_queries`.
        embeddings: (N, D) the ranked embeddings.
        labels: (N,) indices into `classes`.
        classes: names of the classes.
        read: a function that returns the image of an index.
        top: the number of results for each query.
        file: a function that returns the file name of an index; by default none is shown.

    Example:
        >>> from proxymetric.metrics import rank
        >>> vectors, labels = torch.tensor([[3.0, 4.0], [3.0, 4.0], [1.0, 0.0]]), [0, 0, 1]
        >>> row = gallery_rows(rank(vectors, labels, k=2), [0], vectors, labels, ["cat", "dog"], lambda i: i)[0]
        >>> row.query_class, [(hit.class_name, hit.right, round(hit.score, 2)) for hit in row.results]
        ('cat', [('cat', True, 1.0), ('dog', False, 0.6)])
    """
    vectors = torch.as_tensor(embeddings)
    gallery = []
    for row in rows:
        query = int(ranking.queries[row])
        neighbours = [index for index in ranking.neighbours[row, :top].tolist() if index >= 0]
        similarity = torch.cosine_similarity(vectors[query, None].double(), vectors[neighbours].double())
        hits = [
            GalleryHit(read(index), classes[int(labels[index])], float(score), bool(right), file(index))
            for index, score, right in zip(neighbours, similarity, ranking.hits[row])
        ]
        gallery.append(GalleryRow(read(query), classes[int(labels[query])], hits, file(query)))
    return gallery


def data_uri(image: Image.Image, longest: int = THUMBNAIL_PIXELS) -> str:
    """An image of at most `longest` pixels a side as a data URI: PNG or JPEG, whichever is smaller."""
    thumbnail = image.convert("RGB")
    thumbnail.thumbnail((longest, longest))
    formats: dict[str, dict] = {"png": {"optimize": True}, "jpeg": {"quality": 85}}
    encoded = {}
    for format_name, options in formats.items():
        buffer = io.BytesIO()
        thumbnail.save(buffer, format_name, **options)
        encoded[format_name] = buffer.getvalue()
    format_name = min(encoded, key=lambda name: len(encoded[name]))
    return f"data:image/{format_name};base64,{base64.b64encode(encoded[format_name]).decode()}"


def title_of(file: str) -> str:
    """The attribute that shows a file name when the mouse rests on an image; nothing without a name."""
    return f' title="{escaped(file)}"' if file else ""


def gallery_html(rows: Sequence[GalleryRow]) -> str:
    """The rows as HTML figures; marks and frames, not only colours, distinguish right from wrong."""
    return "\n".join(_row(row) for row in rows)


def _row(row: GalleryRow) -> str:
    right = sum(hit.right for hit in row.results)
    name = escaped(row.query_class)
    results = "".join(_hit(place, hit) for place, hit in enumerate(row.results, start=1))
    return (
        f'<article class="find"><figure class="query"><div class="frame">'
        f'<img src="{data_uri(row.query)}" alt="query, class {name}"{title_of(row.file)}></div>'
        f'<figcaption><span class="name" title="{name}">{name}</span>'
        f'<span class="score">{right} of {len(row.results)} right</span></figcaption></figure>'
        f'<ol class="hits">{results}</ol></article>'
    )


def _hit(place: int, hit: GalleryHit) -> str:
    verdict, mark = ("right", "✓") if hit.right else ("wrong", "✗")
    name = escaped(hit.class_name)
    return (
        f'<li class="{verdict}"><figure><div class="frame">'
        f'<img src="{data_uri(hit.image)}" alt="result {place}, {verdict}, class {name}"{title_of(hit.file)}>'
        f'<span class="mark" title="{verdict}" aria-hidden="true">{mark}</span></div>'
        f'<figcaption><span class="name" title="{name}">{name}</span>'
        f'<span class="score">{hit.score:.2f}</span></figcaption></figure></li>'
    )
