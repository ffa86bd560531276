"""`train.evaluate_amp`: evaluations during training in the precision of the training steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from proxymetric.encoders.encoder import Encoder
from training_runs import run, same_tensors

pytestmark = pytest.mark.usefixtures("only_training")


@pytest.mark.parametrize("evaluates_in_amp", [True, False])
def test_only_the_evaluations_of_the_training_use_it(
    evaluates_in_amp: bool, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU plays a GPU that evaluates in bfloat16: the scores at the end, and the training, stay in float32."""
    used: list[bool] = []
    features = Encoder.features

    def noted(self: Encoder, images: Tensor, *args, **kwargs) -> Tensor:
        if not self.training:
            used.append(torch.is_autocast_enabled("cpu"))
        return features(self, images, *args, **kwargs)

    monkeypatch.setattr(Encoder, "features", noted)
    settings = {"train__epochs": 2, "data__validation": 0.3}
    plain = run(photos, tmp_path / "plain", **settings)
    assert used
    assert not any(used)
    used.clear()
    monkeypatch.setattr("proxymetric.runs.session.autocast_type", lambda amp, device: torch.bfloat16)
    other = run(photos, tmp_path / "other", train__evaluate_amp=evaluates_in_amp, **settings)
    assert any(used) is evaluates_in_amp
    assert not used[-1]
    assert other.result.rows.keys() == plain.result.rows.keys()
    same_tensors(other.folder / "last.safetensors", plain.folder / "last.safetensors")


def test_the_last_epoch_of_papers_is_scored_in_float32(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"train__epochs": 2, "protocol": "papers", "data__test": 0.3, "data__validation": 0.0}
    plain = run(photos, tmp_path / "plain", **settings)
    monkeypatch.setattr("proxymetric.runs.session.autocast_type", lambda amp, device: torch.bfloat16)
    other = run(photos, tmp_path / "other", train__evaluate_amp=True, **settings)
    same_tensors(other.folder / "last.safetensors", plain.folder / "last.safetensors")
    assert other.result.rows["last epoch"] == plain.result.rows["last epoch"]
