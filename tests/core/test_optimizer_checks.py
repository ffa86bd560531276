"""Steps of an optimiser are noticed from version counters."""

import copy
import pickle

import pytest
import torch
from torch import nn

from proxymetric.core.optimizer_checks import MAX_NODES, StepDetector, nearest_leaf

ONES = torch.ones(1, 2)


def test_a_step_of_the_network_is_noticed_once() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    optimizer, detector = torch.optim.SGD(net.parameters(), lr=0.1), StepDetector()
    assert detector.stepped([], net(ONES)) is None, "nothing to compare with yet"
    net(ONES).sum().backward()
    assert detector.stepped([], net(ONES)) is False, "a backward pass is not a step"
    optimizer.step()
    assert detector.stepped([], net(ONES)) is True
    assert detector.stepped([], net(ONES)) is False


def test_given_parameters_are_enough() -> None:
    proxies, detector = torch.ones(2, requires_grad=True), StepDetector()
    for expected in (None, False):
        assert detector.stepped([proxies], ONES) is expected
    with torch.no_grad():
        proxies.add_(1)
    assert detector.stepped([proxies], ONES) is True


def test_free_vectors_tell_a_step_but_not_its_absence() -> None:
    vectors, detector = torch.ones(1, 2, requires_grad=True), StepDetector()
    assert detector.stepped([], vectors) is None
    assert detector.stepped([], vectors) is None
    with torch.no_grad():
        vectors.add_(1)
    assert detector.stepped([], vectors) is True
    assert detector.stepped([], torch.ones(1, 2, requires_grad=True)) is None


def test_a_network_that_is_gone_is_not_watched() -> None:
    detector = StepDetector()
    detector.stepped([], nn.Linear(2, 2)(ONES))
    assert detector.stepped([], nn.Linear(2, 2)(ONES)) is None


def test_the_nearest_leaf_is_a_trained_one() -> None:
    body, head = nn.Linear(2, 2), nn.Linear(2, 2)
    assert nearest_leaf(head(body(ONES))) in set(head.parameters())
    head.requires_grad_(False)
    assert nearest_leaf(head(body(ONES))) in set(body.parameters())
    deep = torch.ones(1, requires_grad=True)
    result = deep
    for _ in range(MAX_NODES + 1):
        result = result + 1
    assert nearest_leaf(result) is None, "a search that costs nothing"
    with torch.no_grad():
        assert nearest_leaf(body(ONES)) is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda detector: pickle.loads(pickle.dumps(detector))])
def test_a_copy_watches_nothing_yet(copied) -> None:
    net, detector = nn.Linear(2, 2), StepDetector()
    detector.stepped(net.parameters(), net(ONES))
    assert copied(detector).stepped(net.parameters(), net(ONES)) is None
