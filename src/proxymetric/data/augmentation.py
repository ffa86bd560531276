"""Changes of the colours of training views, and parts of them that are erased: on any device, whole batches at once.

The random numbers come from outside, so that a view stays a pure function of seed, epoch and step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

JITTER_DRAWS = 4
"""random numbers of a view for `jitter`: one for each property"""
ERASE_DRAWS = 5
"""random numbers of a view for `erase`: whether, area, ratio, vertical and horizontal position"""
ERASED_AREA = 0.02, 1 / 3
"""smallest and largest part of a view that is erased, as in the paper on random erasing (Zhong et al., AAAI 2020)"""
ERASED_RATIO = 0.3, 1 / 0.3
"""smallest and largest ratio of height to width of the erased part"""
MAX_IMAGES_PER_CHUNK = 32
"""images whose colours are changed at once, so that a large batch needs little memory"""
_GREY = 0.2989, 0.587, 0.114


def check_strengths(jitter: tuple[float, float, float, float], erase: float) -> None:
    """Check the settings of a view.

    Raises:
        ValueError: a strength is out of range.

    Example:
        >>> check_strengths((0.4, 0.4, 0.4, 0.9), 0.0)
        Traceback (most recent call last):
        ValueError: jitter: got (0.4, 0.4, 0.4, 0.9), expected brightness, contrast and saturation in 0..1 and hue in
        0..0.5
    """
    if not (all(0 <= strength <= 1 for strength in jitter[:3]) and 0 <= jitter[3] <= 0.5):
        raise ValueError(
            f"jitter: got {tuple(jitter)}, expected brightness, contrast and saturation in 0..1 and hue in 0..0.5"
        )
    if not 0 <= erase <= 1:
        raise ValueError(f"erase: got {erase}, expected a probability in 0..1")


def jitter(images: Tensor, strengths: tuple[float, float, float, float], draws: np.ndarray) -> Tensor:
    """Change brightness, contrast, saturation and hue of each image, in this order.

    The first three are multiplied by a factor in 1 - strength..1 + strength; the hue is turned by a part in
    -strength..strength of the colour circle. The changes are those of torchvision's `ColorJitter`, which draws their
    order too.

    Args:
        images: (B, 3, H, W) uint8.
        strengths: of brightness, contrast, saturation and hue; 0 changes nothing.
        draws: (B, JITTER_DRAWS) uniform random numbers.

    Returns:
        (B, 3, H, W) uint8.

    Example:
        >>> grey = torch.full((1, 3, 2, 2), 100, dtype=torch.uint8)
        >>> jitter(grey, (0.5, 0, 0, 0), np.array([[1.0, 0, 0, 0]]))[0, 0, 0].tolist()
        [150, 150]
    """
    chunks = [
        _jitter_chunk(images[i : i + MAX_IMAGES_PER_CHUNK], strengths, draws[i : i + MAX_IMAGES_PER_CHUNK])
        for i in range(0, len(images), MAX_IMAGES_PER_CHUNK)
    ]
    return torch.cat(chunks) if chunks else images


def _jitter_chunk(images: Tensor, strengths: tuple[float, float, float, float], draws: np.ndarray) -> Tensor:
    changes = torch.from_numpy(((2 * draws - 1) * np.array(strengths)).astype(np.float32)).to(images.device)
    brightness, contrast, saturation, hue = changes.view(-1, JITTER_DRAWS, 1, 1, 1).unbind(1)
    pixels = images.float() / 255
    if strengths[0]:
        pixels = (pixels * (1 + brightness)).clamp_(0, 1)
    if strengths[1]:
        mean = _grey(pixels).mean((2, 3), keepdim=True)
        pixels = torch.lerp(mean, pixels, 1 + contrast).clamp_(0, 1)
    if strengths[2]:
        pixels = torch.lerp(_grey(pixels), pixels, 1 + saturation).clamp_(0, 1)
    if strengths[3]:
        pixels = _turn_hue(pixels, hue)
    return (pixels * 255).round_().to(torch.uint8)


def _grey(pixels: Tensor) -> Tensor:
    """Return the grey values (B, 1, H, W) of colours (B, 3, H, W)."""
    red, green, blue = pixels.split(1, dim=1)
    return _GREY[0] * red + _GREY[1] * green + _GREY[2] * blue


def _turn_hue(pixels: Tensor, turn: Tensor) -> Tensor:
    """Turn the hue of colours (B, 3, H, W) in 0..1 by a part (B, 1, 1, 1) of the circle; value and chroma stay."""
    value, brightest = pixels.max(1, keepdim=True)
    chroma = value - pixels.min(1, keepdim=True).values
    red, green, blue = pixels.split(1, dim=1)
    differences = torch.cat([green - blue, blue - red, red - green], dim=1).gather(1, brightest)
    hue = differences / chroma.clamp(min=1e-9) + 2 * brightest + 6 * turn  # in sixths of the circle
    # Each channel is a trapezium over the hue: red is largest at 0, green at 2, blue at 4.
    offsets = torch.tensor([5.0, 3.0, 1.0], device=pixels.device).view(1, 3, 1, 1)
    place = torch.remainder(offsets + hue, 6)
    return value - chroma * torch.minimum(place, 4 - place).clamp_(0, 1)


def erase(images: Tensor, probability: float, draws: np.ndarray) -> Tensor:
    """Fill a random rectangle of some images with the mean colour of the image.

    Args:
        images: (B, 3, H, W) uint8.
        probability: of an image to lose a rectangle.
        draws: (B, ERASE_DRAWS) uniform random numbers.

    Returns:
        (B, 3, H, W) uint8.

    Example:
        >>> image = torch.arange(48, dtype=torch.uint8).view(1, 3, 4, 4)
        >>> erase(image, 1.0, np.array([[0.5, 1.0, 0.5, 0.0, 0.0]]))[0, 0].tolist()
        [[8, 8, 2, 3], [8, 8, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    """
    height, width = images.shape[-2:]
    area = (ERASED_AREA[0] + (ERASED_AREA[1] - ERASED_AREA[0]) * draws[:, 1]) * height * width
    ratio = np.exp(np.log(ERASED_RATIO[0]) + np.log(ERASED_RATIO[1] / ERASED_RATIO[0]) * draws[:, 2])
    sides = np.clip(np.round(np.sqrt(area * ratio)), 1, height), np.clip(np.round(np.sqrt(area / ratio)), 1, width)
    chosen = draws[:, 0] < probability
    inside = []
    for length, side, draw in zip((height, width), sides, (draws[:, 3], draws[:, 4])):
        start = np.floor(draw * (length - side + 1))[:, None]
        place = np.arange(length)
        inside.append((place >= start) & (place < start + side[:, None]) & chosen[:, None])
    rows, columns = (torch.from_numpy(mask).to(images.device) for mask in inside)
    means = images.float().mean((2, 3), keepdim=True).round_().to(torch.uint8)
    return torch.where(rows[:, None, :, None] & columns[:, None, None, :], means, images)
