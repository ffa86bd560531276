"""Studies with real workers: kills and resumes, failures, stops, archives; the scores equal those of single runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import proxymetric as pm
from proxymetric.encoders import build
from proxymetric.studies import load_study, worker
from proxymetric.studies.collected import RUNS_FILE, read_runs, write_runs
from proxymetric.studies.folder import StudyFolder, local_settings
from proxymetric.studies.reporting import Lines
from proxymetric.studies.running import Session
from proxymetric.system.files import read_json, write_json
from proxymetric.system.watcher import Silent
from terminal import proxymetric, refused
from training_runs import WAIT, Process, until

pytestmark = pytest.mark.slow

GLYPHS = Path(__file__).resolve().parent.parent.parent / "studies" / "glyphs.toml"
RUNS = [task.name for task in load_study(GLYPHS).tasks()]


class Running(Process):
    """`proxymetric study` in a separate process."""

    def __init__(self, *words: object) -> None:
        file, name = tempfile.mkstemp(prefix="proxymetric-study-")
        os.close(file)
        super().__init__(["study", *map(str, words)], Path(name), with_workers=True)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something to happen while it runs."""
        until(holds, self.running, "what is waited for")

    def end(self) -> tuple[int, str]:
        """Wait for the end; the exit code and the output."""
        code, text = self.finish(), self.text()
        self.output.unlink()
        return code, text


def study(*words: object) -> tuple[int, str]:
    return Running(*words).end()


@pytest.fixture(scope="module")
def outputs() -> list[str]:
    return []


@pytest.fixture(scope="module")
def finished(outputs: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The glyphs study, killed by SIGKILL in the middle of its second run, then resumed. Only read it."""
    out = tmp_path_factory.mktemp("studies") / "glyphs"
    killed = Running(GLYPHS, "--out", out, "--jobs", 1, "--archive", out.parent / "killed.tar.gz")
    killed.until(lambda: (out / "runs" / RUNS[1] / "last.safetensors").is_file())
    killed.send(signal.SIGKILL)
    code, text = killed.end()
    assert code == -signal.SIGKILL
    outputs.append(text)
    code, text = study(GLYPHS, "--out", out, "--jobs", 2, "--archive", out.parent / "glyphs.tar.gz")
    outputs.append(text)
    assert code == 0, text
    return out


def test_a_killed_study_goes_on_where_it_was(finished, outputs):
    first, second = outputs
    assert f"finished  {RUNS[0]}" in first
    assert RUNS[0] not in second.split("archive:")[0], "a finished run is kept"
    assert f"started   {RUNS[1]} (resumed)" in second or f"finished  {RUNS[1]}" not in second
    for name in RUNS:
        assert (finished / "runs" / name / "result.json").is_file()
    again = proxymetric("study", GLYPHS, "--out", finished, "--dry-run")
    assert again.out.count(" done ") == 4
    assert again.out.splitlines()[-1] == "all runs are done"


def test_a_killed_study_leaves_an_archive_of_what_was_done(finished, tmp_path):
    archive, results = finished.parent / "killed.tar.gz", tmp_path / "results"
    collected = proxymetric("study", GLYPHS, "--collect", archive, "--results", results)
    assert "1 results are new" in collected.out
    there = read_runs(results)[RUNS[0]]
    assert there["rows"] == read_json(finished / "runs" / RUNS[0] / "result.json")["rows"]


def test_an_archive_that_cannot_be_written_does_not_stop_the_runs(tmp_path, capsys):
    book, occupied = StudyFolder(load_study(GLYPHS), tmp_path / "out", None), tmp_path / "a file, not a folder"
    occupied.write_text("")
    session = Session(book, [], {}, {}, 1, None, None, Lines(), archive=occupied / "glyphs.tar.gz")
    session._update_archive()
    assert "glyphs.tar.gz: not written now (" in capsys.readouterr().out


def test_scores_are_those_of_runs_that_were_made_alone(finished, tmp_path):
    """Neither the kill, nor an earlier run in the same process, nor cached images change a bit."""
    task = next(task for task in load_study(GLYPHS).tasks() if task.name == RUNS[1])
    settings = local_settings(task, None)
    alone = pm.train(recipe=task.recipe, settings=settings, out=tmp_path / "run", report=False, watcher=Silent())
    there = read_json(finished / "runs" / RUNS[1] / "result.json")
    assert there["rows"] == alone.result.rows
    assert there["curve"] == alone.result.curve


def test_the_state_file_says_what_it_cost(finished):
    state = read_json(finished / "study.json")
    assert {run["status"] for run in state["runs"].values()} == {"done"}
    assert state["total"]["finished"] >= 3  # the kill may have come before the first session was recorded
    last = state["sessions"][-1]
    assert last["runs_per_hour"] > 0
    assert last["images_per_second"] > 0
    assert last["card_minutes"] == (last["minutes"] if torch.cuda.is_available() else 0.0)


def test_the_tables_of_a_finished_study(finished):
    text = (finished / "tables" / "tables.md").read_text()
    assert "| Proxy-Anchor | Proxy-NCA++ | R@1 | 2 |" in text
    assert (finished / "tables" / "curves-glyphs-small-held-out.png").is_file()


def test_the_archive_holds_results_logs_and_the_best_embeddings(finished):
    with tarfile.open(finished.parent / "glyphs.tar.gz") as archive:
        names = archive.getnames()
        chosen = json.load(archive.extractfile("glyphs/embeddings.json"))
    assert {f"glyphs/{folder}/{name}.{kind}" for folder, kind in (("results", "json"), ("logs", "log"))
            for name in RUNS} <= set(names)  # fmt: skip
    assert not [name for name in names if "last" in name or "best" in name]
    assert [name for name in names if "embeddings/" in name] == [
        f"glyphs/embeddings/{each['run']}.safetensors" for each in chosen
    ]
    results = {name: read_json(finished / "runs" / name / "result.json") for name in RUNS}
    for row in ("proxy-anchor", "proxy-nca-pp"):
        best = max((name for name in RUNS if name.startswith(row)), key=lambda n: results[n]["validation"]["MAP@R"])
        (choice,) = [each for each in chosen if each["run"].startswith(row)]
        assert choice["run"] == best
        assert choice["why"] == "best MAP@R of its seeds, epoch chosen on held-out training classes"


def test_embeddings_give_the_scores_of_their_run(finished):
    for file in (finished / "embeddings").glob("*.safetensors"):
        found = load_file(file)
        assert found["vectors"].dtype == torch.float16
        scores = pm.evaluate(found["vectors"].float(), found["labels"], ["R@1"])
        result = read_json(finished / "runs" / file.stem / "result.json")
        assert scores["R@1"] == pytest.approx(result["rows"]["trained encoder"]["R@1"], abs=0.01)
    assert len(list((finished / "embeddings").glob("*.safetensors"))) == 2


def test_archives_are_collected_into_one_small_file(finished, tmp_path):
    archive, results = finished.parent / "glyphs.tar.gz", tmp_path / "results"
    answer = proxymetric(
        "study", GLYPHS, "--collect", archive, "--results", results, "--embeddings", tmp_path / "vectors"
    )  # fmt: skip
    assert answer.code == 0, answer
    assert {file.name for file in results.iterdir()} == {RUNS_FILE, "study.json"}
    assert len(list((tmp_path / "vectors").iterdir())) == 2
    file = results / RUNS_FILE
    before = file.read_text()
    lines = before.splitlines()
    assert [json.loads(line)["run"] for line in lines] == sorted(RUNS), "sorted by name"
    for name, line in zip(sorted(RUNS), lines, strict=True):
        assert len(line) < 8000
        assert str(tmp_path.parent) not in line
        whole = read_json(finished / "runs" / name / "result.json")
        small = json.loads(line)
        assert small["rows"] == whole["rows"]
        assert small["validation"]["MAP@R"] == pytest.approx(whole["validation"]["MAP@R"], abs=1e-5)
        assert small["study"]["protocol"] == "held-out"
    # The folder of the study gives the same files, and the same tables can be made from them.
    assert "0 results are new" in proxymetric("study", GLYPHS, "--collect", finished, "--results", results).out
    assert proxymetric("study", GLYPHS, "--results", results, "--tables", tmp_path / "tables").code == 0
    assert (tmp_path / "tables" / "tables.md").read_text() == (finished / "tables" / "tables.md").read_text()
    # Another result of the same name is replaced only with --overwrite.
    stored = read_runs(results)
    stored[RUNS[0]]["recipe"]["seed"] = 9
    write_runs(results, {"of a row that was renamed": stored[RUNS[1]], **stored})
    changed = file.read_text()
    answer = proxymetric("study", GLYPHS, "--collect", archive, "--results", results)
    refused(answer, f"{file} with the run {RUNS[0]}, which differs", "--overwrite")
    assert file.read_text() == changed
    assert "1 results are new or replaced" in proxymetric(
        "study", GLYPHS, "--collect", archive, "--results", results, "--overwrite"
    ).out  # fmt: skip
    kept = read_runs(results)
    assert kept.pop("of a row that was renamed"), "runs that the study does not have stay"
    write_runs(results, kept)
    assert file.read_text() == before


def test_parts_of_a_study_that_start_in_the_same_second_keep_their_sessions(finished, tmp_path):
    """Such parts share a machine; a later archive of one of them replaces its session."""
    parts = [tmp_path / name for name in ("small", "large", "large-later")]
    for part, jobs, count in zip(parts, (1, 6, 6), (1, 2, 6), strict=True):
        shutil.copytree(finished, part)
        state = read_json(part / "study.json")
        session = state["sessions"][-1] | {"started": "2026-11-19T23:43:25Z", "jobs": jobs, "finished": count}
        write_json(part / "study.json", state | {"sessions": [session]})
        proxymetric("study", GLYPHS, "--collect", part, "--results", tmp_path / "results")
    sessions = read_json(tmp_path / "results" / "study.json")["sessions"]
    assert [(each["jobs"], each["finished"]) for each in sessions] == [(1, 1), (6, 6)]


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize("place", [100, 5000, 20000, -5])
def test_a_damaged_archive_is_refused_as_a_whole(finished, tmp_path, place):
    content = bytearray((finished.parent / "glyphs.tar.gz").read_bytes())
    content[place] ^= 0xFF
    (tmp_path / "damaged.tar.gz").write_bytes(content)
    words = ["--collect", tmp_path / "damaged.tar.gz", "--results", tmp_path / "results"]
    refused(proxymetric("study", GLYPHS, *words), "damaged.tar.gz, expected a whole archive of a study")
    assert not (tmp_path / "results").exists()


def test_results_of_another_study_or_other_settings_are_not_collected(finished, tmp_path):
    recipes = GLYPHS.parent.parent / "recipes"
    text = GLYPHS.read_text().replace('"recipes/', f'"{recipes}/')
    for name, old, new in (("other", "title = ", 'name = "other"\ntitle = '), ("dim", '.dim" = 32', '.dim" = 16')):
        assert old in text
        (tmp_path / name).mkdir()
        (tmp_path / name / "glyphs.toml").write_text(text.replace(old, new, 1))
    words = ["--collect", finished.parent / "glyphs.tar.gz", "--results", tmp_path / "results"]
    refused(
        proxymetric("study", tmp_path / "other" / "glyphs.toml", *words),
        "is of the study 'glyphs'; expected one of 'other'",
    )
    refused(
        proxymetric("study", tmp_path / "dim" / "glyphs.toml", *words), RUNS[0], "in which encoder.dim is 32, not 16"
    )
    assert not (tmp_path / "results").exists()


def test_results_of_other_images_are_not_collected(finished, tmp_path):
    results = tmp_path / "results"
    words = ["study", GLYPHS, "--collect", finished.parent / "glyphs.tar.gz", "--results", results]
    assert proxymetric(*words).code == 0
    stored = read_runs(results)
    stored[RUNS[0]]["data"] |= {"identity": "0" * 64, "train": {"images": 7, "classes": 2}}
    missing = stored.pop(RUNS[1])
    write_runs(results, stored)
    archive = tmp_path / "one.tar.gz"
    with tarfile.open(finished.parent / "glyphs.tar.gz") as whole, tarfile.open(archive, "w:gz") as part:
        for entry in whole:
            if entry.name.endswith((f"{RUNS[1]}.json", "study.json", "embeddings.json")):
                part.addfile(entry, whole.extractfile(entry))
    words[3] = archive
    refused(
        proxymetric(*words), f"got the run {RUNS[1]} with", f"{RUNS[0]} with 7 images to train", "other images",
        "(identity 000000000000)", f"(identity {missing['data']['identity'][:12]})",
    )  # fmt: skip
    assert read_runs(results) == stored
    assert proxymetric(*words, "--overwrite").code == 0
    assert proxymetric("study", GLYPHS, "--results", results, "--tables", tmp_path / "tables").code == 0
    text = (tmp_path / "tables" / "tables.md").read_text()
    assert "held-out training classes, older photographs (000000000000)" in text


def test_a_damaged_result_is_named(finished, tmp_path):
    results = tmp_path / "results"
    assert proxymetric("study", GLYPHS, "--collect", finished, "--results", results).code == 0
    file, words = results / RUNS_FILE, ["study", GLYPHS, "--results", results]
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    for content, said in (
        (whole[:-100], f"results: got {file} with a damaged line 4, expected the name and the result of a run"),
        (whole + lines[1], f"results: got {file} with the run {sorted(RUNS)[1]} in lines 2 and 5, expected one line"),
        (lines[0].replace('"rows"', '"row"', 1), f"{file}, run {sorted(RUNS)[0]}: got no rows, expected the result of"),
        (lines[0].replace('"trained encoder"', '"another"', 1), f"{file}, run {sorted(RUNS)[0]}: got a result without"),
    ):
        file.write_text(content)
        refused(proxymetric(*words, "--tables", tmp_path / "tables"), said)
        assert not (tmp_path / "tables").exists()
    for content in (whole[:-100], whole + lines[1]):
        file.write_text(content)
        refused(proxymetric(*words, "--collect", finished, "--overwrite"), str(file))
        assert file.read_text() == content, "a run in a line that cannot be read is not lost"


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("metrics = [", 'metrics = ["MAP@9", ', "metrics: got 'MAP@9', which the runs of proxy-"),
        (
            "[backbones.small]",
            "[backbones.smal]",
            "backbones.smal: backbone: got 'smal', expected small",
        ),
        ('"encoder.dim"', '"encoder.dimm"', "settings: encoder.dimm: got an unknown key"),
        ('"train.epochs"', '"encoder.weights" = [1]\n"train.epochs"', "encoder.weights: got [1], expected text"),
    ],
)
def test_what_no_run_could_do_is_said_before_the_first_one(old, new, said, tmp_path):
    text = GLYPHS.read_text().replace('"recipes/', f'"{GLYPHS.parent.parent / "recipes"}/')
    assert old in text
    (tmp_path / "glyphs.toml").write_text(text.replace(old, new, 1))
    for more in (["--dry-run"], [], ["--data-root", tmp_path]):
        refused(proxymetric("study", tmp_path / "glyphs.toml", "--out", tmp_path / "out", *more), said)
    assert not (tmp_path / "out").exists()


@pytest.mark.release
def test_a_changed_recipe_is_refused_and_can_be_redone(finished, tmp_path):
    out = shutil.copytree(finished, tmp_path / "out")
    changed = tmp_path / "glyphs.toml"
    recipes = GLYPHS.parent.parent / "recipes"
    text = GLYPHS.read_text().replace('"encoder.dim" = 32', '"encoder.dim" = 16')
    changed.write_text(text.replace('"recipes/', f'"{recipes}/'))
    answer = proxymetric("study", changed, "--out", out)
    refused(answer, "4 runs in", "encoder.dim was 32 and is 16", "--overwrite repeats them")
    listed = proxymetric("study", changed, "--out", out, "--dry-run")
    assert listed.out.count("changed") == 4
    before = {name: (out / "runs" / name / "result.json").read_bytes() for name in RUNS}
    # The archive must not have vectors of the earlier recipe beside the new result.
    vectors = out / "embeddings" / f"{RUNS[3]}.safetensors"
    for file in vectors.parent.glob("proxy-anchor-*"):
        file.replace(vectors)
    assert load_file(vectors)["vectors"].shape[1] == 32
    code, said = study(changed, "--out", out, "--overwrite", "--only", "proxy-anchor", "--seeds", 1)
    assert code == 0, said
    after = {name: (out / "runs" / name / "result.json").read_bytes() for name in RUNS}
    assert {name for name in RUNS if before[name] != after[name]} == {"proxy-anchor-glyphs-small-held-out-seed1"}
    assert read_json(out / "runs" / RUNS[3] / "result.json")["recipe"]["encoder"]["dim"] == 16
    assert load_file(vectors)["vectors"].shape[1] == 16


def long_study(tmp_path: Path) -> Path:
    """A study with a run that fails, a short run, and a very long run."""
    file = tmp_path / "long.toml"
    common = '"view.size" = 16, "view.resize" = 16, "encoder.dim" = 8, "encoder.backbone" = "small", '
    common += '"encoder.pretrained" = false, "train.save_every" = 1, "train.patience" = "none", "train.warmup" = 0'
    rows = {"bad": '"train.per_class" = 1000', "short": '"train.epochs" = 1', "long": '"train.epochs" = 100000'}
    file.write_text(
        f'settings = {{ {common} }}\nembeddings = []\n[data.g]\npath = "glyphs:60"\n'
        + "\n".join(f'[[rows]]\nname = "{name}"\nsettings = {{ {setting} }}' for name, setting in rows.items())
    )
    return file


@pytest.mark.release
def test_failures_kills_and_stops(tmp_path):
    """One study goes through a run that fails, a worker that is killed, Ctrl-C, and a time limit."""
    file, out = long_study(tmp_path), tmp_path / "out"
    last = out / "runs" / "long-g-held-out-seed0" / "last.safetensors"
    first = Running(file, "--out", out, "--jobs", 1)
    first.until(last.is_file)
    busy = proxymetric("study", file, "--out", out)
    refused(busy, f"in use by process {first.pid}")
    process = read_json(out / "study.json")["runs"]["long-g-held-out-seed0"]["worker"]
    os.kill(process, signal.SIGKILL)
    code, text = first.end()
    assert code == 1
    assert "failed    bad-g-held-out-seed0: " in text
    assert "per_class" in text
    assert "finished  short-g-held-out-seed0: R@1" in text
    assert "failed    long-g-held-out-seed0: the worker was ended by SIGKILL" in text
    log = (out / "logs" / "long-g-held-out-seed0.log").read_text().splitlines()
    assert log[-1] in text.splitlines(), "the last lines of its output"
    listed = proxymetric("study", file, "--out", out, "--dry-run").out
    assert [line.split()[1] for line in listed.splitlines()[:3]] == ["failed", "done", "failed"]
    # At Ctrl-C the study saves, says how to continue, and leaves no process behind.
    step, images = json.loads(state_of(last))["step"], worker.trained_images(last.parent)
    second = Running(file, "--out", out, "--only", "long")
    second.until(lambda: json.loads(state_of(last))["step"] > step)
    second.send(signal.SIGINT)
    code, text = second.end()
    assert code == 130
    assert "started   long-g-held-out-seed0 (resumed)" in text
    assert "stopped   long-g-held-out-seed0: saved" in text
    assert "1 runs are not finished, such as long-g-held-out-seed0; the same command continues the study" in text
    process = read_json(out / "study.json")["runs"]["long-g-held-out-seed0"]["worker"]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    session = read_json(out / "study.json")["sessions"][-1]
    assert session["images"] == worker.trained_images(last.parent) - images > 0
    # The end of the time is not a failure, and the archive is written.
    code, text = study(file, "--out", out, "--only", "long", "--minutes", 0.15, "--archive", tmp_path / "a.tar.gz")
    assert code == 0, text
    assert "the time is over" in text
    assert "1 runs are not finished" in text
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert "long/results/short-g-held-out-seed0.json" in archive.getnames()


@pytest.mark.release
@pytest.mark.parametrize("cache", ["none", "memory"])
def test_files_are_read_by_processes_of_a_worker(cache, photos, tmp_path):
    """Two runs, one after the other, in one worker that forks processes to read images."""
    file = tmp_path / "files.toml"
    file.write_text(
        "seeds = [0, 1]\n[settings]\n"
        f'"data.cache" = "{cache}"\n"data.workers" = 1\n"data.test" = 0.4\n"view.size" = 16\n"view.resize" = 16\n'
        '"encoder.pretrained" = false\n"encoder.dim" = 8\n"train.epochs" = 1\n"train.warmup" = 0\n'
        f'[data.photos]\npath = "{photos.name}"\n[backbones.small]\n[[rows]]\nname = "a"'
    )
    code, text = study(file, "--out", tmp_path / "out", "--data-root", photos.parent)
    assert code == 0, text
    assert text.count("finished  a-photos-small-held-out-seed") == 2


@pytest.mark.release
def test_a_study_of_the_choice_of_a_method(tmp_path):
    """`method = "auto"` from the first run to the tables: what was chosen, and its regret."""
    torch.manual_seed(3)
    save_file(build("small", size=16).backbone.state_dict(), tmp_path / "small.safetensors")
    file, out, results = tmp_path / "choice.toml", tmp_path / "out", tmp_path / "results"
    rows = "".join(
        f'[[rows]]\nname = "{name}"\nsettings = {{ method = "{name}" }}\n' for name in ("whitening", "lda", "auto")
    )
    file.write_text(
        'metrics = ["MAP@R"]\nembeddings = []\n[settings]\n"view.size" = 16\n"view.resize" = 16\n"encoder.dim" = 8\n'
        '"data.validation" = 0.34\n"train.frozen" = true\n"train.epochs" = 1\n"train.warmup" = 0\n'
        f'[data.glyphs]\npath = "glyphs:60"\n[backbones.small]\nweights = "small.safetensors"\n{rows}'
    )
    words = [file, "--out", out, "--data-root", tmp_path]
    code, text = study(*words)
    assert code == 0, text
    name = "auto-glyphs-small-held-out-seed0"
    choice = read_json(out / "runs" / name / "result.json")["auto"]
    assert {"whitening", "lda"} <= {trial["method"] for trial in choice["trials"]}
    assert proxymetric("study", *words, "--dry-run").out.splitlines()[-1] == "all runs are done"
    collected = proxymetric("study", file, "--collect", out, "--results", results, "--tables", tmp_path / "tables")
    assert "3 results are new" in collected.out, collected
    stored = read_runs(results)[name]
    assert stored["recipe"]["method"] == stored["auto"]["method"] == choice["method"]
    scores = {
        row: 100 * read_runs(results)[f"{row}-glyphs-small-held-out-seed0"]["rows"]["trained encoder"]["MAP@R"]
        for row in ("whitening", "lda", "auto")
    }
    best = max(("whitening", "lda"), key=scores.__getitem__)
    regret = scores[best] - scores["auto"]
    name = choice["method"] + (f" from {choice['start']}" if choice["start"] else "")
    line = f"| auto | 0 | {name} | {scores['auto']:.1f} | {best}, {scores[best]:.1f} | {regret:+.2f} |"
    assert line in (tmp_path / "tables" / "tables.md").read_text()


@pytest.mark.usefixtures("only_training")
def test_a_session_counts_the_images_of_its_own_steps(tmp_path):
    """Neither the steps of earlier sessions, nor a batch that is larger than the data."""
    settings = {
        "data.path": "glyphs:60", "encoder.backbone": "small", "encoder.dim": 8, "view.size": 16, "view.resize": 16,
        "train.warmup": 0, "train.batch": 4000,
    }  # fmt: skip
    finished = []

    def send(**event: object) -> None:
        finished.extend([event] if event["event"] == "finished" else [])

    for epochs in (1, 2):
        job = {"recipe": None, "settings": settings | {"train.epochs": epochs}, "out": str(tmp_path / "run")}
        job["score_test"] = True
        worker.train_and_report(job, send)
    count = read_json(tmp_path / "run" / "result.json")["data"]["train"]["images"]
    assert [event["images"] for event in finished] == [count, count]


def state_of(checkpoint: Path) -> str:
    from proxymetric.system.checkpoint import Checkpoint

    return json.dumps({"step": Checkpoint.read(checkpoint).state["step"]})


def test_only_runs_that_fit_are_started(finished):
    """Estimates come from finished runs; a run longer than any session is done in parts."""
    from proxymetric.studies.reporting import Lines
    from proxymetric.studies.running import Session

    tasks = load_study(GLYPHS).tasks()
    book = StudyFolder(load_study(GLYPHS), finished)
    known = {task.name: book.status(task) for task in tasks}
    walls = {name: book.state["runs"][name].get("wall") for name in RUNS}
    estimates = book.estimates(tasks, known)
    assert estimates[RUNS[2]] == pytest.approx(sum(walls[name] for name in (RUNS[0], RUNS[2])) / 2)

    def session(minutes: float | None) -> Session:
        return Session(book, tasks, known, {}, 1, None, minutes, Lines())

    assert session(None)._fits(1e9)
    assert session(1.0)._fits(None)
    assert session(1.0)._fits(50.0)
    assert session(1.0)._fits(61.0), "longer than the whole session: in parts"
    late = session(1.0)
    late.deadline -= 30
    assert not late._fits(50.0)
    assert late._next(None) is None or estimates[late._next(None).name] <= 30
    late.deadline -= 60
    assert not late._fits(None)


def test_an_estimate_is_a_rows_minutes_until_a_run_is_done(tmp_path):
    answer = proxymetric("study", GLYPHS, "--out", tmp_path / "new", "--dry-run", "--jobs", 2)
    assert answer.out.count("to do") == 5
    assert answer.out.splitlines()[-1] == "4 runs, 4 to do: about 12s with 2 at the same time"
    assert not (tmp_path / "new").exists()


def test_an_estimate_is_for_the_runs_that_a_gpu_does_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = ["study", GLYPHS, "--out", tmp_path / "new", "--dry-run"]
    assert proxymetric(*words).out.splitlines()[-1] == "4 runs, 4 to do: about 6s with 4 at the same time"
    assert proxymetric(*words, "--jobs", 1).out.splitlines()[-1].endswith("about 24s with 1 at the same time")


def test_work_before_training_is_shown_and_logged(monkeypatch, capsys):
    from proxymetric.cli.studying import running_table
    from proxymetric.system.tables import plain_lines

    now, sent = [100.0], []
    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])
    watcher = worker._EventWatcher(lambda **event: sent.append(event))
    for done in (0, 32, 320):
        watcher.work("features: training images", done, 960)
        now[0] += 20
    assert [event["done"] for event in sent] == [0, 32, 320]
    assert [event["facts"] for event in sent] == ["", "2 images/s, 9m40s left", "8 images/s, 1m20s left"]
    assert capsys.readouterr().out == "features: training images: 320 of 960, 8 images/s, 1m20s left\n"
    *_, shown = plain_lines(running_table([{"run": "a", "kind": "train", "seconds": 40.0, **sent[2]}], ""))
    assert shown.split() == ["a", "features", "320/960", "40s", "8", "images/s,", "1m20s", "left"]


def test_a_dry_run_says_what_is_not_there_yet(tmp_path):
    study = tmp_path / "study.toml"
    study.write_text('[data.g]\npath = "photos"\n[backbones.small]\nweights = "w"\n[[rows]]\nname = "a"\n')
    answer = proxymetric("study", study, "--data-root", tmp_path, "--dry-run")
    assert answer.code == 0
    assert "not there yet: backbones.small.weights: got '" in answer.out
    assert "not there yet: data.g.path: got '" in answer.out


@pytest.mark.slow(cases=6)
@pytest.mark.parametrize("action", ["--collect", "--tables"])
@pytest.mark.parametrize(("flag", "value"), [("--only", "proxy-anchor"), ("--seeds", "0"), ("--data", "glyphs")])
def test_collect_and_tables_take_all_results(action, flag, value, finished, tmp_path):
    words = [action, finished, "--results", tmp_path / "results", flag, value]
    refused(proxymetric("study", GLYPHS, *words), f"{flag}: got '{value}' together with {action}")
    assert not list(tmp_path.iterdir())


def test_without_typer_and_rich_there_is_still_the_study(tmp_path):
    script = (
        "import runpy, sys\n"
        "for name in ('typer', 'rich', 'click'): sys.modules[name] = None\n"
        "sys.argv = ['proxymetric', *{words}]\n"
        "runpy.run_module('proxymetric', run_name='__main__')"
    )

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        program = script.format(words=list(words))
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT)

    listed = run("study", str(GLYPHS), "--dry-run", "--out", str(tmp_path / "out"))
    assert listed.returncode == 0, listed
    assert "4 runs, 4 to do" in listed.stdout
    other = run("train")
    assert other.returncode == 1
    assert "only `python -m proxymetric study`" in other.stderr
