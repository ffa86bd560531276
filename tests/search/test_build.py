"""`pm.Index.build` and `VectorFile.build` do from Python what the verbs `index` and `embed` do."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

import proxymetric as pm
from proxymetric.search import VectorFile
from proxymetric.search.questions import identify_files, search_folder, search_index
from terminal import finished_run, proxymetric


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    return finished_run(photos, tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def model(run):
    return pm.load(run, device="cpu")


@pytest.fixture(scope="module")
def built(model, photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built") / "a.index"
    return pm.Index.build(folder, photos, model, map="none")


def test_python_builds_what_the_verb_builds(run, model, photos, built, tmp_path):
    answer = proxymetric("index", run, photos, "--out", tmp_path / "b.index", "--map", "none")
    assert answer.code == 0, answer
    other = pm.Index(tmp_path / "b.index")
    assert (other.ids, other.labels, other.model) == (built.ids, built.labels, built.model)
    assert torch.equal(other.vectors, built.vectors)
    assert other.manifest.run == built.manifest.run == {"run": os.path.abspath(run), "which": "best"}
    image = photos / "class5" / "3.png"
    assert proxymetric("search", built.folder, image).out == proxymetric("search", other.folder, image).out


def test_it_says_what_the_verb_says(run, model, photos, tmp_path):
    said, reported = [], []
    index = pm.Index.build(tmp_path / "a.index", photos, model, map="none", say=said.append, report=reported.append)
    answer = proxymetric("index", run, photos, "--out", tmp_path / "b.index", "--map", "none")
    messages, lines = (text.replace("b.index", "a.index").splitlines() for text in (answer.err, answer.out))
    place, loading, rest = messages[0], messages[2], [*messages[1:2], *messages[3:]]
    assert place == f"the index of {photos} is kept in {tmp_path / 'a.index'}"
    assert loading == f"loading the model of {run}"
    assert rest[: len(said)] == said
    assert rest[len(said)] == "next:"
    assert [_without_times(line) for line in lines] == [_without_times(line) for line in reported]
    assert (index.changed.added, index.changed.unchanged, index.changed.bad) == (80, 0, {})


def _without_times(line):
    return line.rsplit(", ", 1)[0] if "ms a query" in line else line


def test_a_second_call_embeds_only_what_is_new(model, photos, tmp_path):
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "class0" / "bad.png").write_text("no image")
    pm.Index.build(tmp_path / "a.index", folder, model, map="none")
    shutil.copy(photos / "class1" / "0.png", folder / "class0" / "new.png")
    (folder / "class2" / "0.png").unlink()
    done = []
    index = pm.Index.build(
        tmp_path / "a.index", folder, model, map="none", progress=lambda number, total: done.append(total)
    )
    changed = index.changed
    assert (changed.added, changed.deleted, changed.unchanged, set(changed.bad)) == (1, 1, 79, {"class0/bad.png"})
    assert done[-1] == 2, "the new image, and the one that cannot be read"
    assert pm.Index(tmp_path / "a.index").changed is None, "an index that is only opened"


def test_arguments_are_checked_before_the_model_is_loaded(photos, tmp_path):
    def load():
        raise AssertionError("the model was loaded")

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x").touch()
    (tmp_path / "empty").mkdir()
    for wrong, message in (
        ({"images": tmp_path / "gone"}, "images: got .*, which does not exist"),
        ({"images": tmp_path / "empty"}, "images: got .*, which has no images"),
        ({"out": tmp_path / "other"}, "out: got .* and holds x"),
        ({"layout": "nestd"}, "layout: got 'nestd'"),
        ({"map": "tsn"}, "map: got 'tsn'"),
        ({"vectors": "int4"}, "vectors: got 'int4'"),
        ({"engine": "fais"}, "engine: got 'fais'"),
        ({"drop_added": True}, "drop_added: got it without rebuild"),
    ):
        with pytest.raises(ValueError, match=message):
            pm.Index.build(**{"out": tmp_path / "a.index", "images": photos, "model": load, **wrong})
    with pytest.raises(ValueError, match=r"out: got .*expected a name that ends in \.safetensors"):
        VectorFile.build(tmp_path / "a.npy", photos, load)
    assert not (tmp_path / "a.index").exists()


def test_vectors_of_a_folder_in_a_file(run, model, photos, tmp_path):
    stored = VectorFile.build(tmp_path / "a.safetensors", photos, model)
    assert proxymetric("embed", run, photos, "--out", tmp_path / "b.safetensors").code == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert (len(stored), stored.dim, stored.bad) == (80, model.dim, {})


def test_questions_of_python_are_those_of_the_verb(model, photos, built):
    image = photos / "class5" / "3.png"
    results = search_index(built, model, [image], k=3, differs={"class": None})
    answer = proxymetric("search", built.folder, image, "-k", 3, "--differs", "class")
    assert [hit.name for hit in results.hits[0]] == [line.split("\t")[4] for line in answer.out.splitlines()]
    by_folder = search_folder(photos, model, [image], k=3)
    assert [hit.name for hit in by_folder.hits[0]] == [
        str(photos / hit.name) for hit in search_index(built, model, [image], k=3).hits[0]
    ]
    identified = identify_files(built, model, [image], far=0.2)
    assert identified.in_index == [True]
    assert identified.answers == built.identify(model.embed([image]), 0.2, without=["class5/3.png"])
