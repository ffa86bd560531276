"""A folder is embedded block by block, by one process or by several, and loaded into an index."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import partial

import numpy as np
import pytest
import torch

import proxymetric as pm
from proxymetric.search import folder_sync, from_parquet, image_blocks
from proxymetric.search.embedding_blocks import embed_blocks, read_shard
from proxymetric.search.image_blocks import block_files
from proxymetric.search.parquet import DamagedParquet, Facts, read_facts, read_items, write_items
from terminal import bytes_of, proxymetric, refused

pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")

SIZE = 10
"""images of a block, less than a batch; the last of four blocks has 2"""
embed = partial(embed_blocks, block=SIZE)


@pytest.fixture(scope="module")
def model(finished):
    return pm.load(finished, device="cpu")


@pytest.fixture(scope="module")
def some(photos, tmp_path_factory):
    """Four classes of the `photos`: 32 images. Only read them."""
    folder = tmp_path_factory.mktemp("some")
    for number in range(4):
        shutil.copytree(photos / f"class{number}", folder / f"class{number}")
    return folder


@pytest.fixture(scope="module")
def blocks(some, model, tmp_path_factory):
    """The blocks of `some`, by one process. Only read them."""
    folder = tmp_path_factory.mktemp("blocks") / "blocks"
    done = embed(folder, some, model)
    assert (done.blocks, done.made, done.skipped, done.missing, done.images) == (4, 4, 0, 0, 32)
    return folder


@pytest.fixture
def copy(some, tmp_path):
    return shutil.copytree(some, tmp_path / "photos")


def test_shards_write_the_same_bytes_as_one_process(some, model, blocks, tmp_path):
    said = []
    done = [embed(tmp_path / "b", some, model, shard=f"{i}/3", say=said.append) for i in (2, 0, 1)]
    assert [(each.made, each.missing) for each in done] == [(1, 3), (2, 1), (1, 0)]
    assert bytes_of(tmp_path / "b") == bytes_of(blocks)
    assert said[:3] == [
        "to embed: 10 images in 1 of 1 blocks of shard 2/3",
        f"10 images in 1 of 4 blocks in {tmp_path / 'b'}: 1 made, 0 there before",
        "3 blocks are not there yet: those of other shards",
    ]


def test_a_slow_machine_writes_the_same_bytes(some, model, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_sync, "PART_SECONDS", 0.0)
    monkeypatch.setattr(image_blocks, "batch_of", lambda model: 5)
    embed(tmp_path / "b", some, model)
    monkeypatch.setattr(folder_sync, "PART_SECONDS", 60.0)
    embed(tmp_path / "c", some, model)
    assert bytes_of(tmp_path / "b") == bytes_of(tmp_path / "c")


def test_blocks_hold_every_image_once_with_the_vectors_of_the_model(some, model, blocks):
    batches = [batch for file in block_files(blocks) for batch in read_items(file, read_facts(file))]
    ids = [item for batch in batches for item in batch.ids]
    assert ids == sorted(path.relative_to(some).as_posix() for path in some.rglob("*.png"))
    vectors = np.concatenate([batch.vectors for batch in batches])
    expected = model.embed([some / item for item in ids]).numpy()
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert [label for batch in batches for label in batch.labels] == [item.split("/")[0] for item in ids]
    assert all(picture.startswith(b"\xff\xd8") for batch in batches for picture in batch.thumbnails)


def test_what_is_there_is_skipped_and_what_was_killed_is_made_again(some, model, blocks, tmp_path):
    def stop(done, total):
        if done >= SIZE + 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed(tmp_path / "b", some, model, progress=stop)
    assert [file.name for file in block_files(tmp_path / "b")] == ["block-00000-of-00004.parquet"]
    leftover = tmp_path / "b" / ".block-00001-of-00004.parquet.7.part"
    leftover.write_text("half a block of a process that was killed")
    done = []
    result = embed(tmp_path / "b", some, model, progress=lambda number, total: done.append((number, total)))
    assert (result.made, result.skipped, result.images) == (3, 1, 32)
    assert (done[0], done[-1]) == ((0, 22), (22, 22))
    assert bytes_of(tmp_path / "b") == bytes_of(blocks)
    assert embed(tmp_path / "b", some, model).skipped == 4


def flip_in_a_thumbnail(file):
    content = bytearray(file.read_bytes())
    content[content.index(b"JFIF")] ^= 1
    file.write_bytes(content)


def test_a_damaged_block_and_one_of_changed_images_are_made_again(copy, model, tmp_path):
    embed(tmp_path / "b", copy, model)
    first, second, third, _ = block_files(tmp_path / "b")
    flip_in_a_thumbnail(first)
    third.write_bytes(third.read_bytes()[:-5])
    os.utime(copy / "class1" / "5.png", ns=(1, 1))
    before, said = second.read_bytes(), []
    result = embed(tmp_path / "b", copy, model, say=said.append)
    assert (result.made, result.skipped) == (3, 1)
    assert [sentence.split(":")[0] for sentence in said[:3]] == [
        "block 0 of 4 is made again", "block 1 of 4 is made again", "block 2 of 4 is made again",
    ]  # fmt: skip
    assert (str(first) in said[0], "its images have changed" in said[1], str(third) in said[2]) == (True, True, True)
    assert second.read_bytes() != before
    assert embed(tmp_path / "b", copy, model).skipped == 4


def test_an_image_that_cannot_be_read_is_named_and_not_missing(copy, model, tmp_path):
    (copy / "class0" / "bad.png").write_text("no image")
    said, counts = [], []
    for _ in range(2):
        result = embed(tmp_path / "b", copy, model, say=said.append)
        counts.append((result.made, result.skipped, result.images, list(result.bad)))
    assert counts == [(4, 0, 32, ["class0/bad.png"]), (0, 4, 32, ["class0/bad.png"])]
    assert sum("left out, cannot be read" in sentence and "bad.png" in sentence for sentence in said) == 2
    index = pm.Index.from_parquet(tmp_path / "a.index", tmp_path / "b", map="none")
    assert (len(index), list(index.changed.bad)) == (32, ["class0/bad.png"])


def test_blocks_of_another_model_or_list_and_other_files_are_refused(copy, model, blocks, tmp_path):
    folder = shutil.copytree(blocks, tmp_path / "b")
    with pytest.raises(ValueError, match=r"made by the model .*, expected blocks of one model"):
        embed(folder, copy, model.cut_to(4, warn=False))
    with pytest.raises(ValueError, match=r"a block of 32 images in blocks of 10 .*expected blocks of 32 images in bl"):
        embed_blocks(folder, copy, model, block=16)
    with pytest.raises(ValueError, match="expected blocks of 32 images in blocks of 16"):
        embed_blocks(folder, copy, model, block=16, shard="1/2")
    (copy / "class0" / "7.png").rename(copy / "class0" / "new.png")
    with pytest.raises(ValueError, match="use another folder for another list"):
        embed(folder, copy, model)
    (folder / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"which holds notes\.txt"):
        embed(folder, copy, model)
    shutil.rmtree(copy / "class1")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="which is a file"):
        embed(tmp_path / "file", copy, model)


def test_a_folder_that_a_machine_lacks_makes_no_block(copy, model, tmp_path):
    def without_images(done, total):
        for path in copy.rglob("*.png"):
            path.unlink()

    with pytest.raises(ValueError, match="where no image of block 0 of 4 is there"):
        embed(tmp_path / "b", copy, model, progress=without_images)
    assert block_files(tmp_path / "b") == []


def test_an_index_of_the_blocks_is_the_index_of_the_folder(some, model, blocks, tmp_path):
    index = pm.Index.from_parquet(tmp_path / "a.index", blocks, map="pca")
    assert (index.changed.added, index.changed.unchanged) == (32, 0)
    built = pm.Index.build(tmp_path / "b.index", some, model, map="pca")
    assert (index.ids, index.labels, index.stamps()) == (built.ids, built.labels, built.stamps())
    torch.testing.assert_close(index.vectors, built.vectors)
    torch.testing.assert_close(index.points, built.points)
    same = ("model", "run", "photos", "layout", "count", "added", "vectors", "columns")
    assert [getattr(index.manifest, name) for name in same] == [getattr(built.manifest, name) for name in same]
    assert index.thumbnail("class2/3.png") == built.thumbnail("class2/3.png")
    done = []
    pm.Index.build(tmp_path / "a.index", some, model, progress=lambda number, total: done.append(total))
    assert done == [], "no image is embedded again"
    again = pm.Index.from_parquet(tmp_path / "a.index", blocks)
    assert (again.changed.added, again.changed.updated, again.changed.unchanged) == (0, 0, 32)


def test_a_load_that_was_killed_goes_on(some, blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(from_parquet, "CHUNK_BYTES", 1)
    out = tmp_path / "a.index"

    def stop(done, total):
        if done == 2 * SIZE:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pm.Index.from_parquet(out, blocks, map="pca", vectors="int8", progress=stop)
    partial_index = pm.Index.open(out)
    assert (len(partial_index), partial_index.points) == (2 * SIZE, None)
    read = []
    monkeypatch.setattr(from_parquet, "read_items", lambda *args: (read.append(args[0].name), read_items(*args))[1])
    index = pm.Index.from_parquet(out, blocks)
    assert read == ["block-00002-of-00004.parquet", "block-00003-of-00004.parquet"]
    assert (index.changed.added, index.changed.unchanged) == (32 - 2 * SIZE, 2 * SIZE)
    assert (index.manifest.vectors["kind"], index.manifest.map["method"]) == ("int8", "pca"), "as was asked for first"
    assert (len(index), len(set(index.ids)), index.points.shape) == (32, 32, (32, 2))
    assert not (out / from_parquet.CHOICES).exists()
    index.verify()


def test_an_item_with_another_stamp_keeps_what_was_said_about_it(copy, model, tmp_path):
    embed(tmp_path / "b", copy, model)
    index = pm.Index.from_parquet(tmp_path / "a.index", tmp_path / "b", map="none")
    index.update(["class3/0.png"], labels=["wren"], metadata=[{"shop": "Ulm"}])
    shutil.copy(copy / "class2" / "0.png", copy / "class3" / "0.png")
    embed(tmp_path / "b", copy, model)
    index = pm.Index.from_parquet(tmp_path / "a.index", tmp_path / "b")
    assert (index.changed.updated, index.changed.unchanged) == (1, 31)
    assert (index["class3/0.png"].label, index["class3/0.png"].metadata) == ("wren", {"shop": "Ulm"})
    torch.testing.assert_close(index.vector("class3/0.png"), index.vector("class2/0.png"))


def test_what_cannot_be_loaded_is_named(some, model, blocks, tmp_path):
    folder, out = shutil.copytree(blocks, tmp_path / "b"), tmp_path / "a.index"
    first, second, third, last = block_files(folder)
    second.unlink()
    with pytest.raises(ValueError, match="where block 1 of 4 is missing; expected all of 0 to 3"):
        pm.Index.from_parquet(out, folder)
    embed(folder, some, model)
    facts = read_facts(third)
    write_items(third, Facts(**vars(facts) | {"model": "another"}), read_items(third, facts))
    with pytest.raises(ValueError, match=r"made by the model another .*expected blocks of one model"):
        pm.Index.from_parquet(out, folder)
    shutil.copy(blocks / third.name, third)
    flip_in_a_thumbnail(last)
    with pytest.raises(ValueError, match=r"got .*block-00003-of-00004\.parquet, which is damaged"):
        pm.Index.from_parquet(out, folder, map="none")
    assert embed(folder, some, model).made == 1
    assert len(pm.Index.from_parquet(out, folder)) == 32
    pm.Index.create(tmp_path / "other.index", dim=3, model="m")
    with pytest.raises(ValueError, match="expected blocks of that model, or another --out"):
        pm.Index.from_parquet(tmp_path / "other.index", folder)
    with pytest.raises(ValueError, match="which does not exist"):
        pm.Index.from_parquet(out, tmp_path / "gone")
    assert first.exists()


def test_images_of_two_folders_are_not_mixed(some, model, blocks, copy, tmp_path):
    shutil.rmtree(copy / "class1")
    (copy / "class0" / "0.png").rename(copy / "class0" / "other.png")
    pm.Index.build(tmp_path / "a.index", copy, model, map="none")
    with pytest.raises(ValueError, match=r"whose images such as class0/other\.png are not among them"):
        pm.Index.from_parquet(tmp_path / "a.index", blocks)


def test_a_flipped_bit_is_noticed_or_changes_nothing(blocks, tmp_path):
    file = block_files(blocks)[3]
    content, facts = file.read_bytes(), read_facts(file)
    (expected,) = read_items(file, facts)
    random = np.random.default_rng(5)
    noticed = 0
    for place in random.integers(0, 8 * len(content), 40):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        (tmp_path / "a.parquet").write_bytes(damaged)
        try:
            facts_there = read_facts(tmp_path / "a.parquet")
            (batch,) = read_items(tmp_path / "a.parquet", facts_there)
        except DamagedParquet:
            noticed += 1
        else:
            assert (facts_there, batch[0], batch[2:]) == (facts, expected[0], expected[2:])
            np.testing.assert_array_equal(batch.vectors, expected.vectors)
    assert noticed > 20


def test_the_verbs(finished, some, blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for shard in ("0/2", "1/2"):
        answer = proxymetric("embed", finished, some, "--parquet", "b", "--shard", shard, "--block", SIZE)
        assert answer.code == 0, answer
    assert bytes_of(tmp_path / "b") == bytes_of(blocks)
    assert answer.out == "12 images in 2 of 4 blocks in b: 2 made, 0 there before\n"
    answer = proxymetric("index", "--from-parquet", "b", "--out", "a.index", "--map", "none")
    assert answer.code == 0, answer
    assert "32 images in a.index: 32 added" in answer.out
    answer = proxymetric("index", finished, some, "--out", "a.index", "--parquet", "all.parquet")
    assert "to embed: 0 of 32 images" in answer.err, answer
    assert proxymetric("index", "--from-parquet", "all.parquet", "--out", "b.index", "--map", "none").code == 0
    first, second = pm.Index("a.index"), pm.Index("b.index")
    assert (first.ids, first.labels, first.stamps()) == (second.ids, second.labels, second.stamps())
    assert torch.equal(first.vectors, second.vectors)
    assert first.thumbnail("class2/3.png") == second.thumbnail("class2/3.png")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--shard", "4/3", "--parquet", "b"), "shard: got '4/3', expected one of 0/3 to 2/3: shards count from 0"),
        (("--shard", "a", "--parquet", "b"), "shard: got 'a', expected i/n"),
        (("--shard", "0/3"), "--shard: got it without --parquet"),
        (("--block", "7"), "--block: got it without --parquet"),
        (("--ray", "auto"), "--ray: got it without --parquet"),
        (("--parquet", "b", "--out", "a.safetensors"), "--out: got it with --parquet"),
        (("--parquet", "b", "--block", "0"), "block: got 0, expected a whole number of at least 1"),
        (("--parquet", "b", "--shard", "0/2", "--ray", "auto"), "shard: got 0/2 and a Ray cluster"),
    ],
)
def test_wrong_words_are_refused(words, sentence, some, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(proxymetric("embed", tmp_path / "no-run", some, *words), sentence)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("IMAGES", "--from-parquet", "b"), "IMAGES: got it with --from-parquet"),
        (("--from-parquet", "b", "--rebuild"), "--rebuild: got it with --from-parquet"),
        ((), "IMAGES: got none, expected a folder of images, or --from-parquet DIR"),
        (("--from-parquet", "gone"), "parquet: got gone, which does not exist"),
    ],
)
def test_wrong_words_about_loading_are_refused(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(proxymetric("index", *words), sentence)


def test_a_shard_is_counted_from_zero():
    assert [read_shard(text) for text in ("0/1", "2/3")] == [(0, 1), (2, 3)]
    for text in ("1/1", "-1/3", "1", "1/2/3", "0/0", "one/2", ""):
        with pytest.raises(ValueError, match="shard: got"):
            read_shard(text)


def test_a_cluster_that_is_not_there_is_refused_at_once(some, tmp_path):
    if importlib.util.find_spec("ray") is None:
        with pytest.raises(ValueError, match="ray: ray is not installed; expected the extra `ray`"):
            embed(tmp_path / "b", some, print, ray="auto")
        return
    with pytest.raises(ValueError, match=r"ray: got 127\.0\.0\.1:1, which does not answer"):
        embed(tmp_path / "b", some, print, ray="127.0.0.1:1")
    with pytest.raises(ValueError, match="expected a function that each worker calls"):
        embed(tmp_path / "b", some, "runs/birds", ray="127.0.0.1:1")
