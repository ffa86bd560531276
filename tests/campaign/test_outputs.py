"""No verb replaces or removes a file that it did not write."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from campaign_cases import check_sentence, contents
from sampled import SHARE, seed
from terminal import proxymetric, train

pytestmark = pytest.mark.slow
VERBS: dict[str, tuple[str, ...]] = {
    "embed": ("embed", "RUN", "PHOTOS", "--out", "TARGET"),
    "inspect": ("inspect", "RUN", "PHOTOS", "--out", "TARGET"),
    "torch": ("export", "RUN", "--torch", "TARGET"),
    "onnx": ("export", "RUN", "--onnx", "TARGET"),
    "slim": ("export", "RUN", "--slim", "TARGET"),
    "train": ("train", "--data", "PHOTOS", "--out", "TARGET", "--epochs", "1", "--backbone", "small"),
    "train --overwrite": ("train", "--data", "PHOTOS", "--out", "TARGET", "--overwrite", "--backbone", "small"),
    "train --resume": ("train", "--data", "PHOTOS", "--out", "TARGET", "--resume", "--backbone", "small"),
    "demo": ("demo", "--out", "TARGET"),
    "archive": ("study", "STUDY", "--out", "NEW", "--archive", "TARGET", "--minutes", "0.001"),
    "tables": ("study", "STUDY", "--out", "NEW", "--tables", "TARGET"),
    "study": ("study", "STUDY", "--out", "TARGET", "--minutes", "0.001"),
}
ENDINGS = {"torch": ".pt2", "onnx": ".onnx", "slim": ".safetensors", "embed": ".safetensors", "archive": ".tar.gz"}
FOREIGN_RUN = "folder with a foreign run.json"
THIRDS = 3
KINDS = ("photo", "own ending", "link", "dangling link", "pipe", "folder", FOREIGN_RUN, "in a file")


def foreign(kind: str, place: Path, ending: str) -> Path:
    """Something of the user at a path that a verb is asked to write to."""
    place.mkdir()
    photo = place / "photo.jpg"
    photo.write_bytes(b"the only photo of grandmother")
    target = place / f"target{ending}"
    if kind == "photo":
        return photo
    if kind == "own ending":
        target.write_bytes(b"somebody else's file")
    elif kind == "link":
        target.symlink_to(photo)
    elif kind == "dangling link":
        target.symlink_to(place / "gone" / "x")
    elif kind == "pipe":
        os.mkfifo(target)
    elif kind == "in a file":
        return photo / f"x{ending}"
    else:
        target.mkdir()
        (target / "thesis.txt").write_text("three years")
        if kind == FOREIGN_RUN:
            (target / "run.json").write_text(json.dumps({"my": "own app"}))
            for name in ("best.safetensors", "result.json", "log.jsonl", "report.html", ".tmpabcdef"):
                (target / name).write_text("mine")
            (target / "tensorboard").mkdir()
            (target / "tensorboard" / "notes.txt").write_text("mine")
    return target


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "run"
    assert train(photos, folder).code == 0
    return folder


ROUND = random.Random(seed()).randrange(THIRDS) if SHARE < 1 else None
CASES = [
    (verb, kind)
    for row, verb in enumerate(VERBS)
    for column, kind in enumerate(KINDS)
    if ROUND is None or (row + column) % THIRDS == ROUND
]
"""a third of the pairs, by the seed: every verb meets two or three kinds, and every kind four verbs"""


@pytest.mark.slow(cases=6)
@pytest.mark.parametrize(("verb", "kind"), CASES)
def test_what_is_there_stays(run, photos, tmp_path, verb, kind):
    target = foreign(kind, tmp_path / "place", ENDINGS.get(verb, ""))
    before = contents(tmp_path / "place")
    study = Path(__file__).resolve().parents[2] / "studies" / "glyphs.toml"
    names = {"RUN": run, "PHOTOS": photos, "TARGET": target, "STUDY": study, "NEW": tmp_path / "new"}
    answer = proxymetric(*(names.get(word, word) for word in VERBS[verb]))
    after = contents(tmp_path / "place")
    assert {name: after.get(name) for name in before} == before, "something of the user's was changed"
    if answer.code:
        check_sentence(answer.err)
    shutil.rmtree(tmp_path / "new", ignore_errors=True)


def test_overwrite_removes_what_the_run_wrote_and_nothing_else(run, photos, tmp_path):
    """Symlinks inside a run are not followed either."""
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    shutil.copytree(run, folder)
    elsewhere.mkdir()
    (elsewhere / "notes.txt").write_text("mine")
    (elsewhere / "log.jsonl").write_text("mine\n")
    (folder / "thesis.txt").write_text("three years")
    (folder / ".tmpabcdef").write_text("mine")
    (folder / "log.jsonl").unlink()
    (folder / "log.jsonl").symlink_to(elsewhere / "log.jsonl")
    (folder / "tensorboard").symlink_to(elsewhere)
    (folder / "refit").symlink_to(elsewhere)
    before = contents(elsewhere)
    answer = train(photos, folder, "--overwrite")
    assert contents(elsewhere) == before
    assert (folder / "thesis.txt").read_text() == "three years"
    assert (folder / ".tmpabcdef").read_text() == "mine"
    if answer.code:
        check_sentence(answer.err)
