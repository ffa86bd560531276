"""The uncertainty of the classes, computed with the reported model: in the result and on the page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import proxymetric as pm
from proxymetric.core.pieces import Commit, Compare, Context, Energy, Objective, References, Sum
from proxymetric.data import ImageSet, open_data, split
from proxymetric.losses import ProxyAnchor
from proxymetric.papers import CATALOGUE
from proxymetric.papers.about import about
from proxymetric.runs.class_uncertainty import class_uncertainty, has_uncertainty
from proxymetric.runs.evaluation_set import seen_set
from proxymetric.runs.report import remake_report
from proxymetric.search.run_knowledge import run_knowledge
from proxymetric.sources import InBatch, LearnedProxies
from proxymetric.system.checkpoint import Checkpoint
from training_runs import records, run, same_run

NAMES = ["ant", "bee", "cat", "dog", "elk", "fox", "gnu", "hen", "ibis", "jay", "kea", "lynx"]


class Doubting(LearnedProxies):
    """Proxies with an uncertainty that differs between classes and grows with every commit."""

    doubt: Tensor

    def __init__(self, classes: int, dim: int, per_class: int = 1) -> None:
        super().__init__(classes, dim, per_class)
        self.register_buffer("doubt", torch.ones(classes))

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        refs, remember = super().forward(ctx, energy)

        def commit() -> None:
            remember()
            self.doubt += (torch.arange(len(self.doubt)) * 7) % len(self.doubt)

        return refs, commit

    def uncertainty(self, draws: int) -> Tensor:
        return self.doubt


def criterion(classes: int, per_class: int = 1, extra: bool = False, doubts: bool = True) -> pm.Criterion:
    source = (Doubting if doubts else LearnedProxies)(classes, 2, per_class)
    objective: Objective = Compare(ProxyAnchor(), source)
    if extra:
        objective = Sum(a=(1.0, objective), b=(1.0, Compare(ProxyAnchor(), LearnedProxies(classes, 2))))
    return pm.Criterion(objective)


def never() -> tuple[Tensor, Tensor]:
    raise AssertionError("nothing to compare with, nothing to embed")


def at(degrees: list[float], length: float = 1.0) -> Tensor:
    angle = torch.tensor(degrees).deg2rad()
    return length * torch.stack([angle.cos(), angle.sin()], 1)


def test_both_ends_from_the_end_inwards() -> None:
    made = criterion(12, extra=True)
    values = [5.0, 1.0, 9.0, 2.0, 2.0, 7.0, 8.0, 3.0, 4.0, 6.0, 10.0, 11.0]
    made.objective.parts["a"].source.doubt.copy_(torch.tensor(values))
    found = class_uncertainty(made, made.uncertainty(), NAMES, never)
    assert found == {
        "mean": pytest.approx(68 / 12),
        "least": [["bee", 1.0], ["dog", 2.0], ["elk", 2.0], ["hen", 3.0], ["ibis", 4.0]],
        "most": [["lynx", 11.0], ["kea", 10.0], ["cat", 9.0], ["gnu", 8.0], ["fox", 7.0]],
    }, "two sources with proxies: no correlation"
    json.dumps(found)
    few = criterion(3, extra=True)
    few.objective.parts["a"].source.doubt.copy_(torch.tensor([2.0, 1.0, 3.0]))
    found = class_uncertainty(few, few.uncertainty(), NAMES[:3], never)
    assert (found["least"], found["most"]) == ([["bee", 1.0]], [["cat", 3.0]]), "no class at both ends"


def test_the_correlation_is_with_the_median_similarity_to_the_mean_proxy() -> None:
    made = criterion(4, per_class=2)
    source = made.objective.source
    # Each class has two proxies of any length, 40 degrees apart: their mean direction lies in between.
    source.reseed(torch.cat([at([c - 20.0, c + 20.0]) * torch.tensor([[3.0], [0.5]]) for c in (0, 90, 180, 270)]))
    source.doubt.copy_(torch.tensor([1.0, 3.0, 2.0, 50.0]))
    away = {0: [10.0, -20.0, 80.0], 1: [60.0, -60.0], 2: [30.0]}  # degrees from the class's mean; class 3 has no image
    vectors = torch.cat([at([90.0 * c + d for d in degrees], length=5.0) for c, degrees in away.items()])
    labels = torch.tensor([c for c, degrees in away.items() for _ in degrees])
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    found = class_uncertainty(made, made.uncertainty(), NAMES[:4], lambda: (vectors[order], labels[order]))
    medians = np.cos(np.deg2rad([20.0, 60.0, 30.0]))
    assert found["correlation"] == pytest.approx(np.corrcoef([1.0, 3.0, 2.0], medians)[0, 1], abs=1e-6)
    assert found["correlation"] < -0.9
    assert found["mean"] == 14.0


def test_a_correlation_that_is_not_defined_is_left_out() -> None:
    vectors, labels = at([0.0, 100.0, 200.0]), torch.arange(3)
    same = criterion(3)
    assert "correlation" not in class_uncertainty(same, same.uncertainty(), NAMES[:3], lambda: (vectors, labels)), (
        "all equally unsure"
    )
    two = criterion(2)
    two.objective.source.doubt.copy_(torch.tensor([1.0, 2.0]))
    assert "correlation" not in class_uncertainty(two, two.uncertainty(), NAMES[:2], lambda: (vectors[:2], labels[:2]))


def test_who_can_tell() -> None:
    assert has_uncertainty(criterion(2))
    assert has_uncertainty(criterion(2, extra=True))
    assert not has_uncertainty(criterion(2, doubts=False))
    assert not has_uncertainty(pm.Criterion(Compare(ProxyAnchor(), InBatch())))


@pytest.fixture
def doubting(monkeypatch: pytest.MonkeyPatch) -> None:
    @about(paper="none", choose="never")
    def build(classes: int, dim: int) -> Objective:
        return Compare(ProxyAnchor(), Doubting(classes, dim))

    monkeypatch.setitem(CATALOGUE, "doubting", build)


STILL: dict[str, Any] = {
    "method": "doubting", "encoder__freeze_bn": True, "train__epochs": 2, "train__lr": 1e-2, "train__warmup": 0,
    "train__decay": "step", "train__decay_every": 1, "train__decay_by": 1e-30,
}  # fmt: skip
"""only the first epoch changes weights, so that it is chosen, and the last one differs from it in its doubts alone"""


def expected(tensors: dict[str, Tensor], seen: ImageSet, vectors: Tensor) -> tuple[np.ndarray, float]:
    doubt = tensors["criterion.objective.source.doubt"].numpy()
    proxies = torch.nn.functional.normalize(tensors["criterion.objective.source.vectors"]).numpy()
    alike = (vectors.numpy() * proxies[seen.labels]).sum(1)
    medians = [np.median(alike[seen.labels == c]) for c in range(len(seen.classes))]
    return doubt, np.corrcoef(doubt, medians)[0, 1]


def test_it_is_that_of_the_model_that_is_reported(
    photos: Path, tmp_path: Path, doubting: None, only_training: None
) -> None:
    done = run(photos, tmp_path / "run", **STILL)
    assert done.result.chosen_epoch == 1
    seen = split(open_data(photos), 0.2, "auto", 0).train
    assert seen_set(done.folder).identity() == seen.identity()
    best, last = (Checkpoint.read(done.folder / name).tensors for name in ("best.safetensors", "last.safetensors"))
    doubt, correlation = expected(best, seen, done.load().embed(seen))
    found = done.result.uncertainty
    assert found["mean"] == pytest.approx(doubt.mean())
    assert found["mean"] != pytest.approx(float(last["criterion.objective.source.doubt"].mean()))
    assert found["least"] == [[seen.classes[c], doubt[c]] for c in np.argsort(doubt)[:4]]
    assert found["most"] == [[seen.classes[c], doubt[c]] for c in np.argsort(-doubt)[:4]]
    assert found["correlation"] == pytest.approx(correlation, abs=1e-5)
    stored = run_knowledge(done.folder).uncertainty
    assert stored == pytest.approx(dict(zip(seen.classes, doubt, strict=True))), (
        "`search --identify` knows each class's"
    )
    assert json.loads((done.folder / "result.json").read_text())["uncertainty"] == found
    again = run(photos, shutil.copytree(done.folder, tmp_path / "again"), resume=True, **STILL)
    same_run(again.folder, done.folder)
    # The uncertainty of a refitted run is that of the refitted model, on all classes.
    both = run(photos, tmp_path / "both", train__refit=True, **STILL)
    everything = seen_set(both.folder)
    assert len(everything.classes) == 10
    doubt, correlation = expected(
        Checkpoint.read(both.folder / "refit" / "last.safetensors").tensors, everything, both.load().embed(everything)
    )
    assert both.result.uncertainty["mean"] == pytest.approx(doubt.mean())
    assert both.result.uncertainty["correlation"] == pytest.approx(correlation, abs=1e-5)
    assert len(both.result.uncertainty["most"]) == 5


def test_the_page_shows_the_classes_and_is_made_again_alike(photos: Path, tmp_path: Path, doubting: None) -> None:
    broken = shutil.copytree(photos, tmp_path / "photos")
    for file in broken.glob("class*/[01].png"):
        file.write_text("no picture")
    done = run(broken, tmp_path / "run", train__frozen=True, **STILL)
    page = (done.folder / "report.html").read_text()
    start = page.index("Certainty about classes")
    part = page[start : page.index("</section>", start)]
    found = done.result.uncertainty
    names = [name for end in ("least", "most") for name, _ in found[end]]
    assert len(names) == len(set(names)) == 8
    assert all(f">{name}</span>" in part for name in names)
    assert part.count("<img") == 8 * 4
    assert f"is {found['correlation']:.2f}." in part
    assert remake_report(done.folder).read_text() == page


def test_others_say_nothing(photos: Path, tmp_path: Path, only_training: None) -> None:
    done = run(photos, tmp_path / "run", train__epochs=1)
    assert done.result.uncertainty is None


@pytest.mark.parametrize("method", ["vcpa", "ccp"])
def test_gaussian_proxies_tell(method: str, photos: Path, tmp_path: Path, only_training: None) -> None:
    """Also under a scheme."""
    base = {"loss__base": "vcpa", "loss__per_class": 1, "train__per_class": 2} if method == "ccp" else {}
    done = run(photos, tmp_path / "run", method=method, train__epochs=1, **base)
    found = done.result.uncertainty
    assert -1 <= found["correlation"] <= 1
    assert found["least"][0][1] < found["most"][0][1]
    assert [record["figures"] for record in records(done.folder) if record["event"] == "evaluation"]
