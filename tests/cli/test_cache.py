"""`cache` shows what is kept, and clears it; a pre-trained backbone runs once over an image, whatever the verbs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import proxymetric as pm
from proxymetric.encoders import Encoder
from proxymetric.features.stored import FEATURES, HASH, stored_features
from terminal import finished_run, proxymetric


@pytest.fixture
def passes(monkeypatch, tmp_path):
    """Counts the images that go through a backbone; nothing is kept at the start."""
    counts: list[int] = []
    features = Encoder.features
    monkeypatch.setattr(
        Encoder, "features", lambda self, images, *rest: counts.append(len(images)) or features(self, images, *rest)
    )
    monkeypatch.setenv("PROXYMETRIC_CACHE", str(tmp_path / "cache"))
    return counts


def done(answer):
    assert answer.code == 0, answer
    return answer


def test_the_route_of_the_readme_makes_one_pass_of_the_backbone(photos, tmp_path, passes, monkeypatch):
    run = tmp_path / "run"
    finished_run(photos, run, "--frozen")
    assert sum(passes) == 80, "each of the images once"
    copied = Path(shutil.copytree(photos, tmp_path / "elsewhere"))
    passes.clear()
    done(proxymetric("evaluate", run, "--no-report"))
    done(proxymetric("evaluate", run, "--data", copied, "--no-report"))
    done(proxymetric("index", run, photos, "--out", tmp_path / "a.index"))
    done(proxymetric("inspect", run, photos, "--out", tmp_path / "inspection"))
    done(proxymetric("embed", run, photos, "--out", tmp_path / "vectors.safetensors"))
    done(proxymetric("search", run, photos / "class0" / "0.png", "--in", copied))
    done(proxymetric("search", tmp_path / "a.index", copied / "class0" / "1.png"))
    finished_run(copied, tmp_path / "lda", "--method", "lda")
    assert passes == []
    index, model = pm.Index(tmp_path / "a.index"), pm.load(run, device="cpu")
    monkeypatch.setenv("PROXYMETRIC_CACHE_GB", "0")
    computed = model.embed([photos / item for item in index.ids])
    assert sum(passes) == 80
    torch.testing.assert_close(index.vectors, computed, atol=1e-5, rtol=0)
    assert index.thumbnail("class0/0.png")[:3] == b"\xff\xd8\xff"


def test_a_backbone_that_was_trained_is_not_kept(finished, photos, passes, tmp_path):
    model = pm.load(finished, device="cpu")
    files = sorted(photos.rglob("*.png"))
    for _ in range(2):
        model.embed(files)
    assert (model.pretrained, sum(passes)) == (False, 160)
    assert not (tmp_path / "cache").exists()


def test_weights_that_changed_after_loading_are_not_those_before_training(photos, passes, tmp_path):
    finished_run(photos, tmp_path / "run", "--frozen")
    model, files = pm.load(tmp_path / "run", device="cpu"), sorted(photos.rglob("*.png"))
    passes.clear()
    before = model.embed(files)
    assert (model.pretrained, passes) == (True, [])
    with torch.no_grad():
        model.encoder.backbone.stages[0][0].weight.mul_(-1)
    after = model.embed(files)
    assert (model.pretrained, sum(passes)) == (False, 80)
    assert not torch.allclose(before, after)


def test_only_new_images_are_computed_and_the_order_stays(photos, passes, tmp_path):
    finished_run(photos, tmp_path / "run", "--frozen")
    model, files = pm.load(tmp_path / "run", device="cpu"), sorted(photos.rglob("*.png"))
    expected = model.embed(files)
    for number in (3, 70):
        Image.open(files[number]).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(tmp_path / f"{number}.png")
        files[number] = tmp_path / f"{number}.png"
    (tmp_path / "no image.png").write_text("no image")
    passes.clear()
    images: dict[int, tuple[int, int]] = {}
    parts = list(
        model.parts(
            [*files, tmp_path / "no image.png"], batch=64, on_image=lambda row, image: images.update({row: image.size})
        )
    )
    assert passes == [1, 1]
    assert sorted(images) == [row for part in parts for row in part.rows] == list(range(80))
    assert [list(part.bad) for part in parts] == [[], [80]]
    vectors = torch.cat([part.vectors for part in parts])
    same = [row for row in range(80) if row not in (3, 70)]
    assert torch.equal(vectors[same], expected[same])
    assert torch.equal(vectors, model.embed(files))
    assert passes == [1, 1]


def test_features_are_shown_and_cleared(photos, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("PROXYMETRIC_CACHE", str(folder))
    monkeypatch.setenv("PROXYMETRIC_CACHE_GB", "0.5")
    empty = proxymetric("cache")
    assert (empty.code, empty.out) == (0, f"0.0 MB of at most 0.5 GB in {folder}\n")
    finished_run(photos, tmp_path / "run", "--frozen")
    (stored,) = stored_features()
    assert HASH.fullmatch(stored.folder.name)
    assert stored.images == 80
    assert stored.bytes == sum(file.stat().st_size for file in stored.folder.iterdir())
    shown = json.loads(proxymetric("cache", "--json").out)
    assert (shown["folder"], shown["limit"]) == (str(folder), 5e8)
    assert [each["images"] for each in shown["features"]] == [80]
    assert shown["bytes"] >= stored.bytes
    assert stored.folder.name in proxymetric("cache").out
    (stored.folder / "notes.txt").write_text("mine")
    (folder / FEATURES / "other").mkdir()
    (folder / FEATURES / "other" / "photo.safetensors").write_bytes(b"mine")
    answer = proxymetric("cache", "--clear")
    assert answer.out.splitlines()[-1].startswith("removed 0.")
    assert sorted(file.name for file in folder.rglob("*") if file.is_file()) == ["notes.txt", "photo.safetensors"]


def test_a_damaged_file_has_no_images(tmp_path):
    place = tmp_path / FEATURES / ("a" * 32)
    place.mkdir(parents=True)
    for number, content in enumerate((b"", b"\x05", b"\xff" * 16, b"\x02" + bytes(7) + b"[]")):
        (place / f"{number:032x}.safetensors").write_bytes(content)
    assert [(each.images, each.bytes) for each in stored_features(tmp_path)] == [(0, 0 + 1 + 16 + 10)]
