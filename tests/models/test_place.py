"""A place is parsed once into what lies there; a loaded model says where it was found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import proxymetric as pm
from proxymetric.models import place as places
from proxymetric.models.hub import FORMAT
from proxymetric.models.place import HubAddress, HubFolder, RunFolder, SlimFile, place_of
from terminal import finished_run


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    return finished_run(photos, tmp_path_factory.mktemp("run") / "run")


def test_each_kind_of_place(tmp_path):
    shared, run, both = tmp_path / "shared", tmp_path / "run", tmp_path / "both"
    for folder in (shared, run, both):
        folder.mkdir()
    for folder in (shared, both):
        (folder / "config.json").write_text(json.dumps({"format": FORMAT}))
    for folder in (run, both):
        (folder / "run.json").write_text("{}")
    (tmp_path / "slim.safetensors").write_bytes(b"")
    kinds = {name: type(place_of(tmp_path / name)) for name in ("shared", "run", "both", "slim.safetensors", "gone")}
    assert kinds == {
        "shared": HubFolder, "run": RunFolder, "both": RunFolder, "slim.safetensors": SlimFile, "gone": RunFolder,
    }  # fmt: skip
    assert place_of("hf://a/b@v1") == HubAddress("hf://a/b@v1", "a/b", "v1")
    assert place_of("hf://a/b").absolute == "hf://a/b"
    assert place_of("runs/a").absolute == os.path.abspath("runs/a")
    assert [place_of(name).exists() for name in ("hf://a/b", str(tmp_path / "gone"))] == [True, False]


def test_a_place_is_asked_once(run, monkeypatch):
    """Loading asks the disk once what kind of place it is, and a place that is parsed is not asked again."""
    parsed = []
    is_file = Path.is_file

    def counted(path):
        parsed.append(path) if path == run else None
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", counted)
    model = pm.load(run, device="cpu")
    assert parsed == [run]
    place = place_of(run)
    pm.load(place, device="cpu")
    assert parsed == [run, run]
    assert place_of(place) is place
    assert model.source == {"run": os.path.abspath(run), "which": "best"}


def test_a_config_of_another_program_is_no_shared_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert places.hub_config(tmp_path) is None
    assert isinstance(place_of(tmp_path), RunFolder)
