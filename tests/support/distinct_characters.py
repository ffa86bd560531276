"""Chooses the characters of the embedded data set "glyphs" from the faces that matplotlib ships.

The package holds the result, `characters.txt`, because the choice takes seconds.
"""

from __future__ import annotations

import unicodedata

import numpy as np
from PIL import Image, ImageFont

from proxymetric.data.glyphs import _COMPUTER_MODERN, _DEJAVU, _fonts, _glyph_numbers, _has_glyph, _ink

_CATEGORIES = ("Lu", "Ll", "Lt", "Lo", "Nd", "Sc")
_MAX_COSINE = 0.96  # above this cosine similarity, a person cannot distinguish two drawings of 32 x 32 pixels
# the same limit for upper and lower case of a letter: x and X differ in size, which scaling to the frame removes
_MAX_CASE_COSINE = 0.85
_MIN_INK = 0.4  # fraction of the font size; smaller glyphs (such as apostrophe-like letters) blur when enlarged
_COMPARED_PIXELS = 24  # font size and frame of the drawings that are compared
_EMPTY_DRAWING = np.zeros(_COMPARED_PIXELS * _COMPARED_PIXELS, dtype=np.float32)


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
