"""`search --differs` and `evaluate --differs`: images of the query's camera are left out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from proxymetric.data.folders import image_files
from terminal import finished_run, proxymetric, refused


@pytest.fixture(scope="module")
def run(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_run(photos, tmp_path_factory.mktemp("runs") / "plain", "--set", "data.validation=0.5")


@pytest.fixture(scope="module")
def cameras(photos: Path) -> dict[str, str]:
    files = sorted(file.relative_to(photos).as_posix() for file in image_files(photos))
    return {file: "left" if number % 2 else "right" for number, file in enumerate(files)}


def test_search(run, photos, cameras, tmp_path):
    with open(tmp_path / "items.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "camera"), *cameras.items()])
    folder = tmp_path / "a.index"
    answer = proxymetric("index", run, photos, "--out", folder, "--metadata", tmp_path / "items.csv", "--map", "none")
    assert answer.code == 0, answer
    query, camera = next(iter(cameras.items()))
    answer = proxymetric("search", folder, photos / query, "-k", 100, "--differs", "camera", "--json")
    assert answer.code == 0, answer
    found = {each["file"] for of_query in json.loads(answer.out) for each in of_query["results"]}
    assert found == {file for file, other in cameras.items() if other != camera}
    answer = proxymetric("search", folder, photos / query, "-k", 100, "--differs", "camera=left", "--json")
    found = {each["file"] for of_query in json.loads(answer.out) for each in of_query["results"]}
    assert found == {file for file, other in cameras.items() if other == "right"} - {query}
    copy = tmp_path / "elsewhere.png"
    copy.write_bytes((photos / query).read_bytes())
    answer = proxymetric("search", folder, copy, "--differs", "camera")
    refused(answer, "differs: got 'camera' for an image that is not in", "expected camera=VALUE")


def test_evaluate(run, photos, cameras, tmp_path):
    rows = [(photos / file, file.split("/")[0], camera) for file, camera in cameras.items()]
    with open(tmp_path / "set.csv", "w", newline="") as file:
        csv.writer(file).writerows([("file", "class", "camera"), *rows])
    words = ("evaluate", run, "--data", tmp_path / "set.csv", "--no-untrained", "--no-report", "--metrics", "R@1")
    plain, other = proxymetric(*words), proxymetric(*words, "--differs", "camera")
    assert (plain.code, other.code) == (0, 0), other
    assert "results of another camera" in other.out
    assert "results of another camera" not in plain.out
    refused(proxymetric(*words, "--differs", "camra"), "differs: got 'camra'", "did you mean 'camera'?")
