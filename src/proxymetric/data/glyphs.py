"""The embedded data set "glyphs": characters drawn in the font faces that matplotlib ships.

A class is a character. A drawing shows the character in one face, slightly rotated, sheared, scaled, shifted and
thickened. Nothing is downloaded and nothing is written to disk.

The characters are letters (with at most one accent), digits and currency signs that exist in all twelve text faces of
DejaVu (Sans, Sans Mono, Serif; plain and bold; upright and slanted). Matplotlib's faces for mathematical symbols,
bracket pieces and fallback glyphs are not used, because they have other glyphs at the code points of letters. The
Computer Modern faces use TeX's encoding, so they are used only for A-Z, a-z and 0-9, where that encoding agrees with
Unicode. If several characters look the same in some face (Latin A, Greek Alpha and Cyrillic A; also C and c, because
drawings are scaled to the frame), only the one with the lowest code point is used.
"""

from __future__ import annotations

import hashlib
import unicodedata
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
_CATEGORIES = ("Lu", "Ll", "Lt", "Lo", "Nd", "Sc")
_MAX_COSINE = 0.96  # above this cosine similarity, a person cannot distinguish two drawings of 32 x 32 pixels
# the same limit for upper and lower case of a letter: x and X differ in size, which scaling to the frame removes
_MAX_CASE_COSINE = 0.85
_MIN_INK = 0.4  # fraction of the font size; smaller glyphs (such as apostrophe-like letters) blur when enlarged
_COMPARED_PIXELS = 24  # font size and frame of the drawings that are compared
_EMPTY_DRAWING = np.zeros(_COMPARED_PIXELS * _COMPARED_PIXELS, dtype=np.float32)
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
    pool = distinct_characters()
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
def distinct_characters() -> tuple[int, ...]:
    """Return the code points, ascending, that exist in the twelve DejaVu faces and do not look like any lower one."""
    maps = _glyph_numbers()
    codes = [
        code
        for code in sorted(maps[_DEJAVU[0]])
        if unicodedata.category(chr(code)) in _CATEGORIES
        and len(unicodedata.normalize("NFD", chr(code))) <= 2
        and all(_has_glyph(maps, face, code) for face in _DEJAVU)
    ]
    similarity = np.zeros((len(codes), len(codes)), dtype=np.float32)
    has_ink = np.ones(len(codes), dtype=bool)
    for face, font in _fonts(_COMPARED_PIXELS).items():
        if face in _COMPUTER_MODERN:
            continue
        in_face = np.array([_has_glyph(maps, face, c) for c in codes])
        vectors = np.stack(
            [_fitted_vector(font, chr(c)) if exists else _EMPTY_DRAWING for c, exists in zip(codes, in_face)]
        )
        norms = np.linalg.norm(vectors, axis=1)
        has_ink &= (norms > 0) | ~in_face
        vectors /= np.maximum(norms, 1e-6)[:, None]
        np.maximum(similarity, vectors @ vectors.T, out=similarity)
    index_of = {chr(code): i for i, code in enumerate(codes)}
    distinct: list[int] = []
    for i in np.flatnonzero(has_ink).tolist():
        other_case = index_of.get(chr(codes[i]).swapcase(), i)
        # Relative to its letter, an accent is larger on a lower-case letter, so accents are removed here.
        bases = [index_of.get(unicodedata.normalize("NFD", chr(codes[k]))[0], k) for k in (i, other_case)]
        same_letter = other_case < i and similarity[bases[0], bases[1]] > _MAX_CASE_COSINE
        # Each character is compared with all lower code points, including those that were themselves left out.
        if not same_letter and not (similarity[i, :i] > _MAX_COSINE).any():
            distinct.append(i)
    return tuple(codes[i] for i in distinct)


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


def _fitted_vector(font: ImageFont.FreeTypeFont, character: str, side: int = _COMPARED_PIXELS) -> np.ndarray:
    """Return the character scaled to the frame and centred, as a vector (side * side,), for comparison with others."""
    ink = _ink(font, character)
    if max(ink.size) < _MIN_INK * side:
        return _EMPTY_DRAWING
    zoom = (side - 2) / max(ink.size)
    scaled = ink.resize((max(1, round(ink.width * zoom)), max(1, round(ink.height * zoom))), Image.Resampling.BILINEAR)
    frame = Image.new("L", (side, side))
    frame.paste(scaled, ((side - scaled.width) // 2, (side - scaled.height) // 2))
    return np.asarray(frame, dtype=np.float32).reshape(-1)


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
