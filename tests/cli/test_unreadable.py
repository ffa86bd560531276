"""Images that cannot be read: every verb names the first ten and counts the others."""

from __future__ import annotations

import shutil

import pytest

from bombs import jpeg_of_scans
from proxymetric.system.unreadable import MAX_IMAGES_NAMED, unreadable_lines
from terminal import proxymetric, train


@pytest.fixture(scope="module")
def run(finished):
    return finished


@pytest.mark.parametrize("verb", ["index", "embed", "inspect"])
def test_a_verb_names_the_first_ones(verb, run, photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    bad = [folder / "class0" / f"bad{number:02}.png" for number in range(MAX_IMAGES_NAMED + 2)]
    for file in bad:
        file.write_text("no image")
    out = tmp_path / {"index": "a.index", "embed": "a.safetensors", "inspect": "inspected"}[verb]
    answer = proxymetric(verb, run, folder, "--out", out)
    assert answer.code == 0, answer
    lines = (answer.out + answer.err).splitlines()
    named = [line for line in lines if "cannot be read: " in line and "(the image format is not recognised" in line]
    assert [any(str(file) in line for line in named) for file in bad] == [True] * MAX_IMAGES_NAMED + [False] * 2
    assert lines[lines.index(named[-1]) + 1] == "... and 2 more"


def test_every_verb_leaves_out_a_jpeg_of_thousands_of_scans(run, photos, tmp_path, no_page):
    folder = shutil.copytree(photos, tmp_path / "photos")
    bomb = folder / "class0" / "bomb.jpg"
    bomb.write_bytes(jpeg_of_scans(20_000, 2000))  # 20,006 passes over four million pixels
    said = "bomb.jpg (got a JPEG of 20,006 scans, expected at most 100)"
    for verb, out in (("embed", "a.safetensors"), ("index", "a.index"), ("inspect", "inspected")):
        answer = proxymetric(verb, run, folder, "--out", tmp_path / out)
        assert answer.code == 0, answer
        assert said in answer.out + answer.err
    answer = train(folder, tmp_path / "trained")
    assert answer.code == 0, answer
    assert said in answer.err
    answer = proxymetric("search", tmp_path / "a.index", bomb)
    assert answer.code == 1
    assert "20,006 scans" in answer.out + answer.err


def test_nothing_is_counted_that_was_named():
    images = [f"{number}.jpg (no image)" for number in range(MAX_IMAGES_NAMED)]
    assert unreadable_lines(images, "gone") == [f"gone: {image}" for image in images]
    assert unreadable_lines([]) == []
