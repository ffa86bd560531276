"""Ask with image files: what is similar to them, in an index or in a folder, and which class of an index they show."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.data.decoding import BadImage, read_encoded, read_image
from proxymetric.search.batches import unit_rows
from proxymetric.search.class_photos import id_of
from proxymetric.search.conditions import CLASS_COLUMN, Condition, as_conditions, text_of
from proxymetric.search.identify import Answer, Identifier, IndexedQueries
from proxymetric.search.index import Index
from proxymetric.search.items import FileEmbedder, loaded
from proxymetric.search.manifest import is_index
from proxymetric.search.result_page import Found
from proxymetric.search.searching import checked_question
from proxymetric.search.vector_file import CuttableModel, VectorFile

if TYPE_CHECKING:
    from PIL import Image


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
    def embed(cls, model: FileEmbedder, images: Sequence[Path]) -> Queries:
        """Embed the images of a question.

        Raises:
            ValueError: no image can be read.
        """
        reasons: list[str] = []
        vectors, kept = model.embed(images, errors="skip", on_bad=lambda title, reason: reasons.append(reason))
        if not kept:
            model.embed(images, errors="raise")  # says what is wrong with the first image
        others = sorted(set(range(len(images))) - set(kept))
        return cls(
            [images[i] for i in kept], vectors, {images[i]: reason for i, reason in zip(others, reasons, strict=True)}
        )


class Results(NamedTuple):
    """What is similar to each image of a question."""

    queries: Queries
    hits: list[list[Found]]
    """for each image that could be read, or for all of them together, what was found, the most similar first"""
    offset: int = 0
    """the results that were left out first"""

    @property
    def titles(self) -> list[str]:
        """The name of each query; of images that were searched together, all names."""
        names = [str(file) for file in self.queries.files]
        return names if len(self.hits) == len(names) else [" + ".join(names)]


class Identified(NamedTuple):
    """Which class each image of a question shows."""

    queries: Queries
    answers: list[Answer]
    """for each image that could be read"""
    in_index: list[bool]
    """whether the image is an item of the index, and was left out of its own class"""
    identifier: Identifier


def search_index(
    index: Index,
    model: FileEmbedder | Callable[[], FileEmbedder],
    images: Sequence[Path],
    k: int = 10,
    where: Mapping[str, Any] | Iterable[str | Condition] | None = None,
    differs: Mapping[str, str | None] | None = None,
    *,
    offset: int = 0,
    min_similarity: float | None = None,
    one_per: str | None = None,
    together: bool = False,
) -> Results:
    """Find the images of an index that are most similar to each of some image files.

    An image that is in the index itself is left out of its own results.

    Args:
        index: the index.
        model: the model that made its vectors; or a function that returns it, called when the question was checked.
        images: image files; those that cannot be read are named in the results.
        k: results for each image.
        where: conditions, see `Index.search`: `class` is the label, other names are metadata columns.
        differs: column -> a value that the results do not have; None: the value of each image, which is in the index.
        offset: the first results that are left out, for the next page.
        min_similarity: only items at least this similar.
        one_per: a column; of items with the same value, only the most similar one is a result.
        together: all images are one query: the mean of their vectors of unit length.

    Raises:
        ValueError: an argument is wrong, or no image can be read.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    if not len(index):
        raise ValueError(f"index: got {index.folder}, which has no images yet; expected one that `index` has finished")
    conditions = as_conditions(where)
    for condition in conditions:
        if condition.column == CLASS_COLUMN and condition.operator in ("=", "!="):
            for value in condition.values:
                one_of("where class", text_of(value), index.classes)
    checked_question(index.manifest.columns, k, conditions, differs, offset, min_similarity, one_per)
    unvalued = [column for column, value in (differs or {}).items() if value is None]
    if together and unvalued:
        raise ValueError(
            f"differs: got {unvalued[0]!r} for images that are searched together, which may have several; expected "
            f"{unvalued[0]}=VALUE"
        )
    queries = Queries.embed(loaded(model), images)
    ids = [id_of(index, file) for file in queries.files]
    hit_lists = index.search(
        mean_query(queries.vectors) if together else queries.vectors,
        k,
        conditions,
        [[item for item in ids if item is not None]] if together else ids,
        _values_of(index, differs or {}, ids),
        offset=offset,
        min_similarity=min_similarity,
        one_per=one_per,
    )
    return Results(
        queries,
        [
            [Found(hit.id, hit.label, hit.similarity, partial(_thumbnail, index, hit.id), hit.metadata) for hit in hits]
            for hits in hit_lists
        ],
        offset,
    )


def search_folder(
    folder: Path,
    model: CuttableModel | Callable[[], CuttableModel],
    images: Sequence[Path],
    k: int = 10,
    say: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Results:
    """Find the images of a folder that are most similar to each of some image files.

    The class of a result is the folder of its file directly under `folder`. An image is left out of its own results.

    Args:
        folder: a folder of images, which are embedded; or a file that `VectorFile.build` wrote with the same model.
        model: the model; or a function that returns it, called when the question was checked.
        images: image files; those that cannot be read are named in the results.
        k: results for each image.
        say: called with a sentence about each image of the folder that is left out.
        progress: called with the number of images of the folder that are embedded, and their number.

    Raises:
        ValueError: an argument is wrong, no image can be read, or another model made the vectors of the file.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    if is_index(folder):
        raise ValueError(
            f"images: got {folder}, which is an index; expected a folder of images or a file that `embed` wrote. To "
            f"search the index: `proxymetric search {folder} {images[0]}`"
        )
    embedder = loaded(model)
    if folder.is_file():
        stored = VectorFile.load(folder)
        if stored.dim < embedder.dim:
            with contextlib.suppress(ValueError):  # the vectors are those of another model
                embedder = embedder.cut_to(stored.dim, warn=False)
        stored.check_model(embedder, folder)
        queries = Queries.embed(embedder, images)
    else:
        queries = Queries.embed(embedder, images)  # first, so that a bad image costs no embedding of the folder
        stored = VectorFile.of_folder(folder, embedder, say=say, progress=progress)
    class_of = dict(zip(stored.names, stored.classes, strict=True))
    hit_lists = stored.search(queries.vectors, k, without=[str(path) for path in queries.files])
    return Results(
        queries,
        [[Found(name, class_of[name], score, partial(_image, name)) for name, score in hits] for hits in hit_lists],
    )


def identify_files(
    index: Index,
    model: FileEmbedder | Callable[[], FileEmbedder],
    images: Sequence[Path],
    far: float = 0.01,
    run: str | Path | None = None,
) -> Identified:
    """Say which class of an index each of some image files shows, or none of them.

    Args:
        index: the index.
        model: the model that made its vectors; or a function that returns it, called when the question was checked.
        images: image files; those that cannot be read are named in the results.
        far: the false-accept rate: the share of images of other classes that are taken for one of these.
        run: the run that made the index; None: as the index says.

    Raises:
        ValueError: an argument is wrong, no image can be read, or there are too few classes to calibrate with.
    """
    embedder = loaded(model)
    identifier = Identifier(index, run)
    identifier.threshold(far)
    queries = Queries.embed(embedder, images)
    indexed = IndexedQueries.of(index, [id_of(index, file) for file in queries.files])
    return Identified(queries, identifier(queries.vectors, far, indexed), (indexed.rows >= 0).tolist(), identifier)


def mean_query(vectors: Tensor) -> Tensor:
    """Make one query of several vectors: the mean of them, each of unit length first, (1, D).

    Example:
        >>> mean_query(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
        tensor([[0.5000, 0.5000]])
    """
    return torch.from_numpy(unit_rows(vectors)).mean(dim=0, keepdim=True)


def _values_of(
    index: Index, differs: Mapping[str, str | None], ids: Sequence[str | None]
) -> dict[str, str | Sequence[str | None] | None]:
    """For each column of `differs` the value of each query, whose ids in the index are given; None: it has none."""
    values: dict[str, str | Sequence[str | None] | None] = {}
    for column, value in differs.items():
        if value is None and any(item is None or item not in index for item in ids):
            raise ValueError(
                f"differs: got {column!r} for an image that is not in {index.folder}, whose {column} is not known; "
                f"expected {column}=VALUE"
            )
        values[column] = [index.value_of(str(item), column) for item in ids] if value is None else value
    return values


def _thumbnail(index: Index, item: str) -> Image.Image | None:
    """The thumbnail of an item; None without one that can be read."""
    content = index.thumbnail(item)
    try:
        return None if content is None else read_encoded(io.BytesIO(content), item)
    except BadImage:
        return None


def _image(name: str) -> Image.Image | None:
    """The image of a result; None if it cannot be read any more."""
    try:
        return read_image(name)
    except BadImage:
        return None
