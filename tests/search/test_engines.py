"""Every engine gives the answers of the exact one, as far as it promises, and is opened with the index."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.engines import ENGINES, build_engine, open_engine
from proxymetric.search.engines import faiss as faiss_engine
from proxymetric.search.engines.exact import Exact

COUNT, DIM = 6_000, 16


@pytest.fixture(scope="module")
def vectors():
    """Vectors with class structure."""
    random = np.random.default_rng(0)
    made = random.normal(size=(60, DIM))[random.integers(0, 60, COUNT)] + 0.7 * random.normal(size=(COUNT, DIM))
    return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module")
def queries(vectors):
    random = np.random.default_rng(1)
    made = vectors[:100] + 0.1 * random.normal(size=(100, DIM)).astype(np.float32)
    return torch.nn.functional.normalize(torch.from_numpy(made.astype(np.float32)))


KINDS = [("exact", {}), ("faiss", {"kind": "hnsw"}), ("faiss", {"kind": "ivf"}), ("milvus", {})]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join([kind[0], *kind[1].values()]))
def engine(request, vectors, tmp_path, tmp_path_factory):
    name, settings = request.param
    if name == "faiss":
        pytest.importorskip("faiss", reason="the extra `index` is not installed")
    if name == "milvus":
        pytest.importorskip("milvus_lite", reason="the extra `milvus` is not installed")
        settings = {"uri": str(tmp_path_factory.mktemp("milvus") / "a.db")}
    facts, files = build_engine({"name": name, **settings}, vectors, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == set(files)
    if name == "faiss":
        assert facts["built"] == settings["kind"]
        assert facts["recall"]["value"] >= faiss_engine.TARGET_RECALL
    return open_engine(facts, torch.from_numpy(vectors), tmp_path)


def test_the_same_answers_are_asked_of_each(engine, vectors, queries):
    expected_values, expected = Exact(torch.from_numpy(vectors)).search(queries, 10)
    values, found = engine.search(queries, 10)
    shared = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), expected.tolist(), strict=True)])
    assert shared == 1 if engine.name in ("exact", "milvus") else shared > 0.95
    assert (values[:, 1:] <= values[:, :-1]).all()
    torch.testing.assert_close(values, (queries[:, None] * torch.from_numpy(vectors)[found]).sum(dim=2))
    torch.testing.assert_close(values[:, 0], expected_values[:, 0], atol=0.05, rtol=0)


def test_among_some_rows_and_with_large_k(engine, vectors, queries):
    rows = torch.arange(5, COUNT, 7)
    expected = Exact(torch.from_numpy(vectors)).search(queries, 20, rows)[1]
    assert torch.equal(engine.search(queries, 20, rows)[1], expected), "searches among some rows are exact"
    _, found = engine.search(queries[:3], COUNT + 5)
    assert found.shape == (3, COUNT)
    assert all(len(set(row)) == COUNT for row in found.tolist())
    assert engine.search(queries[:2], 5, torch.tensor([], dtype=torch.long))[1].shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("k", [1, 10, 500])
def test_exact_search_on_a_gpu(vectors, queries, k):
    """One query and several; few and many results, among all rows and some."""
    gallery = torch.from_numpy(vectors)
    for some in (None, torch.arange(0, len(vectors), 3)):
        for asked in (queries[:1], queries):
            ours = Exact(gallery.cuda()).search(asked.cuda(), k, None if some is None else some.cuda())
            theirs = Exact(gallery).search(asked, k, some)
            torch.testing.assert_close(ours[0].cpu(), theirs[0], rtol=0, atol=1e-5)
            assert (ours[1].cpu() == theirs[1]).float().mean() > 0.99, "similarities may differ in their last bits"


def test_an_index_keeps_its_engine(vectors, tmp_path):
    pytest.importorskip("faiss", reason="the extra `index` is not installed")
    index = Index.create(tmp_path / "a.index", DIM, engine="faiss", map="none")
    assert index.search(torch.ones(1, DIM)) == [[]]
    ids = [f"{number:05d}" for number in range(500)]
    index.add(ids, torch.from_numpy(vectors[:500]))
    index.delete(ids[100:200])
    again = Index.open(index.folder)
    again.verify()
    assert again.engine.name == "faiss"
    assert again.manifest.engine["recall"]["value"] > 0.9
    assert [hit.id for hit in again.search(torch.from_numpy(vectors[300:301]), k=1)[0]] == [ids[300]]
    index.change([], engine={"name": "exact"})
    assert Index.open(index.folder).engine.name == "exact"


def test_copies_of_an_image_do_not_count_as_missed(vectors, tmp_path):
    """Any of several equal vectors may be among the nearest."""
    pytest.importorskip("faiss", reason="the extra `index` is not installed")
    facts, _ = build_engine({"name": "faiss"}, np.tile(vectors[:50], (7, 1)), tmp_path)
    assert facts["recall"]["value"] == 1
    assert facts["effort"] == faiss_engine.FIRST_EFFORT


def test_an_unknown_engine(tmp_path):
    with pytest.raises(ValueError, match=r"engine: got 'fais', .*; did you mean 'faiss'"):
        Index.create(tmp_path / "a", 2, engine="fais")
    assert list(ENGINES) == ["exact", "faiss", "milvus"]


def test_an_engine_that_cannot_be_built_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="uri: got none"):
        Index.create(tmp_path / "a", 2, engine="milvus")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_faiss_is_extended_and_built_anew_when_much_has_changed(vectors, tmp_path, kind):
    pytest.importorskip("faiss", reason="the extra `index` is not installed")
    index = Index.create(tmp_path / "a.index", DIM, engine={"name": "faiss", "kind": kind}, map="none")
    ids = [f"{number:05d}" for number in range(COUNT)]
    index.add(ids[:5_000], torch.from_numpy(vectors[:5_000]))
    assert index.manifest.engine["built_for"] == 5_000
    first = [f"0{item}" for item in ids[5_000:5_400]]  # they become the first rows
    index.add(first, torch.from_numpy(vectors[5_000:5_400]))
    index.delete(ids[:200])
    index.update(ids[300:310], torch.from_numpy(vectors[5_500:5_510]))
    assert index.manifest.engine["built_for"] == 5_000, "it was extended"
    assert index.engine.index.ntotal == 5_410
    for opened in (index, Index.open(index.folder)):
        found = opened.search(torch.from_numpy(vectors[[5_005, 5_505, 700, 100]]), k=5)
        assert [hits[0].id for hits in found[:3]] == ["005005", "00305", "00700"]
        assert all(hit.id not in ids[:200] for hits in found for hit in hits), "they are gone"
        assert all(len(hits) == 5 for hits in found)
    exact = Exact(index.vectors).search(index.vectors[::50], 10)[1]
    both = zip(index.engine.search(index.vectors[::50], 10)[1].tolist(), exact.tolist(), strict=True)
    assert np.mean([len(set(ours) & set(theirs)) / 10 for ours, theirs in both]) > 0.95
    index.delete(ids[1_000:1_600])
    assert index.manifest.engine["built_for"] == len(index) == 4_600, "a tenth was gone"
    assert index.engine.index.ntotal == 4_600
