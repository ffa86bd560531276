"""Decoded images of different sizes in one flat buffer, cut and mirrored for a whole batch at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from proxymetric.data.views import Boxes


class Ragged:
    """N images of any size, end to end in one uint8 tensor on `device`.

    >>> store = Ragged([np.zeros((4, 6, 3), np.uint8), np.full((2, 2, 3), 9, np.uint8)])
    >>> store.heights.tolist(), store.image(1).size
    ([4, 2], (2, 2))
    >>> whole = Boxes(*(np.array([v]) for v in (0.0, 0.0, 2.0, 2.0)), flip=np.array([False]))
    >>> store.cut(np.array([1]), whole, size=3).shape
    torch.Size([1, 3, 3, 3])
    """

    def __init__(self, images: Sequence[np.ndarray], device: str | torch.device = "cpu") -> None:
        self.heights = np.array([image.shape[0] for image in images], dtype=np.int64)
        self.widths = np.array([image.shape[1] for image in images], dtype=np.int64)
        areas = self.heights * self.widths
        self.starts = np.cumsum(areas) - areas
        flat = np.empty((int(areas.sum()), 3), dtype=np.uint8)
        for image, start, area in zip(images, self.starts, areas):
            flat[start : start + area] = image.reshape(-1, 3)
        self.pixels = torch.from_numpy(flat).to(device)

    def image(self, row: int) -> Image.Image:
        """Image `row`, for the views that work on one image (needs the buffer on the CPU)."""
        start, height, width = self.starts[row], self.heights[row], self.widths[row]
        return Image.fromarray(self.pixels[start : start + height * width].view(height, width, 3).numpy())

    def cut(self, rows: np.ndarray, boxes: Boxes, size: int) -> Tensor:
        """(B, 3, size, size) uint8: one box from each of the images `rows`, by bilinear interpolation.

        Where a box is more than 1.5 times as large as the result, every pixel is the mean of several samples.
        """
        device = self.pixels.device
        reduce = max(1, round(max(boxes.height.max(), boxes.width.max()) / size)) if len(rows) else 1
        y, x = (
            torch.from_numpy(_grid(start, length, limit[rows], size * reduce)).to(device)
            for start, length, limit in (
                (boxes.top, boxes.height, self.heights),
                (boxes.left, boxes.width, self.widths),
            )
        )
        flip = torch.from_numpy(boxes.flip).to(device)
        x = torch.where(flip[:, None], x.flip(1), x)
        start, width, last_row, last_column = (
            torch.from_numpy(values[rows]).to(device)[:, None, None]
            for values in (self.starts, self.widths, self.heights - 1, self.widths - 1)
        )
        result = self.pixels.new_zeros((len(rows), size, size, 3), dtype=torch.float32)
        for i in range(reduce):
            for j in range(reduce):
                high, wide = y[:, i::reduce, None], x[:, None, j::reduce]
                above, before = high.floor().long(), wide.floor().long()
                below, after = torch.minimum(above + 1, last_row), torch.minimum(before + 1, last_column)
                down, right = (high - above)[..., None], (wide - before)[..., None]
                upper, lower = start + above * width, start + below * width
                # lerp(a, b, 0) is a: squares that need no resizing come out unchanged
                first = torch.lerp(self.pixels[upper + before].float(), self.pixels[upper + after].float(), right)
                second = torch.lerp(self.pixels[lower + before].float(), self.pixels[lower + after].float(), right)
                result += torch.lerp(first, second, down)
        return (result / reduce**2).round_().to(torch.uint8).permute(0, 3, 1, 2).contiguous()


def _grid(start: np.ndarray, length: np.ndarray, limit: np.ndarray, count: int) -> np.ndarray:
    """(B, count) float32 where the centres of `count` equal parts of each box lie, kept inside the image."""
    centres = start[:, None] + (np.arange(count) + 0.5) * (length / count)[:, None] - 0.5
    return np.clip(centres, 0, limit[:, None] - 1).astype(np.float32)
