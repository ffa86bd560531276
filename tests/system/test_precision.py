"""What a training sets for torch is restored: the user's own code goes on in the same process."""

from __future__ import annotations

import contextlib

import pytest
import torch

from proxymetric.system.precision import training_precision


@pytest.mark.parametrize("was", [False, True])
def test_deterministic_algorithms_are_as_before_also_after_an_error(was: bool) -> None:
    torch.use_deterministic_algorithms(was, warn_only=was)
    try:
        with contextlib.suppress(ZeroDivisionError), training_precision(not was, torch.device("cpu")):
            assert torch.are_deterministic_algorithms_enabled() is not was
            1 / 0  # noqa: B018
        assert torch.are_deterministic_algorithms_enabled() is was
        assert torch.is_deterministic_algorithms_warn_only_enabled() is was
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_products_on_a_gpu_are_as_before() -> None:
    before, device = torch.get_float32_matmul_precision(), torch.device("cuda")
    with training_precision(False, device):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before
