"""One Index object in several threads, many small changes, and an index that was replaced by another one."""

from __future__ import annotations

import shutil
import threading

import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.storage import changes


def unit_vectors(count: int) -> torch.Tensor:
    return torch.nn.functional.normalize(torch.randn(count, 8, generator=torch.Generator().manual_seed(0)), dim=1)


def test_threads_that_change_one_object_wait_for_each_other(tmp_path):
    index = Index.create(tmp_path / "a.index", dim=8, model="m")
    errors: list[BaseException] = []

    def add(name: str) -> None:
        try:
            for number in range(8):
                index.add([f"{name}{number}"], torch.ones(1, 8))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=add, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(index.ids) == sorted(f"{name}{number}" for name in "abc" for number in range(8))
    assert Index(index.folder).ids == index.ids


def test_a_search_sees_one_state_while_another_thread_adds(tmp_path):
    """Each added id sorts before all others, so that every change moves all rows."""
    vectors = unit_vectors(40)
    ids = [f"m{number:02d}" for number in range(40)]
    index = Index.create(tmp_path / "a.index", dim=8, model="m")
    index.add(ids, vectors, labels=ids, metadata=[{"own": item} for item in ids])
    done = threading.Event()

    def add() -> None:
        for number in range(25):
            index.add([f"a{99 - number}"], -vectors[:1])
        done.set()

    thread = threading.Thread(target=add)
    thread.start()
    wrong = []
    while not done.is_set():
        for item, hits in zip(ids, index.search(vectors, k=1), strict=True):
            if (hits[0].id, hits[0].label) != (item, item):
                wrong.append((item, hits[0]))
        filtered = index.search(vectors[:1], k=1, where={"own": "m07"})[0]
        assert [hit.id for hit in filtered] == ["m07"]
        assert index["m03"].label == "m03"
        assert index.value_of("m05", "own") == "m05"
        torch.testing.assert_close(index.vector("m03"), vectors[3])
    thread.join()
    assert not wrong


def test_many_small_changes_are_merged(tmp_path, monkeypatch):
    """The log does not grow without end, and a process that follows sees each state."""
    monkeypatch.setattr(changes, "LEAST_LOG", 20)
    index = Index.create(tmp_path / "a.index", dim=8, model="m", map="none")
    reader, bases = Index(index.folder), set()
    for number in range(50):
        index.add([f"{number:03d}"], torch.ones(1, 8), labels=["a"], thumbnails=[bytes([number]) * (1 + number)])
        if number % 3 == 0:
            index.update([f"{number:03d}"], labels=["b"])
        if number % 10 == 9:
            index.delete([f"{number - 5:03d}"])
        assert reader.reload()
        assert (reader.ids, reader.labels, len(reader)) == (index.ids, index.labels, len(index))
        bases.add(index.manifest.base)
    assert 3 <= len(bases) <= 8
    assert len(list(index.folder.iterdir())) == 6
    opened = Index(index.folder)
    opened.verify()
    for item in opened.ids:
        assert opened.thumbnail(item) == bytes([int(item)]) * (1 + int(item))


def test_an_index_that_was_made_anew_is_not_overwritten(tmp_path):
    folder = tmp_path / "a.index"
    index = Index.create(folder, dim=8, model="m")
    index.add(["old"], torch.ones(1, 8))
    shutil.rmtree(folder)
    other = Index.create(folder, dim=8, model="m")
    other.add(["new"], torch.ones(1, 8))
    assert other.manifest.generation == index.manifest.generation
    assert other.manifest.base == index.manifest.base
    assert index.reload()
    assert index.ids == ["new"]
    index.add(["more"], torch.ones(1, 8))
    assert Index(folder).ids == ["new", "more"]


def test_an_empty_thumbnail_is_none(tmp_path):
    index = Index.create(tmp_path / "a.index", dim=8, model="m")
    index.add(["a", "b"], torch.ones(2, 8), thumbnails=[b"", b"b"])
    index.add(["c"], torch.ones(1, 8))
    assert index.thumbnail("a") is None
    assert index.thumbnail("b") == b"b"
    with pytest.raises(ValueError, match=r"thumbnails: got a str, expected bytes"):
        index.add(["d"], torch.ones(1, 8), thumbnails=["d"])  # type: ignore[list-item]
    assert "d" not in index


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ({"price": 3}, ["a", "b"]),
        ({"price": "3"}, ["a", "b"]),
        ({"price": 1e20}, ["c"]),
        ({"sold": True}, ["a"]),
        ({"sold": "true"}, ["a"]),
        ({"sold": False}, ["b"]),
        ({"class": "cat\0"}, []),
    ],
)
def test_numbers_and_bools_are_conditions(tmp_path, where, ids):
    index = Index.create(tmp_path / "a.index", dim=2, model="m")
    metadata = [{"price": 3, "sold": True}, {"price": "3", "sold": False}, {"price": 1e20}]
    index.add(["a", "b", "c"], torch.ones(3, 2), labels=["cat"] * 3, metadata=metadata)
    assert sorted(hit.id for hit in index.search(torch.ones(1, 2), where=where)[0]) == ids
    others = sorted(hit.id for hit in index.search(torch.ones(1, 2), differs=where)[0])
    assert others == sorted({"a", "b", "c"} - set(ids))


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"a\\b": 1}, r"metadata: got the column 'a\\\\b', expected printable text without"),
        ({"a<b": 1}, r"metadata: got the column 'a<b', expected printable text without"),
        ({"a\tb": 1}, r"metadata: got the column 'a\\tb'"),
        ({"n": 2**70}, r"metadata: got n=1180591620717411303424, expected a whole number of at most 64 bits"),
        ({"t": "a\0b"}, r"metadata: got t='a\\x00b', expected text that UTF-8 can encode, without NUL"),
    ],
)
def test_metadata_that_no_search_could_find_is_refused(tmp_path, metadata, sentence):
    index = Index.create(tmp_path / "a.index", dim=2, model="m")
    with pytest.raises(ValueError, match=sentence):
        index.add(["a"], torch.ones(1, 2), metadata=[metadata])
    with pytest.raises(ValueError, match=r"labels: got '\\ud800', expected None, or text that UTF-8 can encode"):
        index.add(["a"], torch.ones(1, 2), labels=["\ud800"])
    assert not len(index)


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ({"name": "faiss", "knid": "ivf"}, r"setting of the engine 'faiss': got 'knid', .*did you mean 'kind'"),
        ({"name": "exact", "uri": "a.db"}, r"engine: got the setting 'uri' for 'exact', expected none"),
    ],
)
def test_unknown_settings_of_an_engine_are_refused(tmp_path, engine, sentence):
    with pytest.raises(ValueError, match=sentence):
        Index.create(tmp_path / "a.index", dim=2, model="m", engine=engine)
    assert not (tmp_path / "a.index" / "manifest.json").exists()
