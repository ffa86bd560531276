"""Cached features: they equal those of a plain pass, are computed once, and are completed after a kill."""

import os
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from proxymetric.data import EvalView, ImageSet
from proxymetric.encoders import Encoder, build
from proxymetric.features import contents, rows
from proxymetric.features.cache import cached_features
from proxymetric.features.contents import ImageContents
from proxymetric.features.rows import FeatureRows
from proxymetric.features.stored import FILES, default_folder, make_room, size_limit, stored_features, total_bytes
from proxymetric.system.lock import reading
from training_runs import forks


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
    assert sum(seen) == 7, "all but the four batches of four before the interruption"
    assert torch.equal(resumed.vectors, whole.vectors)


def in_child(work: Callable[..., None], *arguments: Any) -> Any:
    """Start a process that does some work."""
    process = forks.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process


def _killed(folder: Path) -> None:
    torch.manual_seed(0)
    stop = lambda done, total: os.kill(os.getpid(), signal.SIGKILL) if done > 13 else None  # noqa: E731
    encoder = build("small", dim=8, size=32)
    cached_features(encoder, images(), VIEW, folder=folder, shard=5, batch=4, progress=stop)


def test_goes_on_after_a_real_kill(encoder: Encoder, tmp_path: Path) -> None:
    child = in_child(_killed, tmp_path)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    seen = count_passes(encoder)
    resumed = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=5)
    assert sum(seen) == 7
    torch.testing.assert_close(resumed.vectors, straight(encoder, images().arrays))


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def test_a_damaged_file_is_made_anew(encoder: Encoder, tmp_path: Path) -> None:
    whole = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=10, batch=4)
    files = files_in(tmp_path)
    assert len(files) == 2
    files[0].write_bytes(files[0].read_bytes()[:100])
    with pytest.warns(
        UserWarning, match=r"features: .* is damaged \(.*\); the features of its images are computed again"
    ):
        again = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=10)
    torch.testing.assert_close(again.vectors, whole.vectors)
    assert len(list(tmp_path.rglob("*.part"))) == 0


@pytest.mark.parametrize("place", ["vectors", "names"])
def test_a_changed_bit_is_noticed(encoder: Encoder, tmp_path: Path, place: str) -> None:
    whole = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=10, batch=4)
    file = files_in(tmp_path)[0]
    content = bytearray(file.read_bytes())
    if place == "vectors":
        content[-1] ^= 64  # a number becomes another one
    else:
        first = content.index(b'[\\"') + 3
        content[first] = ord("1" if content[first] != ord("1") else "2")  # a row becomes that of another image
    file.write_bytes(content)
    seen = count_passes(encoder)
    with pytest.warns(UserWarning, match="checksum"):
        again = cached_features(encoder, images(), VIEW, folder=tmp_path, shard=10)
    assert sum(seen) in (11, 12), "the images of that file"
    torch.testing.assert_close(again.vectors, whole.vectors)
    seen.clear()
    assert torch.equal(cached_features(encoder, images(), VIEW, folder=tmp_path).vectors, again.vectors)
    assert seen == [], "the file was replaced"


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


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read for their hashes; hashes of files that are new are remembered, too."""
    names: list[str] = []
    digest = contents.hashlib.file_digest
    monkeypatch.setattr(
        contents.hashlib, "file_digest", lambda file, kind: names.append(file.name) or digest(file, kind)
    )
    monkeypatch.setattr(contents, "RECENT_SECONDS", -1)
    return names


def test_a_file_is_read_once_and_found_elsewhere(encoder: Encoder, tmp_path: Path, remembering: list[str]) -> None:
    data = photos(tmp_path)
    whole = cached_features(encoder, data, VIEW, folder=tmp_path / "cache")
    assert len(remembering) == 6
    seen = count_passes(encoder)
    cached_features(encoder, data, VIEW, folder=tmp_path / "cache")
    assert (seen, len(remembering)) == ([], 6)
    (tmp_path / "moved").mkdir()
    paths = [Path(shutil.move(path, tmp_path / "moved" / f"new {path.name}")) for path in data.paths or ()]
    moved = cached_features(encoder, replace(data, paths=paths), VIEW, folder=tmp_path / "cache")
    assert (seen, len(remembering)) == ([], 12)
    assert torch.equal(moved.vectors, whole.vectors)


@pytest.mark.parametrize("content", [b"", b"no database" * 100])
def test_a_damaged_table_of_files_is_made_anew(tmp_path: Path, remembering: list[str], content: bytes) -> None:
    data = photos(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / FILES).write_bytes(content)
    for _ in range(2):
        images_contents = ImageContents(tmp_path / "cache")
        names = [images_contents.of(data, row).name for row in range(6)]
        images_contents.close()
    assert len(remembering) == 6
    assert len(set(names)) == 6


def test_a_file_that_was_just_written_is_read_again(tmp_path: Path) -> None:
    """It may change within the same tick of the clock of the file system."""
    data = photos(tmp_path)
    for number in range(2):
        assert data.paths is not None
        data.paths[0].write_bytes(bytes([number]))
        known = ImageContents(tmp_path / "cache")
        name = known.of(data, 0).name
        known.close()
        assert name == ImageContents(None).of(data, 0).name


def test_a_file_that_changes_while_it_is_embedded_is_not_kept(encoder: Encoder, tmp_path: Path) -> None:
    data = photos(tmp_path)

    def change(done: int, total: int) -> None:
        if done == total and data.paths is not None:
            Image.fromarray(255 - images(6).arrays[4]).save(data.paths[4])

    cached_features(encoder, data, VIEW, folder=tmp_path / "cache", on_read=change)
    again = cached_features(encoder, data, VIEW, folder=tmp_path / "cache")
    torch.testing.assert_close(again.vectors[3:4], straight(encoder, 255 - images(6).arrays[4:5]))


def _on_a_full_disk(folder: Path, said: Any) -> None:
    torch.manual_seed(0)
    limit = lambda done, total: resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000)) if done == 8 else None  # noqa: E731
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = cached_features(
            build("small", dim=8, size=32), images(), VIEW, folder=folder, shard=5, batch=4, progress=limit
        )
    said.put(([str(each.message) for each in caught], len(found.vectors)))


def test_a_full_disk_is_said_once_and_nothing_is_lost(encoder: Encoder, tmp_path: Path) -> None:
    said = forks.SimpleQueue()
    child = in_child(_on_a_full_disk, tmp_path, said)
    child.join()
    (sentence,), count = said.get()
    assert "features: got the folder" in sentence
    assert "the disk is full" in sentence
    assert "PROXYMETRIC_CACHE" in sentence
    assert count == 23
    assert [file.suffix for file in tmp_path.rglob("*") if file.is_file()] == [".safetensors"]
    seen = count_passes(encoder)
    cached_features(encoder, images(), VIEW, folder=tmp_path)
    assert sum(seen) == 23 - 8, "what was written before is kept"


def test_a_folder_that_cannot_be_written_is_said_once(encoder: Encoder, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match=r"features: got the folder .*no more of them can be kept") as caught:
        found = cached_features(encoder, photos(tmp_path), VIEW, folder=tmp_path / "file" / "cache", shard=2, batch=2)
    assert (len(caught), len(found.vectors)) == (1, 5)


def _both(folder: Path, start: Any, said: Any) -> None:
    torch.manual_seed(0)
    encoder = build("small", dim=8, size=32)
    start.wait()
    found = cached_features(encoder, photos_again(folder), VIEW, folder=folder / "cache", shard=5, batch=2)
    said.put(found.vectors.sum().item())


def photos_again(folder: Path) -> ImageSet:
    return ImageSet("photos", np.zeros(30, int), ["a"], paths=[folder / f"{number}.png" for number in range(30)])


def test_two_processes_at_once(encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, pixels in enumerate(images(30).arrays):
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    monkeypatch.setattr(rows, "WRITE_SECONDS", 0.0)
    start, said = forks.Event(), forks.SimpleQueue()
    children = [in_child(_both, tmp_path, start, said) for _ in range(2)]
    start.set()
    for child in children:
        child.join()
        assert child.exitcode == 0
    seen = count_passes(encoder)
    again = cached_features(encoder, photos_again(tmp_path), VIEW, folder=tmp_path / "cache")
    assert seen == []
    expected = pytest.approx(again.vectors.sum().item(), rel=1e-5)
    assert [said.get(), said.get()] == [expected, expected]


def test_small_files_are_joined(tmp_path: Path) -> None:
    for number in range(7):
        one = FeatureRows(tmp_path, "0" * 32, shard=3)
        one.add([(str(number), torch.full((2,), float(number)))])
        one.close()
    assert sorted(each.images for each in stored_features(tmp_path)) == [7]
    assert len(files_in(tmp_path)) == 3
    known = FeatureRows(tmp_path, "0" * 32)
    assert [known.get(str(number))[0].item() for number in range(7)] == [0, 1, 2, 3, 4, 5, 6]  # type: ignore[index]


def test_what_was_not_used_for_the_longest_time_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        one = FeatureRows(tmp_path, f"{number:032x}")
        one.add([("a", torch.full((1000,), float(number)))])
        one.close()
    files = files_in(tmp_path)
    for age, file in enumerate(files):
        os.utime(file, (time.time() - 1000 * (age + 1),) * 2)  # the last is the oldest
    assert FeatureRows(tmp_path, f"{3:032x}").get("a") is not None  # and is used now
    size = files[0].stat().st_size
    assert make_room(tmp_path, 3.5 * size) <= 0
    assert files_in(tmp_path) == [files[0], files[1], files[3]]
    with reading(files[1]):
        assert make_room(tmp_path, 2.5 * size) <= 0
    assert files_in(tmp_path) == [files[1], files[3]], "one that is being read stays"
    monkeypatch.setenv("PROXYMETRIC_CACHE_GB", str(1.5 * size / 1e9))
    one = FeatureRows(tmp_path, f"{9:032x}")
    one.add([("b", torch.ones(1000))])
    one.close()
    assert len(files_in(tmp_path)) == 1
    assert one.get("b") is not None
    assert total_bytes(tmp_path) <= size_limit()


def test_features_larger_than_the_limit_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYMETRIC_CACHE_GB", "1e-5")
    one = FeatureRows(tmp_path, "0" * 32, shard=1)
    one.add([("a", torch.ones(1000))])
    with pytest.warns(UserWarning, match="limit of 1e-05 GB is reached.* PROXYMETRIC_CACHE_GB sets another limit"):
        one.add([("b", torch.ones(2000))])
    one.add([("c", torch.ones(2000))])
    known = FeatureRows(tmp_path, "0" * 32)
    assert [known.get(name) is not None for name in "abc"] == [True, True, False]


def test_a_limit_of_zero_keeps_nothing(encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYMETRIC_CACHE_GB", "0")
    assert len(cached_features(encoder, photos(tmp_path), VIEW, folder=tmp_path / "cache").vectors) == 5
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("PROXYMETRIC_CACHE_GB", "much")
    with pytest.raises(ValueError, match="PROXYMETRIC_CACHE_GB: got 'much', expected a number of gigabytes"):
        size_limit()


def test_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoder: Encoder) -> None:
    monkeypatch.delenv("PROXYMETRIC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "proxymetric"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_folder() == tmp_path / ".cache" / "proxymetric"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "general"))
    assert default_folder() == tmp_path / "general" / "proxymetric"
    cached_features(encoder, images(2), VIEW)
    assert default_folder().stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("PROXYMETRIC_CACHE", str(tmp_path / "elsewhere"))
    assert default_folder() == tmp_path / "elsewhere"
