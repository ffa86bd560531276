"""The mean cosine of two training images: its value, and the message when all embeddings fall into a narrow cone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import proxymetric as pm
from proxymetric.ops import using
from proxymetric.runs import session
from proxymetric.runs.mean_cosine import mean_cosine
from proxymetric.system.watcher import Tick
from proxymetric.training.advice import narrow_cone
from training_runs import Notes, records, run, same_run, same_tensors

pytestmark = pytest.mark.usefixtures("only_training")
SENTENCE = "the embeddings of all images have nearly the same direction"
HEALTHY: dict[str, Any] = {"train__frozen": True, "train__lr": 1e-2, "train__epochs": 8, "protocol": "last"}
COLLAPSING = HEALTHY | {"method": "subcentre-arcface", "data__wrong_labels": 0.2}
"""scale 64 and margin 0.5 are the defaults of the method"""


@pytest.fixture(autouse=True)
def no_triton() -> Iterator[None]:
    """Without a GPU, tests interpret the kernels of Triton, which is slow."""
    with using("plain"):
        yield


def oracle(vectors: np.ndarray) -> float:
    """The mean over all pairs of different rows, one pair at a time."""
    cosines = []
    for i, x in enumerate(vectors):
        for j, y in enumerate(vectors):
            if i != j:
                cosines.append(x @ y / np.sqrt((x @ x) * (y @ y)))
    return float(np.mean(cosines))


def narrow(said: list[str]) -> list[str]:
    return [text for text in said if SENTENCE in text]


@pytest.mark.parametrize(("count", "dim"), [(2, 1), (3, 2), (40, 5)])
@pytest.mark.parametrize("offset", [0.0, 30.0])
def test_it_is_the_mean_over_all_pairs(count: int, dim: int, offset: float) -> None:
    vectors = np.random.default_rng(count).normal(size=(count, dim)) + offset
    assert mean_cosine(torch.from_numpy(vectors)) == pytest.approx(oracle(vectors), abs=1e-12)


def test_what_has_no_mean_cosine() -> None:
    assert mean_cosine(torch.ones(1, 3)) is None
    assert mean_cosine(torch.empty(0, 3)) is None
    assert mean_cosine(torch.tensor([[1.0, 0.0], [torch.nan, 0.0]])) is None
    assert mean_cosine(torch.zeros(2, 3)) == 0.0, "a zero vector has no direction"


@pytest.mark.parametrize("frozen", [False, True])
def test_the_curve_has_that_of_the_training_images(frozen: bool, photos: Path, tmp_path: Path) -> None:
    settings = {"train__frozen": frozen, "train__epochs": 2, "protocol": "last"}
    done = run(photos, tmp_path / "run", **settings)
    assert all(0 < record["mean_cosine"] < 1 for record in done.result.curve)
    assert done.result.curve[0]["mean_cosine"] != done.result.curve[-1]["mean_cosine"]
    classes = json.loads((done.folder / "run.json").read_text())["classes"]
    files = [file for name in classes for file in sorted((photos / name).iterdir())]
    assert 2 <= len(files) <= 128, "all training images are in the sample"
    vectors = np.asarray(pm.load(done.folder).embed(files), dtype=np.float64)
    assert done.result.curve[-1]["mean_cosine"] == pytest.approx(oracle(vectors), rel=1e-5)
    logged = [record["mean_cosine"] for record in records(done.folder) if record["event"] == "evaluation"]
    assert logged == [record["mean_cosine"] for record in done.result.curve]


def test_measuring_changes_nothing_else(photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = run(photos, tmp_path / "measured", train__epochs=2)
    monkeypatch.setattr(session, "cosine_meter", lambda *given: lambda: None)
    plain = run(photos, tmp_path / "plain", train__epochs=2)
    assert all("mean_cosine" not in record for record in plain.result.curve)
    without = [{key: value for key, value in each.items() if key != "mean_cosine"} for each in measured.result.curve]
    assert without == plain.result.curve
    assert measured.result.rows == plain.result.rows
    for name in ("last.safetensors", "best.safetensors"):
        same_tensors(measured.folder / name, plain.folder / name)


class Copies(Notes):
    """Also copies the folder of a run as kills at some steps would leave it."""

    def __init__(self, folder: Path, copies: dict[int, Path]) -> None:
        super().__init__()
        self.folder, self.copies = folder, copies

    def tick(self, tick: Tick) -> None:
        if tick.step in self.copies:
            shutil.copytree(self.folder, self.copies[tick.step])


def test_a_collapse_is_said_once_also_over_a_kill(photos: Path, tmp_path: Path) -> None:
    early, late = tmp_path / "early", tmp_path / "late"
    straight = Copies(tmp_path / "straight", {11: early, 75: late})
    done = run(photos, tmp_path / "straight", watcher=straight, **COLLAPSING)
    cosines = [record["mean_cosine"] for record in done.result.curve]
    assert cosines[-1] > 0.97, "this run is expected to collapse"
    (sentence,) = narrow(straight.said)
    epoch = int(sentence.removeprefix("epoch ").split(":")[0])
    assert 0 < epoch < done.result.epochs
    assert f"two training images is {cosines[epoch]:.3f} ({cosines[0]:.3f} before training)" in sentence
    assert "a lower loss.margin, a lower learning rate, or another method" in sentence
    for copy, expected in ((early, [sentence]), (late, [])):
        resumed = Notes()
        run(photos, copy, resume=True, watcher=resumed, **COLLAPSING)
        assert narrow(resumed.said) == expected
        same_run(copy, done.folder)


@pytest.mark.parametrize("method", ["proxy-anchor", "norm-softmax", "multi-similarity"])
def test_a_healthy_training_does_not_say_it(method: str, photos: Path, tmp_path: Path) -> None:
    notes = Notes()
    done = run(photos, tmp_path / "run", watcher=notes, method=method, **HEALTHY)
    assert done.result.curve[0]["mean_cosine"] > 0.7, "the features of a network that ends with a ReLU"
    assert narrow(notes.said) == []


def test_an_evaluation_is_compared_with_the_untrained_model() -> None:
    def said(*cosines: float | None) -> bool:
        curve = [{"epoch": i} | ({} if cosine is None else {"mean_cosine": cosine}) for i, cosine in enumerate(cosines)]
        return narrow_cone(curve, {}) != ""

    assert said(0.5, 0.96)
    assert not said(0.5, 0.94), "12 % is left"
    assert not said(-0.5, 0.88), "8 % is left, but it is below 0.9"
    assert not said(0.98, 0.99), "half is left"
    assert said(0.98, 0.999)
    assert not said(0.5, 0.96, 0.99), "the evaluation before has said it"
    assert not said(0.5, 0.96, 0.2, 0.96), "once for the whole training"
    assert not said(1.0, 1.0), "the model was as narrow before"
    assert not said(None, 0.99), "a checkpoint of an earlier version has no figure of the untrained model"
    assert said(0.5, None, 0.99)
    assert not said(0.5, 0.99, None)
    assert not said(0.99), "before training"
    assert narrow_cone([], {}) == ""


def test_a_margin_is_named_only_if_the_method_has_one() -> None:
    curve = [{"epoch": 0, "mean_cosine": 0.5}, {"epoch": 0.5, "mean_cosine": 0.99}]
    assert "Try a lower loss.margin, a lower learning rate" in narrow_cone(curve, {"margin": 0.1})
    assert "Try a lower learning rate, or another method" in narrow_cone(curve, {"margin": None})
    assert narrow_cone(curve, {}).startswith("epoch 0.5: ")
