"""A compiled criterion is one graph, and checks as much as one that is not compiled."""

from __future__ import annotations

import copy

import pytest
import torch

import proxymetric as pm

C, D = 4, 3
OTHERS = {
    "vptsp-m": "needs images", "vptsp-g": "needs images", "moco": "needs images", "ccp": "needs an encoder",
    "proxy-isa": "reads the epoch at every step", "vcpa": "changes the precision of products for its own steps",
}  # fmt: skip
FAST = ("proxy-anchor", "soft-triple", "adaface", "triplet", "circle")
NAMES = [
    pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in pm.methods() if name not in OTHERS
]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, D, generator=generator).requires_grad_(), torch.arange(8) % C


def trained(name: str, steps: int = 2) -> pm.Criterion:
    """A criterion after some steps of an optimiser: what its checks remember is no longer empty."""
    torch.manual_seed(0)
    criterion = pm.method(name, classes=C, dim=D)
    groups = criterion.param_groups(lr=1e-2)
    optimizer = torch.optim.SGD(groups) if groups else None
    for seed in range(steps):
        criterion(*batch(seed)).backward()
        if optimizer is not None:
            optimizer.step()
        criterion.commit()
    return criterion


@pytest.fixture(autouse=True)
def forget_compiled_code() -> None:
    torch.compiler.reset()


@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_graph_with_the_same_loss_and_gradients(name: str) -> None:
    criterion = trained(name).double()
    compiled = torch.compile(criterion, backend="aot_eager" if name == "proxy-anchor" else "eager", fullgraph=True)
    x, y = batch(5)
    x = x.detach().double().requires_grad_()
    inputs = [x, *criterion.parameters()]
    one = compiled(x, y)
    one_grads = torch.autograd.grad(one, inputs)
    criterion.discard()
    other = criterion(x, y)
    torch.testing.assert_close(one, other)
    for mine, theirs in zip(one_grads, torch.autograd.grad(other, inputs), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["proxy-anchor", "soft-triple", "triplet"])
def test_it_is_not_compiled_again_when_the_optimiser_steps(name: str) -> None:
    criterion = trained(name, steps=0)
    compiled = torch.compile(criterion, backend="eager", fullgraph=True)
    groups = criterion.param_groups(lr=1e-2)
    optimizer = torch.optim.SGD(groups or [torch.zeros(1, requires_grad=True)], lr=1e-2)
    for step in range(4):
        with torch.compiler.set_stance("default" if step == 0 else "fail_on_recompile"):
            compiled(*batch(step)).backward()
        optimizer.step()
        criterion.commit()
    assert criterion.step == 4


@pytest.mark.parametrize("wrong", [-1, C])
def test_a_wrong_label_gets_the_same_sentence(wrong: int) -> None:
    criterion = trained("proxy-anchor")
    compiled = torch.compile(criterion, backend="aot_eager")
    x, y = batch()
    assert compiled(x, y).isfinite()
    criterion.discard()
    y[3] = wrong
    with pytest.raises(ValueError, match=rf"^labels: got {wrong}, expected 0 to 3 \(classes=4\)$"):
        compiled(x, y)
    assert criterion.pending == 0


def test_a_copy_shares_the_compiled_code_and_checks_by_itself() -> None:
    original = trained("proxy-anchor")
    x, y = batch()
    assert torch.compile(original, backend="eager")(x, y).isfinite()
    criterion = copy.deepcopy(original)
    del original
    compiled = torch.compile(criterion, backend="eager")
    with torch.compiler.set_stance("fail_on_recompile"):
        assert compiled(x, y).isfinite()
        criterion.discard()
        with pytest.raises(ValueError, match="labels: got 9"):
            compiled(x, y + 6)


def test_a_missing_commit_is_still_noticed() -> None:
    criterion = trained("proxy-anchor")
    compiled = torch.compile(criterion, backend="eager")
    compiled(*batch()).backward()
    with torch.no_grad():
        criterion.objective.source.vectors.add_(1.0)  # as an optimiser does
    with pytest.warns(UserWarning, match=r"commit\(\) was not called"):
        compiled(*batch())
