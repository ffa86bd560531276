"""The optional protocols: a criterion finds a source that needs a second pass; other sources need nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from proxymetric.core.capabilities import EstimatesUncertainty, NamesParts, Prefetches
from proxymetric.core.pieces import Commit, Compare, Context, Energy, References, Sum
from proxymetric.core.second_pass import ClassPrompts, NeedsSecondPass, SecondPass, SecondPassResult
from proxymetric.criterion import Criterion
from proxymetric.losses import ProxyAnchor
from proxymetric.sources import LearnedProxies

C, D, F = 3, 4, 5
LABELS = torch.tensor([0, 2, 1, 0])


class TwoPasses(LearnedProxies):
    """Learned proxies that need a second pass and record what they receive."""

    def __init__(self, needs_second_pass: bool = True) -> None:
        super().__init__(C, D)
        self.needs_second_pass = needs_second_pass
        self.received: SecondPassResult | None = None
        self.used: list[SecondPassResult | None] = []

    def second_pass(self, labels: Tensor, rows: slice) -> SecondPass:
        return SecondPass(ClassPrompts(torch.zeros(C, 1, 2), labels[rows], [1]), shared=False, plan=labels)

    def receive(self, result: SecondPassResult | None) -> None:
        self.received = result

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        self.used.append(self.received)
        return super().forward(ctx, energy)


def criterion_of(*sources: LearnedProxies) -> Criterion:
    parts = {f"part{i}": (1.0, Compare(ProxyAnchor(), source)) for i, source in enumerate(sources)}
    return Criterion(Sum(**parts), needs=("images",))


def test_the_result_is_with_its_source_during_the_step_only() -> None:
    source = TwoPasses()
    criterion = criterion_of(LearnedProxies(C, D), source)
    request = criterion.second_pass(LABELS, slice(1, 3))
    assert request is not None
    assert request.prompts.place.tolist() == [2, 1]
    assert request.plan is LABELS
    result = SecondPassResult(request, torch.zeros(4, F))
    criterion(torch.randn(4, D), LABELS, second_pass=result)  # images are not needed then
    assert source.used == [result]
    assert source.received is None
    criterion(torch.randn(4, D), LABELS, images=torch.zeros(4, 3, 2, 2))
    assert source.used == [result, None]


def test_a_step_that_fails_leaves_no_result_behind() -> None:
    source = TwoPasses()
    criterion = criterion_of(source, LearnedProxies(C, D))
    request = criterion.second_pass(LABELS)
    assert request is not None
    criterion.objective.parts["part1"].regulariser = lambda refs: 1 / 0  # type: ignore[union-attr]
    with pytest.raises(ZeroDivisionError):
        criterion(torch.randn(4, D), LABELS, second_pass=SecondPassResult(request, torch.zeros(4, F)))
    assert len(source.used) == 1
    assert source.received is None


@pytest.mark.parametrize("needs", [(), (False,), (True, True)])
def test_no_request_unless_exactly_one_source_needs_a_pass(needs: tuple[bool, ...]) -> None:
    assert criterion_of(LearnedProxies(C, D), *map(TwoPasses, needs)).second_pass(LABELS) is None


def test_no_request_without_a_step() -> None:
    criterion = criterion_of(TwoPasses(), TwoPasses(needs_second_pass=False))
    assert criterion.second_pass(LABELS) is not None
    with torch.no_grad():
        assert criterion.second_pass(LABELS) is None
    assert criterion.eval().second_pass(LABELS) is None


def test_a_plain_source_offers_no_optional_protocol() -> None:
    assert isinstance(TwoPasses(), NeedsSecondPass)
    for protocol in (NeedsSecondPass, Prefetches, NamesParts, EstimatesUncertainty):
        assert not isinstance(LearnedProxies(C, D), protocol)
