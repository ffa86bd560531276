"""The embedded characters: distinct, never empty, the same every time."""

import textwrap
import unicodedata

import numpy as np
import pytest

from distinct_characters import distinct_characters
from proxymetric.data import glyphs, open_data, split
from proxymetric.data.glyphs import _CHARACTERS as CHARACTERS


@pytest.fixture(scope="module")
def default():
    return open_data("glyphs")


def test_default_set(default):
    images = default
    assert images.arrays.shape == (8000, 32, 32)
    assert len(images.classes) == len(set(images.classes)) == 400
    assert len(images.test_classes) == 200
    assert np.bincount(images.labels).tolist() == [20] * 400
    ink = images.arrays.reshape(8000, -1)
    assert ink.max(1).min() > 200, "a drawing without ink"
    assert (ink > 127).mean(1).max() < 0.75, "a drawing that is one blot"


def test_same_arguments_same_pixels(default):
    one, again, other = (glyphs(characters=50, seed=seed) for seed in (0, 0, 1))
    assert one.identity() == again.identity()
    assert one.identity() != other.identity()
    row = default.classes.index(one.classes[30])
    assert np.array_equal(default.arrays[row * 20 : row * 20 + 20], one.arrays[600:620])


def test_characters_and_halves_do_not_depend_on_seed_or_number():
    def halves(images):
        return [{images.classes[c] for c in images.test_classes}, set(images.classes)]

    test, every = halves(glyphs(characters=60, drawings=1))
    assert halves(glyphs(characters=60, drawings=2, seed=9)) == [test, every]
    more_test, more = halves(glyphs(characters=61, drawings=1))
    assert every < more
    assert test == more_test & every


def test_class_names_are_the_characters(default):
    for name in default.classes:
        code, character = name.split(" ")
        assert code == f"U+{ord(character):04X}"
        assert unicodedata.category(character) in {"Lu", "Ll", "Lt", "Lo", "Nd", "Sc"}


def test_the_stored_characters_are_those_that_differ_in_every_face():
    assert CHARACTERS.read_text("utf-8").split() == textwrap.wrap("".join(map(chr, distinct_characters())), 60)


def test_look_alikes_are_not_both_there(default):
    present = {name.split(" ")[1] for name in default.classes}
    for alike in ("AΑА", "oοо0O", "cCсϲ", "xXх", "BΒВ", "pрρ", "ćčĉ", "sSѕ"):
        assert len(present & set(alike)) <= 1, alike


def test_no_two_classes_share_a_drawing(default):
    """The check uses drawings of matplotlib's own renderer; the set is drawn with another one."""
    import matplotlib
    from matplotlib.ft2font import FT2Font
    from PIL import Image

    font = FT2Font(f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSerif.ttf")
    font.set_size(32, 72)
    flat = []
    for name in default.classes:
        code = ord(name.split(" ")[1])
        assert font.get_char_index(code) != 0, f"{name} would be the empty box"
        font.set_text(chr(code))
        font.draw_glyphs_to_bitmap()
        ink = Image.fromarray(np.asarray(font.get_image()))
        ink = ink.crop(ink.getbbox())
        square = Image.new("L", (40, 40))
        zoom = 38 / max(ink.size)
        fitted = ink.resize((max(1, round(ink.width * zoom)), max(1, round(ink.height * zoom))))
        square.paste(fitted, ((40 - fitted.width) // 2, (40 - fitted.height) // 2))
        flat.append(np.asarray(square, dtype=np.float32).ravel())
    unit = np.stack(flat) / np.linalg.norm(flat, axis=1, keepdims=True)
    cosine = unit @ unit.T - np.eye(len(unit))
    worst = np.unravel_index(cosine.argmax(), cosine.shape)
    assert cosine.max() < 0.98, [default.classes[i] for i in worst]


def test_the_task_is_neither_trivial_nor_hopeless_for_raw_pixels(default):
    images = split(default).test
    pixels = images.arrays.reshape(len(images), -1).astype(np.float32)
    pixels /= np.linalg.norm(pixels, axis=1, keepdims=True)
    cosine = pixels @ pixels.T - 2 * np.eye(len(pixels), dtype=np.float32)
    first = (images.labels[cosine.argmax(1)] == images.labels).mean()
    assert 0.2 < first < 0.6


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"characters": 3}, "characters: got 3, expected 4 to"),
        ({"characters": 5000}, "the number of distinct characters"),
        ({"size": 4}, "size: got 4, expected at least 8"),
        ({"drawings": 0}, "drawings: got 0, expected at least 1"),
    ],
)
def test_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        glyphs(**options)
