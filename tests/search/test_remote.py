"""Indexes whose items lie in a database: settings, moves, servers that stop, are late, or have lost the items."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.conditions import Condition
from proxymetric.search.remote.milvus_session import expression_of
from proxymetric.search.remote.postgres import shown
from proxymetric.search.remote.postgres_session import sql_of
from proxymetric.search.remote.settings import checked
from search_servers import milvus_lite_server, own_postgres, postgres

EYE = torch.eye(4)
MISTAKES = [
    ({"name": "milvus"}, "uri: got none, expected a file such as shop.db"),
    ({"name": "milvus", "uri": "shop"}, "uri: got 'shop', expected a file that ends in .db"),
    ({"name": "milvus", "uri": "a.db", "batch": 0}, "batch: got 0, expected at least 1"),
    ({"name": "milvus", "uri": "a.db", "consistency": "strong"}, "consistency: got 'strong', .* did you mean 'Strong'"),
    ({"name": "milvus", "uri": "a.db", "replica": 2}, "engine 'milvus': got 'replica', .* did you mean 'replicas'"),
    ({"name": "milvus", "uri": "http://me@host"}, "expected the variable PROXYMETRIC_MILVUS_TOKEN, .*user:password"),
    ({"name": "pgvector", "uri": "http://host"}, "uri: got 'http://host', expected postgresql://user@host/database"),
    ({"name": "pgvector", "ef": "many"}, "ef: got 'many', expected a whole number"),
    ({"name": "pgvector", "m": 64}, "ef_construction: got 64 with m 64, expected at least twice as many"),
    ({"name": "pgvectors"}, "engine: got 'pgvectors', .* did you mean 'pgvector'"),
]


@pytest.mark.parametrize(("settings", "sentence"), MISTAKES)
def test_settings_are_checked_before_a_database_is_asked(settings, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        Index.create(tmp_path / "a.index", 4, engine=settings)
    assert not (tmp_path / "a.index").exists()


@pytest.mark.parametrize("uri", ["postgresql://ada:secret@host/shop", "postgresql://host/shop?password=secret"])
def test_a_password_is_neither_written_nor_shown(uri):
    with pytest.raises(ValueError, match=r"uri: got an address with a password, .* PGPASSWORD") as refused:
        checked({"name": "pgvector", "uri": uri})
    assert "secret" not in str(refused.value)
    assert "secret" not in shown(uri)


def test_conditions_are_values_of_statements_and_quoted_texts():
    """Nothing of a condition is read as a part of the language of a database."""
    evil = Condition('a" OR 1=1 --', "=", ("x') OR true --", 'y"'))
    clause, values = sql_of([evil])
    assert clause == "WHERE (keys @> %s::jsonb OR keys @> %s::jsonb)"
    assert values[1] == r'{"a\" OR 1=1 --": ["y\""]}'
    assert expression_of([evil]).endswith(r"""["a\" OR 1=1 --"], ["x') OR true --", "y\""]))""")


def test_a_server_that_nobody_started(tmp_path):
    for settings, package in (
        ({"name": "pgvector", "uri": "postgresql://ada@127.0.0.1:1/shop"}, "psycopg"),
        ({"name": "milvus", "uri": "http://127.0.0.1:1", "timeout": 1}, "pymilvus"),
    ):
        pytest.importorskip(package, reason="the extra is not installed")
        with pytest.raises(
            ConnectionError, match=rf"uri: got {settings['uri']}, which does not answer \(.*\); expected"
        ):
            Index.create(tmp_path / "a.index", 4, engine=settings)
        assert not (tmp_path / "a.index" / "manifest.json").exists()


def made(folder, engine, count=2):
    index = Index.create(folder, 4, "model", engine=engine, map="none")
    index.add(list("abcd")[:count], EYE[:count], labels=["x"] * count, thumbnails=[b"jpeg"] * count)
    return index


def first_of(index, row=0) -> str:
    return index.search(EYE[row : row + 1], k=1)[0][0].id


@pytest.mark.server
def test_a_postgres_that_stops_is_late_or_has_lost_the_items(tmp_path):
    """Each is a sentence; the same object answers again when the server is back."""
    server = own_postgres(tmp_path / "postgres")
    index = made(tmp_path / "a.index", {"name": "pgvector", "uri": server.uri, "timeout": 1})
    with server.suspended(), pytest.raises(ConnectionError, match=r"does not answer .no answer in 1 seconds"):
        index.search(EYE[:1])
    assert first_of(index) == "a"
    state = index.newest()
    server.stop()
    for ask in (lambda: index.search(EYE[:1]), lambda: index.delete(["a"]), lambda: Index(index.folder)):
        with pytest.raises(ConnectionError, match=r"uri: got postgresql://postgres@.*, which does not answer"):
            ask()
    assert index.newest() == state
    server.start()
    assert first_of(index) == "a"
    index.delete(["a"])
    assert index.newest() != state
    import psycopg

    with psycopg.connect(server.uri) as connection:
        connection.execute(f"DROP TABLE proxymetric_{index.manifest.identity}_1")
    for ask in (lambda: index.search(EYE[:1]), lambda: index.add(["z"], EYE[:1])):
        with pytest.raises(ValueError, match=r"does not have the items of this index; expected .* --rebuild"):
            ask()
    server.stop()


@pytest.mark.server
def test_only_one_process_changes_an_index_in_postgres(tmp_path, tmp_path_factory, monkeypatch):
    uri = postgres(tmp_path_factory.getbasetemp() / "postgres")
    monkeypatch.setattr("proxymetric.search.remote.postgres.LOCK_SECONDS", 0.2)
    index = made(tmp_path / "a.index", {"name": "pgvector", "uri": uri})
    other = Index(index.folder)
    with index.writing():
        index.delete(["a"])
        with pytest.raises(
            ValueError, match=r"another process has been changing this index for more than 0\.2 seconds"
        ):
            other.delete(["b"])
    other.delete(["b"])
    assert not index.search(EYE[:1])[0]


KILLED = """
import os, sys, torch
from proxymetric.search import Index
from proxymetric.search.remote import {module}_session as session
kind = session.{kind}Session
plain, left = getattr(kind, sys.argv[2]), [int(sys.argv[3])]
def killed(*values, **names):
    answer = plain(*values, **names)
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), 9)
    return answer
setattr(kind, sys.argv[2], killed)
index = Index(sys.argv[1])
index.put(["a", "c", "d"], torch.eye(4)[1:], labels=["new"] * 3)
"""


def killed_change(folder, module: str, kind: str, method: str, calls: int) -> int:
    words = [sys.executable, "-c", KILLED.format(module=module, kind=kind), folder, method, calls]
    return subprocess.run([*map(str, words)], timeout=120).returncode


@pytest.mark.server
def test_a_change_of_postgres_that_is_killed_leaves_nothing(tmp_path, tmp_path_factory):
    uri = postgres(tmp_path_factory.getbasetemp() / "postgres")
    index = made(tmp_path / "a.index", {"name": "pgvector", "uri": uri})
    state = index.newest()
    for method in ("put", "settled"):
        assert killed_change(index.folder, "postgres", "Postgres", method, 0) == -9
        assert (index.newest(), index.ids, first_of(index)) == (state, ["a", "b"], "a")
    index.put(["a", "c", "d"], EYE[1:], labels=["new"] * 3)
    assert sorted(index.ids) == [*"abcd"]
    index.verify()


@pytest.mark.slow
def test_a_change_of_milvus_that_is_killed_is_counted_by_the_next(tmp_path):
    """Items that it wrote are whole; the number of the state does not rise before the next change."""
    pytest.importorskip("milvus_lite", reason="the extra `milvus` is not installed")
    with milvus_lite_server(tmp_path) as uri:
        index = made(tmp_path / "a.index", {"name": "milvus", "uri": uri})
        state = index.newest()
        assert killed_change(index.folder, "milvus", "Milvus", "put", 0) == -9
        assert index.newest() == state
        assert (index["d"].label, first_of(index, 3)) == ("new", "d")
        index.delete(["c"])
        assert sorted(index.ids) == [*"abd"]
        assert (len(index), [index.at(row).id for row in range(3)]) == (3, index.ids)
        index.verify()


@pytest.mark.slow
def test_a_milvus_that_stops_or_has_lost_the_items(tmp_path):
    pytest.importorskip("milvus_lite", reason="the extra `milvus` is not installed")
    with milvus_lite_server(tmp_path) as uri:
        index = made(tmp_path / "a.index", {"name": "milvus", "uri": uri, "timeout": 3})
    for ask in (lambda: index.search(EYE[:1]), lambda: index.delete(["a"]), lambda: Index(index.folder)):
        with pytest.raises(ConnectionError, match=f"uri: got {uri}, which does not answer"):
            ask()
    with milvus_lite_server(tmp_path, uri):
        assert first_of(index) == "a"
        index.store.database._connected().drop_collection(f"proxymetric_{index.manifest.identity}_1")
        with pytest.raises(ValueError, match=r"does not have the items of this index; expected .* --rebuild"):
            index.search(EYE[:1])


@pytest.mark.server
def test_items_move_between_the_folder_and_databases(tmp_path, tmp_path_factory):
    uri = postgres(tmp_path_factory.getbasetemp() / "postgres")
    index = made(tmp_path / "a.index", "exact")
    before = [*index.items()], index.search(EYE, k=4), index.thumbnail("a")
    for engine in ({"name": "pgvector", "uri": uri}, {"name": "pgvector", "uri": uri, "ef": 50}, {"name": "exact"}):
        index.change(engine=engine)
        for each in (index, Index(index.folder, "model")):
            assert ([*each.items()], each.search(EYE, k=4), each.thumbnail("a")) == before
        has_vectors = any(file.name.startswith("vectors-") for file in index.folder.iterdir())
        assert has_vectors == (engine["name"] == "exact")


@pytest.mark.server
def test_a_graph_finds_what_it_promises(tmp_path, tmp_path_factory):
    """The recall is that of new queries; conditions that few items match are answered by comparing all of these."""
    uri = postgres(tmp_path_factory.getbasetemp() / "postgres")
    draws = np.random.default_rng(0)
    centres = draws.normal(size=(500, 16))
    vectors, queries = (
        torch.from_numpy((centres[draws.integers(0, 500, count)] + 0.3 * draws.normal(size=(count, 16))).astype("f4"))
        for count in (10_100, 300)
    )
    index = Index.create(tmp_path / "a.index", 16, engine={"name": "pgvector", "uri": uri, "ef": 40}, map="none")
    index.add([*map(str, range(10_100))], vectors, metadata=[{"brand": f"b{row % 500}"} for row in range(10_100)])
    recall = index.manifest.engine["recall"]
    assert recall["queries"] == 200
    unit = torch.nn.functional.normalize
    expected = (unit(queries) @ unit(vectors).T).topk(10).indices.tolist()
    hits = index.search(queries, k=10)
    shares = [len({int(hit.id) for hit in each} & set(rows)) / 10 for each, rows in zip(hits, expected, strict=True)]
    assert recall["value"] <= np.mean(shares) + 0.01
    few = index.search(queries[:5], k=30, where="brand=b7")
    assert [len(each) for each in few] == [21] * 5
    index.delete([str(row) for row in range(7, 10_100, 500)])
    assert index.search(queries[:1], where="brand=b7") == [[]]
