"""The embedded data set "glyphs": characters drawn in the font faces that matplotlib ships.

A class is a character. A drawing shows the character in one face, slightly rotated, sheared, scaled, shifted and
thickened. Nothing is downloaded and nothing is written to disk.

The characters are letters (with at most one accent), digits and currency signs that exist in all twelve text faces of
DejaVu (Sans, Sans Mono, Serif; plain and bold; upright and slanted). Matplotlib's faces for mathematical symbols,
bracket pieces and fallback glyphs are not used, because they have other glyphs at the code points of letters. The
Computer Modern faces use TeX's encoding, so they are used only for A-Z, a-z and 0-9, where that encoding agrees with
Unicode. If several characters look the same in some face (Latin A, Greek Alpha and Cyrillic A; also C and c, because
drawings are scaled to the frame), only the one with the lowest code point is used. This choice takes seconds, so that
`characters.txt` holds it; a test makes it again from the faces.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter, ImageFont, ImageOps

from proxymetric.data.images import ImageSet

_DEJAVU = tuple(
    f"DejaVu{family}{style}"
    for family, styles in {
        "Sans": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "SansMono": ("", "-Bold", "-Oblique", "-BoldOblique"),
        "Serif": ("", "-Bold", "-Italic", "-BoldItalic"),
    }.items()
    for style in styles
)
_STIX = ("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta")
_COMPUTER_MODERN = ("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10")
_CHARACTERS = Path(__file__).with_name("characters.txt")
_FONT_PIXELS = 48


def glyphs(characters: int = 400, size: int = 32, seed: int = 0, drawings: int = 20) -> ImageSet:
    """Return an image set of `characters` classes with `drawings` grey drawings each, white on black.

    The same arguments give the same pixels. Another `seed` gives other drawings of the same characters. The choice of
    characters and of the test half (`test_classes`) does not depend on the seed. The characters of a smaller set are a
    subset of those of a larger set, and each character is in the same half in both.

    Args:
        characters: number of classes, at least 4 and at most the number of distinct characters (about 470).
        size: side in pixels, at least 8.
        seed: seed of rotation, shear, scale, shift and thickness, at least 0.
        drawings: drawings per character, at least 1. They use the 12 to 21 faces of the character in turn.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> images = glyphs(characters=4, drawings=3)
        >>> len(images), images.arrays.shape, len(images.test_classes)
        (12, (12, 32, 32), 2)
    """
    pool = [ord(character) for line in _CHARACTERS.read_text("utf-8").splitlines() for character in line]
    if not 4 <= characters <= len(pool):
        raise ValueError(f"characters: got {characters}, expected 4 to {len(pool)}, the number of distinct characters")
    for argument, value, minimum in (("size", size, 8), ("drawings", drawings, 1), ("seed", seed, 0)):
        if value < minimum:
            raise ValueError(f"{argument}: got {value}, expected at least {minimum}")
    ranked_codes = sorted(pool, key=lambda code: hashlib.sha256(f"glyph U+{code:04X}".encode()).digest())[:characters]
    held_out = set(ranked_codes[1::2])
    codes = sorted(ranked_codes)
    fonts = _fonts(_FONT_PIXELS)
    maps = _glyph_numbers()
    arrays = np.empty((characters, drawings, size, size), dtype=np.uint8)
    for row, code in enumerate(codes):
        faces = [face for face in fonts if _has_glyph(maps, face, code)]
        random = np.random.default_rng([seed, code])
        order = random.permutation(len(faces))
        for k in range(drawings):
            arrays[row, k] = _draw_varied(fonts[faces[order[k % len(faces)]]], chr(code), size, random)
    return ImageSet(
        name="glyphs",
        labels=np.repeat(np.arange(characters), drawings),
        classes=[f"U+{code:04X} {chr(code)}" for code in codes],
        arrays=arrays.reshape(-1, size, size),
        test_classes=tuple(i for i, code in enumerate(codes) if code in held_out),
    )


@lru_cache(maxsize=1)
def _glyph_numbers() -> dict[str, dict[int, int]]:
    """Return, for each face, the glyph index of each code point (0 is the empty box)."""
    from matplotlib.ft2font import FT2Font

    faces = (*_DEJAVU, *_STIX, *_COMPUTER_MODERN)
    return {
        face: {code: int(glyph) for code, glyph in FT2Font(str(_file(face))).get_charmap().items()} for face in faces
    }


def _has_glyph(maps: dict[str, dict[int, int]], face: str, code: int) -> bool:
    """Return whether a face has a glyph for a code point."""
    if face in _COMPUTER_MODERN and not (code < 128 and chr(code).isalnum()):
        return False
    return maps[face].get(code, 0) != 0


def _file(face: str) -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


def _fonts(em: int) -> dict[str, ImageFont.FreeTypeFont]:
    # The basic layout is used because raqm, if Pillow has it, may join or replace characters.
    faces = (*_DEJAVU, *_STIX, *_COMPUTER_MODERN)
    return {face: ImageFont.truetype(str(_file(face)), em, layout_engine=ImageFont.Layout.BASIC) for face in faces}


def _ink(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """Return the character cropped to its ink; one empty pixel if it has none."""
    mask = font.getmask(character, "L")
    ink = Image.frombytes("L", mask.size, bytes(mask)) if 0 not in mask.size else Image.new("L", (1, 1))
    return ink.crop(ink.getbbox() or (0, 0, 1, 1))


def _draw_varied(font: ImageFont.FreeTypeFont, character: str, size: int, random: np.random.Generator) -> np.ndarray:
    """Return one random drawing (size, size): rotated by up to 18 degrees, sheared, scaled, shifted and thickened."""
    angle, shear, width, height, x_shift, y_shift, thickness = random.random(7)
    ink = ImageOps.expand(_ink(font, character), border=2)
    if thickness > 0.5:
        ink = ink.filter(ImageFilter.MaxFilter(3))
    zoom = size * 0.84 / max(ink.size)
    radians = np.deg2rad(36 * angle - 18)
    rotation = np.array([[np.cos(radians), -np.sin(radians)], [np.sin(radians), np.cos(radians)]])
    slant = np.array([[1.0, 0.4 * shear - 0.2], [0.0, 1.0]])
    forward = rotation @ slant @ np.diag([zoom * (0.68 + 0.32 * width), zoom * (0.68 + 0.32 * height)])
    inverse = np.linalg.inv(forward * 2)  # drawing at twice the size and halving it smooths the edges
    centre = np.array([size, size]) + 2 * size * 0.14 * (np.array([x_shift, y_shift]) - 0.5)
    offset = np.array(ink.size) / 2 - inverse @ centre
    coefficients = (*inverse[0], offset[0], *inverse[1], offset[1])
    double_size = ink.transform((2 * size, 2 * size), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    return np.asarray(double_size.reduce(2))
