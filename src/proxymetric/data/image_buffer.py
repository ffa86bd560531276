"""A flat buffer of decoded images of different sizes, from which a whole batch of boxes is cut at once."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from proxymetric.data.views import Boxes


class ImageBuffer:
    """Holds N images of any size consecutively in one uint8 tensor.

    Args:
        images: (H, W, 3) uint8 each. The list is emptied while it is copied, so memory never holds all images twice.
        device: device of the tensor.

    Attributes:
        heights: (N,) heights in pixels.
        widths: (N,) widths in pixels.
        starts: (N,) index of the first pixel of each image.
        pixels: (sum of heights x widths, 3) uint8.

    Example:
        >>> buffer = ImageBuffer([np.zeros((4, 6, 3), np.uint8), np.full((2, 2, 3), 9, np.uint8)])
        >>> buffer.heights.tolist(), buffer.image(1).size
        ([4, 2], (2, 2))
        >>> box = Boxes(*(np.array([v]) for v in (0.0, 0.0, 2.0, 2.0)), flip=np.array([False]))
        >>> buffer.cut(np.array([1]), box, size=3).shape
        torch.Size([1, 3, 3, 3])
    """

    def __init__(self, images: list[np.ndarray], device: str | torch.device = "cpu") -> None:
        self.heights = np.array([image.shape[0] for image in images], dtype=np.int64)
        self.widths = np.array([image.shape[1] for image in images], dtype=np.int64)
        self._longest_shorter_side = int(np.minimum(self.heights, self.widths).max(initial=0))
        areas = self.heights * self.widths
        self.starts = np.cumsum(areas) - areas
        pixels = np.empty((int(areas.sum()), 3), dtype=np.uint8)
        images.reverse()
        for start, area in zip(self.starts, areas):
            pixels[start : start + area] = images.pop().reshape(-1, 3)
        self.pixels = torch.from_numpy(pixels).to(device)

    def image(self, row: int) -> Image.Image:
        """Return image `row` for views that work on one image; the buffer must be on the CPU."""
        start, height, width = self.starts[row], self.heights[row], self.widths[row]
        return Image.fromarray(self.pixels[start : start + height * width].view(height, width, 3).numpy())

    def cut(self, rows: np.ndarray, boxes: Boxes, size: int) -> Tensor:
        """Cut one box from each of the images `rows`, by bilinear interpolation.

        If any image in the buffer has a shorter side of at least 1.5 `size`, each pixel of the result is the mean of
        several samples.

        Args:
            rows: (B,) indices of images.
            boxes: one box for each of these images.
            size: side of the result in pixels.

        Returns:
            (B, 3, size, size) uint8.
        """
        device = self.pixels.device
        samples = max(1, round(self._longest_shorter_side / size))
        y = _grid(boxes.top, boxes.height, self.heights[rows], size * samples)
        x = _grid(boxes.left, boxes.width, self.widths[rows], size * samples)
        x = np.where(boxes.flip[:, None], x[:, ::-1], x)
        start, height, width = (values[rows][:, None] for values in (self.starts, self.heights, self.widths))
        upper_lines, left_columns = np.floor(y).astype(np.int64), np.floor(x).astype(np.int64)
        weights = [(y - upper_lines).astype(np.float32), (x - left_columns).astype(np.float32)]
        if (cut_boxes := _cut_kernel(device.type)) is not None:
            sides = (values[:, 0] for values in (start, height, width))
            positions = (*sides, upper_lines, weights[0], left_columns, weights[1])
            return cut_boxes(self.pixels, *(_send(values, device) for values in positions), size)
        lower_lines, right_columns = np.minimum(upper_lines + 1, height - 1), np.minimum(left_columns + 1, width - 1)
        lines = [_send(start + line * width, device) for line in (upper_lines, lower_lines)]
        columns = [_send(column, device) for column in (left_columns, right_columns)]
        if samples == 1 and (upper_lines == y).all() and (left_columns == x).all():
            return self._pick(lines[0], columns[0]).permute(0, 3, 1, 2).contiguous()
        # The weights of a column are repeated for its three colours: the innermost loop is then long and contiguous.
        line_weights = _send(weights[0], device)[:, :, None]
        column_weights = _send(weights[1].repeat(3, axis=1), device).view(len(rows), 1, -1, 3)
        result = None
        for i in range(samples):
            for j in range(samples):
                upper_pixels, lower_pixels = (
                    self._interpolate_columns(line[:, i::samples], columns, column_weights, j, samples)
                    for line in lines
                )
                part = torch.lerp(upper_pixels, lower_pixels, line_weights[:, i::samples])
                result = part if result is None else result.add_(part)
        assert result is not None
        mean = result if samples == 1 else result.div_(samples**2)
        pixels = mean.round_().to(torch.uint8).view(len(rows), size, size, 3)
        return pixels.permute(0, 3, 1, 2).contiguous()

    def _interpolate_columns(
        self, lines: Tensor, columns: list[Tensor], weights: Tensor, sample: int, samples: int
    ) -> Tensor:
        """Return the pixels (B, H, 3 W) of `lines`, interpolated between the left and the right columns."""
        left_pixels, right_pixels = (
            self._pick(lines, column[:, sample::samples]).flatten(2).float() for column in columns
        )
        return torch.lerp(left_pixels, right_pixels, weights[:, :, sample::samples].flatten(2))

    def _pick(self, lines: Tensor, columns: Tensor) -> Tensor:
        """Return the pixels (B, H, W, 3) at columns (B, W) of lines (B, H); a line is the index of its first pixel."""
        indices = lines[:, :, None] + columns[:, None, :]
        return self.pixels.index_select(0, indices.view(-1)).view(*indices.shape, 3)


def _send(values: np.ndarray, device: torch.device) -> Tensor:
    """Copy an array to the device; a GPU is not waited for, since it copies from pinned memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@functools.cache
def _cut_kernel(device: str) -> Callable[..., Tensor] | None:
    """Return the kernel that cuts boxes on this type of device; None if there is none, or triton is not installed."""
    if device != "cuda":
        return None
    try:
        from proxymetric.data.cut_kernel import cut_boxes
    except ImportError:
        return None
    return cut_boxes


def _grid(start: np.ndarray, length: np.ndarray, limit: np.ndarray, count: int) -> np.ndarray:
    """Return the centres (B, count) of `count` equal parts of each box, clipped to the image."""
    centres = start[:, None] + (np.arange(count) + 0.5) * (length / count)[:, None] - 0.5
    return np.clip(centres, 0, limit[:, None] - 1)
