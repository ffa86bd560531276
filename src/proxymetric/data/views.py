"""How a photograph becomes the square that the network sees.

A view is a box in the image, brought to `size` x `size` pixels in one step. Where the box lies is arithmetic on random
numbers, done for any number of images at once, so the same boxes serve a PIL image in a worker process and images that
lie on the accelerator. Views give uint8; the encoder normalises.
"""

from __future__ import annotations

import difflib
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

TRIES = 10
DRAWS = 2 * TRIES + 3
"""Uniform numbers that one training view uses: area and ratio of each try, where the box lies (down, right), flip."""

_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_CROPS = ("random-resized", "random", "none")


class Boxes(NamedTuple):
    """B boxes in pixels of their images, float64 (B,), and whether each is mirrored, bool (B,)."""

    top: np.ndarray
    left: np.ndarray
    height: np.ndarray
    width: np.ndarray
    flip: np.ndarray


class EvalView:
    """The centre: shorter side to `resize`, then the `size` x `size` square in the middle.

    Arguments:
        size: side of the result in pixels.
        resize: the shorter side before the crop, `size` or more; default `round(size * 256 / 224)`. With
            `resize == size` an image of that size is passed unchanged.
        interpolation: "bilinear" or "bicubic".

    >>> EvalView(32)(Image.new("RGB", (60, 40), "red")).shape
    torch.Size([3, 32, 32])
    """

    def __init__(self, size: int, resize: int | None = None, interpolation: str = "bilinear") -> None:
        self.size = _checked(size, interpolation)
        self.resize = _room(size) if resize is None else resize
        self.interpolation = interpolation
        if self.resize < size:
            raise ValueError(f"resize must be size ({size}) or more, got {resize}")

    def boxes(self, heights: np.ndarray, widths: np.ndarray) -> Boxes:
        """The boxes for images of these heights and widths (B,)."""
        return _centred(heights, widths, self.size / self.resize)

    def __call__(self, image: Image.Image) -> Tensor:
        """RGB image -> (3, size, size) uint8."""
        return _cut(image, self.boxes(*_sides(image)), self.size, self.interpolation)


class TrainView:
    """A random part of the image.

    Arguments:
        size: side of the result in pixels.
        resize: the shorter side that images are brought to first. Default: none for "random-resized" (the box is cut
            from the image as it is), `round(size * 256 / 224)` for the others.
        crop: "random-resized": a box of `scale` times the area, `ratio` wide to high, brought to `size` x `size` (as
            Inception was trained: area uniform, ratio log-uniform, ten tries, then the largest box in the middle).
            "random": a `size` x `size` square anywhere in the resized image. "none": the centre, as `EvalView`.
        scale, ratio: (smallest, largest), of "random-resized".
        flip: mirror every second image.
        interpolation: "bilinear" or "bicubic" (a device cache always cuts with bilinear).

    A view is a pure function of the image and of random numbers: pass a seed, or a NumPy generator.

    >>> view = TrainView(32, scale=(0.5, 1.0))
    >>> image = Image.radial_gradient("L").convert("RGB")
    >>> bool((view(image, 7) == view(image, 7)).all()), bool((view(image, 7) == view(image, 8)).all())
    (True, False)
    """

    def __init__(
        self,
        size: int,
        resize: int | None = None,
        crop: str = "random-resized",
        scale: tuple[float, float] = (0.16, 1.0),
        ratio: tuple[float, float] = (0.75, 1.3333),
        flip: bool = True,
        interpolation: str = "bilinear",
    ) -> None:
        self.size = _checked(size, interpolation)
        if crop not in _CROPS:
            raise ValueError(f"crop must be one of {', '.join(_CROPS)}, got {crop!r}")
        self.resize = _room(size) if resize is None and crop != "random-resized" else resize
        if self.resize is not None and self.resize < (1 if crop == "random-resized" else size):
            raise ValueError(f"resize must be size ({size}) or more with crop {crop!r}, got {resize}")
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(f"scale must be two fractions of the area, 0 < smallest <= largest <= 1, got {scale}")
        if not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"ratio must be two positive numbers, the smaller first, got {ratio}")
        self.crop, self.flip, self.interpolation = crop, flip, interpolation
        self.scale, self.ratio = (float(scale[0]), float(scale[1])), (float(ratio[0]), float(ratio[1]))

    @property
    def stored(self) -> int:
        """The shorter side that a cache keeps of larger images: `resize`, or `round(size * 256 / 224)` without one."""
        return _room(self.size) if self.resize is None else self.resize

    def draw(self, count: int, random: np.random.Generator | int) -> np.ndarray:
        """(count, DRAWS) the uniform numbers for `count` views."""
        return np.random.default_rng(random).random((count, DRAWS))

    def boxes(self, heights: np.ndarray, widths: np.ndarray, draws: np.ndarray) -> Boxes:
        """The boxes for images of these heights and widths (B,), from random numbers (B, DRAWS)."""
        flip = (draws[:, -1] < 0.5) & self.flip
        if self.crop == "none":
            assert self.resize is not None
            return _centred(heights, widths, self.size / self.resize)._replace(flip=flip)
        high, wide = np.asarray(heights, dtype=np.float64), np.asarray(widths, dtype=np.float64)
        # Boxes are placed in the resized image, and cut from the image that is really there: the zoom lies between.
        zoom = 1.0 if self.resize is None else self.resize / np.minimum(high, wide)
        high, wide = np.round(high * zoom), np.round(wide * zoom)
        if self.crop == "random":
            height, width = np.full_like(high, self.size), np.full_like(wide, self.size)
            down, right = draws[:, -3], draws[:, -2]
        else:
            height, width, found = self._random_sides(high, wide, draws)
            down, right = (np.where(found, draws[:, k], 0.5) for k in (-3, -2))
        top = np.floor(down * (high - height + 1))
        left = np.floor(right * (wide - width + 1))
        return Boxes(top / zoom, left / zoom, height / zoom, width / zoom, flip)

    def _random_sides(
        self, high: np.ndarray, wide: np.ndarray, draws: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Heights and widths of the first try that fits into the image, and which images had one."""
        low, top = np.log(self.ratio[0]), np.log(self.ratio[1])
        area = (self.scale[0] + (self.scale[1] - self.scale[0]) * draws[:, :TRIES]) * (high * wide)[:, None]
        ratio = np.exp(low + (top - low) * draws[:, TRIES : 2 * TRIES])
        widths, heights = np.round(np.sqrt(area * ratio)), np.round(np.sqrt(area / ratio))
        fits = (heights >= 1) & (widths >= 1) & (heights <= high[:, None]) & (widths <= wide[:, None])
        found, first, rows = fits.any(1), fits.argmax(1), np.arange(len(high))
        largest_height = np.minimum(high, np.maximum(1, np.round(wide / self.ratio[0])))
        largest_width = np.minimum(wide, np.maximum(1, np.round(high * self.ratio[1])))
        return (
            np.where(found, heights[rows, first], largest_height),
            np.where(found, widths[rows, first], largest_width),
            found,
        )

    def __call__(self, image: Image.Image, random: np.random.Generator | int) -> Tensor:
        """RGB image -> (3, size, size) uint8; the random numbers come from a generator or a seed."""
        return self.apply(image, self.draw(1, random))

    def apply(self, image: Image.Image, draws: np.ndarray) -> Tensor:
        """RGB image -> (3, size, size) uint8, from the random numbers (1, DRAWS)."""
        if self.resize is not None:
            image = shrink(image, self.resize, self.interpolation)
        return _cut(image, self.boxes(*_sides(image), draws), self.size, self.interpolation)


VIEWS: dict[str, dict[str, dict[str, Any]]] = {
    "proxy-anchor": {
        "train": {"size": 224, "scale": (0.08, 1.0), "interpolation": "bilinear"},
        "eval": {"size": 224, "resize": 256, "interpolation": "bilinear"},
    },
    "vptsp": {
        "train": {"size": 224, "scale": (0.08, 1.0), "interpolation": "bicubic"},
        "eval": {"size": 224, "resize": 256, "interpolation": "bicubic"},
    },
    "ccp": {
        "train": {"size": 227, "scale": (0.16, 1.0), "interpolation": "bilinear"},
        "eval": {"size": 227, "resize": 256, "interpolation": "bilinear"},
    },
    "mlrc": {
        "train": {"size": 227, "resize": 256, "scale": (0.16, 1.0), "interpolation": "bilinear"},
        "eval": {"size": 227, "resize": 256, "interpolation": "bilinear"},
    },
}
"""The papers' views by name: arguments of `TrainView` and `EvalView`. All of them flip, and cut at ratios 3/4 to 4/3.

- proxy-anchor: released code; also what Proxy-ISA, VCPA and the MPA family describe.
- vptsp: the text's bicubic (the released code is bilinear, otherwise the same as proxy-anchor).
- ccp: released code, which cuts from the image as it is. Its text is mlrc.
- mlrc: "A Metric Learning Reality Check", which brings the shorter side to 256 before cutting.
"""


def named_view(name: str, size: int | None = None) -> dict[str, dict[str, Any]]:
    """Arguments of the views of a paper: `{"train": for TrainView, "eval": for EvalView}`.

    Arguments:
        name: one of `VIEWS`.
        size: another size than the paper's, in pixels; `resize` grows or shrinks with it.

    >>> named_view("ccp")["eval"]
    {'size': 227, 'resize': 256, 'interpolation': 'bilinear'}
    >>> EvalView(**named_view("proxy-anchor", size=448)["eval"]).resize
    512
    """
    if name not in VIEWS:
        close = difflib.get_close_matches(str(name), VIEWS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"view must be one of {', '.join(VIEWS)}, got {name!r}{hint}")
    views = {kind: dict(arguments) for kind, arguments in VIEWS[name].items()}
    for arguments in views.values():
        if size is not None:
            if "resize" in arguments:
                arguments["resize"] = round(arguments["resize"] * size / arguments["size"])
            arguments["size"] = size
    return views


def shrink(image: Image.Image, side: int, interpolation: str = "bilinear") -> Image.Image:
    """`image` with its shorter side brought down to `side`; smaller images stay as they are.

    >>> shrink(Image.new("RGB", (300, 200)), 100).size
    (150, 100)
    """
    short = min(image.size)
    if short <= side:
        return image
    width, height = (max(1, round(length * side / short)) for length in image.size)
    return image.resize((width, height), _RESAMPLING[interpolation])


def _room(size: int) -> int:
    return round(size * 256 / 224)


def _checked(size: int, interpolation: str) -> int:
    if size < 1:
        raise ValueError(f"size must be 1 or more, got {size}")
    if interpolation not in _RESAMPLING:
        raise ValueError(f"interpolation must be one of {', '.join(_RESAMPLING)}, got {interpolation!r}")
    return size


def _sides(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    return np.array([image.height]), np.array([image.width])


def _centred(heights: np.ndarray, widths: np.ndarray, part: float) -> Boxes:
    """Squares in the middle whose side is `part` of the shorter side."""
    side = np.minimum(heights, widths) * part
    return Boxes((heights - side) / 2, (widths - side) / 2, side, side, np.zeros(len(side), dtype=bool))


def _cut(image: Image.Image, boxes: Boxes, size: int, interpolation: str) -> Tensor:
    """The one box of `boxes`, as (3, size, size) uint8."""
    top, left, height, width = (float(value[0]) for value in boxes[:4])
    box = (max(0.0, left), max(0.0, top), min(left + width, image.width), min(top + height, image.height))
    square = np.array(image.resize((size, size), _RESAMPLING[interpolation], box=box))
    if boxes.flip[0]:
        square = square[:, ::-1]
    return torch.from_numpy(np.ascontiguousarray(square.transpose(2, 0, 1)))
