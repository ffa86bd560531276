"""Views cut a square of `size` x `size` pixels, the input of the network, from an image.

A view is a box in the image that is resized to `size` x `size` in one step. Boxes are computed from random numbers for
any number of images at once. The same boxes therefore work for a PIL image in a worker process and for a buffer of
images on the GPU. Unlike torchvision's transforms, a view is a pure function of seed, epoch and step. Views return
uint8; the encoder normalises the pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.data import augmentation
from proxymetric.data.own_transforms import apply_transform, find_transform

TRIES = 10
"""number of random boxes that "random-resized" tries before it takes the largest box in the centre"""
DRAWS = 2 * TRIES + 3
"""number of random numbers per training view: area and ratio of each try, vertical and horizontal position, flip"""
_VERTICAL, _HORIZONTAL, _FLIP = DRAWS - 3, DRAWS - 2, DRAWS - 1
_JITTER = slice(DRAWS, DRAWS + augmentation.JITTER_DRAWS)
_ERASE = slice(_JITTER.stop, _JITTER.stop + augmentation.ERASE_DRAWS)

_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_CROPS = ("random-resized", "random", "none")


class Boxes(NamedTuple):
    """B boxes, float64 (B,) in pixels of their images, and whether each is mirrored, bool (B,)."""

    top: np.ndarray
    left: np.ndarray
    height: np.ndarray
    width: np.ndarray
    flip: np.ndarray


class EvalView:
    """Resizes the shorter side to `resize` and cuts the `size` x `size` square in the centre.

    Args:
        size: side of the result in pixels, at least 1.
        resize: the shorter side before the crop, at least `size`; default `round(size * 256 / 224)`. With
            `resize == size`, an image of that size does not change.
        interpolation: "bilinear" or "bicubic".

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> EvalView(32)(Image.new("RGB", (60, 40), "red")).shape
        torch.Size([3, 32, 32])
    """

    def __init__(self, size: int, resize: int | None = None, interpolation: str = "bilinear") -> None:
        self.size = _checked_size(size, interpolation)
        self.resize = _default_resize(size) if resize is None else resize
        self.interpolation = interpolation
        if self.resize < size:
            raise ValueError(f"resize: got {resize}, expected at least size={size}")

    def boxes(self, heights: np.ndarray, widths: np.ndarray) -> Boxes:
        """Return the boxes for images of these heights and widths (B,)."""
        return _centred_boxes(heights, widths, self.size, self.resize)

    def __call__(self, image: Image.Image) -> Tensor:
        """Cut the centre of an RGB image: (3, size, size) uint8."""
        return _cut(image, self.boxes(*_sides(image)), self.size, self.interpolation)


class TrainView:
    """Cuts a random part of the image.

    A view is a pure function of the image and of random numbers, which come from a seed or a NumPy generator.

    Args:
        size: side of the result in pixels, at least 1.
        resize: the shorter side to which images are resized first. Default: no resizing for "random-resized",
            `round(size * 256 / 224)` for the other crops, where it must be at least `size`.
        crop: "random-resized" cuts a box of `scale` times the area and `ratio` of width to height, and resizes it to
            `size` x `size` (as for Inception: uniform area, log-uniform ratio, ten tries, then the largest box in the
            centre). "random" cuts a `size` x `size` square anywhere in the resized image. "none" cuts the centre, as
            `EvalView` does.
        scale: smallest and largest fraction of the area, in (0, 1], of "random-resized".
        ratio: smallest and largest ratio of width to height, above 0, of "random-resized".
        flip: mirror an image with probability 1/2.
        interpolation: "bilinear" or "bicubic"; with a device cache, crops are always bilinear.
        jitter: how much brightness, contrast, saturation (0..1 each) and hue (0..0.5) of a view change at most, such as
            `(0.4, 0.4, 0.4, 0.1)`; see `augmentation.jitter`.
        erase: probability that a random rectangle of a view is filled with its mean colour; see `augmentation.erase`.
        transform: replaces crop, flip, jitter and erase by your own transform of a PIL image, such as a pipeline of
            torchvision: "module:function", a function of the size that returns the transform, or (in Python) the
            transform itself. It returns a PIL image, or a tensor (3, size, size) of uint8 or of floats in 0..1. Not
            with a device cache.
        stored: the shorter side to which a cache reduces larger images, at least `resize`. Default: `resize`, or
            `round(size * 256 / 224)` without it. Crops of a larger side are sharper and need more memory: 400 for
            crops of 224 pixels keeps nine of ten crops of 0.08 to 1 of the area as sharp as without a cache.

    Raises:
        ValueError: an argument is out of range.

    Example:
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
        jitter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
        erase: float = 0.0,
        transform: str | Callable[[Any], Any] | None = None,
        stored: int | None = None,
    ) -> None:
        self.size = _checked_size(size, interpolation)
        one_of("crop", crop, _CROPS)
        self.resize = _default_resize(size) if resize is None and crop != "random-resized" else resize
        if self.resize is not None and self.resize < (1 if crop == "random-resized" else size):
            minimum = "1" if crop == "random-resized" else f"size={size}"
            raise ValueError(f"resize: got {resize} with crop={crop!r}, expected at least {minimum}")
        smallest_stored = _default_resize(size) if self.resize is None else self.resize
        self.stored = smallest_stored if stored is None else stored
        if self.stored < (self.resize or 1):
            raise ValueError(f"stored: got {stored}, expected at least {self.resize or 1}")
        if not 0 < scale[0] <= scale[1] <= 1:
            raise ValueError(
                f"scale: got {scale}, expected two fractions of the area with 0 < smallest <= largest <= 1"
            )
        if not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"ratio: got {ratio}, expected two numbers above 0, the smaller first")
        augmentation.check_strengths(jitter, erase)
        self.crop = crop
        self.flip = flip
        self.jitter = jitter
        self.erase = erase
        self.transform = find_transform(transform, size) if isinstance(transform, str) else transform
        self.interpolation = interpolation
        self.scale = (float(scale[0]), float(scale[1]))
        self.ratio = (float(ratio[0]), float(ratio[1]))

    def draw(self, count: int, random: np.random.Generator | int) -> np.ndarray:
        """Return the uniform random numbers of `count` views: (count, DRAWS), or more with jitter or erase."""
        random = np.random.default_rng(random)
        draws = random.random((count, DRAWS))
        if not any(self.jitter) and not self.erase:
            return draws
        return np.concatenate([draws, random.random((count, _ERASE.stop - DRAWS))], axis=1)

    def boxes(self, heights: np.ndarray, widths: np.ndarray, draws: np.ndarray) -> Boxes:
        """Return the boxes for images of these heights and widths (B,), from random numbers (B, DRAWS)."""
        flip = (draws[:, _FLIP] < 0.5) & self.flip
        if self.crop == "none":
            assert self.resize is not None
            return _centred_boxes(heights, widths, self.size, self.resize)._replace(flip=flip)
        image_heights, image_widths = np.asarray(heights, dtype=np.float64), np.asarray(widths, dtype=np.float64)
        # Boxes are computed in the resized image but cut from the original one: `zoom` converts between the two.
        zoom = 1.0 if self.resize is None else self.resize / np.minimum(image_heights, image_widths)
        image_heights, image_widths = np.round(image_heights * zoom), np.round(image_widths * zoom)
        if self.crop == "random":
            height, width = np.full_like(image_heights, self.size), np.full_like(image_widths, self.size)
            vertical, horizontal = draws[:, _VERTICAL], draws[:, _HORIZONTAL]
        else:
            height, width, fits = self._random_sides(image_heights, image_widths, draws)
            vertical, horizontal = (np.where(fits, draws[:, k], 0.5) for k in (_VERTICAL, _HORIZONTAL))
        top = np.floor(vertical * (image_heights - height + 1))
        left = np.floor(horizontal * (image_widths - width + 1))
        return Boxes(top / zoom, left / zoom, height / zoom, width / zoom, flip)

    def _random_sides(
        self, image_heights: np.ndarray, image_widths: np.ndarray, draws: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return height and width of the first try that fits, or else of the largest box, and whether a try fits."""
        log_smallest, log_largest = np.log(self.ratio[0]), np.log(self.ratio[1])
        image_areas = (image_heights * image_widths)[:, None]
        area = (self.scale[0] + (self.scale[1] - self.scale[0]) * draws[:, :TRIES]) * image_areas
        ratio = np.exp(log_smallest + (log_largest - log_smallest) * draws[:, TRIES : 2 * TRIES])
        widths, heights = np.round(np.sqrt(area * ratio)), np.round(np.sqrt(area / ratio))
        fits = (heights >= 1) & (widths >= 1) & (heights <= image_heights[:, None]) & (widths <= image_widths[:, None])
        any_fits = fits.any(1)
        first_fit = fits.argmax(1)
        rows = np.arange(len(image_heights))
        largest_height = np.minimum(image_heights, np.maximum(1, np.round(image_widths / self.ratio[0])))
        largest_width = np.minimum(image_widths, np.maximum(1, np.round(image_heights * self.ratio[1])))
        return (
            np.where(any_fits, heights[rows, first_fit], largest_height),
            np.where(any_fits, widths[rows, first_fit], largest_width),
            any_fits,
        )

    def __call__(self, image: Image.Image, random: np.random.Generator | int) -> Tensor:
        """Cut a view of an RGB image, (3, size, size) uint8, with random numbers from a generator or a seed."""
        return self.apply(image, self.draw(1, random))

    def apply(self, image: Image.Image, draws: np.ndarray) -> Tensor:
        """Cut a view of an RGB image, (3, size, size) uint8, with the random numbers of one view."""
        return self.finish(self.cut(image, draws)[None], draws)[0]

    def cut(self, image: Image.Image, draws: np.ndarray) -> Tensor:
        """Cut a view of an RGB image, or apply the own transform, with the random numbers of one view."""
        if self.transform is not None:
            return apply_transform(self.transform, image, self.size, seed=int(draws[0, 0] * 2**53))
        if self.resize is not None:
            image = shrink(image, self.resize, self.interpolation)
        return _cut(image, self.boxes(*_sides(image), draws), self.size, self.interpolation)

    def finish(self, images: Tensor, draws: np.ndarray) -> Tensor:
        """Change the colours of cut views (B, 3, size, size) uint8 and erase parts of them, on any device."""
        if self.transform is not None:
            return images
        if any(self.jitter):
            images = augmentation.jitter(images, self.jitter, draws[:, _JITTER])
        return augmentation.erase(images, self.erase, draws[:, _ERASE]) if self.erase else images


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
"""the papers' views by name: arguments of `TrainView` and `EvalView`. All of them flip and use ratios from 3/4 to 4/3.

- proxy-anchor: as in its released code. Proxy-ISA, VCPA and the MPA family describe the same views.
- vptsp: as proxy-anchor, but bicubic as in the paper's text; the released code is bilinear.
- ccp: as in its released code, which does not resize the image before cutting. The paper's text describes mlrc.
- mlrc: as in "A Metric Learning Reality Check", which resizes the shorter side to 256 before cutting.
"""


def named_view(name: str, size: int | None = None) -> dict[str, dict[str, Any]]:
    """Return the arguments of a paper's views: "train" for `TrainView` and "eval" for `EvalView`.

    Args:
        name: one of `VIEWS`.
        size: a size in pixels that replaces the paper's; `resize` is scaled in proportion.

    Raises:
        ValueError: the name is unknown.

    Example:
        >>> named_view("ccp")["eval"]
        {'size': 227, 'resize': 256, 'interpolation': 'bilinear'}
        >>> EvalView(**named_view("proxy-anchor", size=448)["eval"]).resize
        512
    """
    one_of("view", name, VIEWS)
    views = {kind: dict(arguments) for kind, arguments in VIEWS[name].items()}
    for arguments in views.values():
        if size is not None:
            if "resize" in arguments:
                arguments["resize"] = round(arguments["resize"] * size / arguments["size"])
            arguments["size"] = size
    return views


def shrink(image: Image.Image, side: int, interpolation: str = "bilinear") -> Image.Image:
    """Reduce the shorter side of `image` to `side`; smaller images do not change.

    Example:
        >>> shrink(Image.new("RGB", (300, 200)), 100).size
        (150, 100)
    """
    shorter = min(image.size)
    if shorter <= side:
        return image
    width, height = (max(1, round(length * side / shorter)) for length in image.size)
    return image.resize((width, height), _RESAMPLING[interpolation])


def _default_resize(size: int) -> int:
    return round(size * 256 / 224)


def _checked_size(size: int, interpolation: str) -> int:
    if size < 1:
        raise ValueError(f"size: got {size}, expected at least 1")
    one_of("interpolation", interpolation, _RESAMPLING)
    return size


def _sides(image: Image.Image) -> tuple[np.ndarray, np.ndarray]:
    return np.array([image.height]), np.array([image.width])


def _centred_boxes(heights: np.ndarray, widths: np.ndarray, size: int, resize: int) -> Boxes:
    """Return the squares in the centre that are `size` pixels wide where the shorter side has `resize` pixels.

    The corner of a square is a whole pixel of the resized image, as in torchvision. So a square that is cut without
    resizing holds the pixels of the image, not means of two neighbours.
    """
    shorter = np.minimum(heights, widths)
    zoom = resize / shorter
    top, left = (np.round((length * resize // shorter - size) / 2) / zoom for length in (heights, widths))
    return Boxes(top, left, size / zoom, size / zoom, np.zeros(len(shorter), dtype=bool))


def cut(image: Image.Image, boxes: Boxes, index: int, size: int, interpolation: str) -> np.ndarray:
    """Cut box `index` of `boxes` from an RGB image and resize it.

    Args:
        image: the image.
        boxes: boxes in pixels of their images.
        index: the box that belongs to the image.
        size: side of the result in pixels.
        interpolation: "bilinear" or "bicubic".

    Returns:
        (3, size, size) uint8, a view of (size, size, 3) in memory.

    Example:
        >>> cut(Image.new("RGB", (6, 4)), EvalView(2).boxes(np.array([4]), np.array([6])), 0, 2, "bilinear").shape
        (3, 2, 2)
    """
    top, left, height, width = (float(value[index]) for value in boxes[:4])
    box = (max(0.0, left), max(0.0, top), min(left + width, image.width), min(top + height, image.height))
    square = np.asarray(image.resize((size, size), _RESAMPLING[interpolation], box=box))
    if boxes.flip[index]:
        square = square[:, ::-1]
    return square.transpose(2, 0, 1)


def _cut(image: Image.Image, boxes: Boxes, size: int, interpolation: str) -> Tensor:
    """Cut the only box of `boxes`: (3, size, size) uint8."""
    return torch.from_numpy(np.array(cut(image, boxes, 0, size, interpolation), order="C"))
