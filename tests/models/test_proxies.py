"""The proxies of a run are read from its checkpoint, whatever the method; a run without proxies has none."""

from __future__ import annotations

import json

import pytest
import torch

import proxymetric as pm
from proxymetric.core.capabilities import HasClassProxies
from proxymetric.core.normalisation import unit
from proxymetric.models.proxies import load_proxies
from proxymetric.search.atlas import place, place_proxies
from proxymetric.system.checkpoint import Checkpoint, module_tensors

CLASSES, DIM = ["wren", "owl", "crow"], 8


def make_run(folder, method, **loss):
    """A folder with what `load_proxies` reads of a run, and the criterion that it holds."""
    criterion = pm.method(method, classes=len(CLASSES), dim=DIM, **loss)
    recipe = {"method": method, "seed": 0, "data": {}, "view": {}, "encoder": {}, "loss": loss, "train": {}}
    description = {
        "recipe": recipe, "said": {}, "encoder": {"backbone": "small"}, "normalise": "l2", "view": {},
        "classes": CLASSES, "data": {"name": "a", "identity": "b"}, "versions": {},
    }  # fmt: skip
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(description))
    for module in criterion.modules():
        if isinstance(module, HasClassProxies):
            for value in module.state_dict().values():
                if value.dtype.is_floating_point:
                    value.copy_(torch.rand_like(value))
    Checkpoint(module_tensors(criterion, "criterion."), {}).write(folder / "best.safetensors")
    return criterion


METHODS = [("proxy-anchor", {}, 1), ("soft-triple", {"per_class": 2}, 2), ("vcpa", {}, 1), ("vptsp-m", {}, 1)]


@pytest.mark.parametrize(("method", "loss", "per_class"), METHODS, ids=[row[0] for row in METHODS])
def test_the_proxies_of_a_checkpoint(tmp_path, method, loss, per_class):
    criterion = make_run(tmp_path / "run", method, **loss)
    (source,) = (module for module in criterion.modules() if isinstance(module, HasClassProxies))
    expected = source.class_proxies()
    found = load_proxies(tmp_path / "run", DIM)
    assert found.names == [name for name in CLASSES for _ in range(per_class)]
    assert torch.equal(found.vectors, expected.vectors)
    assert (found.sigma is not None) == (method == "vcpa")
    if found.sigma is not None:
        assert torch.equal(found.sigma, expected.sigma)


def test_there_may_be_none(tmp_path):
    make_run(tmp_path / "pairs", "contrastive")
    assert load_proxies(tmp_path / "pairs", DIM) is None
    make_run(tmp_path / "run", "proxy-anchor")
    assert load_proxies(tmp_path / "run", DIM + 1) is None, "the checkpoint is of other dimensions"
    slim = tmp_path / "slim.safetensors"
    slim.write_bytes(b"")
    assert load_proxies(slim, DIM) is None


def test_gaussians_have_a_radius_that_grows_with_sigma():
    random = torch.Generator().manual_seed(0)
    vectors = unit(torch.randn(300, DIM, generator=random)).numpy()
    points = vectors[:, :2].copy()
    mean = torch.randn(5, DIM, generator=random)
    narrow, wide = (place_proxies(mean, torch.full_like(mean, sigma), vectors, points) for sigma in (0.01, 0.5))
    assert (narrow[:, :2] == place(unit(mean).numpy(), vectors, points)).all()
    assert (wide[:, 2] > 2 * narrow[:, 2]).all()
    assert (place_proxies(3 * mean, None, vectors, points)[:, 2] == 0).all(), "points have no radius"
    again = place_proxies(mean, torch.full_like(mean, 0.5), vectors, points)
    assert (again == wide).all(), "the same draws each time"
    drawn = unit(mean + 0.5 * torch.randn(2000, *mean.shape, generator=random)).flatten(0, 1)
    offsets = place(drawn.numpy(), vectors, points).reshape(2000, 5, 2) - wide[:, :2]
    expected = (offsets**2).sum(2).mean(0) / 2
    assert wide[:, 2] == pytest.approx(expected**0.5, rel=0.4), "the standard deviation on the map"
