"""The index: add, update, delete and search by id, atomically, with errors for bad input and damage."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sqlite3
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import proxymetric as pm
from proxymetric.search import Index, VectorFile
from proxymetric.search.batches import new_items
from proxymetric.search.engines.exact import CHUNK_ROWS, Exact, top_k
from proxymetric.search.storage import state

IDS = [f"{number:02d}.jpg" for number in range(50)]


@pytest.fixture
def vectors():
    return torch.from_numpy(np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32))


@pytest.fixture
def index(tmp_path, vectors):
    index = Index.create(tmp_path / "a.index", dim=6, model="m1")
    index.add(
        IDS,
        vectors,
        labels=[f"class{number % 5}" for number in range(50)],
        metadata=[{"shop": "Ulm" if number < 10 else "Bonn", "price": number} for number in range(50)],
        thumbnails=[bytes([number]) * (number + 1) for number in range(50)],
    )
    return index


def nearest(vectors, query, k):
    """The nearest by cosine, in double precision."""
    vectors, query = vectors.double().numpy(), query.double().numpy()
    cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    return np.argsort(-cosines, kind="stable")[:k].tolist(), cosines


def test_it_finds_what_double_precision_finds(index, vectors):
    queries = torch.from_numpy(np.random.default_rng(1).normal(size=(7, 6)).astype(np.float32))
    for query, hits in zip(queries, index.search(queries, k=9), strict=True):
        rows, cosines = nearest(vectors, query, 9)
        assert [hit.id for hit in hits] == [IDS[row] for row in rows]
        np.testing.assert_allclose([hit.similarity for hit in hits], cosines[rows], atol=1e-6)
        assert hits[0].label == f"class{rows[0] % 5}"
        assert hits[0].metadata["price"] == rows[0]


def test_no_similarity_is_above_one(tmp_path):
    """Products of unit vectors in float32 are up to some 1e-7 above 1."""
    vectors = torch.randn(200, 37, generator=torch.Generator().manual_seed(0))
    own = torch.nn.functional.normalize(vectors)
    assert (own @ own.T).max() > 1
    index = Index.create(tmp_path / "b.index", dim=37, model="m")
    index.add([str(number) for number in range(200)], vectors)
    assert max(hits[0].similarity for hits in index.search(vectors, 1)) <= 1
    named = VectorFile(vectors, [str(number) for number in range(200)])
    assert max(hits[0][1] for hits in named.search(vectors, 1)) <= 1


def test_conditions_and_what_is_left_out(index, vectors):
    (hits,) = index.search(vectors[:1], k=50, where={"class": "class3"})
    assert {hit.id for hit in hits} == set(IDS[3::5])
    (hits,) = index.search(vectors[:1], k=50, where={"class": "class3", "shop": "Ulm"})
    assert {hit.id for hit in hits} == {IDS[3], IDS[8]}
    (hits,) = index.search(vectors[:1], k=50, where={"price": "7"})
    assert [hit.id for hit in hits] == [IDS[7]]
    assert index.search(vectors[:1], where={"shop": "Kiel"}) == [[]]
    first, second = index.search(vectors[:2], k=50, without=[IDS[0], None])
    assert len(first) == 49
    assert IDS[0] not in [hit.id for hit in first]
    assert len(second) == 50
    with pytest.raises(ValueError, match="where: got 'shopp', expected one of class, price, shop; did you mean 'shop'"):
        index.search(vectors[:1], where={"shopp": "Ulm"})


def test_changes_by_id(index, vectors, tmp_path):
    index.update([IDS[4]], labels=["new"], metadata=[{}])
    assert index[IDS[4]] == (IDS[4], "new", {}, 4)
    assert index.thumbnail(IDS[4]) == bytes([4]) * 5
    torch.testing.assert_close(index.vector(IDS[4]), vectors[4] / vectors[4].norm())
    index.update([IDS[4]], -3 * vectors[4:5], thumbnails=[b"other"])
    assert index[IDS[4]].label == "new"
    assert index.thumbnail(IDS[4]) == b"other"
    torch.testing.assert_close(index.vector(IDS[4]), -vectors[4] / vectors[4].norm())
    index.delete(IDS[:40])
    assert (len(index), IDS[4] in index, index.ids) == (10, False, IDS[40:])
    index.add(["z/ß 名.jpg", "A"], torch.eye(6)[:2])
    assert index.ids == [*IDS[40:], "z/ß 名.jpg", "A"], "in the order in which they were added"
    assert index.thumbnail("A") is None
    again = Index.open(tmp_path / "a.index", "m1")
    assert again.ids == index.ids
    assert torch.equal(again.vectors, index.vectors)
    assert again.labels == index.labels
    assert again.thumbnail(IDS[45]) == bytes([45]) * 46
    again.verify()


def test_nothing_of_removed_items_stays_in_the_files(index):
    """Their bytes are gone after `compact`, and at once when most items are removed."""
    index.update([IDS[1]], metadata=[{"secret": "Rumpelstilzchen"}])
    index.update([IDS[1]], metadata=[{}])
    assert any(b"Rumpelstilzchen" in file.read_bytes() for file in index.folder.iterdir())
    index.compact()
    assert not any(b"Rumpelstilzchen" in file.read_bytes() for file in index.folder.iterdir())
    index.delete(IDS[5:])
    (pictures,) = index.folder.glob("thumbnails-*.bin")
    (vectors,) = index.folder.glob("vectors-*.float32")
    assert (pictures.stat().st_size, vectors.stat().st_size) == (sum(range(1, 6)), 5 * 6 * 4)
    assert [index.thumbnail(item) for item in IDS[:5]] == [bytes([number]) * (number + 1) for number in range(5)]
    index.delete(IDS[:5])
    assert (index.ids, index.labels, index.manifest.columns) == ([], [], [])
    assert index.search(torch.ones(1, 6)) == [[]]


def test_a_change_writes_as_much_as_it_changes(tmp_path):
    """The files that grow keep what they have, and nothing else is written than the manifest."""
    index = Index.create(tmp_path / "a.index", dim=64, map="none")
    index.add([str(number) for number in range(3_000)], torch.randn(3_000, 64), thumbnails=[b"picture"] * 3_000)
    before = {file: (file.read_bytes(), file.stat().st_ino) for file in index.folder.iterdir()}
    index.add(["new"], torch.randn(1, 64), thumbnails=[b"picture"])
    index.update(["7"], labels=["wren"])
    index.delete(["8"])
    written = 0
    for file, (content, node) in before.items():
        if file.name != "manifest.json":
            assert file.stat().st_ino == node
            assert file.read_bytes()[: len(content)] == content, f"{file} only grows"
            written += file.stat().st_size - len(content)
    assert {file.name for file in index.folder.iterdir()} == {file.name for file in before}
    assert written < 64 * 4 + 700


def test_a_reader_keeps_its_state_until_it_reloads(index, vectors):
    reader = Index.open(index.folder)
    before = reader.search(vectors[:3], k=50)
    index.delete(IDS[:20])
    assert reader.search(vectors[:3], k=50) == before
    assert reader.thumbnail(IDS[3]) == bytes([3]) * 4
    assert reader.reload()
    assert not reader.reload()
    assert len(reader) == 30


def test_readers_in_threads_while_it_changes(index, vectors):
    """A reader that opens the index again and again always sees 50 or 49 whole items."""
    stop, wrong, opened = threading.Event(), [], []

    def read():
        while not stop.is_set():
            try:
                reader = Index.open(index.folder)
                found = len(reader.search(vectors[:1], k=60)[0])
                opened.append(found)
                if found not in (49, 50) or found != len(reader):
                    wrong.append(found)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        index.delete(IDS[:1])
        index.add(IDS[:1], vectors[:1])
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert opened


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the open files of a process are not listed here")
def test_a_state_that_was_replaced_is_closed_when_its_last_reader_ends(index, vectors):
    """Also before the garbage collector runs: a service opens a new state after each merge."""

    def open_states() -> list[str]:
        files = [
            os.path.basename(os.path.realpath(f"/proc/self/fd/{number}")) for number in os.listdir("/proc/self/fd")
        ]
        return sorted({file.split()[0] for file in files if file.startswith("items-")})

    gc.collect()
    before = open_states()
    gc.disable()
    try:
        reader = iter(index.store.state)
        ids = [next(reader).id]
        for number in range(3):
            index.add([f"new{number}"], vectors[:1])
            index.compact()
        assert len(open_states()) == len(before) + 1, "the one that is read, and the newest"
        ids += [row.id for row in reader]
        assert ids == IDS
        del reader
        assert len(open_states()) == len(before)
    finally:
        gc.enable()


def test_heads_of_files_are_read_one_at_a_time(index, monkeypatch):
    """Python 3.11 cannot parse in two threads: "AST constructor recursion depth mismatch"."""
    inside, together = threading.Semaphore(1), []
    load = np.load

    def watched(*words, **options):
        if not inside.acquire(blocking=False):
            together.append(words)
            return load(*words, **options)
        try:
            time.sleep(0.01)
            return load(*words, **options)
        finally:
            inside.release()

    monkeypatch.setattr(np, "load", watched)
    threads = [threading.Thread(target=lambda: Index.open(index.folder)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not together


def test_another_model_is_refused_in_a_sentence(index):
    with pytest.raises(
        ValueError, match=r"model: got the model m2, but the vectors of .*a.index were made by the model m1"
    ):
        Index.open(index.folder, "m2")


def test_another_writer_is_refused(index):
    other = Index.open(index.folder)
    with index.writing(), pytest.raises(ValueError, match="in use by process"):
        other.delete(IDS[:1])
    other.delete(IDS[:1])
    index.delete(IDS[1:2])
    assert len(index) == 48, "a writer starts from the newest state"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda i: i.add(["00.jpg"], torch.ones(1, 6)), "ids: got '00.jpg', which the index has already"),
        (lambda i: i.add(["a", "a"], torch.ones(2, 6)), "ids: got 'a' twice"),
        (lambda i: i.add([""], torch.ones(1, 6)), "ids: got '', expected text of printable characters"),
        (lambda i: i.add(["a\n"], torch.ones(1, 6)), r"ids: got 'a\\n', expected"),
        (lambda i: i.add(["a"], torch.ones(1, 5)), r"vectors: got a tensor of shape \(1, 5\), expected \(1, 6\)"),
        (lambda i: i.add(["a"], torch.full((1, 6), torch.nan)), "vectors: got numbers that are not finite"),
        (lambda i: i.add(["a"], torch.ones(1, 6), labels=["b", "c"]), "labels: got 2 for 1 ids"),
        (lambda i: i.add(["a"], torch.ones(1, 6), labels=[3]), "labels: got 3, expected None, or text"),
        (lambda i: i.add(["a"], torch.ones(1, 6), metadata=[{"class": "x"}]), "metadata: got the column 'class'"),
        (lambda i: i.add(["a"], torch.ones(1, 6), metadata=[{"x": [1]}]), r"metadata: got x=\[1\], expected a list of"),
        (lambda i: i.add(["a"], torch.ones(1, 6), metadata=[{"x": {}}]), r"metadata: got x=\{\}, expected text"),
        (lambda i: i.search(torch.ones(1, 6), where=["pricee<5"]), "where: got 'pricee', .*did you mean 'price'"),
        (lambda i: i.search(torch.ones(1, 6), where=["price<x"]), "where: got price<x, expected a number or a date"),
        (lambda i: i.search(torch.ones(1, 6), where=["price"]), "where: got 'price', expected COLUMN=VALUE, or one of"),
        (lambda i: i.search(torch.ones(1, 6), where={"price": {"<<": 1}}), "where price: got '<<', expected one of"),
        (lambda i: i.search(torch.ones(1, 6), offset=-1), "offset: got -1, expected at least 0"),
        (lambda i: i.search(torch.ones(1, 6), min_similarity=2), "min_similarity: got 2, expected a similarity"),
        (lambda i: i.search(torch.ones(1, 6), one_per="shp"), "one_per: got 'shp', .*did you mean 'shop'"),
        (lambda i: i.update(["none"], labels=["x"]), "ids: got 'none', which the index does not have"),
        (lambda i: i.delete(["00.jpg", "none"]), "ids: got 'none', which the index does not have"),
        (lambda i: i.search(torch.ones(1, 6), k=0), "k: got 0, expected at least 1"),
        (lambda i: i.search(torch.ones(1, 5)), r"queries: got a tensor of shape \(1, 5\), expected \(Q, 6\)"),
        (lambda i: i.search(torch.full((1, 6), torch.inf)), "queries: got numbers that are not finite"),
        (lambda i: i.search(torch.ones(1, 6), without=["a", "b"]), "without: got 2 ids for 1 queries"),
        (lambda i: Index.create(i.folder, dim=6), "which is an index already"),
        (lambda i: Index.create(i.folder.parent, dim=6), "which is not an index and holds a.index"),
        (lambda i: Index.create(i.folder / "x", dim=0), "dim: got 0"),
        (lambda i: Index.create(i.folder / "x", dim=1, map="tsn"), "map: got 'tsn', .*did you mean 'tsne'"),
    ],
)
def test_mistakes_are_named_and_change_nothing(index, call, said):
    before = {file: file.read_bytes() for file in index.folder.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=said):
        call(index)
    assert {file: file.read_bytes() for file in index.folder.rglob("*") if file.is_file()} == before


def damage(kind, folder):
    content = json.loads((folder / "manifest.json").read_text())
    (vectors,) = folder.glob("vectors-*.float32")
    if kind == "no folder":
        os.rename(folder, folder.with_name("moved"))
    elif kind == "no manifest":
        (folder / "manifest.json").unlink()
    elif kind == "cut manifest":
        (folder / "manifest.json").write_text("{")
    elif kind == "other manifest":
        (folder / "manifest.json").write_text('{"generation": "1", "count": 3, "dim": 6}')
    elif kind in ("later format", "earlier format"):
        (folder / "manifest.json").write_text(json.dumps(content | {"format": 4 if kind == "later format" else 2}))
    elif kind == "other facts":
        (folder / "manifest.json").write_text(json.dumps(content | {"count": 49}))
    elif kind == "cut vectors":
        vectors.write_bytes(vectors.read_bytes()[:-8])
    elif kind == "no vectors":
        vectors.unlink()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no folder", "a.index, which does not exist; expected a folder that `proxymetric index` wrote"),
        ("no manifest", "a.index, which has no manifest.json; expected a folder"),
        ("cut manifest", "manifest.json: got text that is not valid JSON"),
        ("other manifest", "a.index, whose manifest.json is damaged"),
        ("later format", "a.index of format 4, expected format 3; a later version"),
        ("earlier format", "a.index of format 2, expected format 3; an earlier version .*: make the index anew"),
        ("other facts", "whose manifest.json is damaged .its checksum is that of another content"),
        ("cut vectors", "float32, which has 1,192 bytes, expected at least 1,200: it was damaged"),
        ("no vectors", r"vectors-\d+.float32 is missing; expected all files that manifest.json names"),
    ],
)
def test_a_damaged_index_is_refused(index, kind, said):
    damage(kind, index.folder)
    with pytest.raises(ValueError, match=said):
        Index.open(index.folder)


@pytest.mark.parametrize(
    ("statement", "call"),
    [
        ("DELETE FROM items WHERE number = 7", lambda i: i.search(i.vectors[:1], k=50)),
        ("DELETE FROM items WHERE number = 7", lambda i: list(i.items())),
        ("UPDATE items SET metadata = '2.5'", lambda i: i["07.jpg"]),
        ("UPDATE items SET label = x'00ff'", lambda i: i.search(i.vectors[:1])),
        ("UPDATE items SET number = number + 100", lambda i: i.thumbnail("07.jpg")),
        ("UPDATE items SET start = 0", lambda i: i.update(["07.jpg"], labels=["x"])),
    ],
)
def test_each_row_of_a_large_index_has_its_checksum(index, vectors, statement, call, monkeypatch):
    """The files of a large index are compared after it was opened; its rows are when they are read."""
    monkeypatch.setattr(state, "CHECKED_AT_OPENING", 0)
    monkeypatch.setattr(state.Check, "in_background", lambda *words: None)
    index.compact()
    (file,) = index.folder.glob("items-*.sqlite")
    with contextlib.closing(sqlite3.connect(file)) as database:
        database.execute(statement)
        database.commit()
    with pytest.raises(ValueError, match="it was damaged after it was written"):
        call(Index.open(index.folder))


def test_no_flipped_bit_changes_an_answer(index, vectors):
    """300 bits of all files: the index is refused, or answers as before."""
    index.compact()
    index.update(IDS[:3], labels=["other"] * 3)
    index.add(["new"], vectors[:1] + 1, thumbnails=[b"picture"])
    index.delete(IDS[-1:])
    index.renew()
    draw = random.Random(0)
    files = [file for file in sorted(index.folder.iterdir()) if file.stat().st_size]
    assert {file.name.split("-")[0] for file in files} >= {"vectors", "thumbnails", "items", "columns", "log", "map"}

    def answers() -> list:
        opened = Index.open(index.folder)
        return [
            opened.search(vectors[:5], k=60, where=["class=other,class1,class2"]), opened.labels, opened.ids,
            [opened.thumbnail(item) for item in opened.ids], opened.vectors.tolist(), opened.points.tolist(),
        ]  # fmt: skip

    expected, refused = answers(), 0
    for _ in range(300):
        file = draw.choice(files)
        content = bytearray(file.read_bytes())
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        whole = file.read_bytes()
        file.write_bytes(content)
        try:
            assert answers() == expected, file
        except ValueError as error:
            assert "got " in str(error), error
            refused += 1
        with pytest.raises(ValueError, match="got "):  # what a large index does in the background
            index.verify()
        file.write_bytes(whole)
    assert refused == 300
    index.verify()


def test_damage_of_a_large_index_is_found_in_the_background(index, vectors, monkeypatch):
    monkeypatch.setattr(state, "CHECKED_AT_OPENING", 0)
    index.compact()
    (file,) = index.folder.glob("vectors-*.float32")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    opened = Index.open(index.folder)
    deadline = time.monotonic() + 60
    while opened.store.state.check.fault is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(ValueError, match=r"vectors-\d+.float32, which differs from what was written"):
        opened.search(vectors[:1])
    index.replace_all([new_items(6, IDS, vectors, None, None, None)])
    assert opened.reload()
    assert len(opened.search(vectors[:1])[0]) == 10, "all files were made anew"


def test_damaged_bytes_are_not_signed_again(index, monkeypatch):
    """Neither a merge nor a copy gives damaged bytes a new checksum."""
    monkeypatch.setattr(state, "CHECKED_AT_OPENING", 0)
    monkeypatch.setattr(state.Check, "in_background", lambda *words: None)
    opened = Index.open(index.folder)
    (file,) = index.folder.glob("vectors-*.float32")
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    before = (index.folder / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match=r"float32, which differs from what was written, from byte 0 on"):
        opened.compact()
    assert (index.folder / "manifest.json").read_bytes() == before
    with pytest.raises(ValueError, match=r"vectors-\d+.float32 was damaged"):
        opened.verify()


def test_the_map_keeps_its_points_when_little_is_new(index, vectors):
    """New items are placed among the others; the map is computed anew when many were placed."""
    index.renew()
    before = dict(zip(index.ids, index.points.tolist(), strict=True))
    index.add(["new"], vectors[3:4] + 1e-4)
    for _ in range(2):
        after = dict(zip(index.ids, index.points.tolist(), strict=True))
        place = after.pop("new")
        assert after == before
        np.testing.assert_allclose(place, before[IDS[3]], atol=1e-2)
        index.renew()
    assert index.manifest.map == {"method": "pca", "placed": 1, "rows": 51}
    index.delete(IDS[:2])
    assert index.points.tolist() == [*map(before.get, IDS[2:]), place]
    index.add([f"n{number}" for number in range(12)], torch.randn(12, 6))
    index.renew()
    assert index.manifest.map == {"method": "pca", "placed": 0, "rows": index.manifest.rows}, "made anew"


def test_arrays_of_numpy_are_vectors_too(tmp_path, vectors):
    index = Index.create(tmp_path / "a", dim=6)
    index.add(IDS, vectors.numpy())
    other = Index.create(tmp_path / "b", dim=6)
    other.add(IDS, vectors)
    assert torch.equal(torch.as_tensor(index.vectors[:]), torch.as_tensor(other.vectors[:]))
    assert index.search(vectors.numpy()[:3], k=4) == other.search(vectors[:3], k=4)


@pytest.mark.slow
def test_a_map_by_tsne_and_none(tmp_path, vectors):
    index = Index.create(tmp_path / "t", dim=6, map="tsne")
    index.add(IDS[:9], vectors[:9])
    index.add(IDS[9:], vectors[9:])
    assert index.points.shape == (50, 2)
    assert index.points.isfinite().all()
    flat = Index.create(tmp_path / "n", dim=6, map="none")
    flat.add(IDS, vectors)
    assert flat.points is None


@pytest.mark.parametrize("width", [1, 63, 700, 5000])
@pytest.mark.parametrize("k", [1, 3, 10])
def test_top_k_is_a_stable_sort(width, k):
    random = np.random.default_rng(width + k)
    for values in (random.normal(size=(9, width)), random.integers(0, 4, (9, width)), np.zeros((2, width))):
        values = torch.from_numpy(values.astype(np.float32))
        expected, columns = values.sort(dim=1, descending=True, stable=True)
        best, found = top_k(values, k)
        assert torch.equal(best, expected[:, :k])
        assert torch.equal(found, columns[:, :k])


def test_chunks_do_not_change_the_answer():
    random = np.random.default_rng(3)
    vectors = torch.from_numpy(random.integers(-2, 3, (CHUNK_ROWS + 500, 4)).astype(np.float32))
    queries = torch.from_numpy(random.integers(-2, 3, (3, 4)).astype(np.float32))
    columns = (queries @ vectors.T).sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(Exact(vectors).search(queries, 20)[1], columns[:, :20])
    for step in (2, 50):  # all vectors are compared, or few are copied
        rows = torch.arange(1, CHUNK_ROWS + 500, step)
        mask = np.zeros(len(vectors), dtype=bool)
        mask[rows] = True
        columns = (queries @ vectors[rows].T).sort(dim=1, descending=True, stable=True).indices
        assert torch.equal(Exact(vectors).search(queries, 20, mask)[1], rows[columns[:, :20]])
        assert torch.equal(Exact(vectors).search(queries[:1], 20, mask)[1], rows[columns[:1, :20]])


def test_it_is_public():
    assert pm.Index is Index
