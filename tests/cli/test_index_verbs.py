"""The verbs of an index: their forms, what replaced the earlier ones, their help and their JSON."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import textwrap

import pytest
from typer.core import TyperOption
from typer.main import get_command

from proxymetric.cli import app, identifying, searching, serving, trained, upkeep
from proxymetric.search import Index
from terminal import finished_run, proxymetric, refused

VERBS = {
    "index": searching.index, "search": searching.search, "serve": serving.serve, "embed": trained.embed,
    "index add-class": identifying.add_class, "index remove": identifying.remove, "index metadata": upkeep.metadata,
    "index switch": upkeep.switch, "index verify": upkeep.verify, "index compact": upkeep.compact,
}  # fmt: skip
MOST_LINES = 40
IN_ROOT = {"help", "weights", "device"}
"""options that several verbs share"""


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    return finished_run(photos, tmp_path_factory.mktemp("run") / "run")


@pytest.fixture(scope="module")
def index(run, photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "a.index"
    answer = proxymetric("index", run, photos, "--out", folder, "--map", "none", "--json")
    assert answer.code == 0, answer
    content = json.loads(answer.out)
    assert "80 images in" in answer.err, "messages leave standard output to the JSON"
    assert {name: content[name] for name in ("index", "images", "added", "bad", "dim", "vectors", "engine")} == {
        "index": str(folder), "images": 80, "added": 80, "bad": {}, "dim": 8, "vectors": "float32", "engine": "exact",
    }  # fmt: skip
    return folder


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("query", "run", "photos", "a.png"), "search RUN IMAGE --in IMAGES"),
        (("identify", "a.index", "a.png"), "search INDEX IMAGE --identify"),
        (("add-class", "a.index", "wren", "a.png"), "index add-class INDEX NAME IMAGE"),
        (("remove", "a.index", "a"), "index remove INDEX ID"),
    ],
)
def test_an_earlier_verb_names_the_new_one(words, sentence):
    answer = proxymetric(*words)
    assert answer.code == 2
    assert f"got the verb '{words[0]}', expected `proxymetric {sentence}`" in answer.err


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_parses_calls_and_prints(verb):
    function = ast.parse(textwrap.dedent(inspect.getsource(VERBS[verb]))).body[0]
    assert isinstance(function, ast.FunctionDef)
    body = function.body[1:]
    assert body[-1].end_lineno - body[0].lineno < MOST_LINES


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_says_the_default_of_each_option(verb):
    command = get_command(app).commands[verb]
    options = [each for each in command.params if isinstance(each, TyperOption) and not each.is_flag]
    silent = [
        each.name
        for each in options
        if each.name not in IN_ROOT and each.default is None and "Default: " not in (each.help or "")
    ]
    assert not silent
    answer = proxymetric(*verb.split(), "--help")
    assert answer.code == 0
    assert f"{verb} [OPTIONS]" in answer.out


def test_an_index_may_be_made_by_a_run_that_is_called_remove(run, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "remove").symlink_to(run)
    refused(proxymetric("index", "remove", photos), "manifest.json")
    assert proxymetric("index", "./remove", photos, "--out", "a.index", "--map", "none").code == 0


def test_options_of_another_form_are_refused(run, photos, index):
    image = photos / "class0" / "0.png"
    for words, sentence in (
        (("--far", "0.1"), "--far: got it with an INDEX, expected it only with --identify"),
        (("--identify", "-k", 3), "-k: got it with --identify, expected it only with an INDEX or --in IMAGES"),
        (("--in", photos, "--where", "class=a"), "--where: got it with --in IMAGES, expected it only with an INDEX"),
        (("--which", "last"), "--which: got it with an INDEX, expected it only with --in IMAGES"),
        (("--in", photos, "--identify"), "--identify: got it with --in, expected an INDEX"),
    ):
        refused(proxymetric("search", index, image, *words), sentence)
    refused(proxymetric("search", run, image), f"INDEX: got {run}, which is a model", "--in IMAGES")
    refused(proxymetric("search", f"{index}s", image), "does not exist", f"did you mean '{index}'?")


def test_metadata_changes_without_embedding(run, photos, index, tmp_path):
    copy, table = shutil.copytree(index, tmp_path / "a.index"), tmp_path / "prices.csv"
    table.write_text("id,price,class\nclass0/1.png,4.50,\nclass4/2.png,60,dear\ngone/1.png,3,\n")
    answer = proxymetric("index", "metadata", copy, table)
    assert answer.code == 0, answer
    assert f"2 changed, 0 unchanged in {copy}" in answer.out
    assert f"1 of the lines of {table} are about no image of the index: gone/1.png" in answer.err
    assert "0 changed, 2 unchanged" in proxymetric("index", "metadata", copy, table).out
    words = ("search", copy, photos / "class0" / "0.png", "--where", "price<50")
    assert [line.split("\t")[3:] for line in proxymetric(*words).out.splitlines()] == [["", "class0/1.png"]]
    assert Index(copy)["class4/2.png"].label == "dear"
    table.write_text("file,price\nclass0/1.png,\n")
    assert proxymetric("index", "metadata", copy, table).code == 0
    assert Index(copy)["class0/1.png"].metadata == {}
    refused(proxymetric(*words[:3], "--where", "prise<50"), "where: got 'prise'", "did you mean 'price'?")
    table.write_text("id,price\nclass0/11.png,3\n")
    refused(proxymetric("index", "metadata", copy, table), "no item of", "did you mean 'class0/1.png'?")
    table.write_text("name,price\na,3\n")
    refused(proxymetric("index", "metadata", copy, table), "expected a column 'file' or 'id'")


def test_another_model_takes_the_place_and_goes_back(run, photos, index, tmp_path):
    copy, beside = shutil.copytree(index, tmp_path / "a.index"), tmp_path / "b.index"
    assert proxymetric("index", run, photos, "--out", beside, "--vectors", "int8", "--map", "none").code == 0
    assert proxymetric("index", "remove", beside, "class0/1.png").code == 0
    refused(proxymetric("index", "switch", copy, beside), "lacks 1 of the 80 items", "'class0/1.png'", "--drop-missing")
    answer = proxymetric("index", "switch", copy, beside, "--drop-missing")
    assert answer.code == 0, answer
    assert f"{copy}: 79 images, vectors of {run}; {beside} has the earlier ones" in answer.out
    assert [Index(each).manifest.vectors["kind"] for each in (copy, beside)] == ["int8", "float32"]
    assert proxymetric("search", copy, photos / "class0" / "0.png").code == 0
    assert proxymetric("index", "switch", copy, beside).code == 0
    assert Index(copy).manifest.vectors["kind"] == "float32"


def test_a_flipped_bit_is_found_and_compacting_erases(index, tmp_path):
    copy = shutil.copytree(index, tmp_path / "a.index")
    assert "80 images, all files are as they were written" in proxymetric("index", "verify", copy).out
    vector = Index(copy).vector("class0/1.png").numpy().tobytes()
    assert proxymetric("index", "remove", copy, "class0/1.png").code == 0
    file = next(copy.glob("vectors-*"))
    assert vector in file.read_bytes(), "a removed vector stays until the next merge"
    answer = proxymetric("index", "compact", copy)
    assert answer.code == 0, answer
    assert "79 images" in answer.out
    assert not any(vector in each.read_bytes() for each in copy.iterdir())
    file = next(copy.glob("vectors-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    refused(proxymetric("index", "verify", copy), file.name, "it was damaged after it was written")


def test_embed_has_json(run, photos, tmp_path):
    file = tmp_path / "a.safetensors"
    answer = proxymetric("embed", run, photos, "--out", file, "--json")
    assert answer.code == 0, answer
    assert json.loads(answer.out) == {
        "file": str(file), "images": 80, "dim": 8, "vectors": "float32", "bytes_per_vector": 32, "bad": {},
    }  # fmt: skip
    assert "80 vectors of 8 dimensions" in answer.err
