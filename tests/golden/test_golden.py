"""Every method still ends a short run with the tensors it had, under the same names."""

from __future__ import annotations

import pytest
import torch

from golden.runs import VARIANTS, ended, is_here, same, stored

RECORDS = stored()
STORED = list(dict.fromkeys(variant for record in RECORDS for variant in record["variants"]))
ROUNDING = 0.15
"""how far the sizes of tensors may be apart on another machine. Adam turns a gradient near 0 into a whole step: on one
machine, without oneDNN or with two threads, they are up to 0.1 apart after the same two epochs."""

pytestmark = pytest.mark.usefixtures("only_training")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch):
    """Where Triton is installed, tests interpret its kernels on the CPU. Training does not; they round otherwise."""
    monkeypatch.setattr("proxymetric.ops.triton.cross_entropy.interpreting", lambda: False)


def test_every_stored_variant_is_still_trained():
    """Methods that are newer than the stored file have no tensors in it."""
    assert set(STORED) <= VARIANTS.keys()


@pytest.mark.parametrize("variant", STORED)
def test_a_short_run_ends_as_it_did(variant: str):
    records = sorted((each for each in RECORDS if variant in each["variants"]), key=lambda each: not is_here(each))
    exact, then = is_here(records[0]), records[0]["variants"][variant]
    now = ended(variant)
    assert list(now["tensors"]) == list(then["tensors"]), "names of a checkpoint's tensors"
    for one, other in zip(now["curve"], then["curve"], strict=True):
        assert one.keys() == other.keys()
        if "loss" in one:
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-6 if exact else 5e-3)
    for name, (shape, size, first) in then["tensors"].items():
        assert now["tensors"][name][0] == shape, name
        assert now["tensors"][name][1] == pytest.approx(size, rel=1e-6 if exact else ROUNDING, abs=1e-6), name
        if exact:
            assert now["tensors"][name][2] == pytest.approx(first, rel=1e-5, abs=1e-8), name


def test_the_comparison_of_records_sees_a_digit():
    end = {"curve": [{"loss": 1.0}], "tensors": {"a": [[2], 3.0, [1.0, 2.0]]}}
    assert same(end, {"curve": [{"loss": 1.000001}], "tensors": {"a": [[2], 3.0, [1.0, 2.0]]}})
    assert not same(end, {"curve": [{"loss": 1.001}], "tensors": {"a": [[2], 3.0, [1.0, 2.0]]}})
    assert not same(end, {"curve": [{"loss": 1.0}], "tensors": {"b": [[2], 3.0, [1.0, 2.0]]}})
