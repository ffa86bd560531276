"""Blocks of images: what a folder is divided into, so that many machines share the work of embedding it.

The sorted list of images is cut into blocks of the same number. The vectors of a block are one Parquet file, which is
written atomically. Batches of a forward pass do not cross the borders of blocks, so that a block gets the same vectors
whoever embeds it.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from proxymetric.data.folders import ENDINGS
from proxymetric.search.batches import Batch
from proxymetric.search.folder_sync import Photo, batch_of, default_layout, embedded, list_photos
from proxymetric.search.items import TrainedModel
from proxymetric.search.parquet import DamagedParquet, Facts, read_facts, read_stamps, write_items

BLOCK_IMAGES = 4_096
"""images of a block: some seconds on a GPU, minutes on a CPU, and 30 MB at 512 dimensions"""
NAME = re.compile(r"block-(\d{5,})-of-(\d{5,})\.parquet")


class Description(NamedTuple):
    """What must be known of a model before images are divided into blocks."""

    fingerprint: str
    dim: int
    source: Mapping[str, str]
    """where it was loaded from"""
    classes: Sequence[str]
    """the names of its training classes"""

    @classmethod
    def of(cls, model: TrainedModel) -> Description:
        """Describe a model."""
        return cls(model.fingerprint(), model.dim, dict(model.source), list(model.classes))


class Block(NamedTuple):
    """Images that are embedded together, and the file of their vectors."""

    file: Path
    facts: Facts
    """what the file will say, before it is known which images can be read"""
    photos: list[Photo]

    def __str__(self) -> str:
        return f"block {self.facts.block} of {self.facts.blocks}"


class BlockDone(NamedTuple):
    """A block whose file is there."""

    images: int
    """images that could be read"""
    bad: dict[str, str]
    """ids of those that cannot be read, with the reason"""


def divided(out: Path, images: Path, model: Description, size: int, tell: Callable[[str], None]) -> list[Block]:
    """Divide the images of a folder into blocks.

    Args:
        out: the folder of the blocks.
        images: the folder of the images.
        model: the model that embeds them.
        size: number of images of a block; the last one may have fewer.
        tell: called with a sentence about each folder or file that is left out.

    Raises:
        ValueError: the folder has no images.
    """
    unlisted: dict[str, str] = {}
    layout = default_layout(images, model.classes)
    photos = list_photos(images, unlisted, layout)
    for name, reason in unlisted.items():
        tell(f"left out: {name} ({reason})")
    if not photos:
        raise ValueError(f"images: got {images}, which has no images; expected files that end in {', '.join(ENDINGS)}")
    listing = hashlib.sha256("\n".join([layout, *(photo.id for photo in photos)]).encode()).hexdigest()
    count = -(-len(photos) // size)
    common = Facts(
        model.fingerprint, model.dim, model.source, str(images.resolve()), layout, listing, len(photos), size, 0, count
    )
    return [
        Block(
            out / f"block-{number:05d}-of-{count:05d}.parquet",
            replace(common, block=number),
            photos[number * size : (number + 1) * size],
        )
        for number in range(count)
    ]


def block_files(folder: Path) -> list[Path]:
    """The files of the blocks of a folder, in their order.

    Raises:
        ValueError: it holds something else.
    """
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    others = [file for file in files if not NAME.fullmatch(file.name) and not _is_leftover(file)]
    if others:
        raise ValueError(
            f"parquet: got {folder}, which holds {others[0].name}; expected a folder that has only blocks of "
            "`proxymetric embed --parquet`"
        )
    return [file for file in files if NAME.fullmatch(file.name)]


def check_origin(blocks: Sequence[Block], asked: Sequence[Block]) -> None:
    """Refuse blocks that are there of another model or of other images.

    Those that are asked for are compared, and one of the others: loading compares them all.

    Raises:
        ValueError: there are such blocks.
    """
    there = {file.name: file for file in block_files(blocks[0].file.parent)}
    others = [file for name, file in there.items() if name not in {block.file.name for block in asked}]
    for file in [*(block.file for block in asked if block.file.name in there), *others[:1]]:
        try:
            facts = read_facts(file)
        except DamagedParquet:
            continue
        check_same(facts, blocks[0].facts, file)


def check_same(facts: Facts, expected: Facts, file: Path) -> None:
    """Refuse a block that does not belong to the others.

    Raises:
        ValueError: another model made it, or it is of another list of images.
    """
    if (facts.model, facts.dim) != (expected.model, expected.dim):
        raise ValueError(
            f"parquet: got {file}, made by the model {_named(facts)}, expected blocks of one model, {_named(expected)}"
            "; another model needs another folder"
        )
    if facts.origin != expected.origin:
        raise ValueError(
            f"parquet: got {file}, a block of {_listed(facts)}, expected blocks of {_listed(expected)}: the same list "
            "of images, divided in the same way; use another folder for another list, or load the blocks and let "
            "`proxymetric index` embed the new images"
        )


def done_before(block: Block, tell: Callable[[str], None]) -> BlockDone | None:
    """What the file of a block holds; None if the block must be embedded: it is missing or damaged, or images changed.

    Args:
        block: the block.
        tell: called with a sentence about a file that is made again.
    """
    if not block.file.exists():
        return None
    try:
        facts = read_facts(block.file)
        stamps = read_stamps(block.file, facts, verify=True)
    except DamagedParquet as error:
        tell(f"{block} is made again: {error}")
        return None
    versions = stamps | {name: stamp for name, (stamp, _) in facts.unreadable.items()}
    if versions != {photo.id: photo.stamp for photo in block.photos}:
        tell(f"{block} is made again: its images have changed")
        return None
    return BlockDone(facts.rows, {name: reason for name, (_, reason) in facts.unreadable.items()})


def make_block(block: Block, model: TrainedModel, progress: Callable[[int, int], None] | None = None) -> BlockDone:
    """Embed the images of a block and write its file, in the place of an earlier one.

    Args:
        block: the block.
        model: the model.
        progress: called with the number of its images that are embedded, and their number.

    Raises:
        ValueError: none of its images is there, such as on a machine that lacks the folder.
    """
    bad: dict[str, str] = {}
    parts = list(embedded(model, block.photos, batch_of(model), progress, bad))
    if len(bad) == len(block.photos) and not any(os.path.lexists(photo.path) for photo in block.photos):
        raise ValueError(
            f"images: got {block.facts.photos}, where no image of {block} is there, such as {block.photos[0].id}; "
            "expected a folder that every machine has at this place, and that does not change"
        )
    stamps = {photo.id: photo.stamp for photo in block.photos}
    unreadable = {name: (stamps[name], reason) for name, reason in bad.items()}
    write_items(
        block.file, replace(block.facts, rows=len(block.photos) - len(bad), unreadable=unreadable), _joined(parts)
    )
    for leftover in block.file.parent.glob(f".{block.file.name}.*.part"):  # of a process that was killed
        leftover.unlink(missing_ok=True)
    return BlockDone(len(block.photos) - len(bad), bad)


def _joined(parts: Sequence[Batch]) -> list[Batch]:
    """Parts as one: how many there are depends on the time that they took, and the bytes of a file must not."""
    if not parts:
        return []
    lists = [list(itertools.chain.from_iterable(values)) for values in zip(*((part.ids, *part[2:]) for part in parts))]
    return [Batch(lists[0], np.concatenate([part.vectors for part in parts]), *lists[1:])]


def _is_leftover(file: Path) -> bool:
    """Whether a file is what a killed process was writing."""
    return file.name.startswith(".block-") and file.name.endswith(".part")


def _named(facts: Facts) -> str:
    place = facts.source.get("run")
    return (facts.model[:12] or "of no name") + (f" ({place})" if place else "")


def _listed(facts: Facts) -> str:
    return f"{facts.images:,} images in blocks of {facts.block_images:,} (list {facts.listing[:8] or 'of an index'})"
