"""Several labels for each query of Proxy-Anchor: the equation, both forms of labels, and what is refused."""

import numpy as np
import pytest
import torch

import proxymetric as pm
from oracles import losses as oracle
from proxymetric.training.learner import Learner

B, C, D = 7, 5, 6
LABELS = np.array([[0, 3], [1, -1], [2, 2], [-1, -1], [3, 1], [0, -1], [1, 2]])
MASK = np.array([[c in row for c in range(C)] for row in LABELS])
WEIGHTS, MARGINS = (0.5, 3.0, 1.0, 0.25, 2.0), (0.125, 0.5, 0.0, 0.25, 0.375)


def problem() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.normal(size=(B, D)), generator.normal(size=(C, D))


@pytest.mark.parametrize(
    "labels", [LABELS, MASK, torch.from_numpy(LABELS).int(), torch.from_numpy(MASK), LABELS.tolist()]
)
@pytest.mark.parametrize("balance", [{}, {"weights": WEIGHTS, "margins": MARGINS}])
def test_it_is_the_equation_with_several_positives_in_a_row(labels, balance: dict) -> None:
    x, p = problem()
    criterion = pm.method("proxy-anchor", classes=C, dim=D, scale=7.0, margin=0.125, **balance).double()
    vectors = criterion.objective.source.vectors
    vectors.data.copy_(torch.from_numpy(p))
    tx = torch.from_numpy(x).requires_grad_()
    loss = criterion(tx, labels)
    margins, weights = (MARGINS, WEIGHTS) if balance else ([0.125] * C, [1.0] * C)

    def reference(x: np.ndarray, p: np.ndarray) -> float:
        return oracle.balanced_proxy_anchor(oracle.cosines(x, p), MASK, 7.0, margins, weights)

    assert loss.item() == pytest.approx(reference(x, p), rel=1e-10)
    loss.backward()
    for leaf, expected in zip((tx, vectors), oracle.gradient(reference, [x, p]), strict=True):
        np.testing.assert_allclose(leaf.grad.numpy(), expected, rtol=2e-5, atol=2e-7)


@pytest.mark.parametrize("per_class", [1, 3])
def test_one_label_in_each_row_is_the_loss_of_one_label(per_class: int) -> None:
    torch.manual_seed(0)
    criterion = pm.method("proxy-anchor", classes=C, dim=D, per_class=per_class).double()
    x, y = torch.randn(B, D, dtype=torch.float64), torch.arange(B) % C
    torch.testing.assert_close(criterion(x, y[:, None]), criterion(x, y))
    torch.testing.assert_close(criterion(x, torch.nn.functional.one_hot(y, C).bool()), criterion(x, y))


def test_a_step_trains_and_commits() -> None:
    criterion = pm.method("proxy-anchor", classes=C, dim=D)
    optimizer = torch.optim.SGD(criterion.param_groups(lr=0.1))
    x = torch.randn(B, D)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(criterion(x, torch.from_numpy(MASK)))
        losses[-1].backward()
        optimizer.step()
        criterion.commit()
    assert losses[-1] < losses[0]
    assert criterion.step == 5


@pytest.mark.parametrize(
    ("name", "arguments", "labels", "message"),
    [
        ("proxy-anchor", {}, LABELS + 2, "labels: got 5, expected 0 to 4 .*or -1 for no label"),
        ("proxy-anchor", {}, LABELS - 1, "labels: got -2, expected 0 to 4"),
        ("proxy-anchor", {}, MASK[:, :3], "expected a mask .7, 5. or whole numbers .7, L., padded with -1"),
        ("proxy-anchor", {}, MASK[:3], "expected a mask .7, 5."),
        ("proxy-anchor", {}, MASK.astype(float), "expected a mask .7, 5."),
        (
            "proxy-anchor",
            {},
            MASK.astype(int),
            "of torch.int64 with only 0 and 1, expected a mask of bool",
        ),
        ("proxy-anchor", {}, [[0, 1]] * 6 + [[2]], "labels: got rows of 1 to 2 labels, .* padded with -1"),
        ("proxy-anchor", {"touched": "batch"}, LABELS, "expected 7 whole numbers, one for each embedding"),
        ("mpa", {}, LABELS, "expected 7 whole numbers, one for each embedding"),
        ("vcpa", {}, LABELS, "expected 7 whole numbers, one for each embedding"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, arguments: dict, labels: np.ndarray, message: str) -> None:
    criterion = pm.method(name, classes=C, dim=D, **arguments)
    with pytest.raises(ValueError, match=message):
        criterion(torch.randn(B, D), labels)
    assert criterion.pending == 0


def test_training_runs_take_one_label() -> None:
    learner = Learner(torch.nn.Flatten(), pm.method("proxy-anchor", classes=C, dim=D))
    with pytest.raises(ValueError, match=r"labels: got shape .7, 2., expected one label for each image: training runs"):
        learner(torch.randn(B, D), torch.from_numpy(LABELS))
