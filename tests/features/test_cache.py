"""Cached features: they equal those of a plain pass, are written once, and are completed after a kill."""

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

from proxymetric.data import EvalView, ImageSet
from proxymetric.encoders import Encoder, build
from proxymetric.features.cache import cached_features, default_folder


def images(count: int = 23) -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return ImageSet("noise", np.arange(count) % 3, ["a", "b", "c"], arrays=pixels)


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(0)
    return build("small", dim=8, size=32)


VIEW = EvalView(32, resize=32)


def straight(encoder: Encoder, pixels: np.ndarray) -> torch.Tensor:
    was = encoder.training
    with torch.no_grad():
        vectors = encoder.eval().features(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    encoder.train(was)
    return vectors


def count_passes(encoder: Encoder) -> list[int]:
    """How many images went through the backbone, batch by batch."""
    seen: list[int] = []
    encoder.backbone.stages.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    return seen


def test_equal_to_a_straight_pass_and_loaded_the_second_time(encoder: Encoder, tmp_path: Path) -> None:
    data, told = images(), []
    seen = count_passes(encoder)
    first = cached_features(
        encoder, data, VIEW, folder=tmp_path, shard=10, batch=4, progress=lambda done, all: told.append((done, all))
    )
    assert encoder.training
    assert sum(seen) == 23
    assert told[0] == (4, 23)
    assert told[-1] == (23, 23)
    assert first.vectors.dtype == torch.float32
    assert not first.vectors.requires_grad
    torch.testing.assert_close(first.vectors, straight(encoder, data.arrays))
    np.testing.assert_array_equal(first.kept, np.arange(23))
    assert first.bad == {}
    seen.clear()
    second = cached_features(encoder, data, VIEW, folder=tmp_path, shard=10, batch=4)
    assert seen == []
    assert torch.equal(first.vectors, second.vectors)
    torch.nn.Linear(256, 2)(second.vectors).sum().backward()  # ordinary tensors: a head can be trained on them
    torch.nn.Linear(256, 2)(first.vectors).sum().backward()


def test_a_set_with_a_gallery_in_several_files(encoder: Encoder, tmp_path: Path) -> None:
    data = replace(images(), gallery=np.arange(23) % 2 == 0, test_images=np.arange(23) > 11)
    assert len(cached_features(encoder, data, VIEW, folder=tmp_path, shard=10).vectors) == 23


def test_another_split_of_the_images_finds_its_rows(encoder: Encoder, tmp_path: Path) -> None:
    data = images()
    whole = cached_features(encoder, data, VIEW, folder=tmp_path, shard=10)
    seen = count_passes(encoder)
    part = data.of_classes([2, 0])
    found = cached_features(encoder, part, VIEW, folder=tmp_path)
    assert seen == []
    assert torch.equal(found.vectors, whole.vectors[np.isin(data.labels, [0, 2])])


def test_other_weights_or_views_are_other_features(encoder: Encoder, tmp_path: Path) -> None:
    data = images(6)
    before = cached_features(encoder, data, VIEW, folder=tmp_path).vectors
    zoomed = cached_features(encoder, data, EvalView(32, resize=40), folder=tmp_path).vectors
    with torch.no_grad():
        encoder.backbone.stages[0][0].weight.mul_(-1)
    other = cached_features(encoder, data, VIEW, folder=tmp_path).vectors
    assert not torch.allclose(before, zoomed)
    assert not torch.allclose(before, other)
    torch.testing.assert_close(other, straight(encoder, data.arrays))
    with pytest.raises(ValueError, match=r"view: got .*, expected an EvalView"):
        cached_features(encoder, data, lambda image: image, folder=tmp_path)


def test_goes_on_after_an_interruption(encoder: Encoder, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > 13:
            raise Stop

    whole = cached_features(encoder, images(), VIEW, folder=tmp_path / "whole", shard=5, batch=4)
    seen = count_passes(encoder)
    with pytest.raises(Stop):
        cached_features(encoder, images(), VIEW, folder=tmp_path / "cut", shard=5, batch=4, progress=stop)
    assert encoder.training
    seen.clear()
    resumed = cached_features(encoder, images(), VIEW, folder=tmp_path / "cut", shard=5, batch=4)
    assert sum(seen) == 13  # two files of five were there
    assert torch.equal(resumed.vectors, whole.vectors)


def test_goes_on_after_a_real_kill(encoder: Encoder, tmp_path: Path) -> None:
    program = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch
        from test_cache import VIEW, images
        from proxymetric.encoders import build
        from proxymetric.features.cache import cached_features
        torch.manual_seed(0)
        stop = lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done > 13 else None
        cached_features(build("small", dim=8, size=32), images(), VIEW, folder=sys.argv[1], shard=5, progress=stop)
    """
    died = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], capture_output=True)
    assert died.returncode == -9, died.stderr.decode()
    seen = count_passes(encoder)
    resumed = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=5)
    assert sum(seen) == 13
    torch.testing.assert_close(resumed.vectors, straight(encoder, images().arrays))


def test_a_damaged_file_is_made_anew(encoder: Encoder, tmp_path: Path) -> None:
    whole = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=10)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == 3
    files[0].write_bytes(files[0].read_bytes()[:100])
    again = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=10)
    torch.testing.assert_close(again.vectors, whole.vectors)
    assert len(list(tmp_path.rglob("*.part"))) == 0


@pytest.mark.parametrize("place", ["vectors", "names"])
def test_a_changed_bit_is_noticed(encoder: Encoder, tmp_path: Path, place: str) -> None:
    whole = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=10)
    file = sorted(tmp_path.rglob("*.safetensors"))[0]
    content = bytearray(file.read_bytes())
    if place == "vectors":
        content[-1] ^= 64  # a number becomes another one
    else:
        first = content.index(b'[\\"') + 3
        content[first] = ord("1" if content[first] != ord("1") else "2")  # a row becomes that of another image
    file.write_bytes(content)
    seen = count_passes(encoder)
    again = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=10)
    assert sum(seen) in (3, 10), "the images of that file"
    torch.testing.assert_close(again.vectors, whole.vectors)
    seen.clear()
    assert torch.equal(cached_features(encoder, images(), VIEW, folder=tmp_path).vectors, again.vectors)
    assert seen == [], "the file was replaced"


def test_files_without_a_checksum_are_read(encoder: Encoder, tmp_path: Path) -> None:
    """As earlier versions wrote them; files of this version can be read by an earlier one too."""
    whole = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=10)
    for file in tmp_path.rglob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors, header = {"vectors": opened.get_tensor("vectors")}, {"names": opened.metadata()["names"]}
        save_file(tensors, file, header)
    seen = count_passes(encoder)
    assert torch.equal(cached_features(encoder, images(), VIEW, folder=tmp_path).vectors, whole.vectors)
    assert seen == []


def photos(folder: Path) -> ImageSet:
    paths = []
    for i, pixels in enumerate(images(6).arrays):
        paths.append(folder / f"{i}.png")
        Image.fromarray(pixels).save(paths[-1])
    paths[2].write_text("not a picture")
    return ImageSet("photos", np.arange(6) % 2, ["a", "b"], paths=paths)


def test_unreadable_images_are_named_and_found_once_mended(encoder: Encoder, tmp_path: Path) -> None:
    data = photos(tmp_path)
    for _ in range(2):
        found = cached_features(encoder, data, VIEW, folder=tmp_path / "cache", shard=3)
        np.testing.assert_array_equal(found.kept, [0, 1, 3, 4, 5])
        assert list(found.bad) == [str(data.paths[2])]
        torch.testing.assert_close(found.vectors, straight(encoder, images(6).arrays[found.kept]))
    Image.fromarray(images(6).arrays[2]).save(data.paths[2])
    seen = count_passes(encoder)
    mended = cached_features(encoder, data, VIEW, folder=tmp_path / "cache")
    assert (seen, mended.bad) == ([1], {})
    torch.testing.assert_close(mended.vectors, straight(encoder, images(6).arrays))


def test_a_changed_file_is_noticed(encoder: Encoder, tmp_path: Path) -> None:
    data = photos(tmp_path)
    before = cached_features(encoder, data, VIEW, folder=tmp_path / "cache")
    Image.fromarray(255 - images(6).arrays[0]).save(data.paths[0])
    after = cached_features(encoder, data, VIEW, folder=tmp_path / "cache")
    assert not torch.allclose(before.vectors[0], after.vectors[0])
    assert torch.equal(before.vectors[1:], after.vectors[1:])


def test_nothing_readable(encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(b"")
    data = ImageSet("nothing", np.zeros(1, int), ["a"], paths=[tmp_path / "x.jpg"])
    found = cached_features(encoder, data, VIEW, folder=tmp_path / "cache")
    assert found.vectors.shape == (0, 256)
    assert list(found.bad) == [str(tmp_path / "x.jpg")]


def test_a_full_disk_is_a_sentence_and_keeps_what_was_written(tmp_path: Path) -> None:
    program = f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_cache import VIEW, images
        from proxymetric.encoders import build
        from proxymetric.features.cache import cached_features
        encoder = build("small", dim=8, size=32)
        limit = lambda done, total: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)) if done > 5 else None
        cached_features(encoder, images(), VIEW, folder=sys.argv[1], shard=5, progress=limit)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "features could not be written" in done.stderr
    assert "PROXYMETRIC_CACHE" in done.stderr
    assert [file.suffix for file in tmp_path.rglob("*") if file.is_file()] == [".safetensors"]


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PROXYMETRIC_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "proxymetric" / "features"
    monkeypatch.setenv("PROXYMETRIC_CACHE", str(tmp_path / "elsewhere"))
    assert default_folder() == tmp_path / "elsewhere"
