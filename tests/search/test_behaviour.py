"""What an index does, whatever searches it and wherever its items lie: one suite for all engines."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.conditions import as_conditions, matches
from search_servers import KINDS, engine_settings

DIM, COUNT = 8, 60
IDS = [f"{number:02}.jpg" for number in range(COUNT)]
LABELS = [None if number % 11 == 0 else "abc"[number % 3] for number in range(COUNT)]
DATES = ["2026-01-31", "2026-02-01T08:30:00", "2026-02-01T08:30:00+02:00", "soon"]
PRICES = [3, 12.5, "12.50", "007", True, -1, "1e3", None]


def metadata_of(number: int) -> dict[str, object]:
    """Columns of each type; some items have no value."""
    values: dict[str, object] = {}
    if number % 7:
        values["brand"] = ["Ulm", 'O\'Neill & "Søn"', "a,b", "12.5", "%_\\"][number % 5]
    if number % 5:
        values["price"] = PRICES[number % 8]
    if number % 4:
        values["tags"] = [["red", "new"], ["red"], [], ["dear", "new", "12"]][number % 4]
    if number % 3:
        values["seen at"] = DATES[number % 4]
    return values


METADATA = [metadata_of(number) for number in range(COUNT)]
THUMBNAILS = [None if number % 2 else f"jpeg {number}".encode() for number in range(COUNT)]


@pytest.fixture(scope="module")
def vectors():
    made = np.random.default_rng(0).normal(size=(2 * COUNT, DIM)).astype(np.float32)
    return torch.from_numpy(made / np.linalg.norm(made, axis=1, keepdims=True))


@pytest.fixture(scope="module", params=KINDS)
def engine(request, tmp_path_factory):
    """The settings of an engine."""
    return engine_settings(request.param, tmp_path_factory)


@pytest.fixture(scope="module")
def full(engine, vectors, tmp_path_factory):
    """An index that no test changes."""
    index = Index.create(tmp_path_factory.mktemp("full") / "a.index", DIM, "model", engine=engine)
    half = COUNT // 2
    for part in (slice(0, half), slice(half, COUNT)):
        index.add(
            IDS[part], vectors[:COUNT][part],
            labels=LABELS[part], metadata=METADATA[part], thumbnails=THUMBNAILS[part],
        )  # fmt: skip
    return index


@pytest.fixture
def small(engine, vectors, tmp_path):
    """An index of six items to change."""
    index = Index.create(tmp_path / "b.index", DIM, "model", engine=engine, map="none")
    index.add(IDS[:6], vectors[:6], labels=[*"aabbc", None], metadata=METADATA[:6], thumbnails=[b"jpeg", *[None] * 5])
    return index


def ranked(vectors: torch.Tensor, query: torch.Tensor, rows: list[int]) -> list[str]:
    """What a search shall find, most similar first."""
    similarities = (vectors[rows].double() @ query.double()).tolist()
    return [IDS[row] for _, row in sorted(zip(similarities, rows), key=lambda pair: (-pair[0], pair[1]))]


def ids_of(hits) -> list[str]:
    return [hit.id for hit in hits]


def test_what_was_added_is_there(full, vectors):
    assert (len(full), full.ids, full.labels) == (COUNT, IDS, LABELS)
    assert full.classes == {name: LABELS.count(name) for name in "abc"}
    assert full.stamps() == dict.fromkeys(IDS, "")
    torch.testing.assert_close(full.vectors, vectors[:COUNT])
    for number in (0, 7, 59):
        item = full[IDS[number]]
        assert item == (IDS[number], LABELS[number], METADATA[number], number) == full.at(number)
        torch.testing.assert_close(full.vector(item.id), vectors[number])
        assert full.thumbnail(item.id) == THUMBNAILS[number]
    assert [item.id for item in full.items()] == IDS
    assert full.metadata([IDS[3], "none", IDS[1]]) == {IDS[1]: METADATA[1], IDS[3]: METADATA[3]}
    assert IDS[0] in full
    assert "none" not in full
    with pytest.raises(KeyError, match="got 'none', expected an id of"):
        full["none"]
    assert full.points.shape == (COUNT, 2)
    full.verify()


def test_it_finds_the_nearest(full, vectors):
    for query, hits in zip(vectors[COUNT:], full.search(vectors[COUNT:], k=7), strict=True):
        assert ids_of(hits) == ranked(vectors, query, list(range(COUNT)))[:7]
    hit = full.search(3 * vectors[5:6], k=1)[0][0]
    assert hit[:1] + hit[2:] == (IDS[5], LABELS[5], METADATA[5], 5)
    assert hit.similarity == pytest.approx(1, abs=1e-6)
    assert len(full.search(vectors[:1], k=1_000)[0]) == COUNT


CONDITIONS = [
    "brand=Ulm",
    "brand!=Ulm",
    {"brand": ["Ulm", 'O\'Neill & "Søn"', "%_\\"]},
    {"brand": {"!=": ["a,b", "none"]}},
    "brand=12.50",
    "price<12.5",
    "price<=12.5",
    "price>3",
    "price>=-1",
    "price!=12.5",
    "price=true",
    "price=007",
    "price<2026-01-01",
    "tags=red",
    "tags!=new",
    "tags=red,dear",
    "tags=12",
    "tags>1",
    "seen at<2026-02-01",
    "seen at>=2026-02-01T06:30:00",
    "seen at>2026-02-01T06:30:00.000001",
    "seen at=soon",
    "class=a,c",
    "class!=a",
    "class<1",
]


@pytest.mark.parametrize("where", CONDITIONS, ids=str)
def test_conditions(full, vectors, where):
    """Each engine finds what the rule for a single value says."""
    conditions = as_conditions(where)
    rows = [
        row
        for row in range(COUNT)
        if all(
            matches(LABELS[row] if each.column == "class" else METADATA[row].get(each.column), each)
            for each in conditions
        )
    ]
    hits = full.search(vectors[COUNT : COUNT + 1], k=COUNT, where=where)[0]
    assert ids_of(hits) == ranked(vectors, vectors[COUNT], rows)


def test_conditions_hold_together(full, vectors):
    hits = full.search(vectors[:2], k=COUNT, where=["price>0", "price<100", "class=a", "tags!=red"])
    rows = [
        row
        for row in range(COUNT)
        if LABELS[row] == "a" and METADATA[row].get("price") in (3, 12.5, "12.50", "007")
        and METADATA[row].get("price") is not True and "red" not in METADATA[row].get("tags", [])
    ]  # fmt: skip
    assert [ids_of(each) for each in hits] == [ranked(vectors, vectors[query], rows) for query in (0, 1)]
    assert rows


def test_pages_are_one_long_search(full, vectors):
    for where, one_per in itertools.product((None, "class!=b"), (None, "brand")):
        whole = full.search(vectors[60:62], k=40, where=where, one_per=one_per)
        pages = [full.search(vectors[60:62], k=9, offset=9 * page, where=where, one_per=one_per) for page in range(5)]
        for query in (0, 1):
            assert [hit for page in pages for hit in page[query]][:40] == whole[query]


def test_a_threshold(full, vectors):
    hits = full.search(vectors[60:63], k=COUNT)
    limit = hits[0][10].similarity
    for each, above in zip(hits, full.search(vectors[60:63], k=COUNT, min_similarity=limit), strict=True):
        assert above == [hit for hit in each if hit.similarity >= limit]


def test_one_result_for_each_value(full, vectors):
    for column in ("class", "brand"):
        hits = full.search(vectors[60:61], k=COUNT)[0]
        values = [hit.label if column == "class" else hit.metadata.get(column) for hit in hits]
        first = [hit for row, hit in enumerate(hits) if values[row] is None or values[row] not in values[:row]]
        assert full.search(vectors[60:61], k=COUNT, one_per=column)[0] == first
        assert full.search(vectors[60:61], k=3, one_per=column)[0] == first[:3]


def test_what_is_left_out(full, vectors):
    hits = full.search(vectors[:3], k=4, without=[IDS[0], None, "none"])
    assert [ids_of(each)[0] for each in hits][1:] == IDS[1:3]
    assert IDS[0] not in ids_of(hits[0])
    assert [len(each) for each in hits] == [4, 4, 4]
    several = full.search(vectors[:3], k=COUNT, differs={"class": ["a", None, "b"]})
    wrong = [{hit.label for hit in each} for each in several]
    assert wrong == [{"b", "c", None}, {"a", "b", "c", None}, {"a", "c", None}]


def test_put_twice_changes_nothing(small, vectors):
    more = {"labels": ["x", "y"], "metadata": [{"price": 5}, {}], "thumbnails": [b"1", None]}
    for _ in range(2):
        small.put(["00.jpg", "new.jpg"], vectors[10:12], **more)
        assert sorted(small.ids) == ["00.jpg", *IDS[1:6], "new.jpg"]
        assert (small["00.jpg"].label, small["00.jpg"].metadata) == ("x", {"price": 5})
        torch.testing.assert_close(small.vector("00.jpg"), vectors[10])
        assert (small.thumbnail("00.jpg"), small.thumbnail("new.jpg")) == (b"1", None)
        assert ids_of(small.search(vectors[10:11], k=1)[0]) == ["00.jpg"]
        assert [hit.row for hit in small.search(vectors[11:12], k=1)[0]] == [small.ids.index("new.jpg")]


def test_parts_of_items_are_replaced(small, vectors):
    small.update(IDS[1:3], labels=["new", None])
    assert small.labels == ["a", "new", None, "b", "c", None]
    small.update([IDS[1]], metadata=[{"shop": "Ulm"}])
    assert (small[IDS[1]].label, small[IDS[1]].metadata) == ("new", {"shop": "Ulm"})
    assert ids_of(small.search(vectors[:1], where="shop=Ulm")[0]) == [IDS[1]]
    small.update([IDS[0], IDS[3]], vectors[20:22])
    torch.testing.assert_close(small.vector(IDS[0]), vectors[20])
    assert (small.thumbnail(IDS[0]), small[IDS[0]].label) == (b"jpeg", "a")
    for query, expected in ((20, IDS[0]), (21, IDS[3])):
        (hit,) = small.search(vectors[query : query + 1], k=1)[0]
        assert (hit.id, small.ids[hit.row]) == (expected, expected)
    small.update([IDS[0], IDS[4]], thumbnails=[None, b"other"])
    assert [small.thumbnail(item) for item in (IDS[0], IDS[4])] == [None, b"other"]
    assert len(small) == 6


def test_what_was_deleted_is_gone(small, vectors):
    small.delete([IDS[0], IDS[2]])
    left = [IDS[1], *IDS[3:6]]
    assert (len(small), small.ids) == (4, left)
    assert ids_of(small.search(vectors[:1], k=10)[0]) == ranked(vectors, vectors[0], [1, 3, 4, 5])
    assert [small.at(row).id for row in range(4)] == left
    torch.testing.assert_close(small.vectors, vectors[[1, 3, 4, 5]])
    small.add([IDS[0]], vectors[:1])
    small.compact()
    assert small.ids == [*left, IDS[0]]
    assert small[IDS[0]].row == 4
    small.delete(small.ids)
    assert small.search(vectors[:1], k=3) == [[]]
    assert (len(small), small.ids) == (0, [])


def test_all_items_are_replaced(small, vectors):
    small.replace_all([small.batch(IDS[2:4])], model="other")
    assert (small.ids, small.model, small.labels) == (IDS[2:4], "other", ["b", "b"])
    assert ids_of(small.search(vectors[2:3], k=5)[0])[0] == IDS[2]


def test_it_is_the_same_when_it_is_opened_again(small, vectors):
    small.update([IDS[1]], labels=["new"])
    again = Index.open(small.folder, "model")
    assert list(again.items()) == list(small.items())
    assert again.search(vectors[:2], k=6) == small.search(vectors[:2], k=6)
    with pytest.raises(ValueError, match="model: got the model other"):
        Index.open(small.folder, "other")


def test_one_object_sees_what_another_changed(small, vectors):
    reader, before = Index.open(small.folder), small.newest()
    assert not reader.reload()
    assert reader.newest() == before == reader.newest()
    small.add(["new.jpg"], vectors[30:31], metadata=[{"colour": "red"}])
    small.delete([IDS[0]])
    assert reader.newest() != before
    reader.reload()
    assert (len(reader), reader.ids) == (6, [*IDS[1:6], "new.jpg"])
    assert ids_of(reader.search(vectors[:1], where="colour=red")[0]) == ["new.jpg"]
    assert reader.manifest.generation == small.manifest.generation


MISTAKES = {
    "an id twice": (lambda index, v: index.add(["x", "x"], v[:2]), "ids: got 'x' twice"),
    "known": (lambda index, v: index.add(["x", IDS[0]], v[:2]), "ids: got '00.jpg', which the index has already"),
    "unknown": (lambda index, v: index.update(["x"], labels=["a"]), "ids: got 'x', which the index does not have"),
    "gone": (lambda index, v: index.delete([IDS[1], "x"]), "ids: got 'x', which the index does not have"),
    "shape": (lambda index, v: index.put(["x"], v[:1, :3]), r"vectors: got a tensor of shape \(1, 3\), expected \(1"),
    "column": (lambda index, v: index.search(v[:1], where="prise<5"), "where: got 'prise', .* did you mean 'price'"),
    "order": (lambda index, v: index.search(v[:1], where="price<a"), "where: got price<a, expected a number or a date"),
    "k": (lambda index, v: index.search(v[:1], k=0), "k: got 0, expected at least 1"),
    "one_per": (lambda index, v: index.search(v[:1], one_per="x"), "one_per: got 'x', expected one of"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_and_change_nothing(full, vectors, mistake):
    wrong, sentence = MISTAKES[mistake]
    before = full.newest()
    with pytest.raises(ValueError, match=sentence):
        wrong(full, vectors)
    assert (full.newest(), full.ids) == (before, IDS)
