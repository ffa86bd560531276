"""The model of a run as one file: programs give its vectors, slim files restore it bit for bit."""

from __future__ import annotations

import copy
import json
import logging
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import proxymetric as pm
from no_forms import no_forms
from proxymetric.encoders import build
from proxymetric.models.export import Embedder, export, trace
from proxymetric.models.features import FeatureModel, load_untrained
from proxymetric.models.model import Model
from terminal import bytes_of, proxymetric, refused
from training_runs import run as trained

pytestmark = pytest.mark.slow

VIT = {"encoder__backbone": "test_vit", "view__size": 32, "view__resize": 32, "train__epochs": 1}


def random_weights(file: Path, seed: int, backbone: str = "test_vit", size: int = 32) -> Path:
    torch.manual_seed(seed)
    save_file(build(backbone, dim=8, size=size, pretrained=False).backbone.state_dict(), file)
    return file


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights from which the backbones of the runs start. Only read the file."""
    return random_weights(tmp_path_factory.mktemp("weights") / "vit.safetensors", 1)


@pytest.fixture(scope="module")
def run(photos: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ViT tuned by prompts and biases. Only read it."""
    folder = tmp_path_factory.mktemp("runs") / "prompted"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
        patch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
        trained(photos, folder, **VIT, encoder__weights=str(weights), encoder__tuning="vpt+bitfit")
    return folder


def images(number: int = 5, size: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (number, 3, size, size), dtype=torch.uint8)


def test_a_torch_program_gives_the_runs_vectors_without_this_package(run, tmp_path):
    before = bytes_of(run)
    answer = proxymetric("export", run, "--torch", tmp_path / "out" / "vit.pt2")
    assert answer.code == 0, answer
    assert "(B, 3, 32, 32), uint8" in answer.out
    assert bytes_of(run) == before
    pixels = images(7)
    torch.save(pixels, tmp_path / "pixels")
    code = (
        "import sys, torch; x = torch.load('pixels'); extra = {'proxymetric.json': ''};"
        "program = torch.export.load('out/vit.pt2', extra_files=extra).module();"
        "assert not program(x).requires_grad;"
        "torch.save([program(x), program(x[:1]), extra], 'vectors'); assert 'proxymetric' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    several, one, extra = torch.load(tmp_path / "vectors")
    model = pm.load(run, device="cpu")
    assert torch.allclose(several, model.embed(pixels), rtol=0, atol=1e-6)
    assert torch.allclose(one, model.embed(pixels[:1]), rtol=0, atol=1e-6)
    facts = json.loads(extra["proxymetric.json"])
    assert facts["classes"] == model.classes
    assert facts["dim"] == 8
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["vit.pt2"]


def test_prompts_are_baked_in_and_proxies_are_not(run):
    program = trace(pm.load(run, device="cpu"))
    names = set(program.state_dict)
    assert any(name.startswith("encoder.tuning.vpt.tokens") for name in names)
    assert names <= {f"encoder.{name}" for name in pm.load(run, device="cpu").encoder.state_dict()}


def test_a_program_takes_one_kind_of_images(run, tmp_path):
    """Floats in [0, 1] that are taken for bytes would give wrong vectors without an error."""
    export(run, {"torch": tmp_path / "float.pt2"}, takes="float")
    program = torch.export.load(tmp_path / "float.pt2").module()
    pixels = images() / 255
    assert torch.allclose(program(pixels), pm.load(run, device="cpu").embed(pixels), rtol=0, atol=1e-6)
    with pytest.raises(RuntimeError, match="dtype"):
        trace(pm.load(run, device="cpu")).module()(pixels)


@pytest.mark.parametrize(
    ("backbone", "normalise", "settings"),
    [
        ("test_vit", "ball", {"tuning": {"name": "vpt", "prompts": 3, "step": 2}}),
        ("test_vit", "l2", {"tuning": "lora", "checkpointing": True}),
        ("test_vit", "l2", {"tuning": "vpt+adapter", "pooling": "gem", "learn_p": True}),
        ("small", "l2", {"pooling": "avg+max", "layer_norm": True}),
    ],
)
def test_every_kind_of_encoder_can_be_traced(backbone, normalise, settings):
    encoder = build(backbone, dim=8, size=32, pretrained=False, **settings)
    for parameter in encoder.parameters():
        if parameter.ndim:
            torch.nn.init.normal_(parameter, std=0.2)  # LoRA and adapters have no effect before training
    model = Model(encoder, normalise=normalise, classes=["a"], view={"size": 32, "resize": 32})
    pixels = images()
    with torch.no_grad():
        assert torch.equal(Embedder(model.encoder, normalise)(pixels), model.embed(pixels))
        assert torch.allclose(trace(model).module()(pixels), model.embed(pixels), rtol=0, atol=1e-6)


def test_a_program_that_differs_is_not_written(run, tmp_path, monkeypatch):
    def other(model: Model, takes: str) -> torch.export.ExportedProgram:
        changed = copy.deepcopy(model)
        with torch.no_grad():
            changed.encoder.head.bias += 1e-4
        return trace(changed, takes)

    monkeypatch.setattr("proxymetric.models.export.trace", other)
    with pytest.raises(ValueError, match=r"--torch: got a program whose vectors differ .* is not written"):
        export(run, {"torch": tmp_path / "vit.pt2"})
    assert not list(tmp_path.iterdir())


def test_a_slim_file_and_the_backbone_are_the_model(run, weights, tmp_path):
    file = tmp_path / "vit.safetensors"
    answer = proxymetric("export", run, "--slim", file)
    assert answer.code == 0, answer
    assert file.stat().st_size < (run / "best.safetensors").stat().st_size / 5
    slim, whole = pm.load(file, device="cpu", weights=weights), pm.load(run, device="cpu")
    pixels = images()
    assert torch.equal(slim.embed(pixels), whole.embed(pixels))
    assert slim.fingerprint() == whole.fingerprint()
    assert slim.classes == whole.classes
    names = set(load_file(file))
    assert {"head.weight", "mean", "std", "backbone.norm.bias", "tuning.vpt.tokens.0"} <= names
    assert "backbone.norm.weight" not in names
    with safe_open(file, "pt") as opened:
        about = json.loads(opened.metadata()["state"])
    assert about["encoder"]["backbone"] == "test_vit"
    assert about["weights"] == weights.name


def test_a_slim_file_refuses_another_backbone(run, weights, tmp_path):
    file = tmp_path / "vit.safetensors"
    export(run, {"slim": file})
    with pytest.raises(
        ValueError, match=r"are not the weights of 'test_vit' from which .* started \(vit.safetensors\)"
    ):
        pm.load(file, weights=random_weights(tmp_path / "drawn.safetensors", 2))
    # One changed bit of a frozen tensor is refused; a trained tensor may differ, because the slim file replaces it.
    tensors = load_file(weights)
    tensors["norm.bias"] += 1
    save_file(tensors, tmp_path / "biased.safetensors")
    pixels = images()
    same = pm.load(file, device="cpu", weights=tmp_path / "biased.safetensors")
    assert torch.equal(same.embed(pixels), pm.load(run, device="cpu").embed(pixels))
    tensors["norm.weight"][0] = torch.nextafter(tensors["norm.weight"][0], torch.tensor(9.0))
    save_file(tensors, tmp_path / "bit.safetensors")
    with pytest.raises(ValueError, match="sha256 differs"):
        pm.load(file, weights=tmp_path / "bit.safetensors")
    with pytest.raises(ValueError, match="do not fit backbone='test_vit'"):
        pm.load(file, weights=random_weights(tmp_path / "small.safetensors", 2, "small"))


def test_a_slim_file_without_the_backbone_asks_for_it(run, weights, tmp_path, monkeypatch):
    monkeypatch.setattr("proxymetric.encoders.backbones._reachable", lambda address: False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    export(run, {"slim": tmp_path / "vit.safetensors"})
    with pytest.raises(
        ValueError, match=r"the trained parameters of 'test_vit'; .*weights=FILE \(.*\), where FILE was vit"
    ):
        pm.load(tmp_path / "vit.safetensors")


def test_a_slim_file_on_the_command_line(run, weights, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    export(run, {"slim": "vit.safetensors"})
    wanted = [proxymetric("embed", run, photos, "--out", "whole.safetensors")]
    given = ("--weights", weights)
    wanted.append(proxymetric("embed", "vit.safetensors", photos, *given, "--out", "slim.safetensors"))
    picture = photos / "class0" / "0.png"
    wanted.append(proxymetric("search", "vit.safetensors", "--in", "slim.safetensors", picture, *given))
    wanted.append(proxymetric("evaluate", "vit.safetensors", "--data", photos, *given))
    assert [answer.code for answer in wanted] == [0] * 4, wanted
    assert torch.equal(load_file("whole.safetensors")["vectors"], load_file("slim.safetensors")["vectors"])
    refused(proxymetric("embed", run, photos, *given), "--weights", "has its own")
    for more in ((), ("--data", photos, "--split", "test")):
        refused(proxymetric("evaluate", "vit.safetensors", *given, *more), "vit.safetensors", "--data")


def test_a_damaged_slim_file_is_refused(run, weights, tmp_path):
    file = tmp_path / "vit.safetensors"
    export(run, {"slim": file})
    whole = file.read_bytes()
    for part in (len(whole) // 2, 20, 0):
        file.write_bytes(whole[:part])
        with pytest.raises(ValueError, match=r"vit\.safetensors: got a file that cannot be read"):
            pm.load(file, weights=weights)
    file.write_bytes(whole)
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    save_file({name: value for name, value in load_file(file).items() if name != "head.bias"}, file, header)
    with pytest.raises(ValueError, match="was damaged after it was written"):
        pm.load(file, weights=weights)
    with pytest.raises(ValueError, match="expected the folder of a run, or a file that `export --slim` wrote"):
        pm.load(run / "best.safetensors")


def test_full_fine_tuning_is_kept_whole_and_frozen_features_are_not(photos, weights, tmp_path, monkeypatch):
    monkeypatch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
    monkeypatch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
    pixels = images()
    trained(photos, tmp_path / "full", **VIT, encoder__weights=str(weights))
    said = export(tmp_path / "full", {"slim": tmp_path / "full.safetensors"})
    assert "the whole encoder" in said[tmp_path / "full.safetensors"]
    whole = pm.load(tmp_path / "full.safetensors", device="cpu")
    assert torch.equal(whole.embed(pixels), pm.load(tmp_path / "full", device="cpu").embed(pixels))
    with pytest.raises(ValueError, match="holds the whole encoder"):
        pm.load(tmp_path / "full.safetensors", weights=weights)

    trained(photos, tmp_path / "frozen", **VIT, encoder__weights=str(weights), train__frozen=True)
    export(tmp_path / "frozen", {"slim": tmp_path / "frozen.safetensors"})
    names = set(load_file(tmp_path / "frozen.safetensors"))
    assert names == {"head.weight", "head.bias", "mean", "std", "backbone.pos_embed"}
    slim = pm.load(tmp_path / "frozen.safetensors", device="cpu", weights=weights)
    assert torch.equal(slim.embed(pixels), pm.load(tmp_path / "frozen", device="cpu").embed(pixels))

    begun_with = load_untrained(tmp_path / "frozen", "cpu").embed(pixels)
    gone = shutil.copy(weights, tmp_path / "gone.safetensors")
    trained(photos, tmp_path / "moved", **VIT, encoder__weights=str(gone), train__frozen=True)
    Path(gone).unlink()
    assert torch.equal(load_untrained(tmp_path / "moved", "cpu").embed(pixels), begun_with)
    model = pm.load(tmp_path / "frozen", device="cpu")
    model.encoder = build(backbone="test_vit", size=32, dim=8, weights=str(weights)).eval()
    assert torch.equal(FeatureModel.of(model).embed(pixels), begun_with)

    trained(photos, tmp_path / "drawn", train__epochs=1, train__frozen=True)
    refused(
        proxymetric("export", tmp_path / "drawn", "--slim", tmp_path / "drawn.safetensors"),
        "frozen backbone has random weights",
    )
    assert not (tmp_path / "drawn.safetensors").exists()


def test_bad_input_writes_nothing(run, tmp_path):
    there = tmp_path / "there.pt2"
    there.write_text("kept")
    (tmp_path / "folder.pt2").mkdir()
    before, own = bytes_of(tmp_path), bytes_of(run)
    new = tmp_path / "new.pt2"
    refused(proxymetric("export", tmp_path / "none", "--torch", new), "holds no run")
    refused(proxymetric("export", run), "files: got none, expected --torch")
    refused(proxymetric("export", run, "--torch", there), "which exists", "--overwrite")
    refused(proxymetric("export", run, "--torch", tmp_path / "folder.pt2", "--overwrite"), "is a folder")
    refused(proxymetric("export", run, "--torch", tmp_path / "a.onnx"), "expected a name that ends in .pt2")
    refused(proxymetric("export", run, "--slim", tmp_path / "a.pt"), "expected a name that ends in .safetensors")
    refused(proxymetric("export", run, "--slim", run / "best.safetensors", "--overwrite"), "checkpoint of a run")
    refused(proxymetric("export", run, "--torch", new, "--input", "int8"), "expected one of uint8, float")
    refused(proxymetric("export", run, "--torch", new, "--which", "first"), "which: got 'first'")
    assert bytes_of(tmp_path) == before
    assert bytes_of(run) == own
    refused(proxymetric("export", run, "--torch", there, "--overwrite"), "is not a file that `proxymetric export`")
    assert there.read_text() == "kept"
    assert proxymetric("export", run, "--torch", new).code == 0
    answer = proxymetric("export", run, "--torch", new, "--overwrite")
    assert answer.code == 0, answer
    torch.export.load(new)


@pytest.mark.skipif(find_spec("onnx") is not None and find_spec("onnxscript") is not None, reason="ONNX is here")
def test_without_the_extra_onnx_is_a_sentence(run, tmp_path):
    answer = proxymetric("export", run, "--onnx", tmp_path / "a.onnx", "--torch", tmp_path / "a.pt2")
    refused(answer, "pip install 'proxymetric[export]'")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("takes", ["uint8", "float"])
def test_onnx_gives_the_runs_vectors(run, tmp_path, takes, caplog):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    answer = proxymetric("export", run, "--onnx", tmp_path / "vit.onnx", "--input", takes)
    assert answer.code == 0, answer
    assert "checked with onnxruntime" in answer.out
    assert not [said for said in caplog.records if said.name.startswith("onnx") and said.levelno >= logging.WARNING]
    session = onnxruntime.InferenceSession(str(tmp_path / "vit.onnx"))
    pixels = images(4) if takes == "uint8" else images(4) / 255
    (vectors,) = session.run(["vectors"], {"images": pixels.numpy()})
    assert torch.allclose(torch.from_numpy(vectors), pm.load(run, device="cpu").embed(pixels), rtol=0, atol=1e-4)
