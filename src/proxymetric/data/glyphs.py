"""The embedded data set: characters drawn in the font faces that come with matplotlib.

A class is a character, a drawing of it is one face, turned, sheared, scaled, shifted and thickened a little. Nothing is
downloaded and nothing is written to disk.

Which characters: letters (with one accent at most), digits and currency signs that exist in all twelve text faces of
DejaVu (Sans, Sans Mono, Serif; plain and bold; upright and slanted). Faces of mathematical symbols, of bracket pieces
and of last resort draw something else at a letter's place, so they are not used; the Computer Modern faces follow TeX's
own encoding and are only used where it agrees with Unicode, for A-Z, a-z and 0-9. Of characters whose drawings coincide
in some face (Latin A, Greek Alpha and Cyrillic A; but also C and c, as drawings are fitted to the frame) only the first
code point is kept.
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
_KINDS = ("Lu", "Ll", "Lt", "Lo", "Nd", "Sc")
_COINCIDE = 0.96  # cosine of two fitted drawings; above it a person cannot tell them apart at 32 x 32 pixels
_SAME_LETTER = 0.85  # the same for the two cases of a letter: x and X differ in size, which the frame takes away
_TINY = 0.4  # of the font's size; smaller ink (an apostrophe-like letter) is blurred when it is enlarged
_COMPARED = 24  # pixels: font size and frame of the drawings that are compared
_NOTHING = np.zeros(_COMPARED * _COMPARED, dtype=np.float32)
_EM = 48


def glyphs(characters: int = 400, size: int = 32, seed: int = 0, drawings: int = 20) -> ImageSet:
    """`characters` classes of `drawings` grey drawings each, `size` x `size` pixels, white on black.

    The same arguments give the same pixels. Another `seed` draws the same characters differently; which characters
    there are, and which half of them is for the test (`test_classes`), does not depend on it: fewer characters are a
    subset of more, with the same halves.

    Arguments:
        characters: number of classes, 4 or more; at most as many as there are distinct characters (about 470).
        size: side in pixels, 8 or more.
        seed: of turns, shears, scales, shifts and strokes.
        drawings: per character. The faces take turns: 12 to 21 of them, then the first again, turned otherwise.

    >>> images = glyphs(characters=4, drawings=3)
    >>> len(images), images.arrays.shape, len(images.test_classes)
    (12, (12, 32, 32), 2)
    """
    pool = distinct_characters()
    if not 4 <= characters <= len(pool):
        raise ValueError(f"characters must be 4 to {len(pool)} (that many are distinct), got {characters}")
    if size < 8 or drawings < 1 or seed < 0:
        raise ValueError(f"size must be >= 8, drawings >= 1 and seed >= 0, got {size}, {drawings} and {seed}")
    ranked = sorted(pool, key=lambda code: hashlib.sha256(f"glyph U+{code:04X}".encode()).digest())[:characters]
    held_out = set(ranked[1::2])
    codes = sorted(ranked)
    fonts, maps = _fonts(_EM), _maps()
    arrays = np.empty((characters, drawings, size, size), dtype=np.uint8)
    for row, code in enumerate(codes):
        faces = [face for face in fonts if _has(maps, face, code)]
        random = np.random.default_rng([seed, code])
        order = random.permutation(len(faces))
        for k in range(drawings):
            arrays[row, k] = _vary(fonts[faces[order[k % len(faces)]]], chr(code), size, random)
    return ImageSet(
        name="glyphs",
        labels=np.repeat(np.arange(characters), drawings),
        classes=[f"U+{code:04X} {chr(code)}" for code in codes],
        arrays=arrays.reshape(-1, size, size),
        test_classes=tuple(i for i, code in enumerate(codes) if code in held_out),
    )


@lru_cache(maxsize=1)
def distinct_characters() -> tuple[int, ...]:
    """Code points that exist in the twelve DejaVu faces and look like no earlier one of this list, ascending."""
    maps = _maps()
    codes = [
        code
        for code in sorted(maps[_DEJAVU[0]])
        if unicodedata.category(chr(code)) in _KINDS
        and len(unicodedata.normalize("NFD", chr(code))) <= 2
        and all(_has(maps, face, code) for face in _DEJAVU)
    ]
    alike = np.zeros((len(codes), len(codes)), dtype=np.float32)
    drawn = np.ones(len(codes), dtype=bool)
    for face, font in _fonts(_COMPARED).items():
        if face in _COMPUTER_MODERN:
            continue
        here = np.array([_has(maps, face, c) for c in codes])
        flat = np.stack([_fitted(font, chr(c)) if there else _NOTHING for c, there in zip(codes, here)])
        length = np.linalg.norm(flat, axis=1)
        drawn &= (length > 0) | ~here
        flat /= np.maximum(length, 1e-6)[:, None]
        np.maximum(alike, flat @ flat.T, out=alike)
    place = {chr(code): i for i, code in enumerate(codes)}
    kept: list[int] = []
    for i in np.flatnonzero(drawn).tolist():
        other = place.get(chr(codes[i]).swapcase(), i)
        # An accent is larger beside a small letter, so it is the letters without it that tell whether the cases differ.
        bases = [place.get(unicodedata.normalize("NFD", chr(codes[k]))[0], k) for k in (i, other)]
        same_letter = other < i and alike[bases[0], bases[1]] > _SAME_LETTER
        # Every earlier character counts, also one that was itself left out for the sake of a third.
        if not same_letter and not (alike[i, :i] > _COINCIDE).any():
            kept.append(i)
    return tuple(codes[i] for i in kept)


@lru_cache(maxsize=1)
def _maps() -> dict[str, dict[int, int]]:
    """For each face: code point -> number of its glyph in the face (0 is the empty box)."""
    from matplotlib.ft2font import FT2Font

    faces = (*_DEJAVU, *_STIX, *_COMPUTER_MODERN)
    return {
        face: {code: int(glyph) for code, glyph in FT2Font(str(_file(face))).get_charmap().items()} for face in faces
    }


def _has(maps: dict[str, dict[int, int]], face: str, code: int) -> bool:
    if face in _COMPUTER_MODERN and not (code < 128 and chr(code).isalnum()):
        return False
    return maps[face].get(code, 0) != 0


def _file(face: str) -> Path:
    import matplotlib

    return Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"


def _fonts(em: int) -> dict[str, ImageFont.FreeTypeFont]:
    # The basic layout: raqm, where Pillow has it, may join or replace characters.
    faces = (*_DEJAVU, *_STIX, *_COMPUTER_MODERN)
    return {face: ImageFont.truetype(str(_file(face)), em, layout_engine=ImageFont.Layout.BASIC) for face in faces}


def _ink(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """The character alone, cut to its ink; one empty pixel if there is none."""
    mask = font.getmask(character, "L")
    ink = Image.frombytes("L", mask.size, bytes(mask)) if 0 not in mask.size else Image.new("L", (1, 1))
    return ink.crop(ink.getbbox() or (0, 0, 1, 1))


def _fitted(font: ImageFont.FreeTypeFont, character: str, side: int = _COMPARED) -> np.ndarray:
    """(side * side,) the character, as large as fits, in the middle: what is compared to find those that coincide."""
    ink = _ink(font, character)
    if max(ink.size) < _TINY * side:
        return _NOTHING
    zoom = (side - 2) / max(ink.size)
    small = ink.resize((max(1, round(ink.width * zoom)), max(1, round(ink.height * zoom))), Image.Resampling.BILINEAR)
    frame = Image.new("L", (side, side))
    frame.paste(small, ((side - small.width) // 2, (side - small.height) // 2))
    return np.asarray(frame, dtype=np.float32).reshape(-1)


def _vary(font: ImageFont.FreeTypeFont, character: str, size: int, random: np.random.Generator) -> np.ndarray:
    """(size, size) one drawing: turned up to 18 degrees, sheared, scaled per axis, shifted, thickened."""
    angle, shear, wide, tall, right, down, heavy = random.random(7)
    ink = ImageOps.expand(_ink(font, character), border=2)
    if heavy > 0.5:
        ink = ink.filter(ImageFilter.MaxFilter(3))
    zoom = size * 0.84 / max(ink.size)
    turn = np.deg2rad(36 * angle - 18)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    slant = np.array([[1.0, 0.4 * shear - 0.2], [0.0, 1.0]])
    forward = rotation @ slant @ np.diag([zoom * (0.68 + 0.32 * wide), zoom * (0.68 + 0.32 * tall)])
    inverse = np.linalg.inv(forward * 2)  # drawn at twice the size and halved, which smooths the edges
    centre = np.array([size, size]) + 2 * size * 0.14 * (np.array([right, down]) - 0.5)
    offset = np.array(ink.size) / 2 - inverse @ centre
    coefficients = (*inverse[0], offset[0], *inverse[1], offset[1])
    big = ink.transform((2 * size, 2 * size), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    return np.asarray(big.reduce(2))
