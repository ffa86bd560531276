"""Verbs for an index: index, search."""

from __future__ import annotations

import io
import os
import shlex
from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.arguments.signatures import one_of
from proxymetric.cli.results import AsJson, ImageArgument, OpenPage
from proxymetric.cli.root import CutDim, Device, RunOrFile, SlimWeights, VectorKind, Which, app, example
from proxymetric.system.text import visible

if TYPE_CHECKING:
    from PIL import Image

    from proxymetric.models.model import Model
    from proxymetric.search import Index

MAX_EXACT = 200_000
"""images from which another engine is recommended"""
IndexFolder = Annotated[Path, typer.Argument(metavar="INDEX", help="Folder that `index` wrote.")]
OtherRun = Annotated[
    str | None,
    typer.Option("--run", help="The run that made the index, if it is not where it was then; or hf://owner/name."),
]


@app.command(
    short_help="Index a folder of images, so that it can be searched.",
    epilog=example(
        "proxymetric index runs/birds PHOTOS --out birds.index",
        "proxymetric index runs/birds PHOTOS --out birds.index --metadata items.csv",
    ),
)
def index(
    run: RunOrFile,
    folder: Annotated[Path, typer.Argument(metavar="PHOTOS", help="Folder of images; subfolders are searched too.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the index. Default: PHOTOS.index.")] = None,
    metadata: Annotated[
        Path | None,
        typer.Option(
            help="CSV with a column `file` (path in PHOTOS); the column `class` gives labels, and `search --where` "
            "filters by the others."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Which classes the images have, as data.layout in training: auto (the folders directly under PHOTOS, "
            "or under its parts train/, test/, ..., or the classes of a benchmark such as CUB-200-2011), folder "
            "(always the folders directly under PHOTOS), nested (the whole path), or a benchmark: cub, cars, sop, ... "
            "Default: as before; for a new index auto, or nested if the model was trained so."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="What searches: exact (default), faiss beyond about 200,000 images (extra `index`), or milvus (extra "
            "`milvus`)."
        ),
    ] = None,
    uri: Annotated[
        str | None, typer.Option(help="For milvus: a file such as shop.db, or a server such as http://host:19530.")
    ] = None,
    engine_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-set",
            metavar="KEY=VALUE",
            help="Setting of the engine: kind (faiss); partitions, replicas, consistency, batch (milvus). Repeatable.",
        ),
    ] = None,
    dim: CutDim = None,
    vectors: VectorKind = None,
    map_method: Annotated[
        str | None, typer.Option("--map", help="How the map is made: tsne (default), pca or none.")
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(help="Also write ids, classes, metadata and vectors to this Parquet file (extra `parquet`)."),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Embed all images of PHOTOS again, such as after the model changed.")
    ] = False,
    drop_added: Annotated[
        bool,
        typer.Option(
            "--drop-added",
            help="With --rebuild: drop the images that `add-class` or Python code added, which are no files of PHOTOS.",
        ),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="PHOTOS takes the place of the folder that the index was made of.")
    ] = False,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
) -> None:
    """Index a folder of images: vectors, classes, thumbnails and a map, in a folder that `search` and `serve` open.

    The same command again brings the index up to date: only new and changed files are embedded, and deleted ones drop
    out. Another folder for the same index is refused if images would be deleted, unless --replace says so. A command
    that was killed is continued by the same command. The class is the folder directly under PHOTOS, or under its parts
    train/, test/ and so on; in the folder of a benchmark such as CUB-200-2011 it is the class that training reads.
    --layout and --metadata say otherwise.

    Images that `add-class` added stay, also with --rebuild. Another model cannot embed them again, so that --rebuild by
    another model is refused if there are any, unless --drop-added says that they drop out.
    """
    from proxymetric.arguments.signatures import neighbour
    from proxymetric.cli.trained import load_model, unfinished
    from proxymetric.core.quantisation import check_kind
    from proxymetric.data.folders import ENDINGS, unread_types
    from proxymetric.models.hub_client import is_address
    from proxymetric.search import Index
    from proxymetric.search.engines.milvus import left_behind
    from proxymetric.search.folder_sync import (
        LAYOUTS,
        check_same_folder,
        class_rule,
        layout_of,
        open_to_rebuild,
        photo_files,
        sync,
    )
    from proxymetric.search.generation import check_place
    from proxymetric.search.manifest import Manifest, is_index
    from proxymetric.search.measuring import advice_on_speed
    from proxymetric.search.metadata_file import read_metadata
    from proxymetric.search.size_picture import draw_sizes
    from proxymetric.system.terminal import Terminal
    from proxymetric.system.unreadable import MAX_IMAGES_NAMED, unreadable_lines

    terminal = Terminal()
    target = out if out is not None else Path(f"{folder.resolve().name}.index")
    if not folder.is_dir():
        missing = "is a file" if folder.exists() else "does not exist"
        hint = "" if folder.exists() else neighbour(folder, lambda each: each.is_dir() and not is_index(each))
        if folder.suffix.lower() in (".csv", ".tsv"):
            hint = "; --metadata reads the classes (column `class`) and other columns from such a file"
        raise ValueError(f"PHOTOS: got {folder}, which {missing}; expected a folder of images{hint}")
    if drop_added and not rebuild:
        raise ValueError(
            "--drop-added: got it without --rebuild; expected both, or `proxymetric remove` to remove some images"
        )
    check_place(target, "--out")
    if layout is not None:
        one_of("--layout", layout, LAYOUTS)
    if parquet is not None:
        from proxymetric.search.parquet import check_parquet

        check_parquet(parquet)
    chosen_engine = engine_of(engine, uri, engine_settings or [])
    columns = None if metadata is None else read_metadata(metadata)
    unread: Counter[str] = Counter()
    files = [file for file in photo_files(folder, unread=unread) if file.exists()]
    if not files:
        raise ValueError(f"PHOTOS: got {folder}, which has no images; expected files that end in {', '.join(ENDINGS)}")
    if is_index(target) and not replace and (earlier := _opened(target, rebuild)) is not None:
        check_same_folder(earlier, folder, files)
    chosen = layout or (Manifest.read(target).layout if is_index(target) else "auto")
    class_rule(folder, layout_of(folder, chosen))  # refuses damaged lists of a benchmark before the model is loaded
    terminal.say(f"{len(files):,} images in {folder}")
    if unread:
        terminal.say(f"left out: {unread_types(unread)}")
    model = load_model(run, which, device, weights)
    for sentence in unfinished(run):
        terminal.say(sentence)
    existing = None
    if is_index(target):
        columns_before = set(Manifest.read(target).columns)
        existing = open_to_rebuild(target, chosen_engine, drop_added=drop_added) if rebuild else Index(target)
        if (lost := columns_before.difference(existing.manifest.columns)) and columns is None:
            terminal.say(f"lost with damaged files: the metadata {', '.join(sorted(lost))}; --metadata gives it again")
        dim = _earlier_dim(existing, model) if dim is None else dim
    if columns:
        _check_metadata(columns, metadata, folder, files, () if existing is None else existing)
    if dim is not None:
        model = model.cut_to(dim)
    if existing is not None and not rebuild and existing.manifest.count and existing.dim != model.dim:
        raise ValueError(
            f"dim: got {model.dim}, but the vectors of {target} have {existing.dim} dimensions; expected --dim "
            f"{existing.dim}, another --out, or --rebuild"
        )
    source = {"run": run if is_address(run) else os.path.abspath(run), "which": which}
    if weights is not None:
        source["weights"] = os.path.abspath(weights)
    if existing is None:
        try:
            existing = Index.create(
                target,
                model.dim,
                model,
                engine=chosen_engine or "exact",
                map=map_method or "tsne",
                run=source,
                vectors=vectors or "float32",
            )
        except ValueError:
            if not is_index(target):
                raise
            existing = Index(target)  # another process made it a moment ago: it holds the lock, or has done the work
    elif not rebuild and existing.manifest.count:
        existing.check_model(model)
    is_folders = layout_of(folder) == "auto"
    if layout is None and is_folders and not existing.manifest.count and any("/" in name for name in model.classes):
        layout = "nested"  # classes such as fruit/apple come from this layout of the training data
    facts: dict[str, dict[str, Any]] = {"run": source}
    if vectors is not None and vectors != existing.manifest.vectors["kind"]:
        check_kind(vectors)
        facts["vectors"] = {"kind": vectors}
    if chosen_engine is not None and any(existing.manifest.engine.get(k) != v for k, v in chosen_engine.items()):
        facts["engine"] = chosen_engine
    if map_method is not None and map_method != existing.manifest.map["method"]:
        facts["map"] = {"method": map_method}
    engine_before = existing.manifest.engine
    changed = sync(
        existing,
        model,
        folder,
        metadata=columns,
        rebuild=rebuild or not existing.manifest.count,
        drop_added=drop_added,
        layout=layout,
        on_start=lambda number, total: terminal.say(f"to embed: {number:,} of {total:,} images"),
        progress=lambda done, total: terminal.work("embedding", done, total),
        on_unlisted=lambda name, reason: terminal.say(f"left out: {name} ({reason})"),
        facts=facts,
    )
    bad = [f"{visible(str(folder / name))} ({reason})" for name, reason in changed.bad.items()]
    for line in unreadable_lines(bad):
        terminal.say(line)
    if columns and (absent := [name for name in columns if name not in existing]):
        more = ", ..." if len(absent) > MAX_IMAGES_NAMED else ""
        named = ", ".join(map(visible, absent[:MAX_IMAGES_NAMED])) + more
        terminal.say(f"{len(absent)} of the {len(columns)} files of {metadata} are not in the index: {named}")
    if changed.continued:
        terminal.say(f"continued: {changed.continued} images were embedded before")
    terminal.print(
        f"{len(existing):,} images in {target}: {changed.added} added, {changed.updated} updated, {changed.deleted} "
        f"deleted, {changed.unchanged} unchanged"
    )
    terminal.print(vectors_line(existing))
    if picture := draw_sizes(existing, model.nested or ()):
        terminal.print(f"bytes against what is found: {picture}")
    if (recall := existing.manifest.engine.get("recall")) is not None:
        share, queries = f"{100 * recall['value']:.1f} %", recall["queries"]
        terminal.print(f"faiss finds {share} of the {recall['k']} nearest images, measured with {queries} queries")
        terminal.print(advice_on_speed(existing.engine, existing.vectors))
    if existing.engine.name == "exact" and len(existing) > MAX_EXACT:
        terminal.say(f"more than {MAX_EXACT:,} images: --engine faiss searches faster (extra `index`)")
    if (remains := left_behind(engine_before, existing.manifest.engine)) is not None:
        terminal.say(remains)
    if parquet is not None:
        from proxymetric.search.parquet import write_parquet

        terminal.print(f"vectors: {write_parquet(existing, parquet)}")
    quoted = shlex.quote(visible(target))
    terminal.say(f"next:\n  proxymetric search {quoted} unknown.jpg\n  proxymetric serve {quoted}")


def _opened(target: Path, rebuild: bool) -> Index | None:
    """Open an index; None for one that is damaged and will be rebuilt."""
    from proxymetric.search import Index

    try:
        return Index(target)
    except (ValueError, OSError):
        if rebuild:
            return None
        raise


def _check_metadata(
    columns: Mapping[str, object], file: Path | None, folder: Path, images: Sequence[Path], known: Container[str]
) -> None:
    """Refuse metadata of other files: none of its rows is for an image of the folder or of the index."""
    from proxymetric.search.folder_sync import photo_id

    ids = {photo_id(path, folder) for path in images}
    if not any(name in ids or name in known for name in columns):
        raise ValueError(
            f"--metadata: got {file}, which names {next(iter(columns))!r} and no image of {folder}; expected paths in "
            f"this folder, such as {min(ids)!r}"
        )


@app.command(
    short_help="Find the images of an index most similar to a given one.",
    epilog=example(
        "proxymetric search birds.index unknown.jpg -k 5",
        "proxymetric search birds.index unknown.jpg --where class=wren --json",
        "proxymetric search birds.index PHOTOS/wren/7.jpg --differs camera",
    ),
)
def search(
    folder: IndexFolder,
    image: ImageArgument,
    k: Annotated[int, typer.Option("-k", help="Results for each image.")] = 10,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="COLUMN=VALUE", help="Only images with this value: class=..., or a metadata column."),
    ] = None,
    differs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN[=VALUE]",
            help="Leave out images with the value of IMAGE in this column, such as its camera. Without VALUE, IMAGE "
            "must be in the index.",
        ),
    ] = None,
    as_json: AsJson = False,
    open_page: OpenPage = False,
    run: OtherRun = None,
    device: Device = None,
) -> None:
    """Find the images of an index that are most similar to a given image.

    In a terminal each IMAGE gets a table. Elsewhere each result is a line of query, rank, similarity, class and file,
    separated by tabs; messages go to the error stream. Files are relative to the folder that was indexed. An IMAGE that
    cannot be read is named, the others are searched, and the exit code is 1. An IMAGE that is in the index itself is
    left out of its own results.
    """
    from proxymetric.cli.results import Queries, print_results
    from proxymetric.search import Index
    from proxymetric.search.class_photos import id_of
    from proxymetric.search.result_page import Found
    from proxymetric.search.rows import CLASS_COLUMN
    from proxymetric.serve.searcher import model_of

    opened = Index(folder)
    if not len(opened):
        raise ValueError(f"INDEX: got {folder}, which has no images yet; expected an index that `index` has finished")
    check_images(image)
    conditions = conditions_of(where or [])
    if CLASS_COLUMN in conditions:
        one_of("--where class", conditions[CLASS_COLUMN], opened.classes)
    queries = Queries.embed(model_of(opened, run, device), image)
    ids = [id_of(opened, file) for file in queries.files]
    others = differs_of(opened, differs or [], ids)
    hit_lists = opened.search(queries.vectors, k, conditions, without=ids, differs=others)
    results = [
        (file, [Found(hit.id, hit.label, hit.similarity, _thumbnail(opened, hit.id), hit.metadata) for hit in hits])
        for file, hits in zip(queries.files, hit_lists, strict=True)
    ]
    if (where or differs) and not any(hits for _, hits in results):
        words = " ".join(
            [*(f"--where {visible(text)}" for text in where or []), *(f"--differs {visible(t)}" for t in differs or [])]
        )
        typer.echo(f"no other image of {visible(folder)} matches {words}", err=True)
    print_results(results, as_json, open_page, queries.errors())
    queries.end()


def differs_of(opened: Index, texts: list[str], ids: list[str | None]) -> dict[str, str | Sequence[str | None] | None]:
    """What `--differs` asks for: for each column the value of each query.

    Args:
        opened: the index.
        texts: `COLUMN=VALUE`, or `COLUMN` for the values that the queries have in the index.
        ids: the id of each query in the index; None for another image.

    Raises:
        ValueError: the value of a query is not known.
    """
    wanted: dict[str, str | Sequence[str | None] | None] = {}
    for text in texts:
        column, given, value = text.partition("=")
        if given:
            wanted[column] = value
            continue
        if any(item is None or item not in opened for item in ids):
            raise ValueError(
                f"--differs: got {column!r} for an image that is not in {opened.folder}, whose {column} is not known; "
                f"expected {column}=VALUE"
            )
        wanted[column] = [opened.value_of(item, column) for item in ids if item is not None]
    return wanted


def vectors_line(opened: Index) -> str:
    """One line about the vectors of an index: their bytes, what they lose against 32 bits, and the time of a search."""
    import torch

    from proxymetric.search.measuring import milliseconds
    from proxymetric.search.stored_vectors import stored_bytes

    kind, dim = opened.manifest.vectors["kind"], opened.dim
    parts = [f"{stored_bytes(kind, dim):,} bytes a vector ({kind}, {dim} dimensions)"]
    lost = opened.manifest.vectors.get("lost")
    if lost is None:
        some = torch.stack([opened.vector(opened.at(row).id) for row in range(min(len(opened), 5))])
        return f"{parts[0]}, {milliseconds(opened.engine, some):g} ms a query"
    parts.append(f"{100 * lost['recall@10']:.1f} % of the 10 nearest of float32")
    if "MAP@R lost" in lost:
        before, gone = lost["MAP@R"], lost["MAP@R lost"]
        parts.append(f"MAP@R {100 * (before - gone):.1f} instead of {100 * before:.1f} %")
    parts.append(f"{lost['milliseconds']:g} ms a query")
    among = f"measured with {lost['queries']:,} queries among {lost['among']:,} images"
    return f"{', '.join(parts)} ({among})"


def _earlier_dim(existing: Index, model: Model) -> int | None:
    """The dimensions that the vectors of an index were cut to, if this model made them; None: they were not cut."""
    if existing.dim >= model.dim:
        return None
    try:
        cut = model.cut_to(existing.dim, warn=False)
    except ValueError:
        return None
    return existing.dim if cut.fingerprint() == existing.model else None


def engine_of(name: str | None, uri: str | None, settings: list[str]) -> dict[str, Any] | None:
    """Return the engine and its settings as the options say; None if they say nothing."""
    from proxymetric.search.engines import check_settings

    if name is None:
        if uri is not None or settings:
            raise ValueError("--engine: got none with --uri or --engine-set, expected faiss or milvus")
        return None
    chosen: dict[str, Any] = {"name": name}
    if uri is not None:
        chosen["uri"] = uri if "://" in uri else os.path.abspath(uri)
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--engine-set: got {text!r}, expected KEY=VALUE")
        chosen[key] = int(value) if value.isdecimal() else value
    check_settings(chosen)
    return chosen


def conditions_of(where: list[str]) -> dict[str, str]:
    """Read conditions such as `class=wren`."""
    conditions: dict[str, str] = {}
    for text in where:
        column, equals, value = text.partition("=")
        if not equals or not column:
            raise ValueError(f"--where: got {text!r}, expected COLUMN=VALUE, such as class=wren")
        if column in conditions:
            raise ValueError(f"--where: got {column!r} twice, expected each column once")
        conditions[column] = value
    return conditions


def check_images(images: Sequence[Path], argument: str = "IMAGE", every: bool = False) -> None:
    """Refuse folders, and files that are not there, before a model is loaded.

    Args:
        images: what should be image files.
        argument: name of the argument, for the error.
        every: refuse a single missing file; otherwise only if all are missing, and the others are searched.

    Raises:
        ValueError: see above.
    """
    from proxymetric.arguments.signatures import neighbour
    from proxymetric.data.folders import ENDINGS

    for image in images:
        if image.is_dir():
            patterns = (f"{folders}*{ending}" for folders in ("", "*/") for ending in ENDINGS)
            example = next((pattern for pattern in patterns if next(image.glob(pattern), None) is not None), None)
            such = f", such as {image / example}" if example else ""
            raise ValueError(f"{argument}: got {image}, which is a folder; expected image files{such}")
    missing = [image for image in images if not image.exists()]
    if missing and (every or len(missing) == len(images)):
        hint = neighbour(missing[0], lambda each: each.name.lower().endswith(ENDINGS))
        raise ValueError(f"{argument}: got {visible(missing[0])}, which does not exist; expected an image file{hint}")


def _thumbnail(opened: Index, item: str) -> Callable[[], Image.Image | None]:
    def read() -> Image.Image | None:
        from proxymetric.data.decoding import BadImage, read_encoded

        content = opened.thumbnail(item)
        try:
            return None if content is None else read_encoded(io.BytesIO(content), item)
        except BadImage:
            return None

    return read
