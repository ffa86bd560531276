"""A new tuning is a file and a line in `TUNINGS`: it is trained, counted, saved and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import proxymetric as pm
from proxymetric.encoders import TUNINGS, build, parameter_counts, tuned_parameters
from proxymetric.models.export import export
from scale_shift import ScaleShift
from training_runs import run
from vits import TINY_VIT, pictures, stir, two_blocks

VIT: dict[str, Any] = {
    "encoder__backbone": "test_vit",
    "view__size": 32,
    "view__resize": 32,
    "train__epochs": 1,
    "train__warmup": 0,
}
NORMS = 2 * 2 + 1  # two blocks of two norms, and the last norm


@pytest.fixture(autouse=True)
def one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TUNINGS, "ssf", ScaleShift)


@pytest.mark.parametrize("tuning", ["ssf", "vpt+ssf", "ssf+bitfit"])
def test_it_is_counted_by_the_part_that_it_names(tuning: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder = build(**TINY_VIT, tuning=tuning)
    counts = tuned_parameters(encoder)
    assert counts["scales and shifts"] == NORMS * 2 * encoder.width
    assert set(counts) - {"prompts", "biases"} == {"head", "scales and shifts"}
    assert sum(counts.values()) == parameter_counts(encoder)["trained"]


def test_its_arguments_are_checked_and_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    two_blocks(monkeypatch)
    encoder = build(**TINY_VIT, tuning={"name": "ssf", "deviation": 0.5})
    assert encoder.config["tuning"] == {"name": "ssf", "deviation": 0.5}
    stir(encoder)
    again = build(**json.loads(json.dumps(encoder.config)))
    again.load_state_dict(encoder.state_dict())
    assert torch.equal(again.eval()(pictures()), encoder.eval()(pictures()))
    with pytest.raises(ValueError, match="did you mean 'deviation'"):
        build(**TINY_VIT, tuning={"name": "ssf", "deviatoin": 0.5})


def test_a_run_trains_counts_and_exports_it(photos: Path, tmp_path: Path, only_training: None) -> None:
    torch.manual_seed(1)
    save_file(build("test_vit", dim=8, size=32, pretrained=False).backbone.state_dict(), tmp_path / "vit.safetensors")
    weights = str(tmp_path / "vit.safetensors")
    # gamma starts at exactly 1 and beta at 0, so any other value has been trained.
    tuning = {"name": "ssf", "deviation": 0.0}
    result = run(photos, tmp_path / "run", **VIT, encoder__weights=weights, encoder__tuning=tuning).result
    model = pm.load(tmp_path / "run", "last", device="cpu")
    layers = list(model.encoder.tuning["ssf"].layers)
    assert result.parameters["parts"]["scales and shifts"] == sum(2 * layer.gamma.numel() for layer in layers) > 0
    for layer in layers:
        assert (layer.gamma != 1).any()
        assert layer.beta.any()
    assert torch.equal(model.encoder.backbone.norm.weight, load_file(weights)["norm.weight"]), "it is frozen"

    files = {"torch": tmp_path / "ssf.pt2", "slim": tmp_path / "ssf.safetensors"}
    export(tmp_path / "run", files, which="last")
    vectors = model.embed(pictures(3))
    program = torch.export.load(files["torch"]).module()
    torch.testing.assert_close(program(pictures(3)), vectors, rtol=1e-5, atol=1e-5)
    slim = pm.load(files["slim"], device="cpu", weights=weights)
    assert torch.equal(slim.embed(pictures(3)), vectors)
    assert "tuning.ssf.layers.0.gamma" in load_file(files["slim"])


def test_a_setting_without_annotation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(ScaleShift):
        def __init__(self, backbone: torch.nn.Module, last=2) -> None:  # type: ignore[no-untyped-def]
            super().__init__(backbone)

    monkeypatch.setitem(TUNINGS, "bare", Bare)
    two_blocks(monkeypatch)
    with pytest.raises(TypeError, match=r"Bare\.last: got no annotation, expected the type of this setting"):
        build(**TINY_VIT, tuning="bare")
