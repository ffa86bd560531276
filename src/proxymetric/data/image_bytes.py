"""Decoding of images that are not files, such as uploads; with the formats and conversions of `data.decoding`."""

from __future__ import annotations

import io

from PIL import Image

from proxymetric.data.decoding import BadImage, load_upright, open_image


class TooManyPixels(BadImage):
    """An image has more pixels than the limit; it was not decoded."""


def decode_image(content: bytes, max_pixels: int, title: str = "image") -> Image.Image:
    """Decode an image from memory: upright and in RGB, with transparent parts on white.

    Only the formats of `decoding.read_image` are decoded. The size is read from the header, before anything is decoded.

    Args:
        content: the bytes of the file.
        max_pixels: limit on width times height.
        title: name of the image in errors.

    Raises:
        TooManyPixels: the image is larger than the limit.
        BadImage: the image cannot be read.

    Example:
        >>> buffer = io.BytesIO()
        >>> Image.new("L", (4, 2)).save(buffer, "png")
        >>> decode_image(buffer.getvalue(), max_pixels=8).mode
        'RGB'
        >>> decode_image(buffer.getvalue(), max_pixels=7)
        Traceback (most recent call last):
        proxymetric.data.image_bytes.TooManyPixels: image: got 4 x 2 = 8 pixels, expected at most 7
    """
    if not content:
        raise BadImage(title, "got no bytes, expected an image")
    try:
        image = open_image(io.BytesIO(content), title)
        width, height = image.size
        if width * height > max_pixels:
            raise TooManyPixels(
                title, f"got {width} x {height} = {width * height:,} pixels, expected at most {max_pixels:,}"
            )
        return load_upright(image, title)
    except (BadImage, MemoryError):
        raise
    except Exception as error:  # decoders raise many types of errors for a damaged file
        raise BadImage(title, " ".join(str(error).split()) or type(error).__name__) from error
