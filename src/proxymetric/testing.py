"""What every method must keep to, as checks that also a stranger's method can be put through.

>>> import proxymetric as pm
>>> pm.testing.check_method("proxy-anchor")
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from proxymetric.criterion import Criterion

Build = Callable[[int, int], Criterion]
CLASSES, DIM, SIZE, PIXELS = 5, 6, 12, 3


def check_method(method: str | Build, **options: object) -> None:
    """Put a method through every check of the contract; the first one that fails raises AssertionError.

    method: a name of the catalogue, or a function (classes, dim) -> Criterion.
    """
    for check in CHECKS.values():
        check(builder(method, **options))


def builder(method: str | Build, **options: object) -> Build:
    """The function (classes, dim) -> Criterion behind a name."""
    if callable(method):
        if options:
            raise ValueError(f"options: got {', '.join(options)} beside a function; give them to the function itself")
        return method
    from proxymetric.papers import method as from_catalogue

    def build(classes: int, dim: int) -> Criterion:
        return from_catalogue(method, classes=classes, dim=dim, steps_per_epoch=2, **options)

    return build


def sample(
    seed: int = 0, size: int = SIZE, dtype: torch.dtype = torch.float32, classes: int = CLASSES - 1
) -> tuple[Tensor, Tensor]:
    """Embeddings with some class structure, and labels: of a batch, every class but the last is present."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % classes
    centres = torch.randn(CLASSES, DIM, generator=generator, dtype=dtype)
    return centres[labels] + 0.7 * torch.randn(size, DIM, generator=generator, dtype=dtype), labels


class Toy(torch.nn.Module):
    """The smallest encoder with all that a method may ask of one: `blocks` that prompts are mixed into, and a head.

    `forward(images (B, 3)) -> (B, 6)`; `features(images, prompts, shared) -> (B, width)`: prompts (B, n, embed_dim) or
    None for each block, instead of its own, or with `shared` beside them.
    """

    def __init__(self, width: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.width = self.embed_dim = width
        self.embed = torch.nn.Linear(PIXELS, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.own = torch.nn.Parameter(torch.randn(blocks, width))
        self.head = torch.nn.Linear(width, DIM)

    def features(self, images: Tensor, prompts: Sequence[Tensor | None] | None = None, shared: bool = False) -> Tensor:
        x: Tensor = self.embed(images)
        for i, block in enumerate(self.blocks):
            given = None if prompts is None else prompts[i]
            if prompts is None or shared:
                x = x + self.own[i]
            x = torch.tanh(block(x if given is None else x + given.mean(1)))
        return x

    def forward(self, images: Tensor) -> Tensor:
        embeddings: Tensor = self.head(self.features(images))
        return embeddings


def make(build: Build, dtype: torch.dtype = torch.float32) -> Criterion:
    """A criterion with all it needs: an encoder where it wants one, and the evaluation that stands before training."""
    torch.manual_seed(0)
    criterion = build(CLASSES, DIM)
    if "encoder" in criterion.needs:
        criterion.bind(Toy().to(dtype))
    criterion.to(dtype)
    if {"validation", "pool"} & criterion.needs:
        criterion.boundary(0.0, pool=sample(9, 8 * CLASSES, dtype, classes=CLASSES))
    return criterion


def run(criterion: Criterion, embeddings: Tensor, labels: Tensor) -> Tensor:
    """The loss, with images where the method wants them."""
    generator = torch.Generator().manual_seed(len(labels))
    images = torch.rand(len(labels), PIXELS, generator=generator).to(embeddings)
    loss: Tensor = criterion(embeddings, labels, images=images if "images" in criterion.needs else None)
    return loss


def snapshot(criterion: Criterion) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in criterion.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train_step(criterion: Criterion, optimizer: torch.optim.Optimizer | None, seed: int) -> Tensor:
    torch.manual_seed(seed)
    embeddings, labels = sample(seed)
    loss = run(criterion, embeddings.requires_grad_(), labels)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    criterion.commit(lr=1e-2, network_lr=1e-3)
    assert embeddings.grad is not None
    return embeddings.grad


def optimizer_of(criterion: Criterion) -> torch.optim.Optimizer | None:
    groups = criterion.param_groups(lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-3) if groups else None


def check_gradient(build: Build) -> None:
    """The gradient in the embeddings and in every parameter is that of the value (float64, random state fixed).

    In eval mode, where nothing settles on the batch; where training gives the same value, it gives the same gradient.
    """
    criterion = make(build, torch.float64).eval()
    embeddings, labels = sample(dtype=torch.float64)
    inputs = [embeddings.requires_grad_(), *(p for p in criterion.parameters() if p.requires_grad)]

    def value(embeddings: Tensor, *_: Tensor) -> Tensor:
        torch.manual_seed(1)
        loss = run(criterion, embeddings, labels)
        criterion.discard()
        return loss

    assert torch.autograd.gradcheck(value, tuple(inputs), eps=1e-6, atol=1e-5)
    still = value(*inputs)
    moving = (criterion.train(), value(*inputs))[1]
    if torch.equal(still, moving):
        wanted, found = (torch.autograd.grad(loss, inputs, allow_unused=True) for loss in (still, moving))
        for one, other in zip(wanted, found, strict=True):
            torch.testing.assert_close(one, other)


def check_batch_of_one(build: Build) -> None:
    """One sample is a batch too: a finite loss and a finite gradient."""
    criterion = make(build)
    embeddings, labels = sample()
    one = embeddings[:1].clone().requires_grad_()
    loss = run(criterion, one, labels[:1])
    assert loss.ndim == 0
    assert loss.isfinite()
    if loss.requires_grad:
        loss.backward()
        assert one.grad is None or one.grad.isfinite().all()


def check_zero_embedding(build: Build) -> None:
    """An embedding of zeros (a dead encoder) and coinciding embeddings give finite gradients."""
    criterion = make(build)
    embeddings, labels = sample()
    embeddings[0] = 0
    embeddings[4] = embeddings[8]
    run(criterion, embeddings.requires_grad_(), labels).backward()
    assert embeddings.grad is not None
    assert embeddings.grad.isfinite().all()


def check_labels(build: Build) -> None:
    """Labels out of range, of the wrong type or number, and embeddings of another width are refused by name."""
    criterion = make(build)
    embeddings, labels = sample()
    wrong: list[tuple[Any, Any, str]] = [
        (embeddings, labels.float(), "labels"),
        (embeddings, labels[1:], "labels"),
        (embeddings[0], labels[:1], "embeddings"),
    ]
    if criterion.objective.classes is not None:
        wrong += [(embeddings, labels - 1, "labels"), (embeddings, labels + CLASSES, "labels")]
    if criterion.objective.dim is not None:
        wrong += [(embeddings[:, 1:], labels, "embeddings")]
    for bad_embeddings, bad_labels, named in wrong:
        try:
            criterion(bad_embeddings, bad_labels)
        except ValueError as error:
            assert str(error).startswith(named), error
        else:
            raise AssertionError(f"accepted {named} of shape {tuple(bad_labels.shape)}")
    assert criterion.pending == 0


def check_order(build: Build) -> None:
    """The order of a batch means nothing."""
    criterion = make(build, torch.float64).eval()
    embeddings, labels = sample(dtype=torch.float64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    straight = run(criterion, embeddings, labels)
    torch.manual_seed(1)
    torch.testing.assert_close(run(criterion, embeddings[order], labels[order]), straight)


def check_half(build: Build) -> None:
    """Embeddings in half precision give a float32 loss, close to the full one."""
    criterion = make(build).eval()
    embeddings, labels = sample()
    torch.manual_seed(1)
    full = run(criterion, embeddings.bfloat16().float(), labels)
    torch.manual_seed(1)
    half = run(criterion, embeddings.bfloat16(), labels)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full)


def check_commit(build: Build) -> None:
    """Nothing is remembered before commit, in eval mode, without gradients, or after discard; commit counts once."""
    criterion = make(build)
    embeddings, labels = sample()
    before = snapshot(criterion)
    run(criterion, embeddings.clone().requires_grad_(), labels).backward()
    criterion.zero_grad(set_to_none=True)
    assert criterion.pending == 1
    assert same(before, snapshot(criterion)), "state changed in forward"
    criterion.discard()
    criterion.commit(lr=1e-2, network_lr=1e-3)
    assert same(before, snapshot(criterion)), "a discarded step left a trace"
    with torch.no_grad():
        run(criterion, embeddings, labels)
    run(criterion.eval(), embeddings, labels)
    assert criterion.pending == 0, "pending in eval or no-grad mode"
    criterion.train()
    for part in (slice(0, 6), slice(6, 12)):
        run(criterion, embeddings[part].clone().requires_grad_(), labels[part])
    criterion.commit(lr=1e-2, network_lr=1e-3)
    assert criterion.step == 1
    assert all(not value.requires_grad for name, value in criterion.state_dict().items())


def check_resume(build: Build) -> None:
    """Saved through safetensors after a few steps and loaded into a new one, it goes on bit for bit."""
    straight = make(build)
    moves = optimizer_of(straight)
    for seed in range(3):
        train_step(straight, moves, seed)
    torch.manual_seed(5)
    again = make(build)
    again.load_state_dict(load(save({k: v.contiguous() for k, v in straight.state_dict().items()})))
    moves_again = optimizer_of(again)
    if moves is not None and moves_again is not None:
        moves_again.load_state_dict(copy.deepcopy(moves.state_dict()))
    for seed in range(3, 6):
        assert torch.equal(train_step(straight, moves, seed), train_step(again, moves_again, seed))
    assert same(snapshot(straight), snapshot(again))
    assert again.step == 6


def check_groups(build: Build) -> None:
    """Every trained parameter is in exactly one group; a bound encoder's is in none and not in the state."""
    criterion = make(build)
    names = set(criterion.state_dict())
    encoder = Toy()
    criterion.bind(encoder)
    in_groups = [id(p) for group in criterion.param_groups(lr=1.0, network_lr=0.1) for p in group["params"]]
    assert sorted(in_groups) == sorted(id(p) for p in criterion.parameters() if p.requires_grad)
    assert not {id(p) for p in encoder.parameters()} & set(in_groups)
    assert not any(name.endswith(("weight", "bias")) for name in set(criterion.state_dict()) - names)


CHECKS: dict[str, Callable[[Build], None]] = {
    "gradient": check_gradient,
    "batch of one": check_batch_of_one,
    "zero embedding": check_zero_embedding,
    "labels": check_labels,
    "order": check_order,
    "half precision": check_half,
    "commit": check_commit,
    "resume": check_resume,
    "parameter groups": check_groups,
}
"""every check by name: the contract suite runs each on each method"""
