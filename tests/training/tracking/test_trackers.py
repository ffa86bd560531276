"""Trackers: the protocol, failures that do not stop a run, and real runs of wandb and MLflow without a network."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxymetric.system.watcher import Silent
from proxymetric.training.tracking import TRACKERS, Recorder
from proxymetric.training.tracking.mlflow import MLflow
from proxymetric.training.tracking.recorder import numbers_of, settings_of
from proxymetric.training.tracking.run_id import read_id, write_id
from training_runs import run

SHORT = {"train__epochs": 1, "data__validation": 0.3}


class Said(Silent):
    """Keeps the messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


class Toy:
    """A tracker that keeps what it gets and fails when it is told to."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[tuple] = []
        self.fails = False

    def begin(self, step, settings) -> None:
        self.calls.append(("begin", step, settings))

    def record(self, step, numbers) -> None:
        if self.fails:
            raise ConnectionError("no answer")
        self.calls.append(("record", step, numbers))

    def end(self) -> None:
        self.calls.append(("end",))


@pytest.fixture
def toy(monkeypatch, tmp_path) -> Recorder:
    monkeypatch.setitem(TRACKERS, "toy", f"{__name__}.Toy")
    said = Said()
    recorder = Recorder("toy", tmp_path, said.say)
    recorder.messages = said.said
    return recorder


def test_a_tracker_is_a_class_and_a_line(toy, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps({"recipe": {"seed": 3, "train": {"lr": 0.1}}}))
    toy.begin(4)
    toy({"event": "evaluation", "step": 5, "epoch": 1, "R@1": 0.5, "note": "text"})
    calls = toy.tracker.calls
    toy.end()
    assert calls == [
        ("begin", 4, {"seed": 3, "train.lr": 0.1}),
        ("record", 5, {"validation/R@1": 0.5}),
        ("end",),
    ]


def test_a_tracker_that_loses_numbers_gets_them_again(toy, monkeypatch):
    earlier = [{"event": "step", "step": step, "loss": 1.0} for step in (1, 2)]
    toy.begin(2, earlier)
    assert [call[0] for call in toy.tracker.calls] == ["begin"]
    monkeypatch.setattr(toy.tracker, "takes_earlier_numbers", True, raising=False)
    toy.begin(2, earlier)
    assert toy.tracker.calls[-2:] == [("record", 1, {"train/loss": 1.0}), ("record", 2, {"train/loss": 1.0})]


def test_a_tracker_that_fails_does_not_stop_the_training(toy):
    toy.begin(0)
    toy.tracker.fails = True
    for step in (1, 2):
        toy({"event": "step", "step": step, "loss": 1.0})
    toy.end()
    assert toy.messages == ["toy failed (ConnectionError: no answer); the training goes on without it"]


def test_a_tracker_that_cannot_begin_is_refused(toy, monkeypatch):
    def begin(step, settings):
        raise ConnectionError("no answer")

    monkeypatch.setattr(toy.tracker, "begin", begin)
    with pytest.raises(ValueError, match=r"train\.track: got 'toy', which cannot begin \(no answer\)"):
        toy.begin(0)


def test_ids_are_kept_for_each_tracker(tmp_path):
    assert read_id(tmp_path, "wandb") is None
    write_id(tmp_path, "wandb", "a")
    write_id(tmp_path, "mlflow", "b")
    assert (read_id(tmp_path, "wandb"), read_id(tmp_path, "mlflow")) == ("a", "b")
    assert settings_of(tmp_path) == {}
    assert numbers_of({"event": "skipped", "step": 3, "epoch": 0}) == {}


def logged(folder: Path) -> dict[int, dict[str, float]]:
    """The numbers of the log by step."""
    numbers: dict[int, dict[str, float]] = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        numbers.setdefault(record["step"], {}).update(numbers_of(record))
    return numbers


@pytest.mark.slow
@pytest.mark.usefixtures("only_training")
def test_mlflow_writes_the_curves_to_a_local_folder(photos, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    out = tmp_path / "run"
    watcher = Said()
    run(photos, out, train__track="mlflow", watcher=watcher, **SHORT)
    run(photos, out, train__track="mlflow", watcher=watcher, resume=True, **SHORT | {"train__epochs": 2})
    assert not [text for text in watcher.said if "mlflow" in text]
    client = mlflow.MlflowClient(tracking_uri=(out / "mlflow").as_uri())
    (experiment,) = [e for e in client.search_experiments() if e.name == "proxymetric"]
    (stored,) = client.search_runs([experiment.experiment_id])
    assert stored.info.run_id == read_id(out, "mlflow")
    assert stored.info.status == "FINISHED"
    assert stored.data.params["train.batch"] == "8"
    wanted = {step: numbers["train/loss"] for step, numbers in logged(out).items() if "train/loss" in numbers}
    curve = {m.step: m.value for m in client.get_metric_history(stored.info.run_id, "train/loss")}
    assert wanted
    assert curve == pytest.approx(wanted)
    scores = client.get_metric_history(stored.info.run_id, "validation/R_at_1")
    assert len(scores) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("only_training")
def test_wandb_writes_the_curves_to_an_offline_folder(photos, tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `wandb` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    out = tmp_path / "run"
    watcher = Said()
    run(photos, out, train__track="wandb", watcher=watcher, **SHORT | {"train__epochs": 2})
    assert not [text for text in watcher.said if "wandb" in text]
    (folder,) = (out / "wandb").glob("offline-run-*")
    assert folder.name.endswith(f"-{read_id(out, 'wandb')}")
    history = offline_history(next(folder.glob("*.wandb")))
    wanted = {step: numbers["train/loss"] for step, numbers in logged(out).items() if "train/loss" in numbers}
    assert wanted
    assert {step: row["train/loss"] for step, row in history.items() if "train/loss" in row} == pytest.approx(wanted)
    assert any("validation/R@1" in row for row in history.values())
    resumed = SHORT | {"train__epochs": 3}
    run(photos, out, train__track="wandb", watcher=watcher, resume=True, **resumed)
    assert not [text for text in watcher.said if "wandb" in text]
    folders = sorted((out / "wandb").glob("offline-run-*"))
    assert len(folders) == 2
    assert {folder.name.rpartition("-")[2] for folder in folders} == {read_id(out, "wandb")}
    newest = offline_history(next(folders[-1].glob("*.wandb")))
    assert {step: set(numbers) for step, numbers in logged(out).items()} == {
        step: {name for name in row if not name.startswith("_")} for step, row in newest.items()
    }, "a killed process may have written nothing, so the newest folder holds all steps"


def offline_history(file: Path) -> dict[int, dict[str, float]]:
    """The numbers by step in a file that Weights & Biases would send later."""
    from wandb.proto import wandb_internal_pb2

    history: dict[int, dict[str, float]] = {}
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            history.setdefault(record.history.step.num, {}).update(row)
    return history


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in the log format of LevelDB: blocks of 32 KiB with whole records or parts of them."""
    place, parts = 7, b""  # after the header of wandb
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def test_mlflow_keeps_a_point_once_when_a_killed_run_goes_on(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra `mlflow` is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    killed = MLflow(tmp_path)
    killed.begin(0, {})
    for step in (1, 2):
        killed.record(step, {"train/loss": step / 2})
    resumed = MLflow(tmp_path)
    resumed.begin(1, {})  # the checkpoint is older than the last point
    for step in (2, 3):
        resumed.record(step, {"train/loss": step / 2, "validation/R@1": step / 4})
    resumed.end()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    run_id = read_id(tmp_path, "mlflow")
    losses, scores = (client.get_metric_history(run_id, name) for name in ("train/loss", "validation/R_at_1"))
    assert [(point.step, point.value) for point in losses] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert [point.step for point in scores] == [2, 3], "a metric that the killed run did not have"
