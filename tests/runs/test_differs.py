"""Sets with cameras and with distractors: a CSV says which, and every score of a set follows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from oracles import metrics as oracle
from proxymetric.data import ImageSet, open_data
from proxymetric.runs.comparison import compare
from proxymetric.runs.score import EmbeddedSet, break_down, describe, queries_left_out, rank_set, score

COUNT = 24
NAMES = ["R@1", "MAP@R"]


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def image_set(labels: np.ndarray, **more: object) -> ImageSet:
    grey = np.zeros((len(labels), 8, 8), np.uint8)
    return ImageSet("dots", labels, ["a", "b", "c"], arrays=grey, **more)


def embedded(rng: np.random.Generator, differs: str | None = None, **more: object) -> EmbeddedSet:
    labels = np.arange(COUNT) % 3
    vectors = rng.normal(size=(3, 4))[labels] + rng.normal(size=(COUNT, 4))
    return EmbeddedSet(image_set(labels, **more), torch.from_numpy(vectors), np.arange(COUNT), differs)


def checked(each: EmbeddedSet, lists: list[list[int]], queries: list[int]) -> None:
    """Every way to score the set agrees with the lists of results of its queries."""
    labels = each.labels.numpy()
    values: dict[str, list[float]] = {name: [] for name in NAMES}
    kept = []
    for query, ranked in zip(queries, lists, strict=True):
        hits = [labels[row] == labels[query] for row in ranked]
        if sum(hits):
            kept.append(query)
            for name in NAMES:
                values[name].append(oracle.one(name, hits, sum(hits)))
    means = {name: float(np.mean(numbers)) for name, numbers in values.items()}
    assert score(each, NAMES) == pytest.approx(means)
    assert compare(each, None, NAMES).rows["trained encoder"] == pytest.approx(means)
    assert queries_left_out(each) == len(queries) - len(kept)
    ranking = rank_set(each, 3)
    assert ranking.queries.tolist() == kept
    for query, found in zip(ranking.queries.tolist(), ranking.neighbours.tolist(), strict=True):
        assert [row for row in found if row >= 0] == lists[queries.index(query)][:3]
    for bad in break_down(each, 4, 4).worst:
        assert bad.neighbours == lists[queries.index(bad.query)][: len(bad.neighbours)]


def test_results_of_another_camera(rng):
    cameras = np.array(["left", "right", "", "top"])[rng.integers(0, 4, COUNT)]
    each = embedded(rng, "camera", columns={"camera": cameras})
    lists = [
        [row for row in ranked if cameras[row] == "" or cameras[row] != cameras[query]]
        for query, ranked in enumerate(oracle.results(each.vectors.numpy()))
    ]
    checked(each, lists, list(range(COUNT)))
    assert describe(each) == "24 images of 3 classes, results of another camera"


@pytest.mark.parametrize("differs", [None, "camera"])
def test_distractors_are_found_but_are_no_queries(rng, differs):
    cameras = np.array(["left", "right", ""])[rng.integers(0, 3, COUNT)]
    distractors = np.arange(COUNT) >= 15
    each = embedded(rng, differs, columns={"camera": cameras}, distractors=distractors)
    lists = oracle.results(each.vectors.numpy())[:15]
    if differs is not None:
        may = np.array([[camera == "" or camera != own for camera in cameras] for own in cameras])
        lists = [[row for row in rows if may[query, row]] for query, rows in enumerate(lists)]
    checked(each, lists, list(range(15)))
    assert describe(each).startswith("15 queries among 24 images, 3 classes")
    all_queries = each._replace(images=image_set(each.images.labels), differs=None)
    assert score(each, ["NMI", "R@1"])["NMI"] == score(all_queries, ["NMI"])["NMI"]


def test_a_gallery_of_other_cameras(rng):
    cameras = np.array(["left", "right"])[rng.integers(0, 2, COUNT)]
    gallery = np.arange(COUNT) >= 10
    each = embedded(rng, "camera", columns={"camera": cameras}, gallery=gallery)
    vectors = each.vectors.numpy()
    lists = [
        [row + 10 for row in ranked if cameras[row + 10] != cameras[query]]
        for query, ranked in enumerate(oracle.results(vectors[:10], vectors[10:]))
    ]
    checked(each, lists, list(range(10)))


def test_an_unknown_column_is_refused(rng):
    with pytest.raises(ValueError, match="differs: got 'camera', but dots has no columns; expected a column of a CSV"):
        score(embedded(rng, "camera"), NAMES)
    each = embedded(rng, "camara", columns={"camera": np.full(COUNT, "x")})
    with pytest.raises(ValueError, match="but dots has the columns camera; expected a column of a CSV file; did"):
        score(each, NAMES)


def test_a_csv_has_columns_and_distractors(tmp_path: Path):
    lines = ["file,class,split,Camera,series"]
    for number in range(12):
        Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / f"{number}.png")
        part = "train" if number < 4 else "test" if number < 8 else "distractor"
        lines.append(f"{number}.png,{'ab'[number % 2]},{part},{number % 3},")
    (tmp_path / "set.csv").write_text("\n".join(lines))
    images = open_data(tmp_path / "set.csv", "csv")
    assert images.columns["camera"].tolist() == [str(number % 3) for number in range(12)]
    assert set(images.columns) == {"camera", "series"}
    test = images.subset(images.test_images)
    assert test.columns["camera"].tolist() == [str(number % 3) for number in range(4, 12)]
    assert test.distractors is not None
    assert test.distractors.tolist() == [False] * 4 + [True] * 4
    (tmp_path / "set.csv").write_text("\n".join(line.replace(",test,", ",val,") for line in lines))
    with pytest.raises(ValueError, match="got distractors without test images, expected images of the part test, or"):
        open_data(tmp_path / "set.csv", "csv")
