"""The index that users open, and build of a folder of images: what `pm.Index` is and the verb `index` does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import torch

from proxymetric.arguments.signatures import neighbour, one_of
from proxymetric.core.quantisation import check_kind
from proxymetric.data.folders import ENDINGS, unread_types
from proxymetric.search.atlas import METHODS
from proxymetric.search.engines import check_settings
from proxymetric.search.folder_sync import (
    LAYOUTS,
    AnIndex,
    check_same_folder,
    class_rule,
    default_layout,
    layout_of,
    open_to_rebuild,
    photo_files,
    photo_id,
    sync,
)
from proxymetric.search.items import TrainedModel, loaded
from proxymetric.search.manifest import Manifest, is_index
from proxymetric.search.measuring import advice_on_speed, milliseconds
from proxymetric.search.metadata_file import read_metadata
from proxymetric.search.remote.settings import is_remote
from proxymetric.search.storage.changes import check_place
from proxymetric.search.storage.state import stored_bytes
from proxymetric.search.stored_index import StoredIndex
from proxymetric.system.text import visible
from proxymetric.system.unreadable import MAX_IMAGES_NAMED, unreadable_lines

MAX_EXACT = 200_000
"""images from which another engine is recommended"""


class Index(StoredIndex):
    """A folder of vectors with ids, labels, metadata and thumbnails, searched by cosine similarity.

    `Index.build` makes one of a folder of images, `Index.create` an empty one, and `Index.open` opens one. Every change
    is atomic: a reader, or a process that starts after a crash, sees the index before or after the change. Processes
    that open the same index share its memory.

    Args:
        folder: the folder of an index.
        model: the model whose vectors will be searched for, or its fingerprint; None does not compare.

    Raises:
        ValueError: the folder is not an index, it is damaged, or another model made its vectors.

    Example:
        >>> import tempfile
        >>> index = Index.create(Path(tempfile.mkdtemp()) / "shop.index", dim=2)
        >>> index.add(["a", "b"], torch.eye(2), labels=["cat", "dog"], metadata=[{"shop": "Ulm"}, {"shop": "Bonn"}])
        >>> index.update(["b"], labels=["wolf"])
        >>> [(hit.id, round(hit.similarity, 2), hit.label) for hit in index.search(torch.tensor([[3.0, 4.0]]))[0]]
        [('b', 0.8, 'wolf'), ('a', 0.6, 'cat')]
        >>> [hit.id for hit in index.search(torch.tensor([[3.0, 4.0]]), where={"shop": "Ulm"})[0]]
        ['a']
        >>> index.classes
        {'cat': 1, 'wolf': 1}
        >>> index.delete(["a"])
        >>> len(index), "a" in index
        (1, False)
    """

    @classmethod
    def build(
        cls,
        out: str | Path,
        images: str | Path,
        model: TrainedModel | Callable[[], TrainedModel],
        *,
        metadata: str | Path | None = None,
        layout: str | None = None,
        engine: str | Mapping[str, Any] | None = None,
        dim: int | None = None,
        vectors: str | None = None,
        map: str | None = None,
        parquet: str | Path | None = None,
        rebuild: bool = False,
        drop_added: bool = False,
        replace: bool = False,
        say: Callable[[str], None] | None = None,
        report: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Build an index of a folder of images, or bring it up to date: what `proxymetric index` does.

        Called again, it embeds only new and changed files, and deleted ones drop out. A call that was killed is
        continued by the next one. Nothing is embedded before all arguments were checked.

        Args:
            out: the folder of the index; it is new, empty, or an index.
            images: the folder of images; subfolders are searched too.
            model: the model; or a function that returns it, which is called when the other arguments were checked.
            metadata: a CSV with a column `file` (path in `images`); the column `class` gives labels, the others can be
                filtered by. None keeps what the index has.
            layout: which classes the images have, see `class_rule`; None: as before, and for a new index
                "auto", or "nested" if the model was trained so.
            engine: what searches, see `Index.create`; None: as before, and for a new index "exact".
            dim: the first dimensions of the vectors that are kept; None: as before, and for a new index all.
            vectors: how vectors are stored, see `Index.create`; None: as before, and for a new index "float32".
            map: how the map is made: "tsne", "pca" or "none"; None: as before, and for a new index "tsne".
            parquet: also write ids, classes, metadata and vectors to this file (needs the extra `parquet`).
            rebuild: embed all images again, such as after the model changed.
            drop_added: with `rebuild`, items that are no files of the folder do not stay.
            replace: `images` takes the place of the folder that the index was made of, whose images drop out.
            say: called with each sentence about the work, such as `print`.
            report: called with each line about the index that was built; None: `say` is.
            progress: called with the number of images that are embedded and the number that are to be embedded.

        Returns:
            The index, opened; its `changed` says what was done, and which files cannot be read.

        Raises:
            ValueError: an argument is wrong, no image can be read, or another model made the vectors of the index.

        Example:
            >>> import proxymetric as pm
            >>> model = pm.load("runs/birds")                                              # doctest: +SKIP
            >>> index = pm.Index.build("birds.index", "photos", model, say=print)          # doctest: +SKIP
            >>> index.search(model.embed(["unknown.jpg"]), k=5)                            # doctest: +SKIP
        """
        from proxymetric.search.parquet import check_parquet, write_parquet
        from proxymetric.search.size_picture import draw_sizes

        target, folder = Path(out), Path(images)
        tell = say or (lambda sentence: None)
        _check_folder(folder)
        if drop_added and not rebuild:
            raise ValueError(
                "drop_added: got it without rebuild; expected both, or `proxymetric index remove` to remove some images"
            )
        check_place(target, "out")
        settings = _checked_choices(layout, engine, vectors, map)
        if parquet is not None:
            check_parquet(parquet)
        columns = None if metadata is None else read_metadata(metadata)
        files = _images_in(folder, tell)
        earlier = Manifest.read(target) if is_index(target) else None
        if earlier is not None and not replace and (before := _opened(cls, target, rebuild)) is not None:
            check_same_folder(before, folder, files)
        # Damaged lists of a benchmark are refused before the model is loaded.
        class_rule(folder, layout_of(folder, layout or (earlier.layout if earlier else "auto")))

        whole = loaded(model)
        index = None
        if earlier is not None:
            index = open_to_rebuild(cls, target, settings, drop_added=drop_added) if rebuild else cls(target)
            if (lost := set(earlier.columns).difference(index.manifest.columns)) and columns is None:
                tell(f"lost with damaged files: the metadata {', '.join(sorted(lost))}; --metadata gives it again")
            dim = _earlier_dim(index, whole) if dim is None else dim
        if columns:
            _check_metadata(columns, metadata, {photo_id(file, folder) for file in files}, folder, index or ())
        cut = whole if dim is None else whole.cut_to(dim)
        if index is None:
            index = _created(cls, target, cut, settings, vectors, map)
        elif not rebuild and index.manifest.count:
            _check_fits(index, cut)
        if layout is None and not index.manifest.count:
            layout = default_layout(folder, whole.classes)
        index.changed = sync(
            index,
            cut,
            folder,
            metadata=columns,
            rebuild=rebuild or not index.manifest.count,
            drop_added=drop_added,
            layout=layout,
            on_start=lambda number, total: tell(f"to embed: {number:,} of {total:,} images"),
            progress=progress,
            on_unlisted=lambda name, reason: tell(f"left out: {name} ({reason})"),
            say=tell,
            facts=_new_facts(index.manifest, dict(cut.source), settings, vectors, map),
        )
        index.changed.absent = [name for name in columns or () if name not in index]
        tell("measuring the search")
        picture = draw_sizes(index, whole.nested or ())
        tell_result = report or tell
        if say is not None or report is not None:
            _describe(index, folder, f"{len(columns or ())} files of {metadata}", picture, tell, tell_result)
        if parquet is not None:
            tell_result(f"vectors: {write_parquet(index, parquet)}")
        return index

    @classmethod
    def from_parquet(
        cls,
        out: str | Path,
        parquet: str | Path,
        *,
        engine: str | Mapping[str, Any] | None = None,
        vectors: str | None = None,
        map: str | None = None,
        say: Callable[[str], None] | None = None,
        report: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Load embedded images into an index, without embedding any: what `proxymetric index --from-parquet` does.

        Called again, it loads what is new; a call that was killed is continued by the next one. `Index.build` of the
        same folder of images then embeds only images that are newer than the blocks.

        Args:
            out: the folder of the index; it is new, empty, or an index of the same model.
            parquet: a folder of blocks (`search.embedding_blocks.embed_blocks`), or a file that `build(parquet=...)`
                wrote of another index.
            engine: what searches, see `Index.create`; None: as before, and for a new index "exact".
            vectors: how vectors are stored, see `Index.create`; None: as before, and for a new index "float32".
            map: how the map is made: "tsne", "pca" or "none"; None: as before, and for a new index "tsne".
            say: called with each sentence about the work, such as `print`.
            report: called with each line about the index; None: `say` is.
            progress: called with the number of items that are loaded and the number that are to be loaded.

        Returns:
            The index, opened; its `changed` says what was done, and which images could not be read.

        Raises:
            ValueError: an argument is wrong, a block is missing or damaged, or blocks or index are of another model.

        Example:
            >>> index = Index.from_parquet("birds.index", "blocks", say=print)             # doctest: +SKIP
        """
        from proxymetric.search import from_parquet

        target, tell = Path(out), say or (lambda sentence: None)
        check_place(target, "out")
        settings = _checked_choices(None, engine, vectors, map)
        items = from_parquet.item_files(Path(parquet))
        facts = items[0].facts
        if not is_index(target):
            index = cls.create(
                target,
                facts.dim,
                facts.model,
                engine=settings or "exact",
                map=map or "tsne",
                run=facts.source,
                photos=facts.photos,
                vectors=vectors or "float32",
            )
        index = cls(target)
        if (index.dim, index.model) != (facts.dim, facts.model):
            raise ValueError(
                f"parquet: got {parquet}, made by the model {facts.model[:12]} ({facts.dim} dimensions), but {target} "
                f"has vectors of {index.model[:12]} ({index.dim}); expected blocks of that model, or another --out"
            )
        with index.writing():
            from_parquet.begin(index)
            index.changed = from_parquet.load_items(index, items, say=tell, progress=progress)
            noted = from_parquet.noted_choices(index)
            new = _new_facts(
                index.manifest,
                dict(facts.source),
                settings or noted.get("engine"),
                vectors or noted.get("vectors"),
                map or noted.get("map"),
            )
            if noted or len(new) > 1 or index.changed.added or index.changed.updated:
                index.change(renew=True, say=tell, **new)
            from_parquet.end(index)
        if say is not None or report is not None:
            _describe(index, Path(facts.photos or ""), "", None, tell, report or tell)
        return index


def _check_folder(folder: Path) -> None:
    """Refuse what is not a folder."""
    if folder.is_dir():
        return
    missing = "is a file" if folder.exists() else "does not exist"
    hint = "" if folder.exists() else neighbour(folder, lambda each: each.is_dir() and not is_index(each))
    if folder.suffix.lower() in (".csv", ".tsv"):
        hint = "; --metadata reads the classes (column `class`) and other columns from such a file"
    raise ValueError(f"images: got {folder}, which {missing}; expected a folder of images{hint}")


def _checked_choices(
    layout: str | None, engine: str | Mapping[str, Any] | None, vectors: str | None, map: str | None
) -> dict[str, Any] | None:
    """Refuse what there is not, before any work; return the engine with its settings."""
    if layout is not None:
        one_of("layout", layout, LAYOUTS)
    if map is not None:
        one_of("map", map, METHODS)
    if vectors is not None:
        check_kind(vectors)
    if engine is None:
        return None
    settings = {"name": engine} if isinstance(engine, str) else dict(engine)
    check_settings(settings)
    return settings


def _images_in(folder: Path, tell: Callable[[str], None]) -> list[Path]:
    """The images of a folder, of which there is at least one."""
    unread: Counter[str] = Counter()
    files = [file for file in photo_files(folder, unread=unread) if file.exists()]
    if not files:
        raise ValueError(f"images: got {folder}, which has no images; expected files that end in {', '.join(ENDINGS)}")
    tell(f"{len(files):,} images in {folder}")
    if unread:
        tell(f"left out: {unread_types(unread)}")
    return files


def _opened(cls: type[AnIndex], folder: Path, rebuild: bool) -> AnIndex | None:
    """Open an index; None for one that is damaged and will be rebuilt."""
    try:
        return cls(folder)
    except (ValueError, OSError):
        if rebuild:
            return None
        raise


def _earlier_dim(index: StoredIndex, model: TrainedModel) -> int | None:
    """The dimensions that the vectors of an index were cut to, if this model made them; None: they were not cut."""
    if index.dim >= model.dim:
        return None
    try:
        cut = model.cut_to(index.dim, warn=False)
    except ValueError:
        return None
    return index.dim if cut.fingerprint() == index.model else None


def _check_metadata(
    columns: Iterable[str], file: str | Path | None, ids: set[str], folder: Path, known: Container[str]
) -> None:
    """Refuse metadata of other files: none of its rows is for an image of the folder or of the index."""
    if not any(name in ids or name in known for name in columns):
        raise ValueError(
            f"metadata: got {file}, which names {next(iter(columns))!r} and no image of {folder}; expected paths in "
            f"this folder, such as {min(ids)!r}"
        )


def _created(
    cls: type[AnIndex],
    folder: Path,
    model: TrainedModel,
    engine: dict[str, Any] | None,
    vectors: str | None,
    map: str | None,
) -> AnIndex:
    """Make an empty index, or open the one that another process made a moment ago."""
    try:
        return cls.create(
            folder,
            model.dim,
            model,
            engine=engine or "exact",
            map=map or "tsne",
            run=model.source,
            vectors=vectors or "float32",
        )
    except ValueError:
        if not is_index(folder):
            raise
        return cls(folder)  # the other process holds the lock, or has done the work


def _check_fits(index: StoredIndex, model: TrainedModel) -> None:
    """Refuse a model that did not make the vectors of an index."""
    if index.dim != model.dim:
        raise ValueError(
            f"dim: got {model.dim}, but the vectors of {index.folder} have {index.dim} dimensions; expected --dim "
            f"{index.dim}, another --out, or `proxymetric index --rebuild`"
        )
    index.check_model(model)


def _new_facts(
    manifest: Manifest, run: dict[str, str], engine: dict[str, Any] | None, vectors: str | None, map: str | None
) -> dict[str, Any]:
    """The fields of the manifest that change."""
    facts: dict[str, Any] = {"run": run}
    if vectors is not None and vectors != manifest.vectors["kind"]:
        facts["vectors"] = {"kind": vectors}
    if engine is not None and any(manifest.engine.get(key) != value for key, value in engine.items()):
        facts["engine"] = engine
    if map is not None and map != manifest.map["method"]:
        facts["map"] = {"method": map}
    return facts


def _describe(
    index: StoredIndex,
    folder: Path,
    table: str,
    picture: Path | None,
    say: Callable[[str], None],
    report: Callable[[str], None],
) -> None:
    """Say what was done and left out, how large and how fast the index is, and what would be faster."""
    changed = index.changed
    assert changed is not None
    for line in unreadable_lines([f"{visible(str(folder / name))} ({reason})" for name, reason in changed.bad.items()]):
        say(line)
    if absent := changed.absent:
        more = ", ..." if len(absent) > MAX_IMAGES_NAMED else ""
        named = ", ".join(visible(name) for name in absent[:MAX_IMAGES_NAMED]) + more
        say(f"{len(absent)} of the {table} are not in the index: {named}")
    if changed.continued:
        say(f"continued: {changed.continued} images were embedded before")
    report(
        f"{len(index):,} images in {index.folder}: {changed.added} added, {changed.updated} updated, "
        f"{changed.deleted} deleted, {changed.unchanged} unchanged"
    )
    report(vectors_line(index))
    if picture is not None:
        report(f"bytes against what is found: {picture}")
    if (recall := index.manifest.engine.get("recall")) is not None:
        share, queries = f"{100 * recall['value']:.1f} %", recall["queries"]
        report(
            f"{index.engine.name} finds {share} of the {recall['k']} nearest images, measured with {queries} queries"
        )
        if not is_remote(index.manifest.engine):
            report(advice_on_speed(index.engine, index.vectors))
    if index.engine.name == "exact" and len(index) > MAX_EXACT:
        say(f"more than {MAX_EXACT:,} images: --engine faiss searches faster (extra `index`)")


def vectors_line(index: StoredIndex) -> str:
    """One line about the vectors of an index: their bytes, what they lose against 32 bits, and the time of a search."""
    kind, dim = index.manifest.vectors["kind"], index.dim
    parts = [f"{stored_bytes(kind, dim):,} bytes a vector ({kind}, {dim} dimensions)"]
    lost = index.manifest.vectors.get("lost")
    if lost is None:
        some = torch.stack([index.vector(index.at(row).id) for row in range(min(len(index), 5))])
        return f"{parts[0]}, {milliseconds(index.engine, some):g} ms a query"
    parts.append(f"{100 * lost['recall@10']:.1f} % of the 10 nearest of float32")
    if "MAP@R lost" in lost:
        before, gone = lost["MAP@R"], lost["MAP@R lost"]
        parts.append(f"MAP@R {100 * (before - gone):.1f} instead of {100 * before:.1f} %")
    parts.append(f"{lost['milliseconds']:g} ms a query")
    among = f"measured with {lost['queries']:,} queries among {lost['among']:,} images"
    return f"{', '.join(parts)} ({among})"
