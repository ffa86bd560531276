"""Facts that tell good copies of photographs from poor ones: how many there are, their sides and their bytes."""

from __future__ import annotations

import io
import statistics
from typing import Any

import numpy as np

from proxymetric.data.decoding import BadImage, read_size
from proxymetric.data.images import ImageSet

SAMPLE = 1000
"""number of images that are opened, spread evenly over the set"""


def describe_photographs(images: ImageSet) -> dict[str, Any]:
    """Describe the images of a set, from a sample of at most `SAMPLE`; their pixels are not decoded.

    Args:
        images: the images.

    Returns:
        `images`, their number; `shorter_side`, the median of the shorter sides in pixels; and for encoded images
        `bytes_per_image`, the mean size of the encoded images. Without a readable image, only their number.

    Example:
        >>> describe_photographs(ImageSet("dots", np.array([0, 1]), ["a", "b"], arrays=np.zeros((2, 8, 9), np.uint8)))
        {'images': 2, 'shorter_side': 8}
    """
    facts: dict[str, Any] = {"images": len(images)}
    if images.arrays is not None:
        return facts | {"shorter_side": min(images.arrays.shape[1:3])}
    sides, sizes = [], []
    for row in np.linspace(0, len(images) - 1, min(SAMPLE, len(images))).astype(np.int64).tolist():
        try:
            content = images.content(row)
            box = images.box(row)
            stored = read_size(io.BytesIO(content), images.title(row))
            sides.append(min(stored) if box is None else min(box[2] - box[0], box[3] - box[1]))
        except (BadImage, OSError):
            continue
        sizes.append(len(content))
    if not sides:
        return facts
    return facts | {"shorter_side": round(statistics.median(sides)), "bytes_per_image": round(statistics.mean(sizes))}
