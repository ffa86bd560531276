"""A file of vectors: exact order, save and load, and the errors for bad input."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from proxymetric.search import VectorFile


@pytest.fixture
def index():
    vectors = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32))
    return VectorFile(vectors, [f"{i}.jpg" for i in range(50)], model="m")


def by_numpy(vectors, query, k):
    """The nearest by cosine, in double precision."""
    vectors, query = vectors.astype(np.float64), query.astype(np.float64)
    cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    order = np.argsort(-cosines, kind="stable")[:k]
    return [(f"{i}.jpg", cosines[i]) for i in order]


def test_results_come_in_exact_order(index):
    queries = torch.from_numpy(np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32))
    for query, found in zip(queries, index.search(queries, k=9), strict=True):
        wanted = by_numpy(index.vectors.numpy(), query.numpy(), 9)
        assert [name for name, _ in found] == [name for name, _ in wanted]
        np.testing.assert_allclose([score for _, score in found], [score for _, score in wanted], atol=1e-6)


def test_length_does_not_matter(index):
    query = index.vectors[3:4]
    assert index.search(1000 * query)[0][0][0] == "3.jpg"
    longer = VectorFile(index.vectors * torch.arange(1, 51)[:, None], index.names)
    assert [name for name, _ in longer.search(query)[0]] == [name for name, _ in index.search(query)[0]]


def test_equals_come_in_the_order_of_the_index():
    index = VectorFile(torch.ones(300, 2), [str(i) for i in range(300)])
    assert [name for name, _ in index.search(torch.ones(1, 2), k=300)[0]] == index.names


def test_more_results_than_there_are(index):
    found = index.search(index.vectors[:2], k=1000)
    assert [len(row) for row in found] == [50, 50]
    assert len(index.search(index.vectors[:1], k=1000, without=["0.jpg"])[0]) == 49


def test_a_query_is_left_out_of_its_own_results_only(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, second = index.search(index.vectors[:2], k=50, without=["./0.jpg", str(tmp_path / "1.jpg")])
    assert "0.jpg" not in dict(first)
    assert "1.jpg" in dict(first)
    assert "1.jpg" not in dict(second)
    assert "0.jpg" in dict(second)
    (elsewhere,) = index.search(index.vectors[:1], k=1, without=["other/0.jpg"])
    assert elsewhere[0][0] == "0.jpg"


def test_save_and_load(index, tmp_path):
    file = tmp_path / "new" / "all.safetensors"
    index.save(file)
    again = VectorFile.load(file)
    assert torch.equal(again.vectors, index.vectors)
    assert (again.names, again.model, len(again)) == (index.names, "m", 50)
    assert [path.name for path in file.parent.iterdir()] == ["all.safetensors"]
    with safe_open(str(file), "np") as opened:  # the help promises this content to readers other than this package
        assert json.loads(opened.metadata()["names"]) == index.names
        assert opened.get_tensor("vectors").shape == (50, 6)


def test_a_saved_file_can_be_read_by_whom_the_umask_allows(index, tmp_path):
    before = os.umask(0o027)
    try:
        index.save(tmp_path / "all.safetensors")
    finally:
        os.umask(before)
    assert (tmp_path / "all.safetensors").stat().st_mode & 0o777 == 0o640


def test_names_of_any_alphabet(tmp_path):
    names = ["größe/ß.jpg", "名前.png", 'a "b".jpg']
    VectorFile(torch.eye(3), names).save(tmp_path / "all.safetensors")
    assert VectorFile.load(tmp_path / "all.safetensors").names == names


def foreign(kind, folder):
    file = folder / "foreign.safetensors"
    if kind == "text":
        file.write_text("file,class\n")
    elif kind == "other tensors":
        save_file({"weight": torch.ones(2)}, str(file))
    elif kind == "no names":
        save_file({"vectors": torch.ones(2, 2)}, str(file))
    elif kind == "fewer names":
        save_file({"vectors": torch.ones(2, 2)}, str(file), {"names": '["a"]'})
    elif kind == "names are no list":
        save_file({"vectors": torch.ones(2, 2)}, str(file), {"names": "a, b"})
    elif kind == "cut short":
        VectorFile(torch.eye(9), list("abcdefghi")).save(file)
        file.write_bytes(file.read_bytes()[:-40])
    return file


@pytest.mark.parametrize(
    "kind", ["missing", "text", "other tensors", "no names", "fewer names", "names are no list", "cut short"]
)
def test_a_foreign_file_is_refused(kind, tmp_path):
    said = r"file of vectors: got .*foreign.safetensors, expected a file that `proxymetric embed` wrote"
    with pytest.raises(ValueError, match=said):
        VectorFile.load(foreign(kind, tmp_path))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda i: i.search(i.vectors[:1], k=0), "k: got 0, expected at least 1"),
        (lambda i: i.search(torch.ones(1, 5)), r"queries: got a tensor of shape \(1, 5\), expected \(Q, 6\)"),
        (lambda i: i.search(torch.ones(6)), r"queries: got a tensor of shape \(6,\)"),
        (lambda i: i.search(i.vectors[:2], without=["a"]), "without: got 1 names for 2 queries"),
        (lambda i: VectorFile(i.vectors, ["a"]), "names: got 1 for 50 vectors"),
        (lambda i: VectorFile(torch.ones(3), list("abc")), r"vectors: got a tensor of shape \(3,\)"),
    ],
)
def test_mistakes_are_named(index, call, said):
    with pytest.raises(ValueError, match=said):
        call(index)
