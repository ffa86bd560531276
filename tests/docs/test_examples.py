"""Every example runs from the command line, does what it says, and refuses missing files with a clear error."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxymetric.plots import CcpStage, draw_ccp_stages

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.glob("*.py"))
QUICK = {"proxy_isa": 3, "vcpa": 3, "ccp": 14}
"""epochs"""
MORE = {"ccp": ("--patience", 1)}


def example(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run `python examples/NAME.py WORDS` outside of the repository's root."""
    command = [sys.executable, "-W", "error::UserWarning", str(EXAMPLES / f"{name}.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=EXAMPLES, check=False)


def test_every_example_is_run_here_and_listed():
    assert {file.stem for file in FILES} == {*QUICK, "ccp_mnist"}
    listed = re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [file.stem for file in FILES]


@pytest.mark.slow(cases=4)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_says_how_to_run_it_and_needs_no_trainer(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert f"python examples/{file.name}" in (ast.get_docstring(tree) or "")
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not {
        name for name in imported if name and name.startswith(("proxymetric.training", "proxymetric.models.model"))
    }


@cache
def answer_of(name: str) -> subprocess.CompletedProcess[str]:
    return example(name, "--epochs", QUICK[name], *MORE.get(name, ()))


@pytest.mark.parametrize("name", QUICK)
def test_training_improves_the_score_on_unseen_classes(name):
    answer = answer_of(name)
    assert answer.returncode == 0, answer.stderr
    assert not answer.stderr
    epochs = re.findall(r"^epoch +(\d+) ", answer.stdout, re.MULTILINE)
    assert [int(epoch) for epoch in epochs] == list(range(1, QUICK[name] + 1))
    (scores,) = re.findall(r"^MAP@R on unseen classes: ([\d.]+) before, ([\d.]+) after$", answer.stdout, re.MULTILINE)
    before, after = map(float, scores)
    assert after > 1.5 * before, "not by chance: 1.5 times and more"


@pytest.mark.release
def test_isa_remembers_from_the_second_epoch_on():
    remembered = [float(value) for value in re.findall(r"remembered ([\d.]+)", answer_of("proxy_isa").stdout)]
    assert remembered[0] == 0
    assert all(remembered[1:])


@pytest.mark.release
def test_vcpa_knows_what_it_is_sure_of():
    sure, unsure = (
        [float(value) for value in re.findall(r"\(([\d.]+)\)", line)]
        for line in answer_of("vcpa").stdout.splitlines()
        if "certain" in line
    )
    assert len(sure) == len(unsure) == 5
    assert sure == sorted(sure)
    assert unsure == sorted(unsure, reverse=True)
    assert max(sure) < min(unsure)


@pytest.mark.release
def test_ccp_begins_further_problems():
    problems = [int(number) for number in re.findall(r"problem (\d+)", answer_of("ccp").stdout)]
    assert problems == sorted(problems)
    assert problems[-1] > 1, answer_of("ccp").stdout


@pytest.mark.release
def test_the_picture_of_projections(tmp_path):
    answer = example("ccp_mnist", "--out", tmp_path / "new", "--projections", 2, "--every", 10, "--patience", 1)
    assert answer.returncode == 0, answer.stderr
    found = json.loads((tmp_path / "new" / "ccp-mnist.json").read_text(encoding="utf-8"))
    titles = [stage["stage"] for stage in found["stages"]]
    assert titles == ["before: one problem", "projection 1", "projection 2", "control: no projections"]
    steps = [stage["step"] for stage in found["stages"]]
    assert steps[:3] == sorted(set(steps[:3]))
    assert steps[3] == steps[2], "the control takes as many steps"
    assert all(0 < stage["covering_radius"] < 1 and 0 < stage["MAP@R"] <= 1 for stage in found["stages"])
    with Image.open(tmp_path / "new" / "ccp-mnist.png") as picture:
        assert picture.width > 900
        assert len(picture.convert("RGB").getcolors(2**24)) > 100


def test_wrong_data_is_answered_in_a_sentence(tmp_path, photos):
    for data, said in (
        (tmp_path / "nowhere", "which does not exist"),
        (photos, "expected a folder with MNIST's files"),
    ):
        answer = example("ccp_mnist", "--data", data, "--out", tmp_path / "out")
        assert answer.returncode not in (0, None)
        assert said in answer.stderr
        assert "Traceback" not in answer.stderr
        assert not (tmp_path / "out").exists()


# The drawing


def stage(**changed: object) -> CcpStage:
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 60)
    centres = np.array([[0.8, 0.0], [-0.6, 0.5], [0.0, -0.7]])
    points = centres[labels] + 0.02 * random.standard_normal((60, 2))
    first = CcpStage("before", points, labels, centres[:, None].repeat(2, 1), None, 0.1, 0.5)
    return first._replace(**changed)


def colours(path: Path) -> set[tuple[int, ...]]:
    with Image.open(path) as picture:
        return {colour for _, colour in picture.convert("RGB").getcolors(2**24)}


def test_what_is_picked_is_drawn(tmp_path):
    far = np.array([[[0.1, 0.9]], [[0.2, 0.8]], [[-0.9, -0.2]]])
    draw_ccp_stages(tmp_path / "without.png", [stage()])
    draw_ccp_stages(tmp_path / "with.png", [stage(picks=far)])
    with Image.open(tmp_path / "without.png") as without, Image.open(tmp_path / "with.png") as drawn:
        assert without.size == drawn.size
        differs = np.any(np.asarray(without.convert("RGB")) != np.asarray(drawn.convert("RGB")), axis=2)
        rows, columns = np.nonzero(differs)
        side = drawn.width
        top = 0.5 / 3 * side  # of the panel, below its titles
        x, y = (columns / side - 0.5) * 2.2, -((rows - top) / side - 0.5) * 2.2
        nearest = np.linalg.norm(np.stack([x, y], 1)[:, None] - far[:, 0], axis=2)
        assert set(nearest.argmin(1)) == {0, 1, 2}
        assert nearest.min(1).max() < 0.08


def test_every_class_has_its_colour(tmp_path):
    draw_ccp_stages(tmp_path / "three.png", [stage()])
    assert {(0x33, 0x22, 0x88), (0x88, 0xCC, 0xEE), (0x11, 0x77, 0x33)} <= colours(tmp_path / "three.png")
    assert (0xDD, 0xCC, 0x77) not in colours(tmp_path / "three.png")


def test_stages_that_cannot_be_drawn(tmp_path):
    with pytest.raises(ValueError, match="stages: got none, expected at least one"):
        draw_ccp_stages(tmp_path / "a.png", [])
    with pytest.raises(ValueError, match=r"got points \(60, 3\) for 60 labels in 'before', expected \(N, 2\)"):
        draw_ccp_stages(tmp_path / "a.png", [stage(points=np.zeros((60, 3)))])
    assert not list(tmp_path.iterdir())
