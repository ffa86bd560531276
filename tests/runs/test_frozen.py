"""--frozen trains head and proxies on features that the backbone computes once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import proxymetric as pm
from proxymetric.encoders import Encoder
from proxymetric.system.checkpoint import Checkpoint
from training_runs import LEARNING, Notes, Stop, StopAfter, run, same_run

pytestmark = pytest.mark.usefixtures("only_training")
FROZEN = {"train__frozen": True, "train__lr": 1e-2, "train__epochs": 2}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Counts the images that go through a backbone; no features are cached at the start."""
    seen: list[int] = []
    features = Encoder.features

    def counted(self: Encoder, images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return features(self, images)

    monkeypatch.setattr(Encoder, "features", counted)
    monkeypatch.setenv("PROXYMETRIC_CACHE", str(tmp_path / "features"))
    return seen


def test_features_are_computed_once(photos: Path, tmp_path: Path, passes: list[int]) -> None:
    first = run(photos, tmp_path / "first", **FROZEN)
    assert sum(passes) == 80, "each image once, for all epochs and evaluations together"
    passes.clear()
    second = run(photos, tmp_path / "second", **FROZEN)
    assert passes == []
    same_run(second.folder, first.folder)
    run(photos, tmp_path / "third", method="triplet", encoder__dim=4, **FROZEN)
    assert passes == [], "another head and another method on the same features"


@pytest.mark.parametrize("reason", ["limit", "folder"])
def test_features_that_cannot_be_kept_are_computed_once_in_a_run(
    photos: Path, tmp_path: Path, passes: list[int], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    if reason == "limit":
        monkeypatch.setenv("PROXYMETRIC_CACHE_GB", "0")
        done = run(photos, tmp_path / "run", **FROZEN)
    else:
        monkeypatch.setenv("PROXYMETRIC_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.warns(UserWarning, match="no more of them can be kept") as caught:
            done = run(photos, tmp_path / "run", **FROZEN)
        assert len(caught) == 1
    assert sum(passes) == 80
    monkeypatch.setenv("PROXYMETRIC_CACHE", str(tmp_path / "features"))
    monkeypatch.delenv("PROXYMETRIC_CACHE_GB", raising=False)
    same_run(run(photos, tmp_path / "kept", **FROZEN).folder, done.folder)


def test_only_head_and_proxies_are_trained(photos: Path, tmp_path: Path) -> None:
    done = run(photos, tmp_path / "run", **FROZEN)
    head, proxies = 256 * 8 + 8, 8 * 8
    assert done.result.parameters["trained"] == head + proxies
    assert done.result.parameters["total"] == 388_896 + head + proxies
    still = run(photos, tmp_path / "still", **FROZEN | {"train__lr": 0.0, "train__epochs": 1})
    after, before = (Checkpoint.read(folder / "last.safetensors").tensors for folder in (done.folder, still.folder))
    backbone = [name for name in before if name.startswith("encoder.") and not name.startswith("encoder.head.")]
    assert len(backbone) > 20
    assert all(torch.equal(after[name], before[name]) for name in backbone), "statistics of BatchNorm included"
    assert not torch.equal(after["encoder.head.weight"], before["encoder.head.weight"])


def test_frozen_features_add_the_maximum_unless_a_pooling_is_named(photos: Path, tmp_path: Path) -> None:
    said = Notes()
    default = run(photos, tmp_path / "default", watcher=said, **FROZEN)
    named = run(photos, tmp_path / "named", encoder__pooling="avg+max", **FROZEN)
    assert any("average + maximum of the last map" in line for line in said.said)
    assert pm.load(default.folder).encoder.config["pooling"] == "avg+max"
    assert default.result.curve == named.result.curve
    average = run(photos, tmp_path / "average", encoder__pooling="avg", **FROZEN)
    assert pm.load(average.folder).encoder.config["pooling"] == "avg"
    assert average.result.curve != named.result.curve
    assert pm.load(run(photos, tmp_path / "tuned").folder).encoder.config["pooling"] == "auto"


def test_it_equals_training_the_head_behind_a_backbone_that_stands_still(photos: Path, tmp_path: Path) -> None:
    """The reference trains on uncached images; an endless warm-up and frozen BatchNorm keep its backbone unchanged."""
    plain = {"view__crop": "none", "view__flip": False, "encoder__freeze_bn": True, "view__resize": 16}
    frozen = run(photos, tmp_path / "frozen", **FROZEN | plain)
    still = {"train__frozen": False, "train__warmup": 99, "encoder__pooling": "avg+max"}
    slow = run(photos, tmp_path / "slow", **FROZEN | plain | still)
    for ours, theirs in zip(frozen.result.curve, slow.result.curve, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    ours, theirs = (Checkpoint.read(r.folder / "last.safetensors").tensors for r in (frozen, slow))
    torch.testing.assert_close(ours["encoder.head.weight"], theirs["encoder.head.weight"], rtol=1e-3, atol=1e-5)


def test_stopped_and_resumed(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run(photos, tmp_path / "run", watcher=StopAfter(11), **FROZEN | {"train__save_every": 3})
    run(photos, tmp_path / "run", resume=True, **FROZEN | {"train__save_every": 3})
    same_run(tmp_path / "run", run(photos, tmp_path / "straight", **FROZEN).folder)


def test_it_learns(letters: Path, tmp_path: Path) -> None:
    done = run(letters, tmp_path / "run", **LEARNING)
    before, after = done.result.curve[0], done.result.validation
    assert after["MAP@R"] > 1.3 * before["MAP@R"], "on classes it has never seen, behind random features"
    assert done.result.curve[-1]["loss"] < done.result.curve[1]["loss"]


def test_an_image_that_cannot_be_read_is_left_out_and_named(photos: Path, tmp_path: Path) -> None:
    import shutil

    broken = shutil.copytree(photos, tmp_path / "photos")
    Image.fromarray(np.zeros((16, 16, 3), np.uint8)).save(broken / "class1" / "new.png")
    (broken / "class1" / "new.png").write_bytes((broken / "class1" / "new.png").read_bytes()[:40])
    notes = Notes()
    done = run(broken, tmp_path / "run", watcher=notes, **FROZEN)
    assert [Path(title).name for title in done.result.bad_images] == ["new.png"]
    assert len([said for said in notes.said if "cannot be read" in said]) == 1
