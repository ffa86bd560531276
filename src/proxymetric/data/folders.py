"""Image sets from folders: one folder per class, perhaps inside train/, val/ and test/."""

from __future__ import annotations

import difflib
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from proxymetric.data.decoding import HEIC_EXTRA, READS_AVIF, READS_HEIC
from proxymetric.data.images import ImageSet
from proxymetric.data.parts import PART_NAMES, divide, part_of
from proxymetric.system.files import printable

HEIC_ENDINGS = (".heic", ".heif", ".hif")
ENDINGS = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", *((".avif",) if READS_AVIF else ()),
    *(HEIC_ENDINGS if READS_HEIC else ()),
)  # fmt: skip
"""endings of the images that are read here; those of HEIC need the extra `heic`"""
OTHER_ENDINGS = (
    *HEIC_ENDINGS, ".avif", ".jxl", ".jp2", ".raw", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".psd",
    ".svg", ".ico", ".pdf", ".mp4", ".mov",
)  # fmt: skip
"""endings of images and films that are not read, unless `ENDINGS` has them too"""
WITHOUT_TRAINING = (
    "`proxymetric serve IMAGES` needs neither classes nor training: an encoder that is only pre-trained finds similar "
    "images, on a page; `proxymetric index IMAGES` and `search` do so in the terminal"
)
"""what works with too few images to learn from"""
MAX_NAMES = 3
"""maximum number of names in a message"""
NESTED = (
    "Are the inner folders your classes? Then --set data.layout=nested (evaluate, index: --layout nested) makes each "
    "of them one"
)
MIN_LIKENESS = 0.7
"""how alike the names of a folder and of a part must be for a "did you mean", from 0 to 1 (`difflib`)"""


class _ClassFolder(NamedTuple):
    """The images of one class in one part."""

    name: str
    files: list[Path]
    part: str | None


def image_files(folder: Path, unlisted: dict[str, str] | None = None, unread: Counter[str] | None = None) -> list[Path]:
    """Return every image file under `folder`, at any depth, sorted; hidden files and folders are left out.

    Args:
        folder: where to search.
        unlisted: receives the folders that cannot be listed, with the reason.
        unread: receives the numbers of images of other types (`OTHER_ENDINGS`), by ending.
    """

    def record(error: OSError) -> None:
        if unlisted is not None:
            unlisted[printable(str(error.filename))] = error.strerror or str(error)

    paths = []
    for parent, folders, files in os.walk(folder, onerror=record):
        folders[:] = [name for name in folders if not name.startswith(".")]
        visible_files = [name for name in files if not name.startswith(".")]
        paths += [Path(parent) / name for name in visible_files if name.lower().endswith(ENDINGS)]
        if unread is not None:
            unread.update(other_endings(visible_files))
    return sorted(paths, key=lambda path: path.relative_to(folder).as_posix())


def other_endings(names: list[str]) -> list[str]:
    """Return the endings of the files that are images of a type that is not read."""
    endings = (os.path.splitext(name)[1].lower() for name in names)
    return [ending for ending in endings if ending in OTHER_ENDINGS and ending not in ENDINGS]


def unread_types(unread: Counter[str]) -> str:
    """Say how many images have a type that is not read, and what to do.

    Example:
        >>> unread_types(Counter({".nef": 2}))
        'images of types that are not read: 2 .nef; convert them to .jpg or .png'
        >>> unread_types(Counter({".heic": 10}))
        "images of types that are not read: 10 .heic; to read .heic, pip install 'proxymetric[heic]'"
    """
    counts = ", ".join(f"{count} {ending}" for ending, count in unread.most_common())
    installable = [ending for ending in HEIC_ENDINGS if ending in unread]
    others = [ending for ending in unread if ending not in installable]
    cures = [f"to read {', '.join(installable)}, {HEIC_EXTRA}"] if installable else []
    if others:
        cures.append(f"convert {', '.join(others) if installable else 'them'} to .jpg or .png")
    return f"images of types that are not read: {counts}; {'; '.join(cures)}"


def class_folders(root: Path) -> list[Path]:
    """Return the folders directly under `root` that are not hidden, sorted by name.

    Raises:
        ValueError: `root` cannot be listed.
    """
    try:
        return _visible_folders(root)
    except OSError as error:
        raise ValueError(
            f"data: got {root}, a folder that cannot be listed ({error.strerror}), expected files and folders that you "
            "may read"
        ) from None


def _visible_folders(root: Path) -> list[Path]:
    return sorted((p for p in root.iterdir() if p.is_dir() and not p.name.startswith(".")), key=lambda p: p.name)


def from_folder(root: Path, layout: str = "auto") -> ImageSet:
    """Read a folder of class folders: `root/<class>/**/*.jpg` (or another of `ENDINGS`).

    Each class has the name of its folder. Classes are sorted by name and images by path. Folders that hold no images or
    cannot be listed are left out and named in the notes of the set, which also count images of other types.

    Args:
        root: the folder.
        layout: "auto" takes folders such as train/, val/ and test/ (see `data.parts`) as a split, with class folders in
            each of them; "folder" takes them as classes; "nested" is like "auto", but every folder that directly holds
            images is a class, and the name of the class is the path of the folder.

    Raises:
        ValueError: there are fewer than two classes, a split has no class folders, or a part of it has another name.
    """
    unlisted: dict[str, str] = {}
    parts = {} if layout == "folder" else part_folders(root)
    unread: Counter[str] = Counter()
    folders: list[_ClassFolder] = []
    notes: list[str] = []
    if not parts and layout == "auto":
        _check_names_of_parts(root)
    for place, part in parts.items() or [(root, None)]:
        folders += _classes_in(place, part, layout, notes, unlisted, unread)
    other_folders = [f for f in class_folders(root) if part_of(f.name) is None and image_files(f)] if parts else []
    if parts and not folders and any(_loose_images(f) for f in other_folders):
        # Class folders may be called train and test by chance: this is assumed if other folders hold images directly.
        notes = [
            f"{root}: {' and '.join(place.name for place in parts)} hold no class folders and are taken as classes"
        ]
        parts = {}
        unread.clear()
        folders = _classes_in(root, None, layout, notes, unlisted, unread)
    if parts:
        _check_parts(root, parts, folders)
        if other_folders:
            names = first_names([folder.name for folder in other_folders])
            hint = _similar_parts([folder.name for folder in other_folders])
            notes.append(f"{root}: left out, because they are not part of the split: {names}{hint}")
    else:
        _check_classes(root, [folder.name for folder in folders], unlisted, unread)
    if unread:
        notes.append(f"{root}: left out, {unread_types(unread)}")
    if unlisted:
        reasons = [f"{name} ({reason})" for name, reason in unlisted.items()]
        notes.append(f"folders that cannot be listed and are left out: {len(reasons)}, {first_names(reasons)}")
    classes = sorted({folder.name for folder in folders})
    label_of = {name: label for label, name in enumerate(classes)}
    images = ImageSet(
        name=printable(root.resolve().name),
        labels=np.repeat([label_of[f.name] for f in folders], [len(f.files) for f in folders]),
        classes=[printable(name) for name in classes],
        paths=[path for folder in folders for path in folder.files],
        root=root,
        notes=tuple(notes),
        unlisted=unlisted,
        hint=NESTED if any(NESTED in note for note in notes) else "",
    )
    if not parts:
        return images
    folder_names = ", ".join(f"{folder.relative_to(root).as_posix()}/" for folder in parts)
    part_of_images = np.repeat([f.part for f in folders], [len(f.files) for f in folders])
    divided = divide(
        images, part_of_images, f"{root} with {folder_names}", "data.layout=folder (evaluate: --layout folder)"
    )
    return replace(divided, notes=(*divided.notes[len(notes) :], *notes))


def part_folders(root: Path) -> dict[Path, str]:
    """Return the folders of a split in `root` and their parts; {} if there are fewer than two different parts.

    If test/ contains query/ and gallery/, these two folders are returned instead of test/.
    """
    parts: dict[Path, str] = {}
    for folder in class_folders(root):
        part = part_of(folder.name)
        inner_parts = (
            {f: part_of(f.name) for f in class_folders(folder)} if part == "test" and os.access(folder, os.R_OK) else {}
        )
        if inner_parts and set(inner_parts.values()) == {"query", "gallery"}:
            parts |= {f: str(name) for f, name in inner_parts.items()}
        elif part is not None:
            parts[folder] = part
    return parts if len(set(parts.values())) > 1 else {}


def _check_names_of_parts(root: Path) -> None:
    """Refuse a folder that looks like a split of which only one part has a known name, such as train/ and tset/.

    It looks so if every folder with images holds nothing but folders of images, and one of them is called train, test,
    val, query, ...: as classes of such a folder, train and tset would be learned.
    """
    subfolders = class_folders(root)
    if not any(part_of(folder.name) for folder in subfolders):
        return
    filled_folders = [folder for folder in subfolders if image_files(folder)]
    known = [folder.name for folder in filled_folders if part_of(folder.name)]
    others = [folder.name for folder in filled_folders if not part_of(folder.name)]
    if not known or not others or any(_loose_images(folder) for folder in filled_folders):
        return
    names = (known[0], "test") if part_of(known[0]) == "train" else ("train", known[0])
    places = " and ".join(str(root / name / "CLASS" / "photo.jpg") for name in names)
    raise ValueError(
        f"data: got {root} with {' and '.join(known)}, as in a split, beside {first_names(others)}, which is not a "
        f"part of a split, expected {places}, or --set data.layout=folder (evaluate: --layout folder) if these folders "
        f"are your classes{_similar_parts(others)}"
    )


def _similar_parts(names: list[str]) -> str:
    """Return the end of a message that suggests a part of a split for each name that is similar to one.

    Example:
        >>> _similar_parts(["tset", "notes"])
        "; tset: did you mean 'test'?"
    """
    similar = {name: difflib.get_close_matches(name.lower(), PART_NAMES, 1, MIN_LIKENESS) for name in names}
    hints = [f"; {printable(name)}: did you mean {parts[0]!r}?" for name, parts in similar.items() if parts]
    return "".join(hints[:MAX_NAMES])


def _classes_in(
    place: Path, part: str | None, layout: str, notes: list[str], unlisted: dict[str, str], unread: Counter[str]
) -> list[_ClassFolder]:
    """Return the classes in a folder of class folders; record what is left out or doubtful in the last arguments."""
    try:
        subfolders = _visible_folders(place)
    except OSError as error:
        unlisted[printable(str(place))] = error.strerror or str(error)
        return []
    loose_images = _loose_images(place)
    files = {folder: image_files(folder, unlisted, unread) for folder in subfolders}
    empty_folders = [
        printable(folder.name) for folder in subfolders if not files[folder] and printable(str(folder)) not in unlisted
    ]
    if empty_folders and any(files.values()):
        notes.append(f"{place}: folders without images: {len(empty_folders)}, {first_names(empty_folders)}")
    if loose_images and any(files.values()):
        notes.append(
            f"{place}: images outside class folders, left out: {len(loose_images)}, {first_names(loose_images)}"
        )
    filled_folders = [folder for folder in subfolders if files[folder]]
    if layout == "nested":
        files_by_class: dict[str, list[Path]] = {}
        for folder in filled_folders:
            for path in files[folder]:
                files_by_class.setdefault(path.parent.relative_to(place).as_posix(), []).append(path)
        return [_ClassFolder(name, paths, part) for name, paths in files_by_class.items()]
    inner_folders = _inner_folders(place, filled_folders, files) if layout == "auto" else []
    if inner_folders and not any(NESTED in note for note in notes):
        notes.append(
            f"{place}: all images lie deeper than the {len(filled_folders)} class folders, in {len(inner_folders)} "
            f"folders such as {first_names(inner_folders)}; all images in {printable(filled_folders[0].name)} count as "
            f"one class. {NESTED}. If {first_names([folder.name for folder in filled_folders])} are your classes: "
            "--set data.layout=folder (--layout folder), and this sentence is gone"
        )
    return [_ClassFolder(folder.name, files[folder], part) for folder in filled_folders]


def _inner_folders(place: Path, class_places: list[Path], files: dict[Path, list[Path]]) -> list[str]:
    """Return the folders that hold the images if all of them lie deeper than the class folders, in several folders.

    They may be the classes (makes and models), or not (the sessions of a photographer): the names do not tell.
    """
    inner = {folder: {path.parent for path in files[folder]} for folder in class_places}
    if any(folder in inner[folder] for folder in class_places) or all(len(paths) == 1 for paths in inner.values()):
        return []
    return [path.relative_to(place).as_posix() for folder in class_places for path in sorted(inner[folder])]


def _check_parts(root: Path, parts: dict[Path, str], folders: list[_ClassFolder]) -> None:
    """Refuse a split in which a part has no class folders with images."""
    filled_parts = {folder.part for folder in folders}
    for place, part in parts.items():
        if part not in filled_parts:
            loose_images = _loose_images(place) if os.access(place, os.R_OK) else []
            content = f"{len(loose_images)} images outside class folders" if loose_images else "no images"
            names = " and ".join(folder.name for folder in parts)
            raise ValueError(
                f"data: got {root} with {names}, which look like a split, but {place} has {content}; expected "
                f"{place / 'CLASS' / 'photo.jpg'}. If {names} are your classes: --set data.layout=folder "
                "(evaluate: --layout folder)"
            )


def _check_classes(root: Path, names: list[str], unlisted: dict[str, str], unread: Counter[str]) -> None:
    """Refuse a folder with fewer than two classes."""
    unread = unread + Counter(other_endings([name for name in os.listdir(root) if not name.startswith(".")]))
    unread_hint = f"; it has {unread_types(unread)}" if unread else ""
    layout = f"one folder for each class, such as {root / 'CLASS' / 'photo.jpg'} ({', '.join(ENDINGS)})"
    unlisted_hint = f"; {len(unlisted)} folders cannot be listed, such as {next(iter(unlisted))}" if unlisted else ""
    if not names:
        loose_count = len(_loose_images(root))
        loose_hint = f" and {loose_count} images outside class folders" if loose_count else ""
        raise ValueError(
            f"data: got {root} with no labelled images{loose_hint}, expected {layout}{unread_hint}{unlisted_hint}"
            + (f"; {WITHOUT_TRAINING}" if loose_count else "")
        )
    if len(set(names)) < 2:
        inner_folders = [p for p in class_folders(root / names[0]) if image_files(p)]
        hint = (
            f"; did you mean {root / names[0]}, which has {len(inner_folders)} folders of images?"
            if len(inner_folders) > 1
            else ""
        )
        raise ValueError(
            f"data: got {root} with images of one class only ({names[0]!r}), expected at least two classes: "
            f"{layout}{unread_hint}{unlisted_hint}{hint}; {WITHOUT_TRAINING}"
        )


def _loose_images(folder: Path) -> list[str]:
    """Return the names of the images directly in a folder."""
    names = sorted(name for name in os.listdir(folder) if name.lower().endswith(ENDINGS) and not name.startswith("."))
    return [printable(name) for name in names if is_file(folder / name)]


def first_names(names: list[str]) -> str:
    """Return the first names of a list as text.

    Example:
        >>> first_names(["ant", "bee", "cat", "dog"])
        'ant, bee, cat, ...'
    """
    return ", ".join(printable(name) for name in names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "")


def is_file(path: Path) -> bool:
    """Return whether `path` is a file that can be reached; False for a name that is too long or forbidden."""
    try:
        return path.is_file()
    except OSError:
        return False


def missing_files(paths: list[Path], root: Path) -> list[str]:
    """Return the paths, relative to `root`, that are not files."""
    return [printable(Path(os.path.relpath(path, root)).as_posix()) for path in paths if not is_file(path)]


def require_files(paths: list[Path], root: Path, listed_in: Path) -> None:
    """Raise an error if listed files do not exist.

    Args:
        paths: the listed files.
        root: the folder that paths are shown relative to.
        listed_in: the file with the list, for the error message.

    Raises:
        ValueError: files are missing; the message gives their number and names the first three.
    """
    missing = missing_files(paths, root)
    if missing:
        raise ValueError(
            f"{listed_in}: got {len(missing)} of {len(paths)} files that do not exist, expected all of them under "
            f"{root}; missing: {first_names(missing)}"
        )
