"""Whether two images show the same picture: their small grey copies, aligned and compared."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

SIDE = 48
"""pixels a side of the grey copy of an image, whatever the shape of the image"""
LEVELS = {12: 0.6, 24: 0.8, 48: -1.0}
"""pixels a side at which two copies are aligned, one after the other -> the correlation that is needed to go on; at the
first level, where a crop moves a pixel by little, before they are aligned"""
STEPS_PER_LEVEL = 6
MIN_OVERLAP = 0.6
"""the part of a picture that both images must show"""
FLAT = 2.0
"""the standard deviation of grey values (of 255) under which a picture has nothing that could be compared"""
DETAIL_PIXELS = 5
"""a detail is the difference of a pixel from the mean of the square of this side around it"""
CLEARLY_BETTER = 0.01
"""by how much the mirrored picture must agree better; a picture may be nearly its own mirror image"""
PAIRS_PER_BLOCK = 1024


class Agreement(NamedTuple):
    """How well M pairs of pictures agree.

    Attributes:
        correlation: (M,) of the aligned grey values, from 0 to 1; low for pictures that clearly differ, not aligned.
        detail: (M,) the same of the details alone, the differences from the mean around each pixel: two cars of one
            shape on white correlate well, but their details do not.
        mirrored: (M,) bool: the second picture agrees better when it is mirrored.
    """

    correlation: Tensor
    detail: Tensor
    mirrored: Tensor


def grey_copy(image: Image.Image) -> np.ndarray:
    """A small grey copy (SIDE, SIDE) of an image, uint8; the shape of the image is not kept.

    Example:
        >>> grey_copy(Image.new("RGB", (200, 100), "white")).shape
        (48, 48)
    """
    small = image.reduce(max(1, min(image.size) // (4 * SIDE))) if min(image.size) >= 8 * SIDE else image
    return np.asarray(small.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX))


def agreement(copies: Tensor, first: Tensor, second: Tensor) -> Agreement:
    """Align the grey copies of pairs of images, and correlate them.

    The second picture is stretched, shifted and, if that is better, mirrored. So pictures agree that differ in format,
    compression, size, brightness, contrast, or in a narrow margin that was cut off.

    Args:
        copies: (N, SIDE, SIDE) uint8, see `grey_copy`.
        first: (M,) rows of `copies`.
        second: (M,) rows of `copies`.

    Example:
        >>> ramp = torch.arange(SIDE**2).reshape(1, SIDE, SIDE) % 251
        >>> pictures = torch.cat([ramp, ramp.flip(2), torch.full_like(ramp, 7)]).byte()
        >>> agreements = agreement(pictures, torch.tensor([0, 0]), torch.tensor([1, 2]))
        >>> agreements.correlation.round().tolist(), agreements.mirrored.tolist()
        ([1.0, 0.0], [True, False])
    """
    if not len(first):
        return Agreement(torch.empty(0), torch.empty(0), torch.empty(0, dtype=torch.bool))
    blocks = zip(first.split(PAIRS_PER_BLOCK), second.split(PAIRS_PER_BLOCK))
    parts = [_agreement(copies[rows].float(), copies[others].float()) for rows, others in blocks]
    return Agreement(*(torch.cat(column) for column in zip(*parts)))


def _agreement(first: Tensor, second: Tensor) -> Agreement:
    straight, mirrored = _compare(first, second), torch.zeros(len(first), 2)
    open_pairs = straight[:, 0] < 1 - CLEARLY_BETTER
    mirrored[open_pairs] = _compare(first[open_pairs], second[open_pairs].flip(2))
    is_mirrored = mirrored[:, 0] > straight[:, 0] + CLEARLY_BETTER
    correlation, detail = torch.where(is_mirrored[:, None], mirrored, straight).T
    return Agreement(correlation, detail, is_mirrored)


def _compare(first: Tensor, second: Tensor) -> Tensor:
    """The correlations (M, 2) of grey values and of details after the second picture was moved to fit the first.

    Gauss-Newton steps from the coarsest level to the finest minimise the squared difference of the standardised grey
    values where the pictures overlap. Pairs that clearly differ are given up on the way.
    """
    result = torch.zeros(len(first), 2)
    if not len(first):
        return result
    rows = ((_contrast(first) >= FLAT) & (_contrast(second) >= FLAT)).nonzero().flatten()
    coarse = min(LEVELS)
    rows = rows[_correlation(_at(first[rows], coarse), *_warp(_at(second[rows], coarse))) >= LEVELS[coarse]]
    result[rows] = _correlations(first[rows], second[rows])
    rows = rows[result[rows, 0] < 1 - CLEARLY_BETTER]
    motion = torch.zeros(len(rows), 4)  # stretch of x and y, shift of x and y
    for side, needed in LEVELS.items():
        target, moving = _at(first[rows], side), _at(second[rows], side)
        if side != coarse:
            going_on = _correlation(target, *_warp(moving, motion)) >= needed
            rows, motion, target, moving = rows[going_on], motion[going_on], target[going_on], moving[going_on]
        for _ in range(STEPS_PER_LEVEL):
            motion = motion + _step(target, moving, motion)
        motion = motion.clamp(-0.5, 0.5)
    moved = _correlations(first[rows], second[rows], motion)
    result[rows] = torch.where(moved[:, :1] > result[rows, :1], moved, result[rows])
    return result.clamp(min=0.0)


def _correlations(target: Tensor, moving: Tensor, motion: Tensor | None = None) -> Tensor:
    """The correlations (M, 2) of grey values and of details."""
    warped, mask = _warp(moving, motion)
    margin = DETAIL_PIXELS // 2  # where the mean around a pixel would reach beyond the picture
    inner = functional.pad(mask[:, margin:-margin, margin:-margin], (margin,) * 4)
    return torch.stack([_correlation(target, warped, mask), _correlation(_details(target), _details(warped), inner)], 1)


def _details(pictures: Tensor) -> Tensor:
    margin = DETAIL_PIXELS // 2
    padded = functional.pad(pictures[:, None], (margin,) * 4, mode="replicate")
    return pictures - functional.avg_pool2d(padded, DETAIL_PIXELS, stride=1)[:, 0]


def _correlation(target: Tensor, warped: Tensor, mask: Tensor) -> Tensor:
    """The correlation (M,) where the mask is 1; -1 where that is too small a part."""
    area = mask.flatten(1).mean(dim=1)
    products = _standardised(target, mask) * _standardised(warped, mask) * mask
    return torch.where(area >= MIN_OVERLAP, products.flatten(1).mean(dim=1) / area.clamp(min=1e-6), -1.0)


def _contrast(pictures: Tensor) -> Tensor:
    """The standard deviation (M,) of the grey values."""
    return pictures.flatten(1).std(dim=1)


def _at(pictures: Tensor, side: int) -> Tensor:
    return functional.interpolate(pictures[:, None], size=side, mode="area")[:, 0]


def _grid(side: int) -> tuple[Tensor, Tensor]:
    """The coordinates x (1, side) and y (side, 1) of the pixels, from -1 to 1."""
    line = (torch.arange(side) * 2 + 1) / side - 1
    return line[None], line[:, None]


def _warp(pictures: Tensor, motion: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The stretched and shifted pictures, and a mask of the pixels that lie inside the original."""
    if motion is None:
        return pictures, torch.ones_like(pictures)
    x, y = _grid(pictures.shape[-1])
    stretch_x, stretch_y, shift_x, shift_y = (column[:, None, None] for column in motion.T)
    at_x, at_y = (1 + stretch_x) * x + shift_x + 0 * y, (1 + stretch_y) * y + shift_y + 0 * x
    grid = torch.stack([at_x, at_y], dim=-1)
    warped = functional.grid_sample(pictures[:, None], grid, padding_mode="border", align_corners=False)[:, 0]
    return warped, ((at_x.abs() <= 1) & (at_y.abs() <= 1)).float()


def _standardised(pictures: Tensor, mask: Tensor) -> Tensor:
    """Grey values with mean 0 and variance 1 where the mask is 1."""
    area = mask.flatten(1).sum(dim=1).clamp(min=1.0)[:, None, None]
    centred = pictures - (pictures * mask).sum(dim=(1, 2), keepdim=True) / area
    variance = (centred.square() * mask).sum(dim=(1, 2), keepdim=True) / area
    return centred / variance.clamp(min=1e-6).sqrt()


def _step(target: Tensor, moving: Tensor, motion: Tensor) -> Tensor:
    """One Gauss-Newton step (M, 4)."""
    warped, mask = _warp(moving, motion)
    warped, target = _standardised(warped, mask), _standardised(target, mask)
    side = target.shape[-1]
    padded = functional.pad(warped[:, None], (1, 1, 1, 1), mode="replicate")[:, 0]
    slope_x = (padded[:, 1:-1, 2:] - padded[:, 1:-1, :-2]) * side / 4  # for a unit of x, of which the picture has 2
    slope_y = (padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1]) * side / 4
    x, y = _grid(side)
    slopes = torch.stack([slope_x * x, slope_y * y, slope_x, slope_y], dim=1) * mask[:, None]
    slopes = slopes.flatten(2)
    normal = slopes @ slopes.transpose(1, 2) / side**2 + 1e-2 * torch.eye(4)
    right = (slopes * ((target - warped) * mask).flatten(1)[:, None]).mean(dim=2)
    return torch.linalg.solve(normal, right[..., None])[..., 0].clamp(-0.2, 0.2)
