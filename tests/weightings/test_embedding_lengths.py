"""The running mean and deviation of lengths: what a step uses, and what it keeps."""

import numpy as np
import pytest
import torch

import proxymetric as pm
from oracles import losses as oracle


def test_a_step_uses_its_own_batch_and_commit_keeps_it() -> None:
    criterion = pm.method("adaface", classes=4, dim=5, rate=0.25).double()
    weighting = criterion.objective.weighting
    mean, deviation = 20.0, 100.0
    generator = np.random.default_rng(0)
    for step in range(4):
        x, y = generator.normal(size=(8, 5)) * (step + 1), generator.integers(0, 4, 8)
        batch = np.linalg.norm(x, axis=1)
        new_mean = 0.75 * mean + 0.25 * batch.mean()
        new_deviation = 0.75 * deviation + 0.25 * batch.std(ddof=1)
        z = oracle.length_scores(x, new_mean, new_deviation, 0.333)
        p = criterion.objective.source.vectors.detach().numpy()
        loss = criterion(torch.from_numpy(x), torch.from_numpy(y))
        assert loss.item() == pytest.approx(oracle.adaface(x, y, p, 64.0, 0.4, z), rel=1e-9)
        assert weighting.mean.item() == pytest.approx(mean), "nothing is kept before commit"
        if step == 1:
            criterion.discard()
            continue
        criterion.commit()
        mean, deviation = new_mean, new_deviation
        assert (weighting.mean.item(), weighting.deviation.item()) == pytest.approx((mean, deviation))


def test_no_image_and_one_image_have_no_deviation_and_change_nothing() -> None:
    criterion = pm.method("adaface", classes=4, dim=5)
    for count in (0, 1):
        criterion(torch.randn(count, 5, requires_grad=True), torch.arange(count))
        criterion.commit()
    assert criterion.objective.weighting.mean.item() == 20
    assert criterion.objective.weighting.deviation.item() == 100
