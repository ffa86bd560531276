"""Nested runs of every method of the catalogue: trained, resumed, scored at each size, cut, indexed in fewer bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import proxymetric as pm
from catalogue import BUILT_AROUND, refusal
from conftest import write_photos
from proxymetric.core.normalisation import cut
from proxymetric.core.quantisation import KINDS
from proxymetric.papers import CATALOGUE
from proxymetric.search import Index
from training_runs import Snapshot, run, same_run

pytestmark = pytest.mark.usefixtures("only_training")
SIZES = [2, 5, 8]
PROMPTED = {
    "encoder__backbone": "test_vit", "encoder__pretrained": False, "encoder__tuning": "vpt+bitfit", "view__size": 32,
    "view__resize": 32,
}  # fmt: skip
QUICK = ("vcpa",)
"""methods of which `make test` trains a run; the slow tests train all of them"""
EVERY = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in CATALOGUE]


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("few") / "photos", classes=6, images=6)


@pytest.mark.parametrize("name", EVERY)
def test_a_nested_run_of_every_method(name: str, few: Path, tmp_path: Path) -> None:
    settings = {"method": name, "loss__nested": SIZES, "train__epochs": 2, "train__warmup": 1, "train__save_every": 2}
    if name.startswith("vptsp"):
        settings |= PROMPTED
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    result = run(few, straight, watcher=Snapshot(5, straight, killed), **settings).result
    run(few, killed, resume=True, **settings)
    same_run(killed, straight)
    assert result.sizes is not None
    assert [(each["dim"], each["vectors"]) for each in result.sizes] == [(m, kind) for m in SIZES for kind in KINDS]
    assert result.sizes[-3]["scores"] == result.scores
    model, files = pm.load(straight, device="cpu"), sorted(few.rglob("*.png"))
    whole = model.embed(files)
    for kind in KINDS:
        index = Index.create(tmp_path / f"{kind}.index", 5, model.cut_to(5), map="none", vectors=kind)
        index.add([str(file) for file in files], model.embed(files, dim=5), labels=[file.parent.name for file in files])
        torch.testing.assert_close(model.embed(files, dim=5), cut(whole, 5, model.normalise))
        assert [hits[0].id for hits in index.search(model.embed(files[:3], dim=5), k=1)] == [str(f) for f in files[:3]]


@pytest.mark.parametrize("outer", BUILT_AROUND)
def test_a_method_around_another_is_nested_where_the_plain_one_can_be_built(outer: str) -> None:
    """What cannot be combined is refused in the same sentence with and without `nested`."""
    built = []
    for base in CATALOGUE:
        arguments = {"base": base} | ({"steps_per_epoch": 1} if "epochs" in CATALOGUE[base].about.needs else {})
        plain, nested = (refusal(outer, **arguments, **more) for more in ({}, {"nested": [1, 3]}))
        assert nested == plain, base
        built += [] if nested else [base]
    assert "proxy-anchor" in built
