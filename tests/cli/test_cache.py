"""`cache` shows what is kept between runs, and clears it."""

from __future__ import annotations

import json

from proxymetric.features.stored import HASH, stored_features
from terminal import proxymetric, train


def test_features_are_shown_and_cleared(photos, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PROXYMETRIC_CACHE", str(folder))
    empty = proxymetric("cache")
    assert (empty.code, empty.out) == (0, f"0.0 MB of features in {folder}\n")
    assert train(photos, tmp_path / "run", "--frozen", "--no-report").code == 0
    (stored,) = stored_features()
    assert HASH.fullmatch(stored.folder.name)
    assert stored.images == 80
    assert stored.bytes == sum(file.stat().st_size for file in stored.folder.iterdir())
    shown = json.loads(proxymetric("cache", "--json").out)
    assert shown["folder"] == str(folder)
    assert [each["images"] for each in shown["features"]] == [80]
    assert shown["bytes"] == stored.bytes
    assert stored.folder.name in proxymetric("cache").out
    (stored.folder / "notes.txt").write_text("mine")
    (folder / "other").mkdir()
    (folder / "other" / "photo.safetensors").write_bytes(b"mine")
    answer = proxymetric("cache", "--clear")
    assert answer.out.splitlines()[-1].startswith("removed 0.")
    assert sorted(file.name for file in folder.rglob("*") if file.is_file()) == ["notes.txt", "photo.safetensors"]
    again = train(photos, tmp_path / "again", "--frozen", "--no-report")
    assert again.code == 0
    assert stored_features()[0].images == 80


def test_a_damaged_file_has_no_images(tmp_path):
    place = tmp_path / ("a" * 32)
    place.mkdir()
    for number, content in enumerate((b"", b"\x05", b"\xff" * 16, b"\x02" + bytes(7) + b"[]")):
        (place / f"{number:032x}.safetensors").write_bytes(content)
    assert [(each.images, each.bytes) for each in stored_features(tmp_path)] == [(0, 0 + 1 + 16 + 10)]
