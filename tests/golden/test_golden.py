"""Every method still ends a short run with the tensors it had, under the same names."""

from __future__ import annotations

import json

import pytest
import torch

from golden.runs import FILE, VARIANTS, ended, machine

GOLDEN = json.loads(FILE.read_text())


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_every_stored_variant_is_still_trained():
    """Methods that are newer than the stored file have no tensors in it."""
    assert GOLDEN["variants"].keys() <= VARIANTS.keys()


@pytest.mark.parametrize("variant", GOLDEN["variants"])
def test_a_short_run_ends_as_it_did(variant: str):
    # Another processor or version of torch rounds differently, and Adam turns a gradient near 0 into a whole step.
    exact = GOLDEN["machine"] == machine()
    close = 1e-6 if exact else 5e-3
    now, then = ended(variant), GOLDEN["variants"][variant]
    assert list(now["tensors"]) == list(then["tensors"]), "names of a checkpoint's tensors"
    for one, other in zip(now["curve"], then["curve"], strict=True):
        assert one.keys() == other.keys()
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=close)
    for name, (shape, size, first) in then["tensors"].items():
        assert now["tensors"][name][0] == shape, name
        assert now["tensors"][name][1] == pytest.approx(size, rel=close, abs=1e-6 if exact else 1e-2), name
        if exact:
            assert now["tensors"][name][2] == pytest.approx(first, rel=1e-5, abs=1e-8), name
