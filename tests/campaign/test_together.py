"""Two processes in one folder, kills and a full disk at once: each result is right, or refused with one sentence."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import signal
import time
from collections import Counter

import pytest

from campaign_cases import SEED, SHARE, check_sentence
from training_runs import Process, command, run, same_run

pytestmark = pytest.mark.release
SECONDS = max(15.0, 600 * SHARE) if SHARE >= 0.5 else 15.0


def test_two_processes_kills_and_a_full_disk(photos, tmp_path, only_training):
    straight = run(photos, tmp_path / "straight").folder
    draw, out, ends = random.Random(SEED), tmp_path / "run", Counter[str]()
    processes: list[Process] = []
    disturbed: list[Process] = []
    started, end = 0, time.monotonic() + SECONDS
    latest = end + 120

    def judge(process: Process) -> None:
        code, text = process.finish(), process.text()
        if process in disturbed and not text:
            kind = "before its first word"  # the signal came too early, or the disk was too full, for any output
        elif code == 1:
            check_sentence(text)
            kind = "in use" if "in use" in text else "not saved" if "could not" in text else "refused"
            assert kind != "refused", text
        else:
            assert code in (0, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT), (code, text)
            assert "Traceback" not in text or code == -signal.SIGKILL, text
            kind = {0: "finished", 130: "stopped"}.get(code, "killed")
        ends[kind] += 1

    def met() -> bool:
        return bool(ends["killed"] + ends["stopped"] and ends["in use"])

    while time.monotonic() < (end if met() else latest):  # a slow machine draws less often
        while len(processes) < 2:
            started += 1
            words = command(photos, out, "--resume", train__save_every=draw.choice([1, 5, 1000]))
            processes.append(Process(words, tmp_path / f"text{started}"))
        time.sleep(draw.uniform(0, 1.0))
        victim, act = draw.choice(processes), draw.random()
        if act < 0.5:
            disturbed.append(victim)
        if act < 0.3 and victim.running():
            victim.send(draw.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT]))
        elif act < 0.5 and victim.running():
            limit = draw.choice([1_000, 50_000, 1_000_000])
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        for process in [each for each in processes if not each.running()]:
            processes.remove(process)
            judge(process)
        if ends["finished"] and not processes:
            same_run(out, straight)
            shutil.rmtree(out)
            ends["compared"] += 1
            ends["finished"] = 0
    for process in processes:
        disturbed.append(process)
        process.send(signal.SIGTERM)
        judge(process)
    last = Process(command(photos, out, "--resume"), tmp_path / "last")
    assert last.finish() == 0, last.text()
    same_run(out, straight)
    print(dict(ends))
    assert ends["killed"] + ends["stopped"]
    assert ends["in use"], "the two never met"
