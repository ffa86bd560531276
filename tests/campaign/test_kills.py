"""Kills at any moment: a resumed run ends bit for bit like a run that was never interrupted."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from campaign_cases import SEED, SHARE, check_sentence, some
from no_forms import no_forms
from training_runs import Process, command, run, same_run

pytestmark = pytest.mark.release
KINDS = {
    "proxy-anchor": {},
    "refit": {"train__refit": True},
    "proxy-isa": {"method": "proxy-isa"},
    "vcpa": {"method": "vcpa"},
    "ccp": {"method": "ccp"},
    "xbm": {"method": "xbm"},
    "moco": {"method": "moco"},
    "mpa-ap": {"method": "mpa-ap"},
    "touched rows": {"loss__touched": "batch"},
    "rowwise": {"method": "soft-triple", "train__proxy_optimizer": "rowwise-adagrad", "train__proxy_lr": 0.1},
}
KILLS = 24 if SHARE == 1 else 2
"""of each kind: 240 in the whole campaign"""


@pytest.fixture(scope="module", params=some(list(KINDS)))
def straight(request, photos, tmp_path_factory):
    """A run that was never interrupted, its kind, and how long it takes in a separate process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("proxymetric.runs.session.draw_report", lambda *args, **kwargs: None)
        patch.setattr("proxymetric.runs.session.closed_form_rows", no_forms)
        folder = run(photos, tmp_path_factory.mktemp("straight") / "run", **KINDS[request.param]).folder
    out = tmp_path_factory.mktemp("timed")
    began = time.monotonic()
    assert Process(command(photos, out / "run", **KINDS[request.param]), out / "text").finish() == 0
    return folder, request.param, time.monotonic() - began


def test_killed_anywhere_it_ends_as_if_it_had_not_been(straight, photos, tmp_path):
    folder, kind, seconds = straight
    draw = random.Random(f"{SEED} {kind}")
    out, text, kills = tmp_path / "run", tmp_path / "text", 0
    signals = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    while kills < KILLS:
        save_every = {"train__save_every": draw.choice([1, 3, 1000])}
        text.unlink(missing_ok=True)
        process = Process(command(photos, out, "--resume", **KINDS[kind], **save_every), text)
        if draw.random() < 0.3:  # while a file is being written
            end = time.monotonic() + 2 * seconds
            while process.running() and time.monotonic() < end and not list(out.glob(".*.part")):
                time.sleep(0.0005)
        else:
            time.sleep(draw.uniform(0, seconds))
        signalled = process.running()
        if signalled:
            process.send(draw.choice(signals))
        code = process.finish()
        kills += signalled and bool(process.text())  # without text, the server's own code was interrupted
        assert "Traceback" not in process.text() or code == -signal.SIGKILL, process.text()
        if code == 1 and process.text():
            check_sentence(process.text())
        if code == 0:
            same_run(out, folder)
            for file in sorted(out.rglob("*"), reverse=True):
                os.rmdir(file) if file.is_dir() else file.unlink()
    process = Process(command(photos, out, "--resume", **KINDS[kind]), text)
    assert process.finish() == 0, process.text()
    same_run(out, folder)
