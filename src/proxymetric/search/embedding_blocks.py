"""Embed a folder of images into Parquet files, one for each block: in this process, as one of several, or with Ray."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from proxymetric.arguments.checks import whole_number
from proxymetric.arguments.signatures import neighbour
from proxymetric.search.image_blocks import (
    BLOCK_IMAGES,
    Block,
    BlockDone,
    Description,
    block_files,
    check_origin,
    divided,
    done_before,
    make_block,
)
from proxymetric.search.items import TrainedModel, loaded
from proxymetric.search.parquet import check_pyarrow
from proxymetric.search.ray_workers import RayWorkers
from proxymetric.system.text import visible
from proxymetric.system.unreadable import unreadable_lines


@dataclass
class EmbeddedBlocks:
    """What `embed_blocks` did."""

    folder: Path
    blocks: int
    """blocks of the whole folder of images"""
    made: int = 0
    skipped: int = 0
    """blocks that were there already"""
    missing: int = 0
    """blocks that are not there yet: those of other shards"""
    images: int = 0
    """images of the blocks that were asked for, without those that cannot be read"""
    bad: dict[str, str] = field(default_factory=dict)
    """ids of files that cannot be read, with the reason"""


def embed_blocks(
    out: str | Path,
    images: str | Path,
    model: TrainedModel | Callable[[], TrainedModel],
    *,
    shard: str | None = None,
    block: int = BLOCK_IMAGES,
    dim: int | None = None,
    ray: str | None = None,
    gpus: int | None = None,
    say: Callable[[str], None] | None = None,
    report: Callable[[str], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> EmbeddedBlocks:
    """Embed the images of a folder, or a share of them, into Parquet files: what `proxymetric embed --parquet` does.

    Blocks that are there are kept, if the same model made them of the same files. So a call that was killed is
    continued by the next one, and several processes write into one folder without knowing of each other.
    `Index.from_parquet` makes an index of the blocks.

    Args:
        out: the folder of the blocks; it is new, empty, or has blocks of the same images and the same model.
        images: the folder of images; subfolders are searched too.
        model: the model; or a function that returns it, which is called when the other arguments were checked.
        shard: "i/n", the blocks that are embedded: i, i + n, i + 2n, ...; i is from 0 to n - 1. None: all.
        block: number of images of a block, at least 1; the same for all shards.
        dim: the first dimensions of the vectors that are kept; None: all.
        ray: a Ray cluster that embeds all blocks (needs the extra `ray`): "auto" for the one that `RAY_ADDRESS` names
            or that runs on this machine, "local" to start one, or an address such as "10.0.0.1:6379". `model` is then
            a function that is called on the machines of the cluster, such as `partial(pm.load, "/shared/runs/birds")`.
            `images` and `out` are folders that they all have.
        gpus: with `ray`, the GPUs of a worker; None: 1 if a machine of the cluster has one.
        say: called with each sentence about the work.
        report: called with a line about the blocks; None: `say` is.
        progress: called with the number of images that are embedded and the number that are to be embedded.

    Returns:
        What was done.

    Raises:
        ValueError: an argument is wrong, or `out` holds blocks of other images or of another model.

    Example:
        >>> from functools import partial
        >>> import proxymetric as pm
        >>> load = partial(pm.load, "runs/birds")
        >>> embed_blocks("blocks", "photos", load, shard="0/4")                        # doctest: +SKIP
        >>> embed_blocks("blocks", "photos", load, ray="auto")                         # doctest: +SKIP
    """
    tell = say or (lambda sentence: None)
    first, step = (0, 1) if shard is None else read_shard(shard)
    if ray is not None and shard is not None:
        raise ValueError(f"shard: got {shard} and a Ray cluster, which divides the blocks itself; expected one of them")
    whole_number(1, block=block)
    check_pyarrow()
    folder, target = _checked_images(Path(images)), _checked_place(Path(out))
    with ThisProcess(model, dim) if ray is None else RayWorkers(ray, model, dim, gpus, tell) as workers:
        blocks = divided(target, folder, workers.describe(), block, tell)
        asked = blocks[first::step]
        check_origin(blocks, asked)
        result, todo = EmbeddedBlocks(Path(out), len(blocks)), list[Block]()
        for each in asked:
            if (earlier := done_before(each, tell)) is None:
                todo.append(each)
            else:
                result.skipped += 1
                _count(result, earlier)
        total = sum(len(each.photos) for each in todo)
        share = "" if step == 1 else f" of shard {shard}"
        tell(f"to embed: {total:,} images in {len(todo):,} of {len(asked):,} blocks{share}")
        show = progress or (lambda done, total: None)
        if todo:
            show(0, total)  # the first batch may take long
            target.mkdir(parents=True, exist_ok=True)
        for _, done in workers.make(todo, lambda number: show(number, total)):
            result.made += 1
            _count(result, done)
    result.missing = len(blocks) - len(block_files(target))
    if step == 1 and result.missing:
        raise ValueError(
            f"parquet: got {out}, where {result.missing} blocks are missing although workers wrote them; expected a "
            "folder that all machines of the cluster share"
        )
    _describe(result, folder, tell, report or tell)
    return result


class ThisProcess:
    """Embeds blocks here, one after the other; a context like `RayWorkers`.

    Args:
        model: the model, or a function that returns it.
        dim: the first dimensions of the vectors that are kept; None: all.
    """

    def __init__(self, model: TrainedModel | Callable[[], TrainedModel], dim: int | None) -> None:
        whole = loaded(model)
        self.model = whole if dim is None else whole.cut_to(dim)

    def __enter__(self) -> ThisProcess:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def describe(self) -> Description:
        """Describe the model."""
        return Description.of(self.model)

    def make(self, blocks: Sequence[Block], on_images: Callable[[int], None]) -> Iterator[tuple[Block, BlockDone]]:
        """Embed blocks in their order.

        Args:
            blocks: the blocks.
            on_images: called with the number of images that are done.
        """
        before = 0
        for block in blocks:
            start = before
            yield block, make_block(block, self.model, lambda done, total: on_images(start + done))  # noqa: B023
            before += len(block.photos)


def read_shard(shard: str) -> tuple[int, int]:
    """Read which blocks are embedded: i and n of "i/n".

    Raises:
        ValueError: it is no such text.

    Example:
        >>> read_shard("0/4"), read_shard("3/4")
        ((0, 4), (3, 4))
        >>> read_shard("4/4")
        Traceback (most recent call last):
        ValueError: shard: got '4/4', expected one of 0/4 to 3/4: shards count from 0
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", shard, re.ASCII)
    if match is None or not int(match[2]):
        raise ValueError(f"shard: got {shard!r}, expected i/n, such as 0/4 for the first of four shards")
    number, count = int(match[1]), int(match[2])
    if number >= count:
        known = "0/1" if count == 1 else f"one of 0/{count} to {count - 1}/{count}"
        raise ValueError(f"shard: got {shard!r}, expected {known}: shards count from 0")
    return number, count


def _checked_images(images: Path) -> Path:
    """The folder of images as every process calls it."""
    if not images.is_dir():
        hint = "" if images.exists() else neighbour(images, Path.is_dir)
        raise ValueError(f"images: got {images}, which is not a folder; expected a folder of images{hint}")
    return images.resolve()


def _checked_place(out: Path) -> Path:
    """The folder of the blocks, which has nothing else and can be written."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"parquet: got {out}, which is a file; expected a folder for the blocks")
    folder = next(place for place in (out.absolute(), *out.absolute().parents) if place.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"parquet: got {out}, but {folder} cannot be written; expected a folder that you may write to")
    block_files(out)
    return out.resolve()


def _count(result: EmbeddedBlocks, done: BlockDone) -> None:
    result.images += done.images
    result.bad |= done.bad


def _describe(result: EmbeddedBlocks, images: Path, say: Callable[[str], None], report: Callable[[str], None]) -> None:
    """Say what was done, and what is left out or missing."""
    for line in unreadable_lines([f"{visible(str(images / name))} ({reason})" for name, reason in result.bad.items()]):
        say(line)
    report(
        f"{result.images:,} images in {result.made + result.skipped:,} of {result.blocks:,} blocks in {result.folder}: "
        f"{result.made:,} made, {result.skipped:,} there before"
    )
    if result.missing:
        say(f"{result.missing:,} blocks are not there yet: those of other shards")
