"""The model of a run: what `pm.load(...).embed` accepts, returns and refuses."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from PIL import Image

import proxymetric as pm
from no_forms import no_forms
from proxymetric.models.features import FeatureModel
from proxymetric.runs.time_on_cpu import PROBED_IMAGES
from proxymetric.system.files import read_json
from terminal import train


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Only read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
        patch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
        folder = tmp_path_factory.mktemp("runs") / "photos"
        answer = train(photos, folder)
    assert answer.code == 0, answer
    return folder


def test_embed_takes_paths_pictures_and_tensors(run, photos):
    model = pm.load(run, device="cpu")
    files = sorted(photos.rglob("*.png"))[:5]
    vectors = model.embed(files)
    assert vectors.shape == (5, 8)
    assert vectors.dtype is torch.float32
    assert torch.equal(model.embed([str(file) for file in files]), vectors)
    assert torch.equal(model.embed(Image.open(file) for file in files), vectors)
    assert torch.equal(model.embed(files, batch=5), model.embed(files, batch=2)) or torch.allclose(
        model.embed(files, batch=5), model.embed(files, batch=2), atol=1e-6
    )
    pixels = torch.stack([model.view(Image.open(file).convert("RGB")) for file in files])
    assert torch.equal(model.embed(pixels), vectors)
    assert torch.allclose(model.embed(pixels / 255), vectors, atol=1e-5)
    assert model.embed([]).shape == (0, 8)
    assert model.classes == read_json(run / "run.json")["classes"]
    assert len(model.classes) == 8


def test_a_picture_embeds_like_its_file(run, tmp_path):
    """Transparency, grey levels and the camera's orientation are treated alike."""
    model = pm.load(run, device="cpu")
    clear = Image.linear_gradient("L").convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").rotate(90))
    turned = Image.linear_gradient("L").convert("RGB")
    exif = turned.getexif()
    exif[0x0112] = 6
    clear.save(tmp_path / "clear.png")
    turned.save(tmp_path / "turned.png", exif=exif)
    Image.linear_gradient("L").save(tmp_path / "grey.png")
    for name in ("clear.png", "turned.png", "grey.png"):
        with Image.open(tmp_path / name) as picture:
            assert torch.equal(model.embed([picture]), model.embed([tmp_path / name])), name
    flat = Image.linear_gradient("L").convert("RGB")
    assert not torch.equal(model.embed([flat]), model.embed([tmp_path / "turned.png"]))


def test_embed_skips_or_raises(run, photos, tmp_path):
    model = pm.load(run, device="cpu")
    (tmp_path / "bad.jpg").write_text("not an image")
    files = [photos / "class0" / "0.png", tmp_path / "bad.jpg", photos / "class1" / "0.png", tmp_path / "gone.jpg"]
    vectors, kept = model.embed(files, errors="skip")
    assert kept == [0, 2]
    assert torch.equal(vectors, model.embed([files[0], files[2]]))
    with pytest.raises(ValueError, match=r"bad.jpg: the image format is not recognised"):
        model.embed(files)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ("a.jpg", r"images: got a single image, expected a list"),
        (Path("a.jpg"), r"images: got a single image, expected a list"),
        (Image.new("RGB", (8, 8)), r"images: got a single image, expected a list"),
        ([3], r"images\[0\]: got int, expected a path or a PIL image"),
        (torch.zeros(3, 32, 32), r"images: got a tensor of shape \(3, 32, 32\), expected \(N, 3, H, W\)"),
        (torch.zeros(2, 1, 32, 32), r"expected \(N, 3, H, W\)"),
        (torch.full((1, 3, 32, 32), 200.0), r"images: got floats from 200 to 200, expected floats in \[0, 1\]"),
        (torch.full((1, 3, 32, 32), -2.0), r"expected floats in \[0, 1\]"),
    ],
)
def test_embed_refuses_what_is_no_list_of_images(run, images, said):
    with pytest.raises(ValueError, match=said):
        pm.load(run, device="cpu").embed(images)


class RecordedFiles:
    """Images as files, which records the thread that reads each of them."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.threads: list[str] = []

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Image.Image:
        self.threads.append(threading.current_thread().name)
        return Image.open(self.paths[index]).convert("RGB")


def test_files_are_read_in_threads_and_a_picture_may_occur_twice(run, photos):
    model = pm.load(run, device="cpu")
    paths = sorted(photos.rglob("*.png"))[:7]
    files = RecordedFiles(paths)
    vectors = model.embed(files, batch=2)
    assert len(files.threads) == 7
    assert all(name.startswith("read-ahead") for name in files.threads)
    assert torch.equal(vectors, model.embed(paths, batch=2))
    with Image.open(paths[0]) as picture:  # not loaded yet, and used twice
        twice = model.embed([picture, picture], batch=1)
    assert torch.equal(twice[0], twice[1])
    assert torch.equal(twice[:1], model.embed(paths[:1]))


def test_images_are_embedded_in_the_layout_that_is_fast_for_convolutions(photos, tmp_path, monkeypatch):
    """By a trained model, by its features, and in the evaluations of a run."""
    layouts = []
    forward = torch.nn.Conv2d.forward

    def watched(layer, images):
        probes = (1, 2, PROBED_IMAGES)  # passes that look at a new encoder or time it
        if images.shape[1] == 3 and len(images) not in probes and not torch.is_grad_enabled():
            layouts.append(images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous())
        return forward(layer, images)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", watched)
    words = ("--backbone", "resnet10t", "--set", "encoder.pretrained=false", "--size", 32, "--epochs", 1)
    assert train(photos, tmp_path / "run", *words).code == 0
    assert layouts
    assert all(layouts)
    model = pm.load(tmp_path / "run", device="cpu")
    pixels = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    for embedder in (model, FeatureModel.of(model)):
        layouts.clear()
        vectors = embedder.embed(pixels)
        assert layouts == [True]
        with torch.no_grad():
            plain = embedder.encoder(pixels) if embedder is model else embedder.encoder.features(pixels)
        expected = torch.nn.functional.normalize(plain, dim=1) if embedder is model else plain
        torch.testing.assert_close(vectors, expected, rtol=1e-4, atol=1e-5)
