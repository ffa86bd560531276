"""Numbers in the files of a run that no run has: a sentence that names the file, before memory is reserved."""

from __future__ import annotations

import json
import shutil

import pytest

from proxymetric.system.files import read_json
from proxymetric.system.tensor_files import read_header, read_tensors, write_tensors
from terminal import proxymetric, refused


@pytest.fixture(scope="module")
def run(finished):
    return finished


CASES = [
    ("encoder", "size", 10**9, "got 1000000000 for encoder.size, expected a number in 1..4096"),
    ("encoder", "dim", 10**12, "got 1000000000000 for encoder.dim, expected a number in 1..1000000"),
    ("encoder", "dim", -1, "got -1 for encoder.dim"),
    ("view", "size", 10**9, "got 1000000000 for view.size, expected a number in 1..4096"),
]


@pytest.mark.parametrize(("table", "key", "value", "said"), CASES)
def test_of_a_run(run, photos, tmp_path, table, key, value, said):
    copy = shutil.copytree(run, tmp_path / "run")
    description = read_json(copy / "run.json")
    description[table][key] = value
    (copy / "run.json").write_text(json.dumps(description))
    answer = proxymetric("embed", copy, photos, "--out", tmp_path / "a.safetensors")
    refused(answer, f"{copy / 'run.json'}: {said}", "the file is damaged")


def test_of_a_slim_file_and_of_a_shared_folder(run, photos, tmp_path):
    answer = proxymetric("export", run, "--slim", tmp_path / "a.safetensors", "--hub", tmp_path / "hub")
    assert answer.code == 0, answer
    config = read_json(tmp_path / "hub" / "config.json")
    config["encoder"]["size"] = 10**9
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    refused(proxymetric("embed", tmp_path / "hub", photos), "config.json: got 1000000000 for encoder.size")
    tensors, header = read_tensors(tmp_path / "a.safetensors")[0], read_header(tmp_path / "a.safetensors")
    state = json.loads(header["state"])
    state["encoder"]["size"] = 10**9
    write_tensors(tmp_path / "b.safetensors", tensors, {"state": json.dumps(state)})
    refused(proxymetric("embed", tmp_path / "b.safetensors", photos), "b.safetensors: got 1000000000 for encoder.size")
