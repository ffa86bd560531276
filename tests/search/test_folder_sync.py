"""An index follows its folder: new, changed and deleted files, bad files, and kills at any moment."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

import proxymetric as pm
from proxymetric.data import open_data
from proxymetric.search import Index, folder_sync
from proxymetric.search.folder_sync import open_to_rebuild, sync
from proxymetric.search.manifest import FILE, Manifest
from proxymetric.search.metadata_file import read_metadata
from proxymetric.search.storage.state import all_files
from terminal import bytes_of, finished_run, proxymetric
from training_runs import forks


@pytest.fixture(scope="module")
def run(finished):
    return finished


@pytest.fixture(scope="module")
def other_run(photos, tmp_path_factory):
    return finished_run(photos, tmp_path_factory.mktemp("run") / "other", "--dim", 6, "--seed", 5)


@pytest.fixture(scope="module")
def model(run):
    return pm.load(run, device="cpu")


@pytest.fixture
def folder(photos, tmp_path):
    return Path(shutil.copytree(photos, tmp_path / "photos"))


@pytest.fixture
def index(model, folder, tmp_path):
    index = Index.create(tmp_path / "a.index", model.dim, model)
    sync(index, model, folder)
    return index


def counts(changed):
    return changed.added, changed.updated, changed.deleted, changed.unchanged


def test_an_index_holds_what_the_model_makes_of_the_folder(index, model, folder):
    files = sorted(folder.rglob("*.png"), key=lambda file: file.relative_to(folder).as_posix())
    assert index.ids == [file.relative_to(folder).as_posix() for file in files]
    assert index.labels == [file.parent.name for file in files]
    torch.testing.assert_close(index.vectors, model.embed(files), atol=1e-5, rtol=0)
    assert index.thumbnail("class0/0.png")[:3] == b"\xff\xd8\xff"


def test_only_what_changed_is_embedded(index, model, folder):
    embedded = []
    assert counts(sync(index, model, folder, progress=lambda done, total: embedded.append(total))) == (0, 0, 0, 80)
    assert embedded == []
    generation = index.manifest.generation
    sync(index, model, folder)
    assert index.manifest.generation == generation, "nothing changed, nothing is written"
    (folder / "class0" / "0.png").unlink()
    shutil.rmtree(folder / "class9")
    (folder / "new").mkdir()
    shutil.copy(folder / "class3" / "1.png", folder / "new" / "1.png")
    Image.new("RGB", (20, 30), "red").save(folder / "class1" / "1.png")
    before = index.vector("class1/1.png")
    changed = sync(index, model, folder, progress=lambda done, total: embedded.append(total))
    assert counts(changed) == (1, 1, 9, 70)
    assert set(embedded) == {2}
    assert "class0/0.png" not in index
    assert index["new/1.png"].label == "new"
    torch.testing.assert_close(index.vector("new/1.png"), index.vector("class3/1.png"))
    assert (index.vector("class1/1.png") - before).norm() > 1e-3


def test_changes_one_by_one_give_the_same_index_as_one_rebuild(index, model, folder, tmp_path):
    (folder / "class0" / "0.png").unlink()
    sync(index, model, folder)
    shutil.copy(folder / "class3" / "1.png", folder / "class0" / "0.png")
    sync(index, model, folder)
    other = Index.create(tmp_path / "b.index", model.dim, model)
    sync(other, model, folder)
    for ours, theirs in zip(sorted(contents(index.folder)), sorted(contents(other.folder)), strict=True):
        assert (ours[0][:3], ours[1], ours[3]) == (theirs[0][:3], theirs[1], theirs[3])
        # The last bits of a vector depend on the number of images in its batch.
        torch.testing.assert_close(index.vector(ours[0].id), other.vector(ours[0].id), atol=1e-6, rtol=0)


def test_bad_files_are_named_and_drop_out(index, model, folder):
    (folder / "class0" / "0.png").write_text("no image")
    (folder / "class0" / "x.jpg").write_bytes(b"")
    (folder / "class1" / "1.png").write_bytes((folder / "class1" / "1.png").read_bytes()[:100])
    changed = sync(index, model, folder)
    assert counts(changed) == (0, 0, 2, 78)
    assert changed.bad.keys() == {"class0/0.png", "class0/x.jpg", "class1/1.png"}
    assert "class0/0.png" not in index
    for file in folder.rglob("*.png"):
        file.write_text("no image")
    with pytest.raises(ValueError, match=r"images: got .* with 81 images, none of which can be read"):
        sync(index, model, folder)
    assert len(index) == 78, "the index stays as it was"


def test_metadata_comes_from_a_table_without_embedding_again(index, model, folder, tmp_path):
    table = tmp_path / "items.csv"
    table.write_text("file;shop;price\nclass0/0.png;Ulm;3\nclass0/1.png;Bonn;\n")
    changed = sync(index, model, folder, metadata=read_metadata(table), progress=lambda *_: pytest.fail("embeds"))
    assert counts(changed) == (0, 2, 0, 78)
    assert index["class0/0.png"].metadata == {"shop": "Ulm", "price": "3"}
    assert [hit.id for hit in index.search(index.vectors[:1], where={"shop": "Bonn"})[0]] == ["class0/1.png"]
    Image.new("RGB", (20, 30), "red").save(folder / "class0" / "0.png")
    sync(index, model, folder)
    assert index["class0/0.png"].metadata == {"shop": "Ulm", "price": "3"}, "without a table, metadata stays"
    table.write_text("file\tprice\n")
    sync(index, model, folder, metadata=read_metadata(table))
    assert index.manifest.columns == []
    for content, said in (
        ("name\nx\n", "expected a column 'file'"),
        ("file,a\nx,1,2\n", "more cells than columns"),
        ('file,a\nx,"1\n' + "y" * 200_000, r"line \d+: got a row that cannot be read \(field larger .* quotation"),
        ("file," + "y" * 200_000, r"line \d+: got a row that cannot be read \(field larger .* quotation"),
    ):
        table.write_text(content)
        with pytest.raises(ValueError, match=said):
            read_metadata(table)


def test_another_model_is_refused_until_the_index_is_rebuilt(index, folder, other_run):
    other = pm.load(other_run, device="cpu")
    with pytest.raises(ValueError, match="were made by the model"):
        sync(index, other, folder)
    assert counts(sync(index, other, folder, rebuild=True)) == (0, 80, 0, 0)
    assert (index.dim, index.model) == (6, other.fingerprint())


def test_an_index_that_cannot_be_opened_can_be_rebuilt(index, model, folder):
    """As the error says; a file is damaged, then a file is gone."""
    expected = contents(index.folder)
    for pattern in ("vectors-*.float32", "items-*.sqlite"):
        (file,) = index.folder.glob(pattern)
        if pattern.startswith("vectors"):
            file.write_bytes(file.read_bytes()[:-1])
        else:
            file.unlink()
        with pytest.raises(ValueError, match=r"`proxymetric index --rebuild` makes (it|them) anew"):
            Index.open(index.folder)
        assert counts(sync(open_to_rebuild(Index, index.folder), model, folder, rebuild=True)) == (80, 0, 0, 0)
        assert contents(index.folder) == expected
    manifest = index.folder / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 3', '"format": 4'))
    with pytest.raises(ValueError, match="a later version of proxymetric wrote it"):
        open_to_rebuild(Index, index.folder)


def add_by_hand(index):
    """Two items that are no files of the folder."""
    index.add(
        ["wren/1.jpg", "z"],
        torch.eye(index.dim)[:2] + 0.1,
        labels=["wren", None],
        metadata=[{"shop": "Ulm"}, {}],
        thumbnails=[b"jpeg", None],
    )
    return [(index[item]._replace(row=0), index.thumbnail(item), index.vector(item)) for item in ("wren/1.jpg", "z")]


def assert_there(index, added):
    for item, thumbnail, vector in added:
        assert (index[item.id]._replace(row=0), index.thumbnail(item.id)) == (item, thumbnail)
        torch.testing.assert_close(index.vector(item.id), vector, atol=0, rtol=0)
        assert index.search(vector[None], k=1)[0][0].id == item.id
    index.verify()


def test_a_rebuild_keeps_what_is_no_file(index, model, folder, tmp_path):
    added = add_by_hand(index)
    (folder / "class0" / "0.png").unlink()
    assert counts(sync(index, model, folder, rebuild=True)) == (0, 79, 1, 2)
    assert_there(Index.open(index.folder), added)
    # A table that does not name them leaves them their metadata, in a rebuild and without one.
    for rebuild in (False, True):
        sync(index, model, folder, rebuild=rebuild, metadata={"class0/1.png": {"shop": "Bonn"}})
        assert_there(index, added)
        assert index["class0/1.png"].metadata == {"shop": "Bonn"}
    changed = sync(index, model, folder, rebuild=True, metadata={"wren/1.jpg": {"shop": "Kiel"}})
    assert counts(changed) == (0, 80, 0, 1)
    assert index["wren/1.jpg"].metadata == {"shop": "Kiel"}
    assert counts(sync(index, model, folder, rebuild=True, drop_added=True)) == (0, 79, 2, 0)


def test_a_rebuild_with_larger_numbers_keeps_what_is_no_file(index, model, folder):
    index.change([], vectors={"kind": "int8"})
    added = add_by_hand(index)
    sync(index, model, folder, rebuild=True, facts={"vectors": {"kind": "float32"}})
    assert_there(index, added)


def test_a_photo_that_was_added_from_the_folder_is_embedded_again(index, folder, other_run):
    """Its id is its path, so that another model can make its vector too."""
    index.delete(["class0/0.png"])
    index.add(["class0/0.png"], torch.ones(1, index.dim), labels=["wren"])
    other = pm.load(other_run, device="cpu")
    assert counts(sync(index, other, folder, rebuild=True)) == (0, 80, 0, 0)
    torch.testing.assert_close(
        index.vector("class0/0.png"), other.embed([folder / "class0" / "0.png"])[0], atol=1e-5, rtol=0
    )


def test_another_model_does_not_drop_what_is_no_file_unless_told(index, folder, other_run):
    add_by_hand(index)
    before, other = bytes_of(index.folder), pm.load(other_run, device="cpu")
    said = r"has 2 items without a file, such as 'wren/1.jpg' of the class 'wren', that .*; expected .* --drop-added"
    with pytest.raises(ValueError, match=said):
        sync(index, other, folder, rebuild=True)
    assert bytes_of(index.folder) == before
    assert counts(sync(index, other, folder, rebuild=True, drop_added=True)) == (0, 80, 2, 0)
    assert index.dim == 6


def test_damaged_vectors_of_what_is_no_file_are_not_kept(index, model, folder):
    """A changed bit, which only the checksum notices."""
    add_by_hand(index)
    file = next(index.folder.glob("vectors-*.float32"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    before = bytes_of(index.folder)
    with pytest.raises(ValueError, match=r"vectors-\d+\.float32 is .* 2 items without a file, such as 'wren/1\.jpg'"):
        sync(index, model, folder, rebuild=True)
    assert bytes_of(index.folder) == before
    assert counts(sync(index, model, folder, rebuild=True, drop_added=True)) == (0, 80, 2, 0)


def test_an_index_that_cannot_be_opened_keeps_what_is_no_file(model, folder, tmp_path):
    index = Index.create(tmp_path / "a.index", model.dim, model, map="pca")
    sync(index, model, folder)
    added = add_by_hand(index)
    points = next(index.folder.glob("map-*.npy"))
    points.write_bytes(points.read_bytes()[:-1])
    opened = open_to_rebuild(Index, index.folder)
    assert_there(opened, added)
    assert counts(sync(opened, model, folder, rebuild=True)) == (0, 80, 0, 2)
    assert_there(opened, added)
    vectors = next(index.folder.glob("vectors-*.float32"))
    vectors.write_bytes(vectors.read_bytes()[:-1])
    before = bytes_of(index.folder)
    with pytest.raises(ValueError, match=r"float32 is damaged or missing, .* 2 items without .* --drop-added"):
        open_to_rebuild(Index, index.folder)
    assert bytes_of(index.folder) == before
    assert len(open_to_rebuild(Index, index.folder, drop_added=True)) == 0


def test_what_was_embedded_is_saved_every_few_seconds(model, folder, tmp_path, monkeypatch):
    """Also if a single forward pass of 64 images takes longer: on a CPU a pass has few images."""
    assert folder_sync.PART_SECONDS <= 10
    monkeypatch.setattr(folder_sync, "PART_SECONDS", 0.0)
    index = Index.create(tmp_path / "a.index", model.dim, model)

    def stop(done: int, total: int) -> None:
        if done > 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync(index, model, folder, progress=stop)
    assert sync(index, model, folder).continued == 16
    assert len(index) == 80


def contents(folder: Path) -> list:
    """All that an index says about its items; its files are whole."""
    index = Index.open(folder)
    index.verify()
    return [
        (index[item], index.thumbnail(item), index.vector(item).numpy().tobytes(), index.stamps()[item])
        for item in index.ids
    ]


def files_of(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


def _index(words: list[str], folder: str, fatal: int | str, count_file: str, after: str) -> None:
    """Run the command line; kill this process at its `fatal`-th file operation in the index, or at one on a file.

    `after` is in the name of a file that must have been used before.
    """
    torch.set_num_threads(1)
    seen, is_after = 0, False

    def watch(event: str, arguments: tuple) -> None:
        nonlocal seen, is_after
        if event not in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "sqlite3.connect"):
            return
        if isinstance(arguments[0], str | Path) and str(arguments[0]).startswith(folder):
            seen += 1
            is_after = is_after or after in str(arguments[0])
            if seen == fatal or (isinstance(fatal, str) and is_after and fatal in str(arguments[0])):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    sys.argv = ["proxymetric", *words]
    from proxymetric.cli import main

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            main()
        finally:  # it ends by SystemExit
            Path(count_file).write_text(str(seen))


def killed_at(words: list[str], folder: Path, fatal: int | str, count_file: Path, after: str = "") -> int:
    """The exit code of a process that is killed at a file operation; 0 if it ends before."""
    process = forks.Process(target=_index, args=(words, str(folder), fatal, str(count_file), after), daemon=True)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("change", ["index", "update", "rebuild"])
def test_killed_at_any_moment_it_is_whole_and_continues(change, run, other_run, folder, tmp_path):
    """Seven moments for each of three changes: the index is as before or after the change, and continues to after."""
    for file in [*folder.rglob("[3-7].png")]:
        file.unlink()  # fewer images, faster
    target, model = tmp_path / "a.index", other_run if change == "rebuild" else run
    words = [str(word) for word in ("index", model, folder, "--out", target, "--map", "pca", "--device", "cpu")]
    words += ["--rebuild"] if change == "rebuild" else []
    start = tmp_path / "start"
    if change != "index":
        answer = proxymetric("index", run, folder, "--out", target, "--map", "pca", "--device", "cpu")
        assert answer.code == 0, answer
        (folder / "class0" / "0.png").unlink()
        shutil.copy(folder / "class3" / "1.png", folder / "class0" / "new.png")
        Image.new("RGB", (20, 30), "red").save(folder / "class1" / "1.png")
        os.rename(target, start)
    before = contents(start) if start.exists() else []

    def restore() -> None:
        shutil.rmtree(target, ignore_errors=True)
        if start.exists():
            shutil.copytree(start, target)

    restore()
    assert killed_at(words, target, -1, tmp_path / "count") == 0
    after, operations = contents(target), int((tmp_path / "count").read_text())
    assert before != after
    states = []
    for moment in range(7):
        restore()
        fatal = 1 + moment * (operations - 1) // 6
        assert killed_at(words, target, fatal, tmp_path / "count") == -signal.SIGKILL, f"at {fatal} of {operations}"
        is_there = (target / "manifest.json").exists()
        state = contents(target) if is_there else []
        assert state in (before, after), f"killed at operation {fatal} of {operations}"
        states.append(state == after)
        assert killed_at(words, target, -1, tmp_path / "count") == 0
        assert contents(target) == after
        expected = {*all_files(Manifest.read(target)), "vectors.png"}
        assert files_of(target) == expected, "nothing is left over"
    assert states == sorted(states), "before, and from some moment on after"


def test_what_a_killed_process_embedded_is_not_embedded_again(run, folder, tmp_path):
    target = tmp_path / "a.index"
    words = [str(word) for word in ("index", run, folder, "--out", target, "--map", "none", "--device", "cpu")]
    # When the state after the empty one is written, everything is embedded.
    assert killed_at(words, target, f".{FILE}.", tmp_path / "count", after="staging") == -signal.SIGKILL
    answer = proxymetric(*words)
    assert answer.code == 0, answer
    assert "continued: 80 images were embedded before" in answer.err
    assert not (target / "staging").exists()


def divided(photos, place):
    """A copy of the photos with classes 0 to 5 in train/ and the others in test/."""
    for number in range(10):
        part = "train" if number < 6 else "test"
        shutil.copytree(photos / f"class{number}", place / part / f"class{number}")
    return place


def test_the_classes_of_a_divided_folder_are_those_of_training(model, photos, tmp_path):
    folder = divided(photos, tmp_path / "divided")
    for layout, place in (("auto", 1), ("folder", 0), ("nested", 1)):
        index = Index.create(tmp_path / f"{layout}.index", model.dim, model)
        sync(index, model, folder, layout=layout)
        assert index.labels == [item.split("/")[place] for item in index.ids], layout
        assert Index(index.folder).manifest.layout == layout


def test_classes_that_are_called_train_and_test_by_chance(photos, tmp_path):
    for number, name in enumerate(("train", "test", "wren")):
        shutil.copytree(photos / f"class{number}", tmp_path / "photos" / name)
    assert {photo.label for photo in folder_sync.list_photos(tmp_path / "photos")} == {"train", "test", "wren"}


def test_query_gallery_and_distractors(tmp_path):
    class_of = folder_sync.class_rule(tmp_path, "auto")
    assert class_of(Path("a/b/1.jpg")) == "a"
    for place in ("train/a", "test/query/b", "test/gallery/b", "distractor/x"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / place / "1.png")
    class_of = folder_sync.class_rule(tmp_path, "auto")
    paths = ("train/a/1.png", "test/query/b/1.png", "test/gallery/b/1.png", "distractor/x/1.png", "1.png")
    assert [class_of(Path(path)) for path in paths] == ["a", "b", "b", None, None]


def test_another_layout_renames_the_classes_that_folders_gave(model, photos, tmp_path):
    folder = divided(photos, tmp_path / "divided")
    index = Index.create(tmp_path / "a.index", model.dim, model)
    item = "test/class7/0.png"
    sync(index, model, folder, layout="folder", metadata={item: {"class": "own", "shop": "Ulm"}})
    assert (index[item].label, index["test/class7/1.png"].label) == ("own", "test")
    embedded = []
    changed = sync(index, model, folder, layout="auto", progress=lambda done, total: embedded.append(total))
    assert counts(changed) == (0, 79, 0, 1)
    assert embedded == [], "names are changed without embedding"
    assert (index[item].label, index["test/class7/1.png"].label) == ("own", "class7")
    assert index[item].metadata == {"shop": "Ulm"}
    assert counts(sync(index, model, folder)) == (0, 0, 0, 80), "the index remembers its layout"
    sync(index, model, folder, layout="folder", rebuild=True)
    assert (index[item].label, index["test/class7/1.png"].label) == ("own", "test")


def test_an_index_keeps_its_classes_until_told(model, photos, tmp_path):
    folder = divided(photos, tmp_path / "divided")
    index = Index.create(tmp_path / "a.index", model.dim, model)
    sync(index, model, folder, layout="folder")
    (folder / "test" / "new").mkdir()
    shutil.copy(folder / "test" / "class7" / "0.png", folder / "test" / "new" / "0.png")
    sync(index, model, folder)
    assert set(index.labels) == {"train", "test"}
    sync(index, model, folder, layout="auto")
    assert set(index.labels) == {f"class{number}" for number in range(10)} | {"new"}


def test_what_was_embedded_before_a_kill_gets_the_classes_of_the_last_call(model, photos, tmp_path, monkeypatch):
    folder = divided(photos, tmp_path / "divided")
    index = Index.create(tmp_path / "a.index", model.dim, model)
    monkeypatch.setattr(folder_sync, "PART_SECONDS", 0.0)

    def stop(done, total):
        if done > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sync(index, model, folder, layout="folder", progress=stop)
    assert sync(index, model, folder, layout="auto").continued > 0
    assert index.labels == [item.split("/")[1] for item in index.ids]


def test_files_that_are_no_files_any_more_are_named(model, folder, tmp_path):
    (folder / "class0" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    index, unlisted = Index.create(tmp_path / "a.index", model.dim, model), {}
    sync(index, model, folder, on_unlisted=unlisted.__setitem__)
    assert list(unlisted) == [str(folder / "class0" / "gone.png")]
    assert len(index) == 80


def cub(photos, place):
    """A copy of the photos in the layout of CUB-200-2011, with classes called "Bird 1" to 10; new.png is not listed."""
    files = sorted(photos.rglob("*.png"))
    for file in files:
        number = int(file.parent.name.removeprefix("class")) + 1
        (place / "images" / f"{number:03}.Bird").mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place / "images" / f"{number:03}.Bird" / file.name)
    shutil.copy(files[0], place / "images" / "001.Bird" / "new.png")
    listed = [file for file in sorted((place / "images").rglob("*.png")) if file.name != "new.png"]
    lists = {
        "classes.txt": [f"Bird {number}" for number in range(1, 11)],
        "images.txt": [file.relative_to(place / "images").as_posix() for file in listed],
        "image_class_labels.txt": [int(file.parent.name[:3]) for file in listed],
    }
    for name, rows in lists.items():
        (place / name).write_text("".join(f"{number} {row}\n" for number, row in enumerate(rows, 1)))
    return place


def test_the_classes_of_a_benchmark_are_those_of_training(model, photos, tmp_path):
    """They were all called "images"."""
    folder = cub(photos, tmp_path / "CUB_200_2011")
    index = Index.create(tmp_path / "a.index", model.dim, model)
    sync(index, model, folder)
    images = open_data(folder)
    read = {path.relative_to(folder).as_posix(): images.classes[c] for path, c in zip(images.paths, images.labels)}
    assert len(read) == 80
    assert dict(zip(index.ids, index.labels)) == read | {"images/001.Bird/new.png": None}
    assert set(index.classes) == {f"Bird {number}" for number in range(1, 11)}
    assert Index(index.folder).manifest.layout == "cub"
    sync(index, model, tmp_path)
    assert index["CUB_200_2011/images/002.Bird/0.png"].label == "Bird 2", "found in the folder above it"


def test_an_index_that_took_a_benchmark_for_folders_gets_its_classes(model, photos, tmp_path):
    folder = cub(photos, tmp_path / "birds")
    index = Index.create(tmp_path / "a.index", model.dim, model)
    sync(index, model, folder, layout="folder")
    assert set(index.labels) == {"images"}
    sync(index, model, folder)
    assert set(index.labels) == {"images"}, "until told"
    assert counts(sync(index, model, folder, layout="auto")) == (0, 81, 0, 0)
    assert index["images/010.Bird/0.png"].label == "Bird 10"


def test_images_of_a_benchmark_drop_out_as_others_do(model, photos, tmp_path):
    folder = cub(photos, tmp_path / "birds")
    index = Index.create(tmp_path / "a.index", model.dim, model)
    sync(index, model, folder)
    (folder / "images" / "003.Bird" / "0.png").unlink()
    assert counts(sync(index, model, folder)) == (0, 0, 1, 80)
    (folder / "classes.txt").unlink()
    with pytest.raises(ValueError, match=r"expected the 200 of CUB-200-2011.*; --layout folder takes"):
        sync(index, model, folder)
    sync(index, model, folder, layout="folder")
    assert index["images/003.Bird/1.png"].label == "Bird 3", "what its folder was called before is not known any more"


def test_several_benchmarks_in_a_folder_are_read_by_folders(photos, tmp_path):
    """Training asks which one; an index has them all."""
    cub(photos, tmp_path / "CUB_200_2011")
    products = tmp_path / "Stanford_Online_Products"
    products.mkdir()
    for part in ("train", "test"):
        (products / f"Ebay_{part}.txt").write_text("image_id class_id super_class_id path\n")
    with pytest.raises(ValueError, match="expected one of these folders"):
        open_data(tmp_path)
    assert folder_sync.layout_of(tmp_path) == "auto"
    assert folder_sync.class_rule(tmp_path)(Path("CUB_200_2011/images/001.Bird/0.png")) == "CUB_200_2011"


@pytest.mark.parametrize("layout", ["sop", "in-shop", "inaturalist", "omniglot"])
def test_other_benchmarks(layout, tmp_path):
    rows = {"bicycle_final/1_0.JPG": 1, "bicycle_final/2_0.JPG": 2, "cabinet_final/3_0.JPG": 3, "chair_final/4.JPG": 4}
    if layout == "omniglot":
        rows = {f"images_{part}/Greek/{name}/1.png": 0 for part in ("background", "evaluation") for name in "abc"}
    if layout == "inaturalist":
        rows = {f"train_val2018/Aves/{number}/1.jpg": number for number in range(4)}
    for file in rows:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / file)
    train, test = list(rows)[:2], list(rows)[2:]
    lists = {
        "sop": {
            f"Ebay_{part}.txt": [
                "image_id class_id super_class_id path",
                *(f"1 {rows[file]} 1 {file}" for file in files),
            ]
            for part, files in (("train", train), ("test", test))
        },
        "in-shop": {
            "list_eval_partition.txt": ["6", "image_name item_id evaluation_status"]
            + [
                f"{file} id_{number} {status}"
                for (file, number), status in zip(rows.items(), ["train"] * 2 + ["query"] * 2)
            ]
            + [f"gone_{number}.jpg id_{number} gallery" for number in (3, 4)]
        },
        "inaturalist": {"Inaturalist_train_set1.txt": train, "Inaturalist_test_set1.txt": test},
        "omniglot": {},
    }[layout]
    for name, content in lists.items():
        (tmp_path / name).write_text("\n".join(content))
    assert folder_sync.layout_of(tmp_path) == layout
    if layout == "in-shop":
        with pytest.raises(ValueError, match="got 2 of 6 files that do not exist"):
            open_data(tmp_path)
        for number in (3, 4):
            Image.new("RGB", (8, 8)).save(tmp_path / f"gone_{number}.jpg")
    images = open_data(tmp_path)
    read = {path: images.classes[label] for path, label in zip(images.paths, images.labels)}
    assert len(read) >= 4
    assert {photo.path: photo.label for photo in folder_sync.list_photos(tmp_path, layout=layout)} == read
    images.paths[0].unlink()
    del read[images.paths[0]]
    assert {photo.path: photo.label for photo in folder_sync.list_photos(tmp_path, layout=layout)} == read
