"""A Ray cluster of two machines embeds what one process embeds, also when one of them is killed."""

from __future__ import annotations

import os
import threading
import time
from functools import partial
from pathlib import Path

import pytest

import proxymetric as pm
from proxymetric.search.embedding_blocks import embed_blocks
from proxymetric.search.image_blocks import block_files
from proxymetric.search.parquet import read_facts, read_stamps
from terminal import bytes_of, proxymetric, refused

pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra `ray` is not installed")

pytestmark = pytest.mark.server
MACHINE = {"num_cpus": 1, "object_store_memory": 80_000_000}
SIZE = 5
"""images of a block: 16 blocks"""


@pytest.fixture
def cluster(monkeypatch):
    """The first machine of a cluster, on this one."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(pm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    )
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=MACHINE | {"include_dashboard": False})
    yield made
    made.shutdown()


def stuck_on(machine: str, run: Path, log: Path):
    """Return a function that loads a model; on one machine it hangs in its second block, for which the other waits."""

    def load():
        import ray

        import proxymetric

        model = proxymetric.load(run, device="cpu")
        parts, here, blocks = model.parts, ray.get_runtime_context().get_node_id(), []

        def watched(images, **options):
            blocks.append(images)
            with open(log, "a") as file:
                file.write(f"{here} {images[0]}\n")
            while here == machine and len(blocks) == 2:
                time.sleep(1)
            while here != machine and log.read_text().count(machine) < 2:
                time.sleep(0.05)
            yield from parts(images, **options)

        model.parts = watched
        return model

    return load


def test_a_killed_machine_loses_no_image_and_changes_no_vector(cluster, finished, photos, tmp_path):
    plain = embed_blocks(tmp_path / "plain", photos, partial(pm.load, finished, device="cpu"), block=SIZE)
    lost = cluster.add_node(**MACHINE)
    log, said, kills = tmp_path / "log", [], []
    load = stuck_on(lost.node_id, finished, log)

    def kill() -> None:
        while not log.exists() or log.read_text().count(lost.node_id) < 2:
            time.sleep(0.05)
        kills.append(log.read_text().splitlines())
        cluster.remove_node(lost, allow_graceful=False)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    result = embed_blocks(tmp_path / "blocks", photos, load, block=SIZE, ray=cluster.address, say=said.append)
    thread.join(60)
    interrupted = [line.split()[1] for line in kills[0] if line.startswith(lost.node_id)][1]
    begun = [line.split()[1] for line in log.read_text().splitlines()]
    assert begun.count(interrupted) == 2, "its block was given to the other machine"
    assert len({*begun}) == 16
    assert (result.made, result.skipped, result.images, result.bad) == (plain.made, 0, 80, {})
    assert bytes_of(tmp_path / "blocks") == bytes_of(tmp_path / "plain"), "the same vectors, bit for bit"
    ids = [item for file in block_files(tmp_path / "blocks") for item in read_stamps(file, read_facts(file))]
    assert ids == sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    assert "2 machines; a worker has 1 thread" in said


def test_the_verb_and_what_it_refuses(cluster, finished, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(finished.parent)
    words = ("embed", finished.name, photos, "--device", "cpu", "--ray", cluster.address)
    answer = proxymetric(*words, "--parquet", tmp_path / "b", "--block", 40)
    assert answer.code == 0, answer
    assert answer.out == f"80 images in 2 of 2 blocks in {tmp_path / 'b'}: 2 made, 0 there before\n"
    answer = proxymetric(*words, "--parquet", tmp_path / "b", "--block", 40)
    assert answer.out == f"80 images in 2 of 2 blocks in {tmp_path / 'b'}: 0 made, 2 there before\n"
    refused(
        proxymetric(*words, "--parquet", tmp_path / "b", "--block", 50), "expected blocks of 80 images in blocks of 50"
    )
    refused(proxymetric("embed", "no-run", *words[2:], "--parquet", tmp_path / "c"), "no-run")
    with pytest.raises(ValueError, match="gpus: got 1 for a worker, expected at most 0"):
        embed_blocks(tmp_path / "c", photos, partial(pm.load, finished), ray=cluster.address, gpus=1)
    refused(
        proxymetric(*words[:-1], "127.0.0.1:1", "--parquet", tmp_path / "c"),
        "ray: got 127.0.0.1:1, which does not answer",
    )
    refused(proxymetric(*words[:-1], "nowhere:x", "--parquet", tmp_path / "c"), "ray: got 'nowhere:x'; expected 'auto'")
