"""A folder of images is indexed and served by a backbone that is only pre-trained: without a run, without classes."""

from __future__ import annotations

import json
import shutil
import socket

import pytest
import torch
from safetensors.torch import save_file

import proxymetric as pm
from proxymetric.encoders import build
from proxymetric.models.pretrained import load_pretrained, pretrained_place
from proxymetric.search import Index
from proxymetric.serve.folder import index_folder, training_adds
from terminal import proxymetric, refused


def backbone_file(file, header):
    torch.manual_seed(1)
    network = build("small", dim=8, size=16).backbone
    metadata = None if header is None else {"proxymetric": json.dumps(header)}
    save_file({name: value.contiguous() for name, value in network.state_dict().items()}, file, metadata)
    return file


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return backbone_file(tmp_path_factory.mktemp("weights") / "w.safetensors", {"backbone": "small", "img_size": 16})


@pytest.fixture(scope="module")
def answer_and_index(weights, photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "a.index"
    answer = proxymetric("index", photos, "--weights", weights, "--out", folder, "--map", "none", "--device", "cpu")
    assert answer.code == 0, answer
    return answer, folder


def test_one_command_indexes_a_folder_and_says_what_training_adds(answer_and_index, weights, photos):
    answer, folder = answer_and_index
    index, said = Index(folder), answer.err.splitlines()
    assert index.manifest.run == {"run": "backbone:small", "which": "best", "weights": str(weights)}
    assert said[0] == f"the index of {photos} is kept in {folder}"
    assert said[2] == f"loading small, only pre-trained, with the weights of {weights}"
    assert "your 10 classes" in answer.err
    assert f"train --data {photos} --frozen --backbone small --weights {weights} --out runs/photos" in answer.err
    model = pm.load("backbone:small", device="cpu", weights=weights)
    assert (model.classes, model.dim, model.encoder.config["pooling"]) == ([], 256, "avg+max")
    torch.testing.assert_close(model.embed([photos / "class5" / "3.png"])[0], index.vector("class5/3.png"))


def test_the_same_command_again_needs_no_weights_and_embeds_nothing(answer_and_index, photos):
    _, folder = answer_and_index
    answer = proxymetric("index", photos, "--out", folder, "--device", "cpu")
    assert "loading backbone:small, which made the index" in answer.err
    assert "to embed: 0 of 80 images" in answer.err
    assert proxymetric("index", photos, "--out", folder, "--device", "cpu", "-q").err == ""


def test_search_without_a_run_and_without_an_index(answer_and_index, weights, photos):
    _, folder = answer_and_index
    image = photos / "class5" / "3.png"
    by_index = proxymetric("search", folder, image, "-k", 3, "--device", "cpu")
    by_folder = proxymetric("search", image, "--in", photos, "--weights", weights, "-k", 3, "--device", "cpu")
    assert [line.split("\t")[:4] for line in by_index.out.splitlines()] == [
        line.split("\t")[:4] for line in by_folder.out.splitlines()
    ]
    identified = proxymetric("search", folder, image, "--identify", "--far", 0.5, "--device", "cpu")
    assert identified.code == 0
    assert "whether they were trained on is not known" in identified.err, "its pre-training may have seen them"
    refused(proxymetric("search", image), f"INDEX: got {image}, an image", "--in IMAGES")
    refused(proxymetric("search", folder), "IMAGE: got none")


def test_a_folder_without_classes_is_indexed_and_continued(weights, photos, tmp_path):
    folder, out, said = tmp_path / "flat", tmp_path / "flat.index", []
    folder.mkdir()
    for number in range(6):
        shutil.copy(photos / "class0" / f"{number}.png", folder)

    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_folder(folder, out, weights=weights, device="cpu", progress=stop)
    index = index_folder(folder, out, device="cpu", say=said.append)
    assert (len(index), index.classes) == (6, {})
    assert "loading backbone:small, which made the index" in said
    assert "it needs 4 classes" in said[-1]
    assert "here are 0" in said[-1]


@pytest.mark.parametrize(
    ("classes", "said"),
    [(3, "here are 3"), (6, "with fewer than 20 it often adds little"), (20, "your 20 classes apart:\n")],
)
def test_what_training_adds_depends_on_the_classes(classes, said, tmp_path):
    index = Index.create(tmp_path / "a.index", dim=2, run={"run": "backbone:resnet50"})
    names = [f"{number:02}" for number in range(2 * classes)]
    index.add(names, torch.eye(2).repeat(classes, 1), labels=[str(int(name) // 2) for name in names])
    assert said in training_adds(index, tmp_path)
    made_by_a_run = Index.create(tmp_path / "b.index", dim=2, run={"run": "runs/a"})
    assert training_adds(made_by_a_run, tmp_path) == ""


def test_what_serve_cannot_serve_is_a_sentence(weights, photos, finished, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no image")
    for place, said in (
        (photos / "class0" / "0.png", "which is a file; expected a folder of images"),
        (photos.parent / "photo", "which does not exist; expected a folder of images"),
        (tmp_path / "empty", "which has no images"),
        (tmp_path / "texts", "which has no images"),
        (finished, "which holds a model; expected a folder of images"),
    ):
        out = tmp_path / "a.index"
        refused(proxymetric("serve", place, "--port", 0, "--out", out, "--weights", weights, "--device", "cpu"), said)
        assert not out.exists()
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        refused(proxymetric("serve", photos, "--port", port, "--out", out), f"--port: got {port}, which another")
    assert not out.exists(), "the port is looked at before the images are embedded"


def test_wrong_backbones_and_weights_are_sentences(weights, answer_and_index, finished, photos, tmp_path):
    _, folder = answer_and_index
    nameless = backbone_file(tmp_path / "nameless.safetensors", None)
    for arguments, said in (
        ({"backbone": "resnt50"}, "did you mean resnet50"),
        ({"weights": nameless}, "does not say which backbone it was made for; expected its name, too"),
        ({"backbone": "resnet50", "weights": weights}, "which was made for small, with --backbone resnet50"),
        ({"weights": tmp_path / "gone.safetensors"}, "which does not exist"),
    ):
        with pytest.raises(ValueError, match=said):
            pretrained_place(device="cpu", **arguments)
    assert pretrained_place("small", nameless).name == "small"
    with pytest.raises(ValueError, match="whose weights the model hub does not have"):
        pm.load("backbone:small", device="cpu")
    with pytest.raises(ValueError, match="expected 'backbone:NAME'"):
        pm.load("backbone:")
    refused(proxymetric("index", finished, photos, "--backbone", "small"), "--backbone: got small with the model")
    refused(proxymetric("serve", folder, "--backbone", "small"), "--backbone: got it with an index")


def test_without_the_hub_the_sentence_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"weights: got none, and the weights 'resnet10t.* expected a connection"):
        load_pretrained("resnet10t", None, torch.device("cpu"))


def test_an_index_whose_weights_were_moved_says_where_they_were(weights, photos, tmp_path):
    moved = shutil.copy(weights, tmp_path / "here.safetensors")
    index = index_folder(photos, tmp_path / "a.index", weights=moved, device="cpu")
    moved.rename(tmp_path / "there.safetensors")
    image = photos / "class0" / "0.png"
    refused(proxymetric("search", index.folder, image), "here.safetensors", "is missing", "--weights FILE")
    again = index_folder(photos, index.folder, weights=tmp_path / "there.safetensors", device="cpu")
    assert again.changed.added == again.changed.updated == 0
    assert proxymetric("search", index.folder, image, "--device", "cpu").code == 0
