"""Search among items whose value differs from that of the query."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxymetric.search import Index

CAMERAS = ["left", "right", None, "top"]


@pytest.fixture
def index(tmp_path):
    vectors = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32))
    index = Index.create(tmp_path / "a.index", dim=6)
    metadata = [{"camera": CAMERAS[n % 4], "day": n % 5} if n % 4 != 2 else {"day": n % 5} for n in range(40)]
    index.add([f"{n:02d}" for n in range(40)], vectors, labels=[f"class{n % 3}" for n in range(40)], metadata=metadata)
    return index


def wanted(index, query, keep):
    cosines = index.vectors @ query / query.norm()
    return [f"{row:02d}" for row in cosines.argsort(descending=True).tolist() if keep(row)]


def test_each_query_has_its_own_value(index):
    queries = index.vectors[:4]
    cameras = [index.value_of(f"{n:02d}", "camera") for n in range(4)]
    assert cameras == CAMERAS
    found = index.search(queries, k=40, differs={"camera": cameras})
    for number, hits in enumerate(found):
        keep = lambda row, camera=CAMERAS[number]: camera is None or CAMERAS[row % 4] != camera  # noqa: E731
        assert [hit.id for hit in hits] == wanted(index, queries[number], keep)


def test_with_other_conditions(index):
    hits = index.search(index.vectors[:1], 40, {"class": "class1"}, ["01"], {"camera": "left", "day": "2"})[0]
    keep = lambda row: row % 3 == 1 and row != 1 and row % 4 != 0 and row % 5 != 2  # noqa: E731
    assert [hit.id for hit in hits] == wanted(index, index.vectors[0], keep)
    assert index.value_of("07", "day") == "2"
    hits = index.search(index.vectors[:1], 40, differs={"class": index.value_of("00", "class")})[0]
    assert {hit.label for hit in hits} == {"class1", "class2"}


def test_what_is_wrong_is_refused(index):
    with pytest.raises(ValueError, match="differs: got 'camra', expected one of class, camera, day; did you mean 'cam"):
        index.search(index.vectors[:1], differs={"camra": "left"})
    with pytest.raises(ValueError, match="differs: got 1 values of camera for 2 queries, expected one for each"):
        index.search(index.vectors[:2], differs={"camera": ["left"]})
    with pytest.raises(ValueError, match="column: got 'shop', expected one of class, camera, day"):
        index.value_of("00", "shop")
