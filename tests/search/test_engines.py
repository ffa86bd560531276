"""Every engine gives the answers of the exact one, as far as it promises, and is opened with the index."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.engines import ENGINES
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


KINDS = [("exact", {}), ("faiss", {"kind": "hnsw"}), ("faiss", {"kind": "ivf"})]


def filled(folder, vectors, **engine):
    """An index of some vectors, whose engine was built."""
    index = Index.create(folder, DIM, engine=engine, map="none")
    index.add([f"{number:05d}" for number in range(len(vectors))], torch.from_numpy(vectors))
    return index


def mask_of(rows):
    mask = np.zeros(COUNT, dtype=bool)
    mask[rows] = True
    return mask


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join([kind[0], *kind[1].values()]))
def engine(request, vectors, tmp_path):
    name, settings = request.param
    if name == "faiss":
        pytest.importorskip("faiss", reason="the extra `index` is not installed")
    index = filled(tmp_path / "a.index", vectors, name=name, **settings)
    if name == "faiss":
        facts = index.manifest.engine
        assert facts["built"] == settings["kind"]
        assert facts["recall"]["value"] >= faiss_engine.TARGET_RECALL
    return index.engine


def test_the_same_answers_are_asked_of_each(engine, vectors, queries):
    expected_values, expected = Exact(torch.from_numpy(vectors)).search(queries, 10)
    values, found = engine.search(queries, 10)
    shared = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(found.tolist(), expected.tolist(), strict=True)])
    assert shared == 1 if engine.name == "exact" else shared > 0.95
    assert (values[:, 1:] <= values[:, :-1]).all()
    torch.testing.assert_close(values, (queries[:, None] * torch.from_numpy(vectors)[found]).sum(dim=2))
    torch.testing.assert_close(values[:, 0], expected_values[:, 0], atol=0.05, rtol=0)


def test_among_some_rows_and_with_large_k(engine, vectors, queries):
    for step in (2, 17):
        mask = mask_of(torch.arange(5, COUNT, step))
        expected = Exact(torch.from_numpy(vectors)).search(queries, 20, mask)[1]
        found = engine.search(queries, 20, mask)[1]
        if engine.name == "exact" or step == 17:
            assert torch.equal(found, expected), "searches among few rows are exact"
        assert mask[found.numpy()].all()
        both = zip(found.tolist(), expected.tolist(), strict=True)
        assert np.mean([len(set(ours) & set(theirs)) / 20 for ours, theirs in both]) > 0.9
    _, found = engine.search(queries[:3], COUNT + 5)
    assert found.shape == (3, COUNT)
    assert all(len(set(row)) == COUNT for row in found.tolist())
    assert engine.search(queries[:2], 5, np.zeros(COUNT, dtype=bool))[1].shape == (2, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("k", [1, 10, 500])
def test_exact_search_on_a_gpu(vectors, queries, k):
    """One query and several; few and many results, among all rows and some."""
    gallery = torch.from_numpy(vectors)
    for some in (None, mask_of(torch.arange(0, COUNT, 3)), mask_of(torch.arange(0, COUNT, 9))):
        for asked in (queries[:1], queries):
            ours = Exact(gallery.cuda()).search(asked.cuda(), k, some)
            theirs = Exact(gallery).search(asked, k, some)
            torch.testing.assert_close(ours[0].cpu(), theirs[0], rtol=0, atol=1e-5)
            assert (ours[1].cpu() == theirs[1]).float().mean() > 0.99, "similarities may differ in their last bits"


def test_an_index_keeps_its_engine(vectors, tmp_path):
    pytest.importorskip("faiss", reason="the extra `index` is not installed")
    index = Index.create(tmp_path / "a.index", DIM, engine="faiss", map="none")
    assert index.search(torch.ones(1, DIM)) == [[]]
    ids = [f"{number:05d}" for number in range(2_000)]
    index.add(ids, torch.from_numpy(vectors[:2_000]))
    index.delete(ids[100:200])
    again = Index.open(index.folder)
    again.verify()
    assert again.engine.name == "faiss"
    assert again.manifest.engine["recall"]["value"] > 0.9
    assert [hit.id for hit in again.search(torch.from_numpy(vectors[300:301]), k=1)[0]] == [ids[300]]
    index.change(engine={"name": "exact"})
    assert Index.open(index.folder).engine.name == "exact"


@pytest.mark.parametrize("noise", [0.15, 0.7], ids=["tight", "loose"])
def test_the_recall_that_is_promised_is_that_of_new_queries(noise, tmp_path):
    """At most what new queries of the same clusters get, and a hundredth."""
    pytest.importorskip("faiss", reason="the extra `index` is not installed")
    random = np.random.default_rng(3)
    made = random.normal(size=(1_500, DIM))[random.integers(0, 1_500, 8_000)]
    made = made + noise * random.normal(size=made.shape)
    made = (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)
    index = filled(tmp_path / "a.index", made[:7_000], name="faiss", kind="hnsw")
    queries = torch.from_numpy(made[7_000:])
    expected = Exact(index.vectors).search(queries, 10)[1].tolist()
    both = zip(index.engine.search(queries, 10)[1].tolist(), expected, strict=True)
    measured = np.mean([len(set(ours) & set(theirs)) / 10 for ours, theirs in both])
    assert index.manifest.engine["recall"]["value"] <= measured + 0.01


def test_copies_of_an_image_do_not_count_as_missed(vectors, tmp_path):
    """Any of several equal vectors may be among the nearest."""
    pytest.importorskip("faiss", reason="the extra `index` is not installed")
    index = filled(tmp_path / "a.index", np.tile(vectors[:200], (7, 1)), name="faiss")
    assert index.manifest.engine["recall"]["value"] == 1
    assert index.manifest.engine["effort"] == faiss_engine.FIRST_EFFORT


def test_an_unknown_engine(tmp_path):
    with pytest.raises(ValueError, match=r"engine: got 'fais', .*; did you mean 'faiss'"):
        Index.create(tmp_path / "a", 2, engine="fais")
    assert not (tmp_path / "a").exists()
    assert list(ENGINES) == ["exact", "faiss"]


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_faiss_is_extended_and_built_anew_when_much_has_changed(vectors, tmp_path, kind):
    """Newer vectors are compared one by one until `renew`; removed ones are not found from the change on."""
    pytest.importorskip("faiss", reason="the extra `index` is not installed")
    index = filled(tmp_path / "a.index", vectors[:5_000], name="faiss", kind=kind)
    ids = index.ids
    assert index.manifest.engine["built_for"] == 5_000
    new = [f"new{number}" for number in range(400)]
    index.add(new, torch.from_numpy(vectors[5_000:5_400]))
    index.delete(ids[:200])
    index.update(ids[300:310], torch.from_numpy(vectors[5_500:5_510]))
    for step in ("at once", "renewed"):
        assert index.engine.index.ntotal == (5_000 if step == "at once" else 5_410)
        assert index.manifest.engine["built_for"] == 5_000, "it was extended"
        for opened in (index, Index.open(index.folder)):
            found = opened.search(torch.from_numpy(vectors[[5_005, 5_505, 700, 100]]), k=5)
            assert [hits[0].id for hits in found[:3]] == ["new5", "00305", "00700"]
            assert all(hit.id not in ids[:200] for hits in found for hit in hits), "they are gone"
            assert all(len(hits) == 5 for hits in found)
        mask, queries = index.store.state.is_living, index.vectors[::50]
        exact = Exact(torch.from_numpy(index.store.state.arrays["float32"])).search(queries, 10, mask)[1]
        both = zip(index.engine.search(queries, 10, mask)[1].tolist(), exact.tolist(), strict=True)
        assert np.mean([len(set(ours) & set(theirs)) / 10 for ours, theirs in both]) > 0.95
        index.renew()
    index.delete(ids[1_000:1_600])
    index.renew()
    assert index.manifest.engine["built_for"] == len(index) == 4_600, "a tenth was gone"
    assert index.engine.index.ntotal == 4_600
    index.compact()
    assert index.manifest.engine["built_for"] == index.manifest.rows == 4_600
    assert [hits[0].id for hits in index.search(torch.from_numpy(vectors[[5_005, 5_505, 700]]), k=1)] == [
        "new5", "00305", "00700"
    ]  # fmt: skip
