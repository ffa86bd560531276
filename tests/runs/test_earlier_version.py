"""Runs of version 0.1.0: a run resumes where its method has the same state, and is refused in one sentence otherwise.

`before/*.json` were made from real runs of 0.1.0. They hold the JSON files of the runs and, of their checkpoints, the
headers, the states of random generators, and the name, type and shape of every tensor. The tests fill in the weights,
because only names and shapes decide what can be read.
"""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from terminal import proxymetric, refused

BEFORE = Path(__file__).parent / "before"


def run_of_0_1_0(method: str, folder: Path) -> Path:
    recorded = json.loads((BEFORE / f"0.1.0-{method}.json").read_text())
    folder.mkdir()
    for name, text in recorded["files"].items():
        (folder / name).write_text(text)
    generator = np.random.default_rng(0)
    for name, checkpoint in recorded["tensors"].items():
        tensors = {}
        for key, (dtype, shape, *content) in checkpoint["tensors"].items():
            if content:
                values = np.frombuffer(zlib.decompress(base64.b64decode(content[0])), dtype).reshape(shape)
            elif dtype.startswith("float"):
                values = generator.uniform(0.01, 0.05, shape).astype(dtype)
            else:
                values = np.zeros(shape, dtype)
            tensors[key] = np.ascontiguousarray(values).reshape(shape)
        save_file(tensors, folder / f"{name}.safetensors", checkpoint["header"])
    return folder


def test_a_run_with_the_same_state_resumes(tmp_path):
    folder = run_of_0_1_0("proxy-anchor", tmp_path / "run")
    assert proxymetric("evaluate", folder, "--metrics", "R@1").code == 0
    answer = proxymetric("train", "--out", folder, "--resume", "--epochs", 3)
    assert answer.code == 0
    assert json.loads((folder / "result.json").read_text())["epochs"] == 3


@pytest.mark.parametrize("verb", ["evaluate", "train"])
def test_a_run_of_a_method_that_remembers_more_now_can_be_used_but_not_resumed(tmp_path, verb):
    folder = run_of_0_1_0("proxy-isa", tmp_path / "run")
    if verb == "evaluate":
        assert proxymetric("evaluate", folder, "--metrics", "R@1").code == 0
        return
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    answer = proxymetric("train", "--out", folder, "--resume", "--epochs", 3)
    refused(answer, "last.safetensors does not fit", "objective.weighting.tally.sums is missing", "--overwrite")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
