"""Impossible numbers are refused by name before the work, and a training without a finite step has no result."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import proxymetric as pm
from proxymetric.encoders import build
from proxymetric.search import VectorFile
from proxymetric.system.checkpoint import Checkpoint
from terminal import proxymetric, refused, train

pytestmark = pytest.mark.usefixtures("only_training")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--lr", "1e9"), "train.lr: got 1e+09, expected at most"),
        (("--set", "train.proxy_lr=1e9"), "train.proxy_lr: got 1e+09, expected at most"),
        (("--seed", 10**23), "seed: got 100000000000000000000000, expected"),
        (("--set", f"seed={10**23}"), "seed: got 100000000000000000000000, expected"),
        (("--dim", 10**13), "encoder.dim: got 10000000000000, expected at most"),
        (("--size", 7), "view.size: got 7, expected at least 8"),
        (("--size", 100_000), "view.size: got 100000, expected at least 8 and at most 4096"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(photos, tmp_path, words, said):
    answer = train(photos, tmp_path / "run", *words)
    refused(answer, said)
    assert "opening" not in answer.err
    assert not (tmp_path / "run").exists()


def test_all_steps_skipped_is_no_result(photos, tmp_path):
    state = {name: value.clone() for name, value in build("small", dim=8, size=16).backbone.state_dict().items()}
    for value in state.values():
        if value.ndim == 4:
            value.fill_(1e38)
    save_file(state, tmp_path / "huge.safetensors")
    words = ("--weights", tmp_path / "huge.safetensors", "--protocol", "last", "--set", "train.amp=off")
    answer = train(photos, tmp_path / "run", *words)
    refused(answer, "train: got no step with a finite loss", "train.lr is 0.0001", "huge.safetensors")
    assert not (tmp_path / "run" / "result.json").exists()
    refused(proxymetric("train", "--out", tmp_path / "run", "--resume"), "train: got no step with a finite loss")


def test_a_model_that_gives_nan_is_refused(photos, tmp_path):
    run = tmp_path / "run"
    assert train(photos, run).code == 0
    for name in ("best.safetensors", "last.safetensors"):
        checkpoint = Checkpoint.read(run / name)
        for key, value in checkpoint.tensors.items():
            if key.startswith("encoder.") and value.is_floating_point():
                value.fill_(float("nan"))
        checkpoint.write(run / name)
    image = next(photos.rglob("*.png"))
    for words in (("embed", run, photos, "--out", tmp_path / "v.safetensors"), ("search", run, image, "--in", photos)):
        refused(proxymetric(*words), "not finite")
    assert not (tmp_path / "v.safetensors").exists()
    with pytest.raises(ValueError, match="not finite"):
        pm.load(run).embed([image])


def test_an_index_holds_finite_numbers():
    with pytest.raises(ValueError, match="vectors: got numbers that are not finite"):
        VectorFile(torch.full((2, 2), float("nan")), ["a", "b"])
    with pytest.raises(ValueError, match="queries: got numbers that are not finite"):
        VectorFile(torch.eye(2), ["a", "b"]).search(torch.full((1, 2), float("inf")))


def test_weights_are_looked_for_before_the_data_is_opened(photos, tmp_path):
    answer = train(photos, tmp_path / "run", "--weights", tmp_path / "nowhere.safetensors")
    refused(answer, "weights: got", "nowhere.safetensors")
    assert "opening" not in answer.err
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    assert not Path(tmp_path / "run").exists()
