"""Embed images for a person who waits: with progress, and with a line for each image that cannot be read."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from proxymetric.data import ImageSet
from proxymetric.models.model import Model
from proxymetric.system.text import visible
from proxymetric.system.unreadable import unreadable_lines
from proxymetric.system.watcher import Watcher


def embed_images(
    model: Model, images: ImageSet | list[Path], watcher: Watcher, what: str = "embedding", again: bool = False
) -> tuple[Tensor, list[int]]:
    """Embed all images that can be read, and name the others.

    Args:
        model: the model.
        images: the images.
        watcher: receives the progress and the names of images that cannot be read.
        what: the name of the work.
        again: the images were embedded before, by another model, and those that cannot be read were named then.

    Returns:
        The vectors (N, D), and the N indices of their images.

    Raises:
        ValueError: no image can be read.
    """
    bad: list[str] = []
    vectors, indices = model.embed(
        images,
        errors="skip",
        progress=lambda done, total: watcher.work(what, done, total),
        on_bad=lambda title, reason: bad.append(f"{visible(title)} ({reason})"),
    )
    for line in unreadable_lines([] if again else bad):
        watcher.say(line)
    if not indices:
        raise ValueError(
            f"images: got {len(images)} images, none of which can be read; expected images that can be decoded"
        )
    return vectors, list(indices)
