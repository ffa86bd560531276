"""Decoded images of different sizes in one flat buffer, cut and mirrored for a whole batch at once."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from proxymetric.data.views import Boxes


class ImageBuffer:
    """N images of any size, end to end in one uint8 tensor on `device`.

    The list of images, (H, W, 3) uint8 each, is emptied while it is copied, so that memory never holds all of it twice.

    >>> store = Ragged([np.zeros((4, 6, 3), np.uint8), np.full((2, 2, 3), 9, np.uint8)])
    >>> store.heights.tolist(), store.image(1).size
    ([4, 2], (2, 2))
    >>> whole = Boxes(*(np.array([v]) for v in (0.0, 0.0, 2.0, 2.0)), flip=np.array([False]))
    >>> store.cut(np.array([1]), whole, size=3).shape
    torch.Size([1, 3, 3, 3])
    """

    def __init__(self, images: list[np.ndarray], device: str | torch.device = "cpu") -> None:
        self.heights = np.array([image.shape[0] for image in images], dtype=np.int64)
        self.widths = np.array([image.shape[1] for image in images], dtype=np.int64)
        areas = self.heights * self.widths
        self.starts = np.cumsum(areas) - areas
        flat = np.empty((int(areas.sum()), 3), dtype=np.uint8)
        images.reverse()
        for start, area in zip(self.starts, areas):
            flat[start : start + area] = images.pop().reshape(-1, 3)
        self.pixels = torch.from_numpy(flat).to(device)

    def image(self, row: int) -> Image.Image:
        """Image `row`, for the views that work on one image (needs the buffer on the CPU)."""
        start, height, width = self.starts[row], self.heights[row], self.widths[row]
        return Image.fromarray(self.pixels[start : start + height * width].view(height, width, 3).numpy())

    def cut(self, rows: np.ndarray, boxes: Boxes, size: int) -> Tensor:
        """(B, 3, size, size) uint8: one box from each of the images `rows`, by bilinear interpolation.

        Where the images are 1.5 times as large as the result or more, every pixel is the mean of several samples.
        """
        device = self.pixels.device
        shorter = np.minimum(self.heights, self.widths)
        reduce = max(1, round(shorter.max(initial=0) / size))
        y = _grid(boxes.top, boxes.height, self.heights[rows], size * reduce)
        x = _grid(boxes.left, boxes.width, self.widths[rows], size * reduce)
        x = np.where(boxes.flip[:, None], x[:, ::-1], x)
        start, height, width = (values[rows][:, None] for values in (self.starts, self.heights, self.widths))
        above, before = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
        below, after = np.minimum(above + 1, height - 1), np.minimum(before + 1, width - 1)
        lines = [torch.from_numpy(start + line * width).to(device) for line in (above, below)]
        columns = [torch.from_numpy(column).to(device) for column in (before, after)]
        if reduce == 1 and (above == y).all() and (before == x).all():
            return self._pick(lines[0], columns[0]).permute(0, 3, 1, 2).contiguous()
        down = torch.from_numpy((y - above).astype(np.float32)).to(device)[:, :, None, None]
        right = torch.from_numpy((x - before).astype(np.float32)).to(device)[:, None, :, None]
        result = torch.zeros((len(rows), size, size, 3), device=device)
        for i in range(reduce):
            for j in range(reduce):
                upper, lower = (self._between(line[:, i::reduce], columns, right, j, reduce) for line in lines)
                result += torch.lerp(upper, lower, down[:, i::reduce])
        return (result / reduce**2).round_().to(torch.uint8).permute(0, 3, 1, 2).contiguous()

    def _between(self, lines: Tensor, columns: list[Tensor], right: Tensor, j: int, reduce: int) -> Tensor:
        before, after = (self._pick(lines, column[:, j::reduce]).float() for column in columns)
        return torch.lerp(before, after, right[:, :, j::reduce])

    def _pick(self, lines: Tensor, columns: Tensor) -> Tensor:
        """(B, H, W, 3) the pixels where lines (B, H), as the place of their first pixel, and columns (B, W) cross."""
        places = lines[:, :, None] + columns[:, None, :]
        return self.pixels.index_select(0, places.view(-1)).view(*places.shape, 3)


def _grid(start: np.ndarray, length: np.ndarray, limit: np.ndarray, count: int) -> np.ndarray:
    """(B, count) where the centres of `count` equal parts of each box lie, kept inside the image."""
    centres = start[:, None] + (np.arange(count) + 0.5) * (length / count)[:, None] - 0.5
    return np.clip(centres, 0, limit[:, None] - 1)
