"""The verbs index and search."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import webbrowser
from pathlib import Path

import pytest
import torch
from PIL import Image

from proxymetric.encoders import Encoder
from proxymetric.search import Index, class_photos
from terminal import bytes_of, finished_run, proxymetric, refused


@pytest.fixture(scope="module")
def run(finished):
    return finished


@pytest.fixture(scope="module")
def index(run, photos, tmp_path_factory):
    place = tmp_path_factory.mktemp("index")
    (place / "items.csv").write_text("file,shop\nclass0/1.png,Ulm\nclass4/2.png,Ulm\n")
    answer = proxymetric(
        "index", run, photos, "--out", place / "a.index", "--map", "pca", "--metadata", place / "items.csv"
    )
    assert answer.code == 0, answer
    assert f"80 images in {place / 'a.index'}: 80 added, 0 updated, 0 deleted, 0 unchanged" in answer.out
    assert f"proxymetric search {place / 'a.index'} unknown.jpg" in answer.err
    return place / "a.index"


def lines(answer):
    assert answer.code == 0, answer
    return [line.split("\t") for line in answer.out.splitlines()]


def test_search_finds_what_query_finds(run, photos, index):
    images = [photos / "class5" / "3.png", photos / "class0" / "0.png"]
    by_index = lines(proxymetric("search", index, *images, "-k", 6))
    by_folder = lines(proxymetric("search", run, *images, "--in", photos, "-k", 6))
    assert len(by_index) == 12
    assert [(*line[:4], str(photos / line[4])) for line in by_index] == [tuple(line) for line in by_folder]


def test_query_refuses_an_index(run, photos, index):
    refused(
        proxymetric("search", run, photos / "class0" / "0.png", "--in", index),
        "which is an index",
        "proxymetric search",
    )


def test_a_search_without_results_names_all_conditions(photos, index):
    answer = proxymetric("search", index, photos / "class0" / "1.png", "--where", "shop=Ulm", "--differs", "shop")
    assert answer.code == 0, answer
    assert "matches --where shop=Ulm --differs shop" in answer.err


def test_a_search_in_which_nothing_differs_says_so(run, photos, tmp_path):
    shutil.copytree(photos / "class0", tmp_path / "photos" / "class0")
    answer = proxymetric("index", run, tmp_path / "photos", "--out", tmp_path / "a.index", "--map", "none")
    assert answer.code == 0, answer
    image = tmp_path / "photos" / "class0" / "1.png"
    for differs in ("class", "class=class0"):
        answer = proxymetric("search", tmp_path / "a.index", image, "--differs", differs)
        assert (answer.code, answer.out) == (0, "")
        assert f"no other image of {tmp_path / 'a.index'} matches --differs {differs}" in answer.err


def test_search_of_an_image_from_elsewhere(photos, index, tmp_path):
    copy = tmp_path / "copy.png"
    shutil.copy(photos / "class5" / "3.png", copy)
    first, *_ = lines(proxymetric("search", index, copy))
    assert first == [str(copy), "1", "1.000", "class5", "class5/3.png"]


def test_vectors_for_other_databases(run, photos, index, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    copy = shutil.copytree(index, tmp_path / "a.index")
    answer = proxymetric("index", run, photos, "--out", copy, "--parquet", tmp_path / "v.parquet")
    assert answer.code == 0, answer
    assert "80 unchanged" in answer.out
    assert pq.read_table(tmp_path / "v.parquet").num_rows == 80


def test_metadata_of_files_that_are_not_there(run, photos, tmp_path):
    table, target = tmp_path / "items.csv", tmp_path / "x.index"
    table.write_text("file,shop\nelsewhere/0.png,Ulm\n")
    refused(
        proxymetric("index", run, photos, "--out", target, "--metadata", table),
        "items.csv, which names 'elsewhere/0.png' and no image of",
        "such as 'class0/0.png'",
    )
    assert not target.exists()
    table.write_text("file,shop\nclass0/0.png,Ulm\nelsewhere/0.png,Ulm\n")
    answer = proxymetric("index", run, photos, "--out", target, "--metadata", table)
    assert answer.code == 0, answer
    assert f"1 of the 2 files of {table} are not in the index: elsewhere/0.png" in answer.err
    table.write_text("file,shop\nclass0/0.png,Bonn\n")
    assert "not in the index" not in proxymetric("index", run, photos, "--out", target, "--metadata", table).err


def test_conditions_and_json(photos, index):
    image = photos / "class0" / "0.png"
    answer = proxymetric("search", index, image, "--where", "class=class4", "--json")
    assert answer.code == 0, answer
    (content,) = json.loads(answer.out)
    assert content["query"] == str(image)
    assert {hit["class"] for hit in content["results"]} == {"class4"}
    assert [hit["rank"] for hit in content["results"]] == list(range(1, 9))
    metadata = {hit["file"]: hit["metadata"] for hit in content["results"]}
    assert metadata["class4/2.png"] == {"shop": "Ulm"}
    assert metadata["class4/3.png"] == {}
    nothing = proxymetric("search", index, image, "--where", "shop=Bonn")
    assert (nothing.code, nothing.out) == (0, "")
    assert "matches --where shop=Bonn" in nothing.err
    both = lines(proxymetric("search", index, image, "--where", "class=class4", "--where", "shop=Ulm"))
    assert [line[4] for line in both] == ["class4/2.png"]
    refused(proxymetric("search", index, image, "--where", "clas=x"), "where: got 'clas'", "did you mean 'class'?")
    refused(proxymetric("search", index, image, "--where", "class"), "where: got 'class', expected COLUMN=VALUE")
    refused(proxymetric("search", index, image, "--where", "shop<new"), "where: got shop<new, expected a number or a")


def test_pages_thresholds_and_one_result_for_each_value(photos, index):
    image = photos / "class0" / "0.png"
    words = ("search", index, image, "--where", "class!=class9,class8")
    all_lines = lines(proxymetric(*words, "-k", 79))
    assert len(all_lines) == 63
    assert not {line[3] for line in all_lines} & {"class8", "class9"}
    pages = [lines(proxymetric(*words, "-k", 30, "--offset", offset)) for offset in (0, 30, 60)]
    assert [line for page in pages for line in page] == all_lines, "with the ranks of all pages together"
    least = float(all_lines[9][2]) - 0.0005
    assert all(float(line[2]) >= least for line in lines(proxymetric(*words, "--min-similarity", least)))
    groups = lines(proxymetric(*words, "--one-per", "class"))
    assert sorted(line[3] for line in groups) == [f"class{number}" for number in range(8)]
    first = {line[3]: line[4] for line in reversed(all_lines)}
    assert {line[3]: line[4] for line in groups} == first, "the most similar of each class"
    answer = proxymetric(*words, "--offset", 99)
    assert (answer.out, "matches --where class!=class9,class8 --offset 99" in answer.err) == ("", True)
    refused(proxymetric(*words, "--one-per", "clas"), "one_per: got 'clas'", "did you mean 'class'?")
    refused(proxymetric(*words, "--min-similarity", 2), "min_similarity: got 2, expected a similarity between -1 and 1")


def test_images_together_are_one_query(photos, index, run):
    images = [photos / "class5" / "3.png", photos / "class0" / "0.png"]
    found = lines(proxymetric("search", index, *images, "--together", "-k", 78))
    opened = Index(index)
    own = [image.relative_to(photos).as_posix() for image in images]
    mean = torch.stack([opened.vector(item) for item in own]).mean(dim=0, keepdim=True)
    assert [line[4] for line in found] == [hit.id for hit in opened.search(mean, 80)[0] if hit.id not in own]
    assert {line[0] for line in found} == {" + ".join(map(str, images))}
    refused(proxymetric("search", index, *images, "--together", "--differs", "shop"), "expected shop=VALUE")
    refused(proxymetric("search", run, *images, "--in", photos, "--together"), "--together: got it with --in IMAGES")


@pytest.mark.parametrize("form", ["index", "folder"])
def test_open_shows_a_page(form, run, photos, index, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    words = ["search", index] if form == "index" else ["search", run, "--in", photos]
    answer = proxymetric(*words, photos / "class5" / "3.png", "-k", 3, "--open")
    assert answer.code == 0, answer
    (address,) = opened
    page = Path(address.removeprefix("file://")).read_text(encoding="utf-8")
    assert page.count('src="data:image/') == 4
    assert "http" not in page, "nothing is loaded from elsewhere"
    assert "class5" in page


@pytest.mark.parametrize("engine", ["faiss", "milvus"])
def test_other_engines_find_the_same(engine, run, photos, index, tmp_path):
    pytest.importorskip({"faiss": "faiss", "milvus": "milvus_lite"}[engine], reason="the extra is not installed")
    more = ["--uri", tmp_path / "shop.db", "--engine-set", "batch=7"] if engine == "milvus" else []
    words = ("index", run, photos, "--out", tmp_path / "b.index", "--map", "none", "--engine", engine, *more)
    answer = proxymetric(*words)
    assert answer.code == 0, answer
    assert ("faiss finds 100.0 % of the 10 nearest images" in answer.out) == (engine == "faiss")
    assert bool(re.search(r"faiss: \S+ ms a query one at a time \(exact: \S+ ms\), .* 64 at a time", answer.out)) == (
        engine == "faiss"
    )
    assert "80 unchanged" in proxymetric(*words).out, "the same options change nothing"
    if engine == "milvus" and importlib.util.find_spec("fastapi") is not None:
        refused(proxymetric("serve", tmp_path / "b.index", "--workers", 2), "workers: got 2, expected 1 for vectors in")
    image = photos / "class5" / "3.png"
    assert lines(proxymetric("search", tmp_path / "b.index", image)) == lines(proxymetric("search", index, image))
    answer = proxymetric(*words[: words.index("--engine")], "--engine", "exact")
    assert ("shop.db keeps the items of this index, proxymetric_" in answer.err) == (engine == "milvus"), answer


def test_refusals(run, photos, index, tmp_path):
    image = photos / "class0" / "0.png"
    refused(proxymetric("search", tmp_path, image), "which has no manifest.json; expected a folder that `proxymetric")
    refused(
        proxymetric("search", index, image.with_name("00.png")),
        "IMAGE: got",
        "00.png, which does not exist; expected an image file; did you mean",
        "/0.png'?",
    )
    for verb, words, argument in (
        (("search",), (), "IMAGE"),
        (("search", "--identify"), (), "IMAGE"),
        (("index", "add-class"), ("x",), "IMAGE"),
    ):
        refused(
            proxymetric(*verb, index, *words, photos / "class0"),
            f"{argument}: got {photos / 'class0'}, which is a folder; expected image files, such as",
            f"{photos / 'class0' / '*.png'}",
        )
        refused(proxymetric(*verb, index, *words, photos), f"such as {photos / '*' / '*.png'}")
        refused(proxymetric(*verb, index, *words, tmp_path / "gone.png"), f"{argument}: got", "which does not exist")
    refused(
        proxymetric("index", "add-class", index, "x", image, tmp_path / "gone.png"),
        "IMAGE: got",
        "gone.png, which does not",
    )
    refused(proxymetric("search", f"{index}s", image), "which does not exist", f"did you mean '{index}'?")
    refused(
        proxymetric("search", index, image, "--where", "class=clas4"),
        "where class: got 'clas4', expected one of class0, class1",
        "did you mean 'class4'?",
    )
    refused(proxymetric("search", index, image, "-k", 0), "k: got 0, expected at least 1")
    refused(proxymetric("search", index, image, "--run", tmp_path / "gone"), "gone", "is missing")
    refused(
        proxymetric("index", run, tmp_path / "gone"), "images: got", "gone, which does not exist; expected a folder"
    )
    refused(proxymetric("index", run, image), f"images: got {image}, which is a file; expected a folder of images")
    refused(proxymetric("index", run, f"{photos}s"), "images: got", f"did you mean '{photos}'?")
    refused(proxymetric("index", run, photos, "--out", photos), "out: got", "is not an index and holds class")
    refused(proxymetric("index", run, photos, "--out", image), "out: got", "which is a file")
    refused(proxymetric("index", run, photos, "--engine", "fais", "--out", tmp_path / "x"), "did you mean 'faiss'?")
    refused(
        proxymetric("index", run, photos, "--uri", "a.db", "--out", tmp_path / "x"), "--engine: got none with --uri"
    )
    (tmp_path / "empty").mkdir()
    refused(proxymetric("index", run, tmp_path / "empty", "--out", tmp_path / "x"), "which has no images")
    assert not (tmp_path / "x").exists()


def test_bad_files_are_listed_at_the_end(run, tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    Image.new("RGB", (20, 20), "red").save(folder / "a.png")
    for number in range(12):
        (folder / f"b{number:02d}.png").write_text("no image")
    answer = proxymetric("index", run, folder, "--out", tmp_path / "x.index")
    assert answer.code == 0, answer
    assert f"left out, cannot be read: {folder / 'b00.png'} (the image format is not recognised" in answer.err
    assert "... and 2 more" in answer.err
    assert "1 images in" in answer.out


@pytest.mark.parametrize("form", ["folder", "index", "identify"])
def test_an_image_that_cannot_be_read_does_not_cost_the_others(form, run, photos, index, tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"no image")
    words = ["search", run, "--in", photos] if form == "folder" else ["search", index]
    good = [photos / "class5" / "3.png", photos / "class0" / "0.png"]
    more = ["--identify", "--far", "0.2"] if form == "identify" else ["-k", 1]
    without = proxymetric(*words, *good, *more)
    answer = proxymetric(*words, good[0], bad, good[1], *more)
    assert (without.code, answer.code) == (0, 1)
    assert answer.out == without.out
    assert f"left out, cannot be read: {bad} (the image format is not recognised" in answer.err
    answer = proxymetric(*words, good[0], bad, good[1], *more, "--json")
    assert answer.code == 1
    *found, error = json.loads(answer.out)
    key = "image" if form == "identify" else "query"
    assert [Path(each[key]) for each in [*found, error]] == [*good, bad]
    assert "not recognised" in error["error"]
    refused(proxymetric(*words, bad, *more), "bad.png", "not recognised")


def test_another_model_is_refused_until_rebuild(photos, index, tmp_path):
    copy = shutil.copytree(index, tmp_path / "a.index")
    other = finished_run(photos, tmp_path / "other", "--seed", 3)
    refused(proxymetric("index", other, photos, "--out", copy), "were made by the model", "--rebuild")
    refused(proxymetric("search", copy, photos / "class0" / "0.png", "--run", other), "were made by the model")
    answer = proxymetric("index", other, photos, "--out", copy, "--rebuild")
    assert "0 added, 80 updated, 0 deleted" in answer.out
    first, *_ = lines(proxymetric("search", copy, photos / "class0" / "0.png", "-k", 1))
    assert first[1] == "1"


def test_another_folder_does_not_delete_the_images_of_the_first(run, photos, index, tmp_path):
    copy = shutil.copytree(index, tmp_path / "a.index")
    other = tmp_path / "other"
    shutil.copytree(photos / "class0", other / "class0")
    shutil.copytree(photos / "class1", other / "new")
    before = bytes_of(copy)
    for more in ([], ["--rebuild"]):
        refused(
            proxymetric("index", run, other, "--out", copy, *more),
            f"images: got {other}, but {copy} was made of {photos}, and 72 of its images, such as class1/0.png, would",
            f"expected {photos}, another --out, `proxymetric index add-class` to add images, or --replace",
        )
        assert bytes_of(copy) == before
    answer = proxymetric("index", run, other, "--out", copy, "--replace")
    assert answer.code == 0, answer
    assert "8 added, 0 updated, 72 deleted" in answer.out or "8 added, 8 updated, 72 deleted" in answer.out
    (other / "new" / "0.png").unlink()
    assert "1 deleted" in proxymetric("index", run, other, "--out", copy).out, "the same folder needs no --replace"
    moved = shutil.move(other, tmp_path / "moved")
    assert "15 unchanged" in proxymetric("index", run, moved, "--out", copy).out, "a moved folder is the same"
    assert Index(copy).manifest.photos == str(moved)
    Index(copy).change([], photos=None)
    answer = proxymetric("index", run, photos, "--out", copy)
    assert answer.code == 0, "an index that does not know its folder"


def test_a_damaged_index_of_another_folder_can_be_rebuilt(run, photos, index, tmp_path):
    copy = shutil.copytree(index, tmp_path / "a.index")
    next(copy.glob("vectors-*")).unlink()
    shutil.copytree(photos / "class0", tmp_path / "other" / "class0")
    assert proxymetric("index", run, tmp_path / "other", "--out", copy).code == 1
    assert proxymetric("index", run, tmp_path / "other", "--out", copy, "--rebuild").code == 0
    assert len(Index(copy)) == 8


def test_index_says_at_once_what_it_does(run, photos, tmp_path):
    answer = proxymetric("index", run, photos, "--out", tmp_path / "a.index", "--map", "none")
    assert answer.err.splitlines()[:6] == [
        f"the index of {photos} is kept in {tmp_path / 'a.index'}",
        f"80 images in {photos}",
        f"loading the model of {run}",
        "to embed: 80 of 80 images",
        "writing the vectors and thumbnails of 80 images",
        "measuring the search",
    ]


def test_an_image_of_the_index_is_left_out_of_its_own_class(run, photos, tmp_path):
    """The only image of a class would be accepted by matching itself."""
    folder = shutil.copytree(photos, tmp_path / "photos")
    (folder / "single").mkdir()
    only = folder / "single" / "only.png"
    Image.effect_mandelbrot((32, 32), (-1.5, -1.0, 0.5, 1.0), 30).convert("RGB").save(only)
    assert proxymetric("index", run, folder, "--out", tmp_path / "a.index", "--map", "none").code == 0
    copy = shutil.copy(only, tmp_path / "copy.png")
    answer = proxymetric("search", "--identify", tmp_path / "a.index", only, copy, "--far", "0.2")
    assert answer.code == 0, answer
    assert f"in the index, and left out of the own class: {only}" in answer.err
    assert str(copy) not in answer.err.splitlines()[-1]
    own, other = json.loads(
        proxymetric("search", "--identify", tmp_path / "a.index", only, copy, "--far", "0.2", "--json").out
    )
    assert (own["in_index"], other["in_index"]) == (True, False)
    assert own["best"] != "single"
    assert other["best"] == "single"
    assert other["similarity"] == pytest.approx(1, abs=1e-3)


def test_classes_and_images_are_removed_in_one_step(run, photos, index, tmp_path):
    own = shutil.copytree(photos, tmp_path / "photos")
    copy = tmp_path / "a.index"
    assert proxymetric("index", run, own, "--out", copy).code == 0
    shutil.copy(own / "class0" / "0.png", tmp_path / "wren.png")
    assert proxymetric("index", "add-class", copy, "wren", tmp_path / "wren.png").code == 0
    before, count = bytes_of(copy), len(Index(copy))
    refused(
        proxymetric("index", "remove", copy),
        "remove: got no image and no class, expected ids of images, or --class NAME",
    )
    refused(proxymetric("index", "remove", copy, "--class", "clas3"), "class: got 'clas3'", "did you mean 'class3'?")
    refused(
        proxymetric("index", "remove", copy, "class1/0.png", "wren/wern.png", "--class", "class3"),
        "id: got 'wren/wern.png', expected the id of an image", "did you mean 'added:wren/wren.png'?",
    )  # fmt: skip
    every = [word for name in Index(copy).classes for word in ("--class", name)]
    refused(proxymetric("index", "remove", copy, *every), f"got all {count} images", "expected some that stay")
    assert bytes_of(copy) == before, "nothing is removed if a name is wrong"
    answer = proxymetric("index", "remove", copy, "class1/0.png", "--class", "class3", "--class", "wren")
    assert answer.code == 0, answer
    assert "removed 10 images: class1/0.png, class3/0.png, class3/1.png" in answer.out
    assert f"9 of them still lie in {own}: delete the files" in answer.out, "wren.png lies elsewhere"
    left = Index(copy)
    left.verify()
    assert len(left) == count - 10
    assert "wren" not in left.classes
    assert "class3" not in left.classes
    assert proxymetric("index", run, own, "--out", copy).code == 0
    assert "class3/0.png" in Index(copy)
    assert "wren" not in Index(copy).classes


def test_a_class_name_that_was_forgotten(index, photos, tmp_path):
    before = bytes_of(index)
    images = [photos / "class0" / "0.png", photos / "class0" / "1.png"]
    refused(
        proxymetric("index", "add-class", index, *images),
        f"name: got '{images[0]}', which is an image file; expected the name of the class, and then its images",
    )
    assert bytes_of(index) == before


def test_a_class_is_added_and_identified(run, photos, index, tmp_path):
    copy = shutil.copytree(index, tmp_path / "a.index")
    new = []
    for number in range(3):
        file = tmp_path / f"new{number}.png"
        Image.effect_mandelbrot((32, 32), (-1.5, -1.0, 0.4 + number / 10, 1.0), 30).convert("RGB").save(file)
        new.append(file)
    answer = proxymetric("index", "add-class", copy, "shape", *new[:2])
    assert answer.code == 0, answer
    assert "2 images of shape, a new class: added:shape/new0.png, added:shape/new1.png" in answer.out
    assert "82 images of 11 classes" in answer.out
    already = "images: got 'added:shape/new0.png', 'added:shape/new1.png', which the"
    refused(proxymetric("index", "add-class", copy, "shape", *new), already)
    refused(proxymetric("index", "add-class", copy, " ", new[2]), "name: got ' ', expected the name of a class")
    (tmp_path / "bad.png").write_bytes(b"no image")
    assert proxymetric("index", "add-class", copy, "shape", new[2], tmp_path / "bad.png").code == 1
    assert len(Index(copy)) == 82, "all photos are added, or none"
    assert Index(copy).thumbnail("added:shape/new0.png") is not None
    images = [new[2], photos / "class5" / "3.png"]
    found = proxymetric("search", "--identify", copy, *images, "--far", "0.2")
    rows = [line.split("\t") for line in found.out.splitlines() if line.startswith(tuple(map(str, images)))]
    content = json.loads(proxymetric("search", "--identify", copy, *images, "--far", "0.2", "--json").out)
    assert [Path(each["image"]) for each in content] == images
    for row, each in zip(rows, content, strict=True):
        assert (each["class"] is None) == (each["score"] <= each["threshold"])
        assert row[1] == (each["class"] or "none of these")
        assert each["class"] in (None, each["best"])
        assert each["runner_up"] not in (None, each["best"])
        assert each["uncertainty"] is None
    assert content[0]["best"] == "shape"
    assert "classes were trained on" in found.out + found.err
    refused(
        proxymetric("search", "--identify", copy, images[0], "--far", "2"),
        "far: got 2, expected a false-accept rate between",
    )
    again = proxymetric("index", run, photos, "--out", copy)
    assert "0 deleted" in again.out, "the class that was added stays"
    assert len(Index(copy)) == 82


def test_a_class_that_was_added_stays_in_a_rebuild(run, photos, index, tmp_path):
    copy = shutil.copytree(index, tmp_path / "a.index")
    Image.effect_mandelbrot((32, 32), (-1.5, -1.0, 0.4, 1.0), 30).convert("RGB").save(tmp_path / "new.png")
    assert proxymetric("index", "add-class", copy, "shape", tmp_path / "new.png").code == 0
    words = ("index", run, photos, "--out", copy)
    assert "0 added, 80 updated, 0 deleted, 1 unchanged" in proxymetric(*words, "--rebuild").out
    assert Index(copy).classes["shape"] == 1
    refused(proxymetric(*words, "--drop-added"), "drop_added: got it without rebuild", "index remove")
    words = ("index", finished_run(photos, tmp_path / "other", "--seed", 3), photos, "--out", copy, "--rebuild")
    before = bytes_of(copy)
    such = "1 item without a file, such as 'added:shape/new.png' of the class 'shape'"
    refused(proxymetric(*words), such, "--drop-added")
    assert bytes_of(copy) == before
    assert "0 added, 80 updated, 1 deleted, 0 unchanged" in proxymetric(*words, "--drop-added").out


def test_the_layout_of_an_index(run, photos, tmp_path):
    folder = tmp_path / "photos"
    for number in range(4):
        shutil.copytree(photos / f"class{number}", folder / ("train" if number < 2 else "test") / f"class{number}")
    (folder / "train" / "class0" / "x.nef").write_bytes(b"raw")
    words = ("index", run, folder, "--out", tmp_path / "a.index")
    refused(proxymetric(*words, "--layout", "nestd"), "layout: got 'nestd'", "did you mean 'nested'?")
    assert not (tmp_path / "a.index").exists()
    answer = proxymetric(*words)
    assert "left out: images of types that are not read: 1 .nef; convert them to .jpg or .png" in answer.err
    assert set(Index(tmp_path / "a.index").classes) == {"class0", "class1", "class2", "class3"}
    assert "0 added, 32 updated, 0 deleted, 0 unchanged" in proxymetric(*words, "--layout", "folder").out
    assert "32 unchanged" in proxymetric(*words).out, "the index remembers its layout"
    assert set(Index(tmp_path / "a.index").classes) == {"train", "test"}


def test_a_model_with_nested_classes_makes_a_nested_index(photos, tmp_path):
    folder = tmp_path / "photos"
    for number in range(10):
        shutil.copytree(photos / f"class{number}", folder / ("even" if number % 2 == 0 else "odd") / f"class{number}")
    run = finished_run(folder, tmp_path / "run", "--set", "data.layout=nested")
    assert proxymetric("index", run, folder, "--out", tmp_path / "a.index").code == 0
    assert set(Index(tmp_path / "a.index").classes) == {
        f"{'even' if number % 2 == 0 else 'odd'}/class{number}" for number in range(10)
    }


def test_an_index_of_a_benchmark_has_the_classes_of_training(run, photos, tmp_path):
    folder, classes = tmp_path / "photos", [f"Bird {number}" for number in range(4)]
    for number in range(4):
        shutil.copytree(photos / f"class{number}", folder / "images" / f"{number}")
    files = sorted((folder / "images").rglob("*.png"))
    lists = {
        "classes.txt": classes,
        "images.txt": [file.relative_to(folder / "images") for file in files],
        "image_class_labels.txt": [int(file.parent.name) + 1 for file in files],
    }
    for name, rows in lists.items():
        (folder / name).write_text("".join(f"{line} {row}\n" for line, row in enumerate(rows, 1)))
    words = ("index", run, folder, "--out", tmp_path / "a.index")
    (folder / "classes.txt").write_text("1 Bird\n2 Bird\n3 Bird\n")
    refused(proxymetric(*words), "8 images of unknown classes", "; --layout folder takes the folders directly under")
    assert not (tmp_path / "a.index").exists()
    (folder / "classes.txt").write_text("".join(f"{line} {row}\n" for line, row in enumerate(classes, 1)))
    assert proxymetric(*words).code == 0
    assert list(Index(tmp_path / "a.index").classes) == classes
    assert "0 added, 32 updated, 0 deleted, 0 unchanged" in proxymetric(*words, "--layout", "folder").out
    assert list(Index(tmp_path / "a.index").classes) == ["images"]
    assert "32 unchanged" in proxymetric(*words).out
    assert "32 updated" in proxymetric(*words, "--layout", "cub").out
    assert list(Index(tmp_path / "a.index").classes) == classes
    refused(
        proxymetric(*words, "--layout", "sop"), "expected the layout of Stanford_Online_Products", "--layout folder"
    )


def test_an_added_photo_is_left_out_of_its_own_results(photos, index, tmp_path):
    """The photo of `index add-class` lies elsewhere: its name and its thumbnail tell that it is an item."""
    copy = shutil.copytree(index, tmp_path / "a.index")
    image, other = tmp_path / "new.png", tmp_path / "other" / "new.png"
    Image.effect_mandelbrot((32, 32), (-1.5, -1.0, 0.4, 1.0), 30).convert("RGB").save(image)
    other.parent.mkdir()
    Image.effect_mandelbrot((32, 32), (-1.5, -1.0, 0.5, 1.0), 30).convert("RGB").save(other)
    assert proxymetric("index", "add-class", copy, "shape", image).code == 0
    own, another = (
        [line[4] for line in lines(proxymetric("search", copy, each, "-k", 100))] for each in (image, other)
    )
    assert (len(own), len(another)) == (80, 81)
    assert "added:shape/new.png" not in own
    assert "added:shape/new.png" in another, "another image of the same name"
    content = json.loads(proxymetric("search", "--identify", copy, image, other, "--far", "0.2", "--json").out)
    assert [each["in_index"] for each in content] == [True, False]


def test_two_processes_that_make_the_same_index(run, photos, tmp_path, monkeypatch):
    """The other process makes the empty index after this one has looked for it."""
    create = Index.create

    def second(*args, **kwargs):
        create(*args, **kwargs)
        return create(*args, **kwargs)

    monkeypatch.setattr(Index, "create", second)
    answer = proxymetric("index", run, photos, "--out", tmp_path / "a.index")
    assert answer.code == 0, answer
    assert len(Index(tmp_path / "a.index")) == 80


def test_many_photos_of_a_class_are_embedded_in_batches(photos, index, tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(class_photos, "batch_of", lambda model: 3)
    encoded = Encoder.features
    monkeypatch.setattr(Encoder, "features", lambda self, images: sizes.append(len(images)) or encoded(self, images))
    copy = shutil.copytree(index, tmp_path / "a.index")
    files = [Path(shutil.copy(photos / "class0" / f"{number}.png", tmp_path / f"{number}.png")) for number in range(7)]
    assert proxymetric("index", "add-class", copy, "again", *files).code == 0
    assert sizes == [3, 3, 1]
    added = Index(copy)
    for number in range(7):
        torch.testing.assert_close(
            added.vector(f"added:again/{number}.png"), added.vector(f"class0/{number}.png"), atol=1e-5, rtol=0
        )
