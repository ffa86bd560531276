"""Bring an index up to date with a folder of images: embed what is new or changed, drop what is gone."""

from __future__ import annotations

import contextlib
import io
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from PIL import Image
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.data.benchmarks import BENCHMARKS, detect, from_benchmark
from proxymetric.data.folders import class_folders, image_files, part_folders
from proxymetric.search.added_items import check_added, rescue_added
from proxymetric.search.batches import Batch, as_metadata, unit_rows
from proxymetric.search.conditions import CLASS_COLUMN
from proxymetric.search.derived import derive
from proxymetric.search.items import Changed, Embedder
from proxymetric.search.manifest import Manifest, is_index
from proxymetric.search.remote.settings import is_remote
from proxymetric.search.staging import Staging
from proxymetric.search.storage.changes import Change, Edit, commit, write_anew
from proxymetric.search.storage.state import State, damaged_files
from proxymetric.search.stored_index import StoredIndex
from proxymetric.search.stores import make_lost_store
from proxymetric.system.files import printable
from proxymetric.system.lock import locked
from proxymetric.system.text import visible

AnIndex = TypeVar("AnIndex", bound=StoredIndex)
THUMBNAIL_PIXELS = 160
THUMBNAIL_QUALITY = 82
PART_IMAGES = 4_096
"""images after which the embedded ones are written to disk"""
PART_SECONDS = 5.0
"""time after which the embedded images are written to disk; a kill loses no more than this and a forward pass"""
BENCHMARK_LAYOUTS = tuple(name for name in BENCHMARKS if name != "mnist")
"""the benchmarks whose classes are read as in training; "auto" reads the class folders of MNIST as they are"""
LAYOUTS = ("auto", "folder", "nested", *BENCHMARK_LAYOUTS)
GPU_BATCH, CPU_BATCH = 64, 16
"""images in a forward pass; on a CPU few, so that a pass of a large model ends within seconds"""


class Photo(NamedTuple):
    """An image file of the folder, as the index knows it."""

    path: Path
    id: str
    """its path in the folder"""
    label: str | None
    """the name of its class folder; None if it lies in none"""
    stamp: str
    """size and time of the last change"""


def open_to_rebuild(
    kind: type[AnIndex], folder: str | Path, engine: Mapping[str, Any] | None = None, *, drop_added: bool = False
) -> AnIndex:
    """Open an index that will be rebuilt.

    If only its engine or map is damaged, these are made anew. If vectors, items or thumbnails are damaged, the index is
    emptied; items that are no files stay in it, because no folder has them.

    Args:
        kind: the class of the index.
        folder: the folder of the index.
        engine: the engine of the index that is emptied; None: the one that it has.
        drop_added: items that are no files do not stay.

    Raises:
        ValueError: the folder is not an index, what its engine needs is not there, or items that are no files cannot
            be read.
    """
    folder = Path(folder)
    if is_remote(Manifest.read(folder).engine):
        make_lost_store(folder, engine)
        return kind(folder)
    with contextlib.suppress(ValueError, OSError):
        index = kind(folder)
        index.verify()
        return index
    with locked(folder):
        manifest = Manifest.read(folder)
        without_engine = replace(manifest, derived={})
        new = without_engine if engine is None else replace(without_engine, engine=dict(engine))
        if damaged_files(folder, manifest, derived=False):
            write_anew(folder, None, new, derive, [] if drop_added else rescue_added(folder, manifest))
        else:
            commit(State(folder, without_engine), Change(), new, derive, renew=True)
    return kind(folder)


def sync(
    index: StoredIndex,
    model: Embedder,
    images: str | Path,
    *,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
    rebuild: bool = False,
    drop_added: bool = False,
    layout: str | None = None,
    batch: int | None = None,
    on_start: Callable[[int, int], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    on_unlisted: Callable[[str, str], None] | None = None,
    say: Callable[[str], None] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Changed:
    """Bring an index up to date with a folder of images.

    Only new and changed files are embedded; files that are gone drop out, but items that are no files stay. The index
    changes in one step at the end. Embedded images are kept on disk until then, so that a call that was killed is
    continued by the next one.

    Args:
        index: the index.
        model: the model that made its vectors; with `rebuild`, the model that makes the new ones.
        images: the folder.
        metadata: the metadata of files, by their path in the folder; None keeps what the index has. Items that are no
            files keep theirs, unless it names them. A value of `class` is the label of the file. Without one a file
            keeps the label that it has; a new file gets the name of its class folder.
        rebuild: embed all images of the folder again, for instance because the model changed.
        drop_added: with `rebuild`, items that are no files do not stay.
        layout: which folders are classes, see `class_rule`; None: as the index says. With another layout than before,
            files whose label was the name of their class folder get the new name.
        batch: number of images in a forward pass; None: `GPU_BATCH` or `CPU_BATCH`.
        on_start: called with the number of images that are to be embedded and the number of images of the folder.
        progress: called with the number of images that are embedded and the number that are to be embedded.
        on_unlisted: called for each folder that cannot be listed and each file that cannot be read, with the reason.
        say: called with the name of each stage after the embedding, when it begins.
        facts: fields of the manifest that change, such as `run`.

    Returns:
        The numbers of images, and the files that cannot be read.

    Raises:
        ValueError: no image can be read, another model made the vectors of the index, or with `rebuild` items that
            are no files cannot stay: another model made their vectors, or they are damaged.
    """
    folder, fingerprint = Path(images), model.fingerprint()
    with index.writing():
        if not rebuild:
            index.check_model(fingerprint)
        unlisted: dict[str, str] = {}
        layout = layout_of(folder, index.manifest.layout if layout is None else layout)
        photos = list_photos(folder, unlisted, layout)
        folder_labels = {photo.id: photo.label for photo in photos}
        for name, reason in unlisted.items():
            if on_unlisted is not None:
                on_unlisted(name, reason)
        known = index.stamps()
        # Items without a stamp are no files of the folder: `index add-class` or Python code added them.
        added = {item for item, stamp in known.items() if not stamp}
        if rebuild and drop_added:
            added = set()
        elif rebuild:
            check_added(index, fingerprint, sorted(added - {photo.id for photo in photos}))
        new = [photo for photo in photos if rebuild or known.get(photo.id) != photo.stamp]
        staging, result = Staging(index.folder, fingerprint), Changed()
        staged = {version for part in staging.batches for version in zip(part.ids, part.stamps, strict=True)}
        todo = [photo for photo in new if (photo.id, photo.stamp) not in staged]
        result.continued = len(new) - len(todo)
        if on_start is not None:
            on_start(len(todo), len(photos))
        for part in embedded(model, todo, batch or batch_of(model), progress, result.bad):
            staging.write(part)
        if len(result.bad) == len(photos):
            raise ValueError(
                f"images: got {folder} with {len(photos)} images, none of which can be read; expected images that can "
                "be decoded"
            )
        batches = _current(staging.batches, {(photo.id, photo.stamp) for photo in new})
        written = {item for part in batches for item in part.ids}
        # A changed file that cannot be read any more drops out: its old vector belongs to the old image.
        if rebuild and fingerprint != index.model:
            added = set()  # what is left of them are files that cannot be read
        kept = added if rebuild else (known.keys() & {photo.id for photo in photos} - result.bad.keys()) | added
        relabelled = _relabelled(index, photos, folder) if layout != index.manifest.layout else set()
        labels = {item: label for item, label in folder_labels.items() if item not in known or item in relabelled}
        batches = [_described(part, index, known, labels, metadata) for part in batches]
        named = relabelled if metadata is None else relabelled | metadata.keys() | {i for i in kept if known[i]}
        edits = _edits(index, sorted(named & (kept - written)), labels, metadata)
        result.added, result.deleted = len(written - known.keys()), len(known.keys() - kept - written)
        result.updated = len(written & known.keys()) + len(edits)
        result.unchanged = len(kept - written) - len(edits)
        staying = sorted(kept - written) if rebuild else []
        facts = {
            **(facts or {}),
            "model": fingerprint,
            "dim": model.dim,
            "photos": str(folder.resolve()),
            "layout": layout,
        }
        differing = any(getattr(index.manifest, name) != value for name, value in facts.items())
        if say is not None and written:
            say(f"writing the vectors and thumbnails of {len(written):,} images")
        if rebuild:
            # Everything is written anew, so that the numbers of the vectors may get another kind.
            index.replace_all([*batches, _edited(index.batch(staying), edits)], say=say, **facts)
        elif written or edits or result.deleted or differing:
            index.change(batches, edits, known.keys() - kept - written, renew=True, say=say, **facts)
        staging.remove()
    return result


def check_same_folder(index: StoredIndex, images: Path, files: Sequence[Path]) -> None:
    """Refuse a folder that would take the place of another one, whose images would drop out of the index.

    A folder that was moved holds the same files, and is not refused.

    Args:
        index: the index.
        images: the folder that is to be indexed.
        files: its images.

    Raises:
        ValueError: the index was made of another folder, of which images would be deleted.
    """
    earlier, given = index.manifest.photos, str(images.resolve())
    if earlier is None or earlier == given:
        return
    present = {photo_id(path, images) for path in files}
    gone = [item for item, stamp in index.stamps().items() if stamp and item not in present]
    if gone:
        raise ValueError(
            f"images: got {images}, but {index.folder} was made of {earlier}, and {len(gone):,} of its images, such as "
            f"{gone[0]}, would be deleted; expected {earlier}, another --out, `proxymetric index add-class` to add "
            "images, or --replace to put the new folder in the place of the old one"
        )


def batch_of(model: Embedder) -> int:
    """The number of images in a forward pass on the device of a model."""
    return CPU_BATCH if getattr(getattr(model, "device", None), "type", "cpu") == "cpu" else GPU_BATCH


def photo_files(photos: Path, unlisted: dict[str, str] | None = None, unread: Counter[str] | None = None) -> list[Path]:
    """Return the image files of a folder and its subfolders, without the pictures of an index that lies in it.

    Args:
        photos: the folder.
        unlisted: receives the folders that cannot be listed, with the reason.
        unread: receives the numbers of images of other types, by ending.
    """
    files = image_files(photos, unlisted, unread)
    indexes = {folder for folder in {parent for file in files for parent in file.parents} if is_index(folder)}
    return [file for file in files if not indexes.intersection(file.parents)]


def layout_of(photos: Path, layout: str = "auto") -> str:
    """Return the layout of a folder: for "auto" that of a benchmark if the folder has one, as in training.

    A folder with several benchmarks inside is read by its folders: training asks which one, but an index has them all.

    Args:
        photos: the folder.
        layout: one of `LAYOUTS`; all but "auto" are returned as they are.
    """
    if layout != "auto" or not photos.is_dir():
        return layout
    try:
        detected = detect(photos)
    except ValueError:
        return layout
    return detected if detected in BENCHMARK_LAYOUTS else layout


def default_layout(photos: Path, classes: Iterable[str]) -> str:
    """Return the layout of a folder whose images are embedded for the first time.

    Args:
        photos: the folder.
        classes: names of the training classes of the model; those such as fruit/apple come from the layout "nested".
    """
    layout = layout_of(photos)
    return "nested" if layout == "auto" and any("/" in name for name in classes) else layout


def class_rule(photos: Path, layout: str = "auto") -> Callable[[Path], str | None]:
    """Return the rule that says which class an image belongs to, the same as in training.

    Args:
        photos: the folder.
        layout: "folder": the folder directly under `photos`. "auto": the same, but in folders such as train/ and test/
            that hold class folders, those are the classes; distractors have no class. "nested": like "auto", but the
            class is the path of the folder that holds the image. A benchmark such as "cub" (see `layout_of`): the
            class that training reads for the image; an image that training does not read has none.

    Returns:
        A function of a path in `photos`; None for an image in no class folder.

    Raises:
        ValueError: there is no such layout, or the folder does not have the layout of that benchmark.

    Example:
        >>> class_rule(Path("photos"), "nested")(Path("fruit/apple/1.jpg"))
        'fruit/apple'
    """
    one_of("layout", layout, LAYOUTS)
    if layout in BENCHMARK_LAYOUTS:
        return _benchmark_rule(photos, layout)
    parts = {} if layout == "folder" or not photos.is_dir() else part_folders(photos)
    if not any(class_folders(folder) for folder in parts):  # classes that are called train and test by chance
        parts = {}
    part_places = {folder.relative_to(photos): part for folder, part in parts.items()}

    def class_of(path: Path) -> str | None:
        part_place = next((place for place in part_places if place in path.parents), None)
        if part_place is not None and part_places[part_place] == "distractor":
            return None
        names = path.parts[len(part_place.parts) if part_place is not None else 0 : -1]
        return visible("/".join(names if layout == "nested" else names[:1])) if names else None

    return class_of


def _benchmark_rule(photos: Path, layout: str) -> Callable[[Path], str | None]:
    """The rule of `class_rule` for a benchmark; images that are listed and not there are no error for an index."""
    try:
        images = from_benchmark(photos, layout, complete=False)
    except ValueError as error:
        raise ValueError(f"{error}; --layout folder takes the folders directly under {photos} as classes") from None
    labels = zip(images.paths or (), images.labels, strict=True)
    classes = {path: visible(images.classes[label]) for path, label in labels}
    return lambda path: classes.get(photos / path)


def list_photos(photos: Path, unlisted: dict[str, str] | None = None, layout: str = "auto") -> list[Photo]:
    """List the image files of a folder with their ids, labels and stamps.

    Args:
        photos: the folder; subfolders are searched too.
        unlisted: receives the folders that cannot be listed, and the files that cannot be read, with the reason.
        layout: which folders are classes, see `class_rule`.
    """
    images, class_of = [], class_rule(photos, layout)
    for path in photo_files(photos, unlisted):
        try:
            status = path.stat()
        except OSError as error:  # it was removed a moment ago, or it is a broken link
            if unlisted is not None:
                unlisted[printable(str(path))] = error.strerror or str(error)
            continue
        label = class_of(path.relative_to(photos))
        images.append(Photo(path, photo_id(path, photos), label, f"{status.st_size}-{status.st_mtime_ns}"))
    return images


def photo_id(path: Path, photos: Path) -> str:
    """Return the id of a file: its path in the folder, as text that can be printed."""
    return visible(printable(path.relative_to(photos).as_posix()))


def thumbnail_of(image: Image.Image) -> bytes:
    """Return an image of at most `THUMBNAIL_PIXELS` a side, as JPEG.

    Example:
        >>> Image.open(io.BytesIO(thumbnail_of(Image.new("RGB", (400, 200))))).size
        (160, 80)
    """
    small = image.copy()
    small.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    buffer = io.BytesIO()
    small.save(buffer, "jpeg", quality=THUMBNAIL_QUALITY)
    return buffer.getvalue()


def embedded(
    model: Embedder,
    photos: Sequence[Photo],
    batch: int,
    progress: Callable[[int, int], None] | None,
    bad: dict[str, str],
) -> Iterator[Batch]:
    """Embed images and yield them in parts that are worth to be written to disk.

    Args:
        model: the model.
        photos: the images.
        batch: number of images in a forward pass.
        progress: called with the number of images that are done, and their number.
        bad: receives the ids of images that cannot be read, with the reason.
    """
    thumbnails: dict[int, bytes] = {}
    waiting: list[tuple[Photo, bytes]] = []
    vectors: list[Tensor] = []
    last_write = time.monotonic()
    if progress is not None and photos:
        progress(0, len(photos))  # the first batch may take long

    def keep_thumbnail(row: int, image: Image.Image) -> None:
        thumbnails[row] = thumbnail_of(image)

    paths = [photo.path for photo in photos]
    with contextlib.closing(model.parts(paths, batch=batch, on_image=keep_thumbnail)) as parts:
        for part in parts:
            bad |= {photos[row].id: error.reason for row, error in part.bad.items()}
            waiting += [(photos[row], thumbnails.pop(row)) for row in part.rows]
            vectors.append(part.vectors)
            if progress is not None:
                progress(part.done, len(photos))
            is_due = len(waiting) >= PART_IMAGES or time.monotonic() - last_write > PART_SECONDS
            if waiting and (is_due or part.done == len(photos)):
                yield _part(waiting, torch.cat(vectors))
                waiting, vectors, last_write = [], [], time.monotonic()


def _part(items: list[tuple[Photo, bytes]], vectors: Tensor) -> Batch:
    return Batch(
        [photo.id for photo, _ in items],
        unit_rows(vectors),
        [photo.label for photo, _ in items],
        ["{}"] * len(items),
        [photo.stamp for photo, _ in items],
        [thumbnail for _, thumbnail in items],
    )


def _current(parts: Sequence[Batch], versions: set[tuple[str, str]]) -> list[Batch]:
    """Of the staged parts, the images that are still there as they were embedded."""
    current, versions = [], set(versions)
    for part in parts:
        rows = [row for row, version in enumerate(zip(part.ids, part.stamps, strict=True)) if version in versions]
        versions -= {(part.ids[row], part.stamps[row]) for row in rows}
        lists = [[values[row] for row in rows] for values in (part.ids, *part[2:])]
        current.append(Batch(lists[0], part.vectors[rows], *lists[1:]))  # type: ignore[arg-type]
    return current


def _relabelled(index: StoredIndex, images: Sequence[Photo], photos: Path) -> set[str]:
    """The ids of files whose label in the index is the name of their class folder, by the layout of the index."""
    try:
        class_of = class_rule(photos, index.manifest.layout)
    except ValueError:  # the lists of a benchmark are gone, and with them what the classes were
        return set()
    earlier = dict(zip(index.ids, index.labels, strict=True))
    folder_labels = {photo.id: class_of(photo.path.relative_to(photos)) for photo in images if photo.id in earlier}
    return {item for item, label in folder_labels.items() if earlier[item] == label}


def _described(
    part: Batch,
    index: StoredIndex,
    known: Container[str],
    labels: Mapping[str, str | None],
    metadata: Mapping[str, Mapping[str, Any]] | None,
) -> Batch:
    """Images with their labels and metadata.

    Args:
        part: the images.
        index: the index.
        known: the ids of the index.
        labels: the labels of files that are new or get another one; the others keep theirs.
        metadata: the metadata of files; None: they keep what the index has.
    """
    pairs = []
    for item in part.ids:
        earlier = index[item] if item in known else None
        label = labels[item] if item in labels or earlier is None else earlier.label
        if metadata is None:
            pairs.append((label, as_metadata(None if earlier is None else earlier.metadata)))
        else:
            pairs.append(_label_and_metadata(metadata.get(item), label))
    return part._replace(labels=[label for label, _ in pairs], metadata=[content for _, content in pairs])


def _label_and_metadata(values: Mapping[str, Any] | None, label: str | None) -> tuple[str | None, str]:
    """The label, which a value of `class` replaces, and the metadata as JSON."""
    content = dict(values or {})
    return content.pop(CLASS_COLUMN, label), as_metadata(content)


def _edits(
    index: StoredIndex,
    ids: Sequence[str],
    labels: Mapping[str, str | None],
    metadata: Mapping[str, Mapping[str, Any]] | None,
) -> dict[str, Edit]:
    """The items that stay but have a new label or new metadata; `labels` and `metadata` as in `_described`."""
    edits = {}
    for item in ids:
        earlier = index[item]
        label, content = labels.get(item, earlier.label), as_metadata(earlier.metadata)
        edit = (label, content) if metadata is None else _label_and_metadata(metadata.get(item), label)
        if edit != (earlier.label, content):
            edits[item] = Edit(*edit)
    return edits


def _edited(part: Batch, edits: Mapping[str, Edit]) -> Batch:
    """Items with their new labels and metadata."""
    items = [
        edits.get(item, Edit(label, content))
        for item, label, content in zip(part.ids, part.labels, part.metadata, strict=True)
    ]
    return part._replace(labels=[edit.label for edit in items], metadata=[edit.metadata for edit in items])
