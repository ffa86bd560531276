"""Under torchrun: which verbs may run, and that a sentence which all processes have is printed once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from groups import place
from proxymetric.cli import FOR_SEVERAL_PROCESSES, VERBS
from proxymetric.system.faults import said_once
from terminal import proxymetric, refused

NAMES = [verb.__name__.replace("_", "-") for verb in VERBS if verb not in FOR_SEVERAL_PROCESSES]


@pytest.fixture
def in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place(1, 2, 29500).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("in_a_group")
@pytest.mark.parametrize("verb", NAMES)
def test_a_verb_without_work_for_several_processes_is_refused(verb):
    refused(proxymetric(verb), f"{verb}: got 2 processes from torchrun (WORLD_SIZE=2), expected one: start it without")


@pytest.mark.usefixtures("in_a_group")
def test_the_verbs_that_may_run():
    assert {verb.__name__ for verb in FOR_SEVERAL_PROCESSES} == {"train", "evaluate", "methods"}
    answer = proxymetric("methods", "--plan", 1000, "--dim", 64, "--batch", 32, "--device", "H200")
    assert answer.code == 0, answer


def test_a_scheduler_that_sets_world_size_alone_is_no_torchrun(monkeypatch):
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    answer = proxymetric("methods")
    assert answer.code == 0, answer


def torchrun(*words: object, restarts: int = 0, code: int = 1, folder: Path | None = None) -> str:
    """The error stream of a command that torchrun starts twice, and that fails unless `code` is 0."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         f"--max_restarts={restarts}", *map(str, words)],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=folder,
    )  # fmt: skip
    assert (done.returncode != 0) == (code != 0), done
    return done.stderr


def shell(script: str) -> tuple[str, ...]:
    """Words of torchrun for a shell script that sees RANK and starts `"$PM"`."""
    return ("--no-python", "sh", "-c", f'PM="{sys.executable} -m proxymetric"; {script}')


TRAIN = "train --data glyphs:40 --backbone small"


@pytest.mark.slow
def test_what_all_processes_refuse_is_printed_once(photos, tmp_path):
    """Also when torchrun starts them again."""
    words = ("-m", "proxymetric", "index", tmp_path / "run", photos, "--out", tmp_path / "x.index")
    assert torchrun(*words, restarts=1).count("index: got 2 processes from torchrun") == 1
    assert not (tmp_path / "x.index").exists()
    words = ("-m", "proxymetric", *TRAIN.split(), "--out", tmp_path / "out", "--set", "loss.margn=2")
    assert torchrun(*words, restarts=1).count("loss.margn: got an unknown key") == 1
    error = torchrun("-m", "proxymetric", "train", "--bogus", restarts=1)
    assert error.count("No such option: --bogus") == error.count("Usage: ") == 1


@pytest.mark.release
def test_what_one_process_has_alone_is_printed(tmp_path):
    """These settings are refused before the processes join."""
    for alone in (0, 1):
        script = f"if [ $RANK = {alone} ]; then $PM {TRAIN} --out {tmp_path}/x --set wrong; else sleep 20; fi"
        assert torchrun(*shell(script)).count("got 'wrong'") == 1
    error = torchrun(*shell(f"$PM {TRAIN} --out {tmp_path}/x --set wrong$RANK; sleep 5; exit 1"))
    assert error.count("got 'wrong0'") == error.count("got 'wrong1'") == 1


OWN_METHOD = """
import os
import warnings

import proxymetric as pm


def warned(classes, dim):
    rank = os.environ["RANK"]
    for message in ("what all have", f"what {rank} has", *(["what 1 has alone"] if rank == "1" else [])):
        warnings.warn(message)
    return pm.method("proxy-anchor", classes=classes, dim=dim).objective
"""


@pytest.mark.release
def test_what_all_processes_warn_about_is_printed_once(tmp_path):
    """And what only some of them warn about is printed, too."""
    (tmp_path / "own.py").write_text(OWN_METHOD)
    words = (*TRAIN.split(), "--epochs", 1, "--no-report", "--out", tmp_path / "run", "--method", "own:warned")
    error = torchrun("-m", "proxymetric", *words, code=0, folder=tmp_path)
    for warning in ("what all have", "what 0 has", "what 1 has", "what 1 has alone"):
        assert error.count(f"proxymetric: warning: {warning}\n") == 1, error


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What torchrun says to its second process."""
    file = tmp_path / "command" / "attempt_0" / "1" / "error.json"
    file.parent.mkdir(parents=True)
    told = {"TORCHELASTIC_ERROR_FILE": str(file), "TORCHELASTIC_RESTART_COUNT": "0"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    return told


def says(sentence: str, stream: Path, each_start: bool = False) -> bool:
    with open(stream, "a") as place, said_once(sentence, each_start, place) as is_first:
        return is_first


def test_a_sentence_is_said_once_in_each_place(start, tmp_path):
    assert says("a", tmp_path / "terminal")
    assert not says("a", tmp_path / "terminal")
    assert says("b", tmp_path / "terminal")
    assert says("a", tmp_path / "own log"), "torchrun --redirects: each process has its own error stream"


def test_a_fault_is_said_again_when_it_comes_again(start, tmp_path, monkeypatch):
    assert says("memory", tmp_path / "terminal", each_start=True)
    assert not says("memory", tmp_path / "terminal", each_start=True), "by another process"
    assert says("margn", tmp_path / "terminal")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", start["TORCHELASTIC_ERROR_FILE"].replace("attempt_0", "attempt_1"))
    assert says("memory", tmp_path / "terminal", each_start=True)
    assert not says("margn", tmp_path / "terminal")


@pytest.mark.parametrize("file", ["", "error.json", "/nowhere/attempt_0/0/error.json", "/tmp/other/0/error.json"])
def test_without_a_place_for_the_list_all_say_it(file, start, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", file)
    assert says("a", tmp_path / "terminal")
    assert says("a", tmp_path / "terminal")


def test_a_process_that_is_killed_before_it_prints_leaves_it_to_another(start, tmp_path):
    script = (
        "import sys, time\nfrom proxymetric.system.faults import said_once\n"
        "with said_once('a', False, open(sys.argv[1], 'a')) as is_first:\n"
        "    print(is_first, flush=True); time.sleep(60)"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "terminal")]
    first = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    assert first.stdout.readline() == "True\n"
    second = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    time.sleep(2)
    first.send_signal(signal.SIGKILL)
    assert second.stdout is not None
    assert second.stdout.readline() == "True\n", "it waited for the first one"
    second.kill()
    for process in (first, second):
        process.wait()
        process.stdout.close()


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_others_waiting(start, tmp_path):
    """As one that reads images may be, while a thread prints a warning."""
    script = (
        "import os, sys\nfrom proxymetric.system.faults import said_once\n"
        "terminal, (read, write) = open(sys.argv[1], 'a'), os.pipe()\n"
        "with said_once('a', False, terminal):\n"
        "    if os.fork() == 0:\n"
        "        os.close(write)\n"
        "        os.read(read, 1)  # until the first process ends\n"
        "        os._exit(0)\n"
        "with said_once('a', False, terminal) as is_first:\n"
        "    print(is_first)"
    )
    words = [sys.executable, "-c", script, str(tmp_path / "terminal")]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.stdout == "False\n"
