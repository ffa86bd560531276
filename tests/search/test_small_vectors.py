"""int8 and binary vectors: what is stored, exact search in it, what is measured, and changes of an index."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxymetric.core.normalisation import unit
from proxymetric.core.quantisation import KINDS, bit_codes, from_int8, int8_codes, rounded
from proxymetric.metrics import evaluate
from proxymetric.search import Index, VectorFile
from proxymetric.search.engines import binary
from proxymetric.search.engines.binary import Binary, differing_bits
from proxymetric.search.engines.int8 import CHUNK_ROWS, Int8

DIM = 70
"""not a multiple of 64: the last word has unused bits"""


@pytest.fixture(scope="module")
def vectors():
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(8, DIM, generator=generator)
    return unit(centres[torch.arange(200) % 8] + 1.5 * torch.randn(200, DIM, generator=generator))


def mask_of(rows, count):
    mask = np.zeros(count, dtype=bool)
    mask[rows] = True
    return mask


def test_codes_by_numpy(vectors):
    values = vectors.double().numpy()
    wanted = np.rint(127 * values / np.abs(values).max(1, keepdims=True))
    codes = int8_codes(vectors).numpy()
    assert np.abs(codes - wanted).max() <= 1, "a half may be rounded in another way in float32"
    assert (codes == wanted).mean() > 0.999
    np.testing.assert_allclose(from_int8(int8_codes(vectors)).norm(dim=1), 1, rtol=1e-6)
    assert torch.equal(int8_codes(from_int8(int8_codes(vectors))), int8_codes(vectors)), "codes are kept when read back"
    assert torch.equal(int8_codes(torch.zeros(1, 4)), torch.zeros(1, 4, dtype=torch.int8))
    bits = np.unpackbits(bit_codes(vectors).numpy(), axis=1)
    assert bits.shape == (200, 128)
    assert (bits[:, :DIM] == (values > 0)).all()
    assert not bits[:, DIM:].any()


def test_differing_bits_with_and_without_a_popcount(vectors, monkeypatch):
    bits = bit_codes(vectors).numpy()
    wanted = ((vectors > 0) != (vectors[3] > 0)).sum(1).numpy()
    assert (differing_bits(bits, bits[3]) == wanted).all()
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert (differing_bits(bits, bits[3]) == wanted).all()


@pytest.mark.parametrize("some", [False, True])
def test_int8_is_exact_for_what_is_stored(vectors, some):
    many = torch.cat([vectors] * (2 * CHUNK_ROWS // 200)) + 0.01 * torch.randn(2 * CHUNK_ROWS // 200 * 200, DIM)
    codes, queries = int8_codes(many), vectors[:6]
    rows = torch.arange(1, len(many), 3) if some else None
    similarities, found = Int8(codes).search(queries, 15, None if rows is None else mask_of(rows, len(many)))
    stored = codes.double() / codes.double().norm(dim=1, keepdim=True)
    exact = queries.double() @ stored.T
    if rows is not None:
        exact[:, [row for row in range(len(many)) if row % 3 != 1]] = -2
    torch.testing.assert_close(similarities.double(), exact.topk(15).values, atol=1e-6, rtol=0)
    torch.testing.assert_close(exact.gather(1, found), similarities.double(), atol=1e-6, rtol=0)


def test_binary_ranks_the_first_by_bits_again_by_codes(vectors, monkeypatch):
    engine, queries = Binary(bit_codes(vectors), int8_codes(vectors)), vectors[:5]
    all_compared = engine.search(queries, 20)  # 200 candidates: all vectors are compared again
    wanted = Int8(int8_codes(vectors)).search(queries, 20)
    for got, expected in zip(all_compared, wanted, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    monkeypatch.setattr(binary, "MIN_CANDIDATES", 12)
    monkeypatch.setattr(binary, "CANDIDATES_PER_RESULT", 1)
    rows = torch.arange(0, 200, 2)
    _, found = engine.search(queries, 4, mask_of(rows, 200))
    for query, numbers in zip(queries, found, strict=True):
        distances = ((vectors[rows] > 0) != (query > 0)).sum(1)
        nearest = rows[distances.argsort(stable=True)[:12]]
        exact = from_int8(int8_codes(vectors))[nearest] @ query
        assert numbers.tolist() == nearest[exact.argsort(descending=True)[:4]].tolist()
    assert engine.search(queries, 3, np.zeros(200, dtype=bool))[1].shape == (5, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_index_keeps_what_it_measures(kind, vectors, tmp_path):
    ids = [f"{number:03d}" for number in range(200)]
    labels = [f"class{number % 8}" for number in range(200)]
    index = Index.create(tmp_path / "a.index", dim=DIM, map="pca", vectors=kind)
    index.add(ids, vectors, labels=labels)
    facts = Index(index.folder).manifest.vectors
    assert facts["kind"] == kind
    assert facts["bytes"] == {"float32": 280, "int8": 70, "binary": 86}[kind]
    assert sum(file.stat().st_size for file in index.folder.glob("vectors-*")) == 200 * facts["bytes"]
    torch.testing.assert_close(index.vectors, vectors if kind == "float32" else rounded(vectors, "int8"))
    if kind == "float32":
        assert "lost" not in facts
        return
    lost = facts["lost"]
    assert (lost["among"], lost["queries"]) == (200, 200)
    assert lost["MAP@R"] == pytest.approx(evaluate(vectors, labels, "MAP@R")["MAP@R"], abs=1e-4)
    if kind == "int8":
        stored = evaluate(rounded(vectors, "int8"), labels, "MAP@R")["MAP@R"]
        assert lost["MAP@R"] - lost["MAP@R lost"] == pytest.approx(stored, abs=2e-3), (
            "queries are not rounded in a search"
        )
    assert 0.9 < lost["recall@10"] <= 1
    sizes = {each["vectors"]: each for each in lost["sizes"]}
    assert {name: each["bytes"] for name, each in sizes.items()} == {"float32": 280, "int8": 70, "binary": 86}
    assert sizes["float32"]["scores"] == {"recall@10": 1.0, "MAP@R": lost["MAP@R"]}
    assert sizes[kind]["scores"]["MAP@R"] == pytest.approx(lost["MAP@R"] - lost["MAP@R lost"], abs=1e-4)
    assert sizes[kind]["scores"]["recall@10"] == lost["recall@10"]
    assert lost["milliseconds"] > 0
    index.delete(ids[:1])
    index.update(ids[1:2], labels=["other"])
    assert index.manifest.vectors["lost"] == lost, "the 32-bit vectors are gone"
    torch.testing.assert_close(index.vector(ids[2]), rounded(vectors, "int8")[2])
    assert index.search(vectors[2:3], k=1)[0][0].id == ids[2]


def test_an_index_is_made_smaller_but_not_larger(vectors, tmp_path):
    index = Index.create(tmp_path / "a.index", dim=DIM, map="none")
    index.add([str(number) for number in range(200)], vectors)
    index.change(vectors={"kind": "binary"})
    facts = index.manifest.vectors
    assert facts["kind"] == "binary"
    assert facts["lost"]["recall@10"] > 0.9
    assert "MAP@R" not in facts["lost"], "there are no labels"
    with pytest.raises(
        ValueError, match=r"vectors: got 'float32' for .*, whose vectors are binary; the other bits are"
    ):
        index.change(vectors={"kind": "float32"})
    with pytest.raises(ValueError, match="vectors: got 'int8' with the engine 'faiss', which keeps 32-bit numbers"):
        Index.create(tmp_path / "b.index", dim=DIM, engine="faiss", vectors="int8")
    with pytest.raises(ValueError, match="vectors: got 'int4', expected one of float32, int8, binary; did you mean"):
        Index.create(tmp_path / "b.index", dim=DIM, vectors="int4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_vectors(kind, vectors, tmp_path):
    names = [f"{number}.jpg" for number in range(200)]
    VectorFile(vectors, names, "model", kind=kind).save(tmp_path / "a.safetensors")
    loaded = VectorFile.load(tmp_path / "a.safetensors")
    assert loaded.kind == kind
    torch.testing.assert_close(loaded.vectors, vectors if kind == "float32" else rounded(vectors, "int8"))
    ((name, similarity),) = loaded.search(vectors[5:6], k=1)[0:1][0]
    assert name == "5.jpg"
    assert similarity == pytest.approx(1, abs=1e-4)
    assert loaded.search(vectors[5:6], k=1, without=["5.jpg"])[0][0][0] != "5.jpg"
