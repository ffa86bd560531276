"""The guide for users of pytorch-metric-learning: both scripts train the same network, and its check holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "how-to" / "from-pytorch-metric-learning.md"
SCRIPTS = ROOT / "benchmarks" / "moving"
pytest.importorskip("pytorch_metric_learning", reason="the other library is not installed")


def script(name: str) -> dict:
    """The functions of a script."""
    namespace: dict = {"__name__": name}
    exec(compile((SCRIPTS / f"{name}.py").read_text(encoding="utf-8"), f"{name}.py", "exec"), namespace)
    return namespace


def test_both_scripts_train_the_same_network_and_give_it_the_same_scores():
    torch.manual_seed(0)
    centres = torch.randn(8, 3, 4, 4)
    labels = torch.arange(256) % 8
    images = centres[labels] + torch.randn(256, 3, 4, 4)
    curves, scores = [], []
    for name in ("pml_theirs", "pml_ours"):
        side = script(name)
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 128))
        curves.append(torch.tensor(side["train"](net, images, labels, 8, 2)))
        scores.append(side["measure"](net, images, labels))
    assert len(curves[0]) == 8
    assert curves[0][-1] < curves[0][0]
    torch.testing.assert_close(curves[0], curves[1], rtol=1e-4, atol=0)
    assert scores[0] == pytest.approx(scores[1], abs=0.005)


def test_our_side_of_the_other_guide_learns():
    torch.manual_seed(0)
    labels = torch.arange(256) % 8
    images = torch.randn(8, 48)[labels] + 0.5 * torch.randn(256, 48)
    net, side = torch.nn.Linear(48, 128), script("oml_ours")
    curve = side["train"](net, images, labels, 8, 2)
    assert curve[-1] < curve[0]
    assert side["measure"](net, images, labels)["R@1"] > 0.9


def test_the_check_of_the_page_holds():
    code = re.findall(r"```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[-1]
    assert "assert_close" in code
    exec(compile(code, PAGE.name, "exec"), {})
