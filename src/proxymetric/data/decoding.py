"""Decoding of image files: the formats that are decoded, the limit on their pixels, and the conversion to RGB."""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import struct
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, cast

import numpy as np
from PIL import (  # noqa: F401 - each plugin registers its format in `Image.OPEN`
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageFile,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from proxymetric.data.image_structure import BoundedFile, TooMuchWork, check_structure, reads_of_pixels
from proxymetric.system.files import printable

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
"""the formats of Pillow that are decoded (MPO is opened as JPEG); not EPS, for which Pillow would start Ghostscript"""
READS_AVIF = False
with contextlib.suppress(ImportError):
    from PIL import AvifImagePlugin  # a Pillow before 11.3 has none

    READS_AVIF = AvifImagePlugin.SUPPORTED
MIN_PILLOW_HEIF = (1, 4)
"""earlier ones decode images of any size, whatever size the file declares"""


def _reads_heic() -> bool:
    """Return whether the extra `heic` is installed."""
    try:
        version = importlib.metadata.version("pillow-heif")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(number) for number in version.split(".")[:2]) >= MIN_PILLOW_HEIF


READS_HEIC = _reads_heic()
HEIC_EXTRA = "pip install 'proxymetric[heic]'"
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs", b"mif1", b"msf1")
"""what the bytes 8 to 12 of a HEIC file may be"""
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)
"""the EXIF tag of the orientation, and its values with which width and height change places"""
Box = tuple[int, int, int, int]
"""the part of an upright image from x1, y1 (inside) to x2, y2 (outside), in pixels"""
MAX_PIXELS = 100_000_000
"""default of the maximum number of pixels of an image; see `max_pixels`"""
LIMIT_VARIABLE = "PROXYMETRIC_MAX_PIXELS"
STRIP_PIXELS = 2**20
"""pixels that are converted to RGB at once, so that the conversion of a large image needs little memory"""
_WARNINGS_OF_PILLOW = r"PIL\."


class BadImage(ValueError):
    """An image cannot be read.

    Args:
        path: the path or title of the image.
        reason: why it cannot be read.

    Example:
        >>> str(BadImage("a.jpg", "the file is empty"))
        'a.jpg: the file is empty'
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def max_pixels() -> int:
    """Return the limit on the pixels of an image: `PROXYMETRIC_MAX_PIXELS` if it is set, else `MAX_PIXELS`.

    Raises:
        ValueError: the variable is not a positive integer.

    Example:
        >>> max_pixels()
        100000000
    """
    text = os.environ.get(LIMIT_VARIABLE, "")
    if not text:
        return MAX_PIXELS
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{LIMIT_VARIABLE}: got {text!r}, expected a number of pixels such as {MAX_PIXELS}")
    return int(text)


def read_image(
    path: str | Path, title: str | None = None, min_side: int | None = None, box: Box | None = None
) -> Image.Image:
    """Read an image file and return it decoded, upright and in RGB, with transparent parts on white.

    Only JPEG (also MPO), PNG, WebP, BMP, GIF, TIFF, AVIF and, with the extra `heic`, HEIC are decoded, whatever the
    file is called. A JPEG with more pixels
    than `max_pixels()` is decoded at 1/2, 1/4 or 1/8 of its size, which needs little memory; a progressive JPEG or
    another format with more pixels is a `BadImage`.

    Args:
        path: the file.
        title: name of the image in errors; None means the path.
        min_side: decode a JPEG at 1/2, 1/4 or 1/8 of its size, whichever is the smallest with a shorter side of at
            least `min_side` pixels. This is faster and changes the pixels: the decoder averages them. None: full size.
            With a box, this is about the box.
        box: return only this part of the upright image; None: all of it.

    Raises:
        BadImage: the file cannot be read, or the box lies outside the image.
        ValueError: the environment variable `PROXYMETRIC_MAX_PIXELS` is not a number.
    """
    title = printable(str(path)) if title is None else title
    max_pixels()  # refuses a wrong value, which is no fault of the image
    try:
        if os.path.getsize(path) == 0:
            raise BadImage(title, "the file is empty")
        with open(path, "rb") as file:
            return read_encoded(file, title, min_side, box)
    except BadImage:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path that cannot exist
        # `strerror` is the operating system's message for a missing or forbidden file; it does not contain the path.
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise BadImage(title, reason or type(error).__name__) from error


def read_encoded(file: IO[bytes], title: str, min_side: int | None = None, box: Box | None = None) -> Image.Image:
    """Read an image from an open file or from bytes in memory (`io.BytesIO`), as `read_image` does.

    Args:
        file: the encoded image.
        title: name of the image in errors.
        min_side: as for `read_image`.
        box: as for `read_image`.

    Raises:
        BadImage: the image cannot be read.
        ValueError: the environment variable `PROXYMETRIC_MAX_PIXELS` is not a number.
    """
    limit = max_pixels()
    try:
        image = open_image(file, title)
        stored_size = image.size
        if min_side is not None:
            _reduce(image, min_side if box is None else min_side * min(stored_size) / _shorter_side(box))
        _limit_pixels(image, limit, title)
        if box is None:
            return load_upright(image, title)
        decoded, is_turned = _load(image, title)
        return _cut_out(decoded, stored_size[::-1] if is_turned else stored_size, box, title)
    except (BadImage, MemoryError):
        raise
    except Exception as error:
        # Decoders raise many types of errors for a damaged file: OSError, SyntaxError, struct.error.
        message = " ".join(str(error).split()) or type(error).__name__
        raise BadImage(title, getattr(error, "strerror", None) or f"the image is damaged: {message}") from error


def read_size(file: IO[bytes], title: str) -> tuple[int, int]:
    """Return width and height of an encoded image as they are stored, without decoding its pixels.

    Args:
        file: the encoded image.
        title: name of the image in errors.

    Raises:
        BadImage: the format is not one that `read_image` decodes.
    """
    return open_image(file, title).size


def upright_sizes(file: IO[bytes], title: str) -> list[tuple[int, int]]:
    """Return width and height that an encoded image has when it is upright, without decoding its pixels.

    A PNG may say behind its pixels that it is turned: both sizes are returned for it.

    Args:
        file: the encoded image.
        title: name of the image in errors.

    Raises:
        BadImage: the format is not one that `read_image` decodes.
    """
    image = open_image(file, title)
    if image.format == "PNG" and "exif" not in image.info:
        return [image.size, image.size[::-1]]
    return [image.size[::-1] if image.getexif().get(ORIENTATION) in TURNED else image.size]


def is_inside(box: Box, size: tuple[int, int]) -> bool:
    """Return whether a box lies inside an image of this width and height.

    Example:
        >>> is_inside((0, 0, 4, 2), (4, 2)), is_inside((0, 0, 2, 4), (4, 2))
        (True, False)
    """
    return 0 <= box[0] < box[2] <= size[0] and 0 <= box[1] < box[3] <= size[1]


def _shorter_side(box: Box) -> int:
    return max(1, min(box[2] - box[0], box[3] - box[1]))


def _cut_out(image: Image.Image, full_size: tuple[int, int], box: Box, title: str) -> Image.Image:
    """Cut a box out of an upright image, which may be decoded smaller than its full size."""
    if not is_inside(box, full_size):
        raise BadImage(
            title, f"the box {box} lies outside the image, which is {full_size[0]} x {full_size[1]} when upright"
        )
    x, y = (decoded / full for decoded, full in zip(image.size, full_size))
    return image.crop((int(box[0] * x), int(box[1] * y), math.ceil(box[2] * x), math.ceil(box[3] * y)))


def upright(image: str | Path | Image.Image, title: str) -> Image.Image:
    """Return an image from a path or a PIL image, upright and RGB as from `read_image`.

    Args:
        image: a path or a PIL image.
        title: name of the image in errors.

    Raises:
        BadImage: the image cannot be read.
        ValueError: `image` is neither a path nor a PIL image.

    Example:
        >>> upright(Image.new("L", (4, 2)), "images[0]").mode
        'RGB'
    """
    if isinstance(image, str | Path):
        return read_image(image)
    if not isinstance(image, Image.Image):
        raise ValueError(f"{title}: got {type(image).__name__}, expected a path or a PIL image")
    try:
        return as_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # a PIL image may be opened but not decoded yet
        raise BadImage(getattr(image, "filename", "") or title, " ".join(str(error).split())) from error


def as_rgb(image: Image.Image) -> Image.Image:
    """Convert `image` to RGB: transparent parts become white, and 16-bit grey is scaled to 8 bits, not clipped.

    NaN in an image of floats becomes black.

    Example:
        >>> as_rgb(Image.new("RGBA", (1, 1), (0, 0, 0, 0))).getpixel((0, 0))
        (255, 255, 255)
    """
    if image.mode == "RGB":
        return image
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        scale = 257 if any(_largest_value(image.crop(box)) > 255 for box in _strips(image)) else 1
        return _convert_by_strips(image, lambda strip: _grey_to_rgb(strip, scale))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        return _convert_by_strips(image, _blend_with_white)
    return image.convert("RGB")


def _grey_to_rgb(strip: Image.Image, scale: int) -> Image.Image:
    values = np.nan_to_num(np.asarray(strip, dtype=np.float64), posinf=np.inf, neginf=-np.inf) / scale
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8)).convert("RGB")


def _blend_with_white(strip: Image.Image) -> Image.Image:
    rgba = strip.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def _largest_value(strip: Image.Image) -> float:
    """Return the largest finite value of a strip."""
    values = np.asarray(strip)
    return float(values[np.isfinite(values)].max(initial=0))


def _strips(image: Image.Image) -> list[tuple[int, int, int, int]]:
    """Return boxes of whole rows with about `STRIP_PIXELS` pixels each, which together are the image."""
    rows = max(1, STRIP_PIXELS // max(1, image.width))
    return [(0, top, image.width, min(top + rows, image.height)) for top in range(0, image.height, rows)]


def _convert_by_strips(image: Image.Image, convert: Callable[[Image.Image], Image.Image]) -> Image.Image:
    """Convert an image strip by strip to RGB."""
    strips = _strips(image)
    if len(strips) <= 1:
        return convert(image)
    rgb = Image.new("RGB", image.size)
    for box in strips:
        rgb.paste(convert(image.crop(box)), box)
    return rgb


def open_image(file: IO[bytes], title: str) -> ImageFile.ImageFile:
    """Open an image of one of the `FORMATS` without decoding it; `load_upright` decodes it.

    `Image.open` is not used, because it refuses large images before a JPEG could be reduced, and its limit is a
    global variable of the process.

    Args:
        file: the encoded image.
        title: name of the image in errors.

    Raises:
        BadImage: the file has another format, or decoding it would take too long (`image_structure`).
    """
    _silence_pillow()
    prefix = file.read(16)
    for name, factory in _decoders(prefix):
        try:
            check_structure(name, file)
            reads = reads_of_pixels(name, file)
            bounded = BoundedFile(file)
            file.seek(0)
            image = factory(cast(IO[bytes], bounded), "")
            bounded.allowed += reads
            return image
        except TooMuchWork as error:
            raise BadImage(title, str(error)) from None
        except (SyntaxError, IndexError, TypeError, KeyError, EOFError, struct.error):
            continue
    if _is_heic(prefix) and not READS_HEIC:
        raise BadImage(title, f"got a HEIC image, which needs an extra; expected {HEIC_EXTRA}")
    raise BadImage(title, "the image format is not recognised, expected JPEG, PNG, WebP, BMP, GIF, TIFF, AVIF or HEIC")


def _decoders(prefix: bytes) -> Iterator[tuple[str, Callable[..., ImageFile.ImageFile]]]:
    """Return the formats that a file of these first bytes may have, and what opens it."""
    for name in FORMATS:
        if name not in Image.OPEN:
            continue
        factory, accept = Image.OPEN[name]
        accepted = accept is None or accept(prefix)
        if accepted and not isinstance(accepted, str):  # a string says that the decoder is not installed
            yield name, factory
    if READS_HEIC and _is_heic(prefix):
        from pillow_heif import HeifImageFile  # not registered: what `Image.open` of the caller reads is left as it is

        yield "HEIF", HeifImageFile


def _is_heic(prefix: bytes) -> bool:
    return prefix[4:8] == b"ftyp" and prefix[8:12] in HEIC_BRANDS


def load_upright(image: ImageFile.ImageFile, title: str) -> Image.Image:
    """Decode an image from `open_image` and return it upright and in RGB.

    Raises:
        BadImage: decoding it would take too long.
        Exception: the image is damaged; decoders raise many types.
    """
    return _load(image, title)[0]


def _load(image: ImageFile.ImageFile, title: str) -> tuple[Image.Image, bool]:
    """Do what `load_upright` says; return also whether width and height changed places."""
    try:
        image.load()
        is_turned = image.getexif().get(ORIENTATION) in TURNED
        ImageOps.exif_transpose(image, in_place=True)
    except TooMuchWork as error:
        raise BadImage(title, str(error)) from None
    return as_rgb(image), is_turned


def _limit_pixels(image: ImageFile.ImageFile, limit: int, title: str) -> None:
    """Reduce a JPEG that has too many pixels, before it is decoded; refuse other images."""
    width, height = image.size
    if width * height <= limit:
        return
    if isinstance(image, JpegImagePlugin.JpegImageFile) and not image.info.get("progressive"):
        for divisor in (2, 4, 8):
            if -(-width // divisor) * -(-height // divisor) <= limit:
                image.draft(None, (width // divisor, height // divisor))
                break
    if image.size[0] * image.size[1] > limit:
        raise BadImage(
            title,
            f"got {width} x {height} = {width * height:,} pixels, expected at most {limit:,}; to read it, set the "
            f"environment variable {LIMIT_VARIABLE}={width * height}",
        )


def _reduce(image: ImageFile.ImageFile, min_side: float) -> None:
    """Ask the decoder of a JPEG for the smallest size whose shorter side is at least `min_side`."""
    if not isinstance(image, JpegImagePlugin.JpegImageFile):
        return
    shorter = min(image.size)
    for divisor in (8, 4, 2):
        if shorter // divisor >= min_side:
            image.draft(None, (image.width // divisor, image.height // divisor))
            return


def _silence_pillow() -> None:
    """Ignore the warnings of Pillow's modules about unusual files; files that cannot be read raise `BadImage` anyway.

    The filter is set once and stays, because filters cannot be set for one thread alone.
    """
    if not any(getattr(entry[3], "pattern", None) == _WARNINGS_OF_PILLOW for entry in warnings.filters):
        warnings.filterwarnings("ignore", module=_WARNINGS_OF_PILLOW)
