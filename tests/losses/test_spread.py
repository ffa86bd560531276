"""The spread of proxies: never NaN, also for bfloat16 proxies that nearly coincide."""

import pytest
import torch

import proxymetric as pm
from proxymetric.core.pieces import References

CLASSES, DIM, PER_CLASS = 6, 32, 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["soft-triple", "mpa", "mpa-dw", "mpa-ap"])
def test_close_proxies_have_a_finite_spread_and_gradient(name, dtype) -> None:
    """In bfloat16, products of nearly equal unit vectors round to more than 1: the root would have a negative argument.

    There are 20 seeds, with distances from 0 to a few rounding steps of the type.
    """
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(CLASSES, 1, DIM, generator=generator)
        noise = 10.0 ** -(seed % 5) * torch.randn(CLASSES, PER_CLASS, DIM, generator=generator)
        criterion = pm.method(name, classes=CLASSES, dim=DIM, per_class=PER_CLASS).to(dtype)
        with torch.no_grad():
            criterion.objective.source.vectors.copy_((centres + (noise if seed % 5 else 0 * noise)).flatten(0, 1))
        x = torch.randn(8, DIM, generator=generator, requires_grad=True)
        loss = criterion(x, torch.arange(8) % CLASSES)
        loss.backward()
        assert loss.isfinite(), seed
        assert criterion.terms["regulariser"] >= 0, seed
        assert criterion.objective.source.vectors.grad.isfinite().all(), seed
        assert x.grad.isfinite().all(), seed


def test_the_value_is_that_of_the_rounded_proxies_in_float64() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(CLASSES, 1, DIM, generator=generator)
        vectors = (centres + 1e-2 * torch.randn(CLASSES, PER_CLASS, DIM, generator=generator)).flatten(0, 1).bfloat16()
        labels = torch.arange(CLASSES).repeat_interleave(PER_CLASS)
        refs = References(vectors, labels, PER_CLASS, normalise="l2")
        value = pm.losses.Spread()(refs)
        exact = pm.losses.Spread()(refs._replace(rows=vectors.double()))
        torch.testing.assert_close(value.double(), exact, rtol=1e-3, atol=0)
