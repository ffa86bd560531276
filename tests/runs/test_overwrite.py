"""`--overwrite` removes what a run wrote and nothing else, also if it is killed at any point."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from proxymetric.runs import folder as folders
from proxymetric.system.files import read_json
from terminal import bytes_of, proxymetric, refused, train

pytestmark = pytest.mark.usefixtures("only_training")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def test_a_run_json_of_another_program_is_no_run(photos, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "run.json").write_text('{"my": "own app"}')
    for name in ("best.safetensors", "result.json", "log.jsonl"):
        (mine / name).write_text("mine")
    before = bytes_of(mine)
    for words in ((), ("--overwrite",), ("--resume",)):
        refused(train(photos, mine, *words), "run.json was not written by proxymetric", "--out")
    assert bytes_of(mine) == before


@pytest.mark.parametrize("content", ["{}", "[]", "null", "", '{\n "recipe": {\n  "meth'])
def test_a_damaged_run_json_can_be_overwritten(photos, run, content):
    (run / "run.json").write_text(content)
    assert train(photos, run, "--overwrite").code == 0


def test_files_of_others_in_a_run_stay(photos, run):
    board = run / "tensorboard"
    board.mkdir()
    for path in (board / "events.out.tfevents.1.mine", board / "notes.txt", run / ".tmpAbCdEf", run / "thesis.txt"):
        path.write_text("mine")
    (run / "refit").mkdir()
    (run / "refit" / "data.csv").write_text("mine")
    assert train(photos, run, "--overwrite").code == 0
    files = bytes_of(run)
    for name in (
        "tensorboard/events.out.tfevents.1.mine", "tensorboard/notes.txt", ".tmpAbCdEf", "thesis.txt", "refit/data.csv",
    ):  # fmt: skip
        assert files[name] == b"mine"


def test_curves_of_a_run_that_tracked_are_removed(photos, run):
    about = read_json(run / "run.json")
    about["recipe"]["train"]["track"] = "tensorboard"
    (run / "run.json").write_text(json.dumps(about))
    (run / "tensorboard").mkdir()
    (run / "tensorboard" / "events.out.tfevents.1.host").write_text("curves")
    (run / "tensorboard" / "notes.txt").write_text("mine")
    assert train(photos, run, "--overwrite").code == 0
    assert [file.name for file in (run / "tensorboard").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("name", ["log.jsonl", "best.safetensors", "refit", "tensorboard", "run.json"])
@pytest.mark.parametrize("words", [("--overwrite",), ("--resume", "--epochs", "2")])
def test_links_are_never_followed(photos, run, tmp_path, name, words):
    elsewhere = tmp_path / "elsewhere"
    if "." in name:
        shutil.move(run / name, elsewhere)
    else:
        elsewhere.mkdir()
        shutil.copy(run / "run.json", elsewhere / "run.json")
        (elsewhere / "events.out.tfevents.1.proxymetric").write_text("curves")
    (run / name).symlink_to(elsewhere)
    before = bytes_of(elsewhere) if elsewhere.is_dir() else elsewhere.read_bytes()
    refused(train(photos, run, *words), "expected")
    assert before == (bytes_of(elsewhere) if elsewhere.is_dir() else elsewhere.read_bytes())
    assert (run / name).is_symlink()


def cut_short(run: Path, calls: int) -> bool:
    """Clear a run in a separate process that is killed before its `calls`-th change; return whether it was killed."""
    process = os.fork()
    if process == 0:
        left = [calls]

        def killing(change):
            def changed(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return change(*args, **kwargs)

            return changed

        os.replace, os.rmdir = killing(os.replace), killing(os.rmdir)
        Path.unlink, Path.rmdir = killing(Path.unlink), killing(Path.rmdir)
        folders.clear(run)
        os._exit(0)
    return os.waitpid(process, 0)[1] != 0


@pytest.mark.parametrize(
    "words",
    [("--resume",), pytest.param((), marks=pytest.mark.slow), pytest.param(("--overwrite",), marks=pytest.mark.slow)],
)
def test_killed_while_it_clears_it_starts_anew(photos, finished, tmp_path, words):
    """After a kill at any change, a new start gives the result of a run in an empty folder, and keeps foreign files."""
    assert train(photos, tmp_path / "fresh", "--seed", 5).code == 0
    expected = read_json(tmp_path / "fresh" / "result.json")["curve"]
    calls, killed = 1, True
    while killed and calls < 12:
        run = shutil.copytree(finished, tmp_path / f"run{calls}")
        (run / "thesis.txt").write_text("mine")
        killed = cut_short(run, calls)
        answer = train(photos, run, "--seed", 5, *words)
        assert answer.code == 0, (calls, answer)
        assert read_json(run / "result.json")["curve"] == expected
        assert (run / "thesis.txt").read_text() == "mine"
        assert not list(run.glob(".*"))
        calls += 3
    assert calls > 4


def test_killed_before_it_clears_the_old_run_is_whole(photos, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    assert cut_short(run, 0)
    assert bytes_of(run) == bytes_of(finished)
    assert proxymetric("evaluate", run, "--metrics", "R@1").code == 0
