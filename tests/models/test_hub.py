"""Shared models: a folder for the Hugging Face hub, and its address."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import proxymetric as pm
from hub_server import COMMIT, hub
from proxymetric.system.files import read_json, write_json
from terminal import bytes_of, proxymetric, refused

FILES = ["README.md", "config.json", "model.safetensors"]


@pytest.fixture(scope="module")
def run(finished):
    return finished


@pytest.fixture(scope="module")
def shared(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run as a folder for the hub. Only read it."""
    folder = tmp_path_factory.mktemp("shared") / "birds"
    answer = proxymetric("export", run, "--hub", folder, "--licence", "cc-by-4.0")
    assert answer.code == 0, answer
    assert "licence: cc-by-4.0" in answer.out
    return folder


def test_a_folder_is_the_model(run, shared):
    assert sorted(file.name for file in shared.iterdir()) == FILES
    ours, theirs = pm.load(shared, device="cpu"), pm.load(run, device="cpu")
    assert ours.fingerprint() == theirs.fingerprint()
    assert (ours.classes, ours.nested) == (theirs.classes, theirs.nested)
    pixels = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(ours.embed(pixels), theirs.embed(pixels))


def test_the_card_has_the_fields_of_the_hub_and_the_results(run, shared):
    from huggingface_hub import ModelCard

    card, rows = ModelCard.load(shared / "README.md"), read_json(run / "result.json")["rows"]
    fields = card.data
    assert (fields.license, fields.library_name, fields.pipeline_tag) == (
        "cc-by-4.0", "proxymetric", "image-feature-extraction",
    )  # fmt: skip
    stated = {each.metric_type: each.metric_value for each in fields.eval_results}
    assert stated == {name: round(100 * value, 2) for name, value in rows["trained encoder"].items()}
    for name, scores in rows.items():
        assert f"| {name} | {' | '.join(f'{100 * score:.2f}' for score in scores.values())} |" in card.text
    assert str(run.parent) not in (shared / "README.md").read_text(), "a place on this machine"


def test_without_a_licence_the_card_says_so(run, tmp_path):
    answer = proxymetric("export", run, "--hub", tmp_path / "birds")
    assert answer.code == 0, answer
    card = (tmp_path / "birds" / "README.md").read_text()
    assert "license: unknown\n" in card
    assert "not stated" in card


def test_the_client_fetches_a_model_from_the_server_in_hf_endpoint(run, shared, tmp_path):
    """The client reads HF_ENDPOINT when it is imported, so it runs in a process of its own."""
    code = (
        "from proxymetric.models.hub_client import fetch\n"
        "from proxymetric.models.place import place_of\n"
        "for address in ('hf://me/birds', 'hf://me/birds@main', 'hf://me/birds@v9', 'hf://me/cats'):\n"
        "    try: print(fetch(place_of(address)))\n"
        "    except ValueError as error: print(error)\n"
    )
    with hub("me/birds", shared) as server:
        settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True, check=True
        )
        first, again, no_revision, no_model = ended.stdout.splitlines()
    assert first == again
    assert Path(first).name == COMMIT
    assert "'hf://me/birds@v9', which has no revision 'v9'" in no_revision
    assert "'hf://me/cats', which the hub does not have, or which is private" in no_model
    fetched = [request for request in server.requests if request.startswith("GET /me/birds/resolve")]
    assert len(fetched) == 2, "the card is not fetched, and nothing is fetched twice"
    assert pm.load(first, device="cpu").fingerprint() == pm.load(run, device="cpu").fingerprint()


@pytest.fixture
def served(shared, tmp_path, monkeypatch):
    """The shared model at hf://me/birds, with an empty cache."""
    from huggingface_hub import constants

    with hub("me/birds", shared) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)  # what HF_ENDPOINT sets in a new process
        template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


@pytest.mark.usefixtures("served")
def test_load_takes_an_address(run):
    model = pm.load(f"hf://me/birds@{COMMIT}", device="cpu")
    assert model.fingerprint() == pm.load(run, device="cpu").fingerprint()
    with pytest.raises(ValueError, match="which: got 'last', but hf://me/birds holds a single model"):
        pm.load("hf://me/birds", "last")


def test_a_hub_that_does_not_answer(shared, tmp_path, monkeypatch):
    from huggingface_hub import constants

    with hub("me/birds", shared) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="the hub cannot be reached"):
        pm.load("hf://me/birds", device="cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("served")
def test_verbs_take_an_address(run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address, cpu = "hf://me/birds", ("--device", "cpu")
    image = next(iter(sorted(photos.rglob("*.png"))))
    copy = shutil.copy(image, tmp_path / "owl.png")
    for words in (
        ("embed", address, photos, "--out", "a.safetensors"),
        ("search", address, "--in", "a.safetensors", image),
        ("evaluate", f"{address}@main", "--data", photos),
        ("inspect", address, photos),
        ("index", address, photos, "--out", "a.index", "--map", "none"),
        ("search", "a.index", image),
        ("search", "--identify", "a.index", image, "--far", "0.5"),
        ("index", "add-class", "a.index", "owl", copy),
        ("search", "a.index", image, "--run", address),
        ("search", "a.index", image, "--run", run),
    ):
        answer = proxymetric(*words, *cpu)
        assert answer.code == 0, (words, answer)
        assert "not finished" not in answer.out + answer.err, words
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "a.index", "a.safetensors", "birds-inspects-photos", "birds-on-photos.html", "cache", "owl.png",
    ]  # fmt: skip
    refused(proxymetric("search", "a.index", image, "--run", "hf://me/cats"), "which the hub does not have")


@pytest.mark.usefixtures("served")
def test_embed_takes_an_address_and_refuses_a_wrong_one(run, photos, tmp_path):
    address, out = "hf://me/birds", ("--out", tmp_path / "a.safetensors", "--device", "cpu")
    answer = proxymetric("embed", address, photos, *out)
    assert answer.code == 0, answer
    answer = proxymetric("embed", run, photos, *out)
    assert answer.code == 0, "without --overwrite: both are the same model"
    refused(proxymetric("evaluate", address, "--no-report"), "hf://me/birds", "a shared model", "expected --data")
    refused(proxymetric("embed", "hf://me/cats", photos), "'hf://me/cats', which the hub does not have")
    refused(proxymetric("embed", "hf://birds", photos), "run: got 'hf://birds', expected 'hf://owner/name'")
    for words in (("export", address, "--slim", "b.safetensors"), ("evaluate", address, "--redraw")):
        refused(proxymetric(*words), "RUN: got hf://me/birds, a shared model", "expected the folder of a run")


def test_verbs_take_a_folder(shared, photos, tmp_path):
    answer = proxymetric("embed", shared, photos, "--out", tmp_path / "a.safetensors", "--device", "cpu")
    assert answer.code == 0, answer
    assert "not finished" not in answer.out + answer.err
    answer = proxymetric("evaluate", shared, "--data", photos, "--no-report", "--device", "cpu")
    assert answer.code == 0, answer
    refused(proxymetric("evaluate", shared, "--no-report"), "a shared model", "expected --data")
    refused(proxymetric("embed", shared, photos, "--weights", "w.safetensors"), "holds the whole encoder")


@pytest.mark.parametrize("there", ["photo", "run", "model", "file"])
def test_export_replaces_nothing_of_others(run, shared, tmp_path, there):
    target = tmp_path / "target"
    if there == "file":
        target.write_text("mine")
    elif there == "photo":
        target.mkdir()
        (target / "photo.jpg").write_text("mine")
    else:
        shutil.copytree(run if there == "run" else shared, target)
    before = bytes_of(tmp_path)
    refused(proxymetric("export", run, "--hub", target), f"--hub: got {target}", "expected")
    assert bytes_of(tmp_path) == before
    answer = proxymetric("export", run, "--hub", target, "--overwrite")
    assert (answer.code == 0) == (there == "model"), answer


def test_wrong_arguments_are_refused_before_anything_is_written(run, tmp_path):
    refused(proxymetric("export", run, "--hub", tmp_path / "a", "--licence", "My own"), "licence: got 'My own'")
    refused(proxymetric("export", run, "--slim", tmp_path / "a.safetensors", "--licence", "mit"), "without --hub")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"encoder": {"backbone": "small", "evil": 1}}, "encoder.evil"),
        ({"classes": None}, "for classes"),
        ({"normalise": "l3"}, "normalise 'l3'"),
        ({"format": "proxymetric hub 9"}, "got the format 'proxymetric hub 9'"),
        ({"versions": {"proxymetric": "99.0"}}, "newer than this version"),
        ({"encoder": {"backbone": "small", "dim": 8, "size": 16, "weights": "/etc/passwd", "pretrained": True}}, None),
    ],
)
def test_a_foreign_description_is_checked(shared, tmp_path, change, said):
    """It names no files of this machine and fetches nothing: `weights` and `pretrained` have no effect."""
    folder = shutil.copytree(shared, tmp_path / "copy")
    write_json(folder / "config.json", json.loads((folder / "config.json").read_text()) | change)
    if said is None:
        assert pm.load(folder, device="cpu").fingerprint() == pm.load(shared, device="cpu").fingerprint()
        return
    with pytest.raises(ValueError, match=said):
        pm.load(folder, device="cpu")


def test_a_folder_without_weights_is_refused(shared, tmp_path):
    folder = shutil.copytree(shared, tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        pm.load(folder, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("there", ["nothing", "model"])
def test_an_export_that_was_killed_is_made_again(run, shared, tmp_path, there):
    folder = tmp_path / "birds"
    if there == "model":
        shutil.copytree(shared, folder)
    code = (
        "import os; from proxymetric.cli import main; from proxymetric.models import hub; write = hub.write_tensors;"
        "hub.write_tensors = lambda *given: (write(*given), os.kill(os.getpid(), 9)); main()"
    )
    command = [sys.executable, "-c", code, "export", str(run), "--hub", str(folder), "--overwrite"]
    assert subprocess.run(command, capture_output=True).returncode == -9
    with pytest.raises(ValueError, match=r"whose export was stopped; expected the same `export --hub` once more"):
        pm.load(folder, device="cpu")
    answer = proxymetric("export", run, "--hub", folder)
    assert answer.code == 0, answer
    assert [file.name for file in sorted(folder.iterdir()) if not file.name.startswith(".")] == FILES
    assert pm.load(folder, device="cpu").fingerprint() == pm.load(shared, device="cpu").fingerprint()


def test_an_unfinished_folder_is_not_loaded_and_may_be_replaced(run, shared, tmp_path):
    folder = shutil.copytree(shared, tmp_path / "birds")
    write_json(folder / "config.json", {"format": "proxymetric hub 1", "unfinished": True})
    with pytest.raises(ValueError, match="whose export was stopped"):
        pm.load(folder, device="cpu")
    assert proxymetric("export", run, "--hub", folder).code == 0
    assert "unfinished" not in read_json(folder / "config.json")
