"""The Milvus engine: settings, changes that write only what changed, and the state before that readers keep."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from proxymetric.search import Index
from proxymetric.search.engines import Earlier, build_engine, milvus_client
from proxymetric.search.engines.exact import Exact
from proxymetric.search.engines.milvus import check_settings
from training_runs import forks

DIM = 16
IDS = [f"{number:05d}" for number in range(500)]


@pytest.fixture(scope="module")
def vectors():
    made = np.random.default_rng(0).normal(size=(700, DIM)).astype(np.float32)
    return made / np.linalg.norm(made, axis=1, keepdims=True)


MISTAKES = [
    ({}, "uri: got none, expected a file such as shop.db"),
    ({"uri": "shop"}, "uri: got 'shop', expected a file that ends in .db"),
    ({"uri": "a.db", "batch": 0}, "batch: got 0, expected at least 1"),
    ({"uri": "a.db", "consistency": "strong"}, "consistency: got 'strong', .* did you mean 'Strong'"),
    ({"uri": "a.db", "replica": 2}, "engine: got 'replica', .* did you mean 'replicas'"),
]


@pytest.mark.parametrize(("settings", "said"), MISTAKES)
def test_settings_of_milvus_are_checked_before_it_is_asked(settings, said):
    with pytest.raises(ValueError, match=said):
        check_settings({"name": "milvus", **settings})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a server in a process of its own: that of milvus-lite, which speaks the protocol of Milvus."""
    pytest.importorskip("milvus_lite", reason="the extra `milvus` is not installed")
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "milvus_lite", "server", "--host", "127.0.0.1", "--port", port]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen([*map(str, words), "--data-dir", folder / "data"], stdout=log, stderr=log)
    try:
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"the server does not answer: {(folder / 'log').read_text()}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(params=["file", pytest.param("server", marks=pytest.mark.server)])
def milvus_index(request, vectors, tmp_path):
    """An index of 500 vectors in a file of milvus-lite, or on a server."""
    pytest.importorskip("milvus_lite", reason="the extra `milvus` is not installed")
    settings: dict[str, object] = {"uri": str(tmp_path / "a.db")}
    if request.param == "server":
        settings = {"uri": request.getfixturevalue("server"), "partitions": 3}
    index = Index.create(tmp_path / "a.index", DIM, engine={"name": "milvus", "batch": 100, **settings}, map="none")
    index.add(IDS, torch.from_numpy(vectors[:500]))
    return index


def entities(index):
    """What the collection of an index holds: number, state of birth and of death; without the seals."""
    facts, client = index.manifest.engine, milvus_client.connect(index.manifest.engine["uri"])
    found = client.query(facts["collection"], "number >= 0", output_fields=["born", "died"], limit=10_000)
    return sorted((entity["number"], entity["born"], entity["died"]) for entity in found)


def assert_as_exact(index):
    queries = index.vectors[::7]
    expected_values, expected = Exact(index.vectors).search(queries, 10)
    values, found = index.engine.search(queries, 10)
    assert torch.equal(found, expected)
    torch.testing.assert_close(values, expected_values)


def test_milvus_is_changed_and_keeps_one_earlier_state(milvus_index, vectors):
    """Only what changed is written; what only older states than the last one need is removed."""
    index, collection = milvus_index, milvus_index.manifest.engine["collection"]
    before = entities(index)
    index.delete(IDS[:100])
    assert index.manifest.engine["collection"] == collection
    assert entities(index) == [(number, 1, 2 if row < 100 else 2**62) for row, (number, *_) in enumerate(before)]
    index.add(["0", "9"], torch.from_numpy(vectors[500:502]))  # the first row and the last one
    index.update(IDS[200:210], torch.from_numpy(vectors[600:610]))
    assert index.manifest.engine["collection"] == collection
    assert len(entities(index)) == 412, "the ten that were replaced are kept for readers, the first hundred is removed"
    index.update(IDS[100:101], labels=["wren"])
    assert len(entities(index)) == 403
    assert_as_exact(index)
    assert index.search(torch.from_numpy(vectors[605:606]), k=1)[0][0].id == IDS[205]
    assert not any("token" in key for key in index.manifest.engine)


def test_a_reader_of_the_state_before_sees_all_of_it(milvus_index, vectors):
    reader = Index.open(milvus_index.folder)
    milvus_index.delete(IDS[:100])
    milvus_index.reload()
    query = torch.from_numpy(vectors[300:301])
    assert [len(index.search(query, k=500)[0]) for index in (reader, milvus_index)] == [500, 400]
    assert_as_exact(reader)
    assert_as_exact(milvus_index)


def test_much_that_changed_is_written_to_a_new_collection(milvus_index, vectors):
    names = [milvus_index.manifest.engine["collection"]]
    for ids in (IDS[:300], IDS[300:310]):
        milvus_index.delete(ids)
        names.append(milvus_index.manifest.engine["collection"])
    assert names[0] != names[1] == names[2]
    prefix = f"proxymetric_{milvus_index.manifest.engine['index']}"
    client = milvus_client.connect(milvus_index.manifest.engine["uri"])
    assert [name for name in client.list_collections() if name.startswith(prefix)] == names[2:]
    milvus_index.change([], engine={**milvus_index.manifest.engine, "consistency": "Bounded"})
    assert milvus_index.manifest.engine["collection"] not in names, "a collection keeps its consistency"
    assert_as_exact(milvus_index)


def test_what_a_killed_change_wrote_is_taken_back(milvus_index, vectors, tmp_path):
    """A state that was written but never became that of the index."""
    folder = milvus_index.folder / "generations" / f"{milvus_index.manifest.generation:08d}"
    rows = np.array([-1, *range(100, 500), -1, -1])
    changed = np.concatenate([vectors[600:601], vectors[100:500], vectors[601:603]])
    before = entities(milvus_index)
    build_engine(milvus_index.manifest.engine, changed, tmp_path, Earlier(milvus_index.manifest.engine, folder, rows))
    assert len(entities(milvus_index)) == 503
    for index in (milvus_index, Index.open(milvus_index.folder)):
        assert_as_exact(index)
    milvus_index.delete(IDS[498:])
    numbers = [number for number, *_ in before]
    assert entities(milvus_index) == [(number, 1, 2**62) for number in numbers[:498]] + [
        (number, 1, 2) for number in numbers[498:]
    ]
    assert_as_exact(milvus_index)


def test_a_database_that_another_copy_of_the_index_changed(milvus_index, tmp_path):
    """Both copies write the next state; the one that was overwritten is refused, instead of answering wrongly."""
    copy = Index.open(shutil.copytree(milvus_index.folder, tmp_path / "copy.index"))
    milvus_index.delete(IDS[:10])
    copy.delete(IDS[10:30])
    assert_as_exact(copy)
    with pytest.raises(ValueError, match=r"does not have the vectors of this index; .* --rebuild"):
        Index.open(milvus_index.folder)


def test_a_file_that_another_process_has_open(tmp_path):
    pytest.importorskip("milvus_lite", reason="the extra `milvus` is not installed")
    uri = tmp_path / "a.db"
    uri.mkdir()
    lines = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", lines, uri / "LOCK"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        holder.stdout.readline()
        with pytest.raises(ValueError, match=r"uri: got .*a\.db, which another process has open; expected .* server"):
            Index.create(tmp_path / "a", 2, engine={"name": "milvus", "uri": str(uri)})
    finally:
        holder.kill()
        holder.communicate()
    assert Index.create(tmp_path / "a", 2, engine={"name": "milvus", "uri": str(uri)}).engine.name == "milvus"


@pytest.mark.server
def test_on_a_server(server, vectors, tmp_path):
    """Over TCP: made, changed, opened by another reader, searched."""
    settings = {"name": "milvus", "uri": server, "partitions": 2, "replicas": 2, "consistency": "Bounded"}
    index = Index.create(tmp_path / "a.index", DIM, engine=settings, map="none")
    index.add(IDS, torch.from_numpy(vectors[:500]))
    reader = Index.open(index.folder)
    index.delete(IDS[:50])
    assert index.manifest.engine["state"] == 2
    for opened in (reader, index, Index.open(index.folder)):
        assert_as_exact(opened)


def test_a_server_that_does_not_answer(tmp_path):
    pytest.importorskip("milvus_lite", reason="the extra `milvus` is not installed")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ValueError, match=rf"uri: got {uri}, which does not answer \(.*\); expected a Milvus"):
            Index.create(tmp_path / "a", 2, engine={"name": "milvus", "uri": uri})
    assert not (tmp_path / "a").exists()


def cut(folder: Path, what: str) -> None:
    """In a process of its own: make, search or change an index, and write down what is found."""
    vectors = torch.eye(8).repeat(6, 1)[:40] + torch.arange(40)[:, None] / 100
    if what == "make":
        Index.create(folder / "a.index", dim=8, model="m", engine={"name": "milvus", "uri": f"{folder}/a.db"}).add(
            [str(number) for number in range(40)], vectors
        )
    index = Index.open(folder / "a.index")
    found = [[hit.id for hit in index.search(vectors[:1], k=5)[0]]]
    if what == "change":
        index.delete(["0"])
        found.append([hit.id for hit in index.search(vectors[:1], k=4)[0]])
    (folder / what).write_text(json.dumps(found))


def test_a_file_that_a_kill_has_cut_is_made_anew(tmp_path):
    """milvus-lite does not write the arrays that it searches in atomically; it can make them from its other files."""
    pytest.importorskip("milvus_lite", reason="the extra `milvus` is not installed")

    def say(what: str) -> list[list[str]]:
        process = forks.Process(target=cut, args=(tmp_path, what), daemon=True)
        process.start()
        process.join(60)
        assert process.exitcode == 0, what
        return json.loads((tmp_path / what).read_text())

    (found,) = say("make")
    files = list(tmp_path.rglob("*.flat.idx"))
    assert files
    for number, file in enumerate(files):
        content = file.read_bytes()
        file.write_bytes(content[: (0, 128, len(content) - 1)[number % 3]])
    assert say("look") == [found]
    for file in tmp_path.rglob("*.flat.idx"):
        file.write_bytes(b"")
    first, after = say("change")
    assert first == found
    assert "0" not in after
