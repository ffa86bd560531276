"""The criterion in a training loop of the user: commit, discard, needs, epochs, groups, bind."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import proxymetric as pm
from proxymetric.core.pieces import Boundary, Compare, Context, Objective, Outcome, Progress, Sum
from proxymetric.criterion import NEEDS
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.contract import PIXELS, sample
from proxymetric.papers.contract import Toy as Encoder
from proxymetric.sources import LearnedProxies

CLASSES, DIM = 4, 3


class Toy(Objective):
    """Records its inputs: contexts, boundaries, and, in its commit, the sum of the embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.contexts: list[Context] = []
        self.boundaries: list[Boundary] = []

    def forward(self, ctx: Context) -> Outcome:
        self.contexts.append(ctx)
        amount = ctx.embeddings.detach().sum()

        def commit() -> None:
            self.total += amount

        return Outcome({"pull": ctx.embeddings.square().sum(), "push": 0.5 * ctx.embeddings.sum()}, commit)

    def boundary(self, run: Boundary) -> None:
        self.boundaries.append(run)


def batch(value: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.full((2, DIM), value, requires_grad=True), torch.tensor([0, 1])


def toy(*needs: str, **options: Any) -> tuple[pm.Criterion, Toy]:
    objective = Toy()
    return pm.Criterion(objective, needs=needs, name="toy", **options), objective


def test_the_loss_is_the_sum_of_its_terms_and_commit_applies_all_that_is_pending() -> None:
    criterion, objective = toy()
    loss = criterion(*batch())
    assert loss.item() == 6 + 3
    assert {name: value.item() for name, value in criterion.terms.items()} == {"pull": 6, "push": 3}
    assert not any(value.requires_grad for value in criterion.terms.values())
    criterion(*batch(2.0))
    assert (criterion.pending, criterion.step, objective.total.item()) == (2, 0, 0)
    criterion.commit()
    assert (criterion.pending, criterion.step, objective.total.item()) == (0, 1, 18)
    criterion.commit()
    assert criterion.step == 1, "a commit without pending changes is not a step"


def test_a_discarded_step_and_one_without_gradients_leave_nothing() -> None:
    criterion, objective = toy()
    criterion(*batch())
    criterion.discard()
    with torch.no_grad():
        criterion(*batch())
    with torch.inference_mode():
        criterion(torch.ones(2, DIM), torch.tensor([0, 1]))
    criterion.eval()(*batch())
    assert criterion.pending == 0
    criterion.train().commit()
    assert (criterion.step, objective.total.item()) == (0, 0)


def moving(commits: bool, discards: bool = False, accumulate: int = 1) -> list[str]:
    """Return the warnings of a loop of three steps."""
    torch.manual_seed(0)
    criterion, net = pm.method("proxy-anchor", classes=CLASSES, dim=DIM), nn.Linear(2, DIM)
    criterion.bind(net)
    optimizer = torch.optim.SGD([*net.parameters(), *criterion.parameters()], lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for _ in range(accumulate):
                criterion(net(torch.randn(4, 2)), torch.arange(4)).backward()
            if discards:
                criterion.discard()
            else:
                optimizer.step()
            if commits:
                criterion.commit()
    return [str(w.message) for w in caught if "commit" in str(w.message)]


def test_forgetting_commit_warns_once() -> None:
    (warning,) = moving(commits=False)
    assert warning.startswith("proxy-anchor: ")
    assert "call criterion.commit() after optimizer.step()" in warning
    assert moving(commits=True) == []
    assert moving(commits=True, accumulate=3) == [], "several passes before one commit are allowed"
    assert moving(commits=False, discards=True) == []


def test_an_optimizer_without_the_proxies_warns_once() -> None:
    network = torch.nn.Linear(DIM, DIM)
    for with_proxies in (False, True):
        criterion = pm.method("proxy-anchor", classes=CLASSES, dim=DIM)
        groups = criterion.param_groups(lr=0.1) if with_proxies else []
        optimizer = torch.optim.SGD([{"params": network.parameters()}, *groups], lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                criterion(network(torch.randn(4, DIM)), torch.arange(4)).backward()
                optimizer.step()
                criterion.commit(optimizer)
        said = [str(each.message) for each in caught]
        assert [text for text in said if "the optimizer does not hold objective.source.vectors" in text] == said
        assert len(said) == (0 if with_proxies else 1)
        assert with_proxies or caught[0].filename == __file__


@pytest.mark.parametrize(
    "third", ["nonsense", (torch.tensor([0]), torch.tensor([1])), None], ids=["text", "pairs", "none"]
)
def test_a_third_argument_without_its_name_is_refused_as_that_of_a_miner(third: object) -> None:
    criterion = pm.method("triplet", classes=CLASSES, dim=DIM)
    with pytest.raises(
        TypeError, match=r"^criterion: got a third argument .*, expected criterion\(embeddings, labels\)"
    ) as error:
        criterion(torch.eye(DIM), torch.arange(DIM) % CLASSES, third)
    assert "multi-similarity mines pairs (epsilon)" in str(error.value)
    assert criterion.pending == 0


def test_pieces_that_do_not_fit_together_are_refused() -> None:
    compare = Compare(ProxyAnchor(), LearnedProxies(CLASSES, DIM))
    with pytest.raises(ValueError, match=r"a: got Compare, expected a weight and an objective: Sum\(a=\(1.0, "):
        Sum(a=compare)
    with pytest.raises(ValueError, match=r"objective: got ProxyAnchor, expected a Compare\(loss, source\) or a Sum"):
        pm.Criterion(ProxyAnchor())
    with pytest.raises(ValueError, match=r"steps_per_epoch: got 2.5, expected a whole number"):
        pm.Criterion(compare, steps_per_epoch=2.5)


def test_the_warning_points_at_the_callers_line() -> None:
    criterion = pm.method("proxy-anchor", classes=CLASSES, dim=DIM)
    optimizer = torch.optim.SGD(criterion.parameters(), lr=0.1)
    criterion(torch.randn(4, DIM), torch.arange(4)).backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="commit") as caught:
        criterion(torch.randn(4, DIM), torch.arange(4))
    assert caught[0].filename == __file__


def test_epochs_by_the_length_of_one_or_by_saying_so() -> None:
    criterion, objective = toy(steps_per_epoch=4)
    for _ in range(6):
        criterion(*batch())
        criterion.commit()
    assert [ctx.progress for ctx in objective.contexts] == [Progress(step, step / 4) for step in range(6)]
    criterion.epoch(7)
    criterion(*batch())
    assert objective.contexts[-1].progress == Progress(6, 7.0), "an announced epoch overrides the counted one"
    criterion, objective = toy()
    criterion(*batch())
    assert objective.contexts[-1].progress == Progress(0, None)
    with pytest.raises(ValueError, match=r"^steps_per_epoch: got 0, expected"):
        toy(steps_per_epoch=0)


def test_step_and_epoch_are_in_the_state() -> None:
    criterion, _ = toy(steps_per_epoch=4)
    criterion(*batch())
    criterion.commit()
    criterion.epoch(2)
    criterion(*batch())
    again, objective = toy(steps_per_epoch=4)
    again(*batch())
    again.load_state_dict(criterion.state_dict())
    assert again.pending == 0, "pending changes belong to the replaced state"
    again(*batch())
    assert objective.contexts[-1].progress == Progress(1, 2.0)
    assert objective.total.item() == 6


def call(criterion: pm.Criterion, **given: Any) -> None:
    images = given.get("images")
    if "encoder" in given:
        criterion.bind(given["encoder"])
    if "epochs" in given:
        criterion.epoch(given["epochs"])
    criterion(*batch(), images=images)
    criterion.commit()
    criterion.boundary(given.get("validation"), given.get("pool"))


GIVEN: dict[str, Any] = {
    "encoder": nn.Linear(2, DIM),
    "images": torch.zeros(2, 3, 4, 4),
    "validation": 0.5,
    "pool": (torch.zeros(2, DIM), torch.tensor([0, 1])),
    "epochs": 0,
}


@pytest.mark.parametrize("need", NEEDS)
def test_what_a_method_needs_is_asked_for_by_name(need: str) -> None:
    assert GIVEN.keys() == NEEDS.keys()
    criterion, _ = toy(need)
    with pytest.raises(ValueError, match=rf"^{need}: got none, expected .*criterion.*toy needs it$") as refused:
        call(criterion)
    assert NEEDS[need] in str(refused.value)
    criterion, _ = toy(need)
    call(criterion, **{need: GIVEN[need]})
    criterion, _ = toy(*NEEDS)
    with pytest.raises(ValueError, match=f"^{need}: got none"):
        call(criterion, **{key: value for key, value in GIVEN.items() if key != need})


def test_a_refused_call_leaves_nothing_pending() -> None:
    criterion, objective = toy("images")
    with pytest.raises(ValueError, match="images"):
        criterion(*batch())
    assert criterion.pending == 0
    assert objective.contexts == []


def test_everything_that_is_given_arrives() -> None:
    criterion, objective = toy(*NEEDS)
    call(criterion, **GIVEN)
    ctx, boundary = objective.contexts[-1], objective.boundaries[-1]
    assert ctx.batch.images is GIVEN["images"]
    points = torch.ones(2, 2)
    assert torch.equal(ctx.encode(points), GIVEN["encoder"](points))
    assert ctx.progress.epoch == 0
    assert boundary.score == 0.5
    vectors, labels = boundary.pool(5)
    assert vectors.shape == (2, DIM)
    assert labels.tolist() == [0, 1]


class WithNetwork(Compare):
    """An objective with proxies, its own network, and a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__(ProxyAnchor(), LearnedProxies(CLASSES, DIM))
        self.cell = nn.GRUCell(DIM, DIM)
        self.fixed = nn.Parameter(torch.zeros(2), requires_grad=False)


def test_a_network_of_the_methods_own_gets_its_own_rate() -> None:
    criterion = pm.Criterion(WithNetwork())
    proxies, network = criterion.param_groups(lr=1.0, network_lr=0.25)
    assert (proxies["name"], proxies["lr"], len(proxies["params"])) == ("proxies", 1.0, 1)
    assert (network["name"], network["lr"]) == ("criterion", 0.25)
    assert {id(p) for p in network["params"]} == {id(p) for p in criterion.objective.cell.parameters()}
    _, network = criterion.param_groups(lr=1.0)
    optimizer = torch.optim.SGD(criterion.param_groups(lr=1.0), lr=0.125)
    assert "lr" not in network
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.125], "else the optimiser's own"
    assert pm.method("triplet", classes=CLASSES, dim=DIM).param_groups(lr=1.0) == []


def test_bind_makes_the_encoder_no_part_of_the_criterion() -> None:
    criterion, net = pm.Criterion(WithNetwork()), nn.Linear(5, 7)
    names, groups = set(criterion.state_dict()), criterion.param_groups(lr=1.0)
    assert criterion.bind(net) is criterion
    assert set(criterion.state_dict()) == names
    assert net not in list(criterion.modules())
    for after, before in zip(criterion.param_groups(lr=1.0), groups, strict=True):
        assert [id(p) for p in after["params"]] == [id(p) for p in before["params"]]
    criterion.to(torch.float64)
    assert net.weight.dtype == torch.float32
    criterion.eval()
    assert net.training
    other = nn.Linear(5, 7)
    criterion.bind(other)
    assert criterion._encoder == [other], "the last encoder replaces the first"


def test_a_loop_of_ones_own_learns() -> None:
    """The loop of the README, on points of four classes that overlap at first."""
    torch.manual_seed(0)
    centres, labels = 3 * torch.randn(CLASSES, 6), torch.arange(80) % CLASSES
    points = centres[labels] + torch.randn(80, 6)
    net, criterion = nn.Linear(6, DIM), pm.method("mpa-ap", classes=CLASSES, dim=DIM)
    optimizer = torch.optim.AdamW([{"params": net.parameters(), "lr": 1e-2}, *criterion.param_groups(lr=1e-1)])
    before = pm.evaluate(net(points).detach(), labels, ("MAP@R",))["MAP@R"]
    for _ in range(40):
        optimizer.zero_grad()
        loss = criterion(net(points), labels)
        loss.backward()
        optimizer.step()
        criterion.commit()
    assert criterion.step == 40
    assert pm.evaluate(net(points).detach(), labels, ("MAP@R",))["MAP@R"] > before + 0.1


@pytest.mark.parametrize(("name", "arguments"), [("triplet", {}), ("proxy-anchor", {"touched": "batch"})])
def test_forgetting_commit_is_seen_without_parameters_too(name, arguments):
    criterion = pm.method(name, classes=3, dim=4, **arguments)
    x, y = torch.randn(6, 4, requires_grad=True), torch.arange(6) % 3
    for _ in range(64):
        criterion(x, y).backward()
    with pytest.warns(UserWarning, match="commit\\(\\) was not called"):
        criterion(x, y)


@pytest.mark.parametrize("name", pm.methods())
def test_forgetting_commit_is_seen_at_the_second_step_of_any_method(name) -> None:
    """This holds even if nothing is bound and the method has no parameters: a step of the user's network shows it."""
    torch.manual_seed(0)
    net = Encoder()
    criterion = pm.method(name, classes=5, dim=6, steps_per_epoch=2)
    if "encoder" in criterion.needs:
        criterion.bind(net)
    if "pool" in criterion.needs:
        criterion.boundary(0.0, pool=sample(9, 40, classes=5))
    optimizer, images = torch.optim.SGD(net.parameters(), lr=1e-3), torch.rand(12, PIXELS)
    labels = torch.arange(12) % 4

    def forward() -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            criterion(net(images), labels, images=images).backward()
        return [str(warning.message) for warning in caught if "commit()" in str(warning.message)]

    assert forward() + forward() == [], "gradient accumulation"
    optimizer.step()
    criterion.commit(lr=0.1, network_lr=0.1)
    assert forward() == []
    optimizer.step()
    (warning,) = forward()
    assert warning.startswith(f"{name}: a training step ended, but commit() was not called")
    optimizer.step()
    assert forward() == [], "once"


def test_a_copy_has_nothing_pending() -> None:
    """Regression test: a commit of a copied proxy-isa counted samples in the original."""
    criterion = pm.method("proxy-isa", classes=CLASSES, dim=DIM, steps_per_epoch=1)
    criterion(*batch())
    twin = copy.deepcopy(criterion)
    twin.commit()
    assert (twin.pending, twin.step, criterion.pending) == (0, 0, 1)
    assert not criterion.objective.weighting.count.any()
    criterion.commit()
    assert criterion.objective.weighting.count.sum() == 2
    assert not twin.objective.weighting.count.any()
