"""The guide for users of pytorch-metric-learning: both scripts train the same network, and its check holds."""

from __future__ import annotations

import inspect
import math
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


ARGUMENTS = [
    ("ProxyAnchorLoss", "margin", "proxy-anchor", "margin"),
    ("ProxyAnchorLoss", "alpha", "proxy-anchor", "scale"),
    ("ArcFaceLoss", "margin", "arcface", "margin"),
    ("ArcFaceLoss", "scale", "arcface", "scale"),
    ("SubCenterArcFaceLoss", "margin", "subcentre-arcface", "margin"),
    ("SubCenterArcFaceLoss", "scale", "subcentre-arcface", "scale"),
    ("SubCenterArcFaceLoss", "sub_centers", "subcentre-arcface", "per_class"),
    ("CosFaceLoss", "margin", "cosface", "margin"),
    ("CosFaceLoss", "scale", "cosface", "scale"),
    ("NormalizedSoftmaxLoss", "temperature", "norm-softmax", "scale"),
    ("SoftTripleLoss", "centers_per_class", "soft-triple", "per_class"),
    ("SoftTripleLoss", "la", "soft-triple", "scale"),
    ("SoftTripleLoss", "gamma", "soft-triple", "gamma"),
    ("SoftTripleLoss", "margin", "soft-triple", "margin"),
    ("TripletMarginLoss", "margin", "triplet", "margin"),
    ("ContrastiveLoss", "pos_margin", "margin-contrastive", "positive_margin"),
    ("ContrastiveLoss", "neg_margin", "margin-contrastive", "margin"),
    ("MultiSimilarityLoss", "alpha", "multi-similarity", "alpha"),
    ("MultiSimilarityLoss", "beta", "multi-similarity", "beta"),
    ("MultiSimilarityLoss", "base", "multi-similarity", "base"),
    ("CircleLoss", "m", "circle", "margin"),
    ("CircleLoss", "gamma", "circle", "scale"),
    ("SupConLoss", "temperature", "supcon", "temperature"),
    ("CrossBatchMemory", "memory_size", "xbm", "memory"),
]
"""a class of the other library and its argument, a method here and its argument"""


@pytest.mark.parametrize(("their_class", "their_name", "method", "name"), ARGUMENTS)
def test_defaults_that_differ_are_in_the_table_and_no_others(their_class, their_name, method, name):
    from pytorch_metric_learning import losses

    from proxymetric.papers import options

    theirs = inspect.signature(getattr(losses, their_class)).parameters[their_name].default
    ours = options(method)[name].default
    in_degrees, in_temperature = theirs == 28.6, (their_name, name) == ("temperature", "scale")
    meant = math.radians(theirs) if in_degrees else 1 / theirs if in_temperature else theirs
    table = PAGE.read_text(encoding="utf-8").split("### Defaults that differ")[1].split("### ")[0]
    rows = [line.split("|") for line in table.splitlines() if line.startswith("|")]
    found = [
        (float(there[1]), float(here[1]))
        for row in rows
        if f"`{their_class}`" in row[1]
        and (there := re.search(rf"`{their_name}=([\d.]+)`", row[2]))
        and (here := re.search(rf"`{name}=([\d.]+)`", row[3]))
    ]
    assert found == ([] if meant == pytest.approx(ours, rel=1e-9) else [(theirs, ours)])


def test_the_check_of_the_page_holds():
    code = re.findall(r"```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[-1]
    assert "assert_close" in code
    exec(compile(code, PAGE.name, "exec"), {})
