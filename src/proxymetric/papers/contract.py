"""The contract of a method: checks that every method must pass, including methods defined outside this library.

Example:
    >>> import proxymetric as pm
    >>> pm.testing.check_method("proxy-anchor")
"""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from proxymetric.core.capabilities import traits
from proxymetric.core.pieces import Compare, References
from proxymetric.core.surrogate import Factors
from proxymetric.criterion import Criterion
from proxymetric.ops import using

Build = Callable[[int, int], Criterion]
"""a function (classes, dim) -> Criterion"""
CLASSES, DIM, SIZE, PIXELS = 5, 6, 12, 3
"""classes, dimensions of the embeddings, images in a batch, and pixels of an image"""
MAX_MESSAGE_LENGTH = 300
"""characters of a failed check's own message that are shown"""


@dataclass(frozen=True)
class Subject:
    """A method under test: how to build it, and what its catalogue row states.

    Args:
        build: a function (classes, dim) -> Criterion.
        name: its name in messages.
        sums_over: "batch", "classes" or None, as in `papers.About`.
        grouped: whether the K proxies of a class are combined into one similarity.
        surrogate_gradient: whether the loss has factors that count as constants in its gradient.
        fast: whether gradients are compared along random directions only, instead of entry by entry.
    """

    build: Build
    name: str
    sums_over: str | None = None
    grouped: bool = False
    surrogate_gradient: bool = False
    fast: bool = False

    def __call__(self, classes: int, dim: int) -> Criterion:
        return self.build(classes, dim)


def check_method(method: str | Build, *, surrogate_gradient: bool = False, **options: object) -> None:
    """Run every check of the contract on a method.

    Args:
        method: a name of the catalogue, or a function (classes, dim) -> Criterion.
        surrogate_gradient: for a function only: whether its loss has factors that count as constants in its gradient.
            A method of the catalogue states this in its row.
        **options: arguments of a method of the catalogue.

    Raises:
        AssertionError: a check failed; the message names the method and the check.
        ValueError: `options` was given with a function, or `surrogate_gradient` with a name.

    Example:
        >>> check_method("proxy-nca++", temperature=0.1)
    """
    subject = builder(method, surrogate_gradient=surrogate_gradient, **options)
    for check in CHECKS.values():
        check(subject)


def builder(method: str | Build, *, surrogate_gradient: bool = False, **options: Any) -> Subject:
    """The subject of the checks.

    Args:
        method: a name of the catalogue, or a function (classes, dim) -> Criterion.
        surrogate_gradient: as in `check_method`.
        **options: arguments of a method of the catalogue.

    Returns:
        The function that builds the method, and what its catalogue row states.
    """
    if callable(method):
        if options:
            raise ValueError(f"options: got {', '.join(options)} with a function, expected them inside the function")
        if isinstance(method, Subject):
            return method
        return Subject(method, getattr(method, "__name__", repr(method)), surrogate_gradient=surrogate_gradient)
    if surrogate_gradient:
        raise ValueError(f"surrogate_gradient: got True for {method!r}, expected it in the catalogue row")
    from proxymetric.papers import method as from_catalogue
    from proxymetric.papers import rows

    def build(classes: int, dim: int) -> Criterion:
        return from_catalogue(method, classes=classes, dim=dim, steps_per_epoch=2, **options)

    row, *bases = rows(method, options)
    return Subject(
        build,
        name=method + (f"({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else ""),
        sums_over=row.sums_over,
        grouped=row.grouped,
        surrogate_gradient=any(each.surrogate_gradient for each in (row, *bases)),
        fast=bool(bases) or "nested" in options,
    )


def sample(
    seed: int = 0, size: int = SIZE, dtype: torch.dtype = torch.float32, classes: int = CLASSES - 1
) -> tuple[Tensor, Tensor]:
    """Embeddings with some class structure, and their labels; the last class is absent by default."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(size) % classes
    centres = torch.randn(CLASSES, DIM, generator=generator, dtype=dtype)
    return centres[labels] + 0.7 * torch.randn(size, DIM, generator=generator, dtype=dtype), labels


class Toy(torch.nn.Module):
    """The smallest encoder that serves every method: `blocks` that take prompts, and a head.

    `forward(images (B, 3)) -> (B, 6)`. `features(images, prompts, shared) -> (B, width)`: prompts (B, n, embed_dim) or
    None for each block replace the prompt of the encoder, or are added to it with `shared`.

    Args:
        width: features of each block.
        blocks: number of blocks.
    """

    def __init__(self, width: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.width = self.embed_dim = width
        self.embed = torch.nn.Linear(PIXELS, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(blocks))
        self.own_prompts = torch.nn.Parameter(torch.randn(blocks, width))
        self.head = torch.nn.Linear(width, DIM)

    def features(self, images: Tensor, prompts: Sequence[Tensor | None] | None = None, shared: bool = False) -> Tensor:
        x: Tensor = self.embed(images)
        for i, block in enumerate(self.blocks):
            given = None if prompts is None else prompts[i]
            if prompts is None or shared:
                x = x + self.own_prompts[i]
            x = torch.tanh(block(x if given is None else x + given.mean(1)))
        return x

    def forward(self, images: Tensor) -> Tensor:
        embeddings: Tensor = self.head(self.features(images))
        return embeddings


def make(build: Build, dtype: torch.dtype = torch.float32) -> Criterion:
    """A criterion that is ready to train: bound to an encoder and evaluated once, if the method needs that."""
    torch.manual_seed(0)
    criterion = build(CLASSES, DIM)
    if "encoder" in criterion.needs:
        criterion.bind(Toy().to(dtype))
    criterion.to(dtype)
    if {"validation", "pool"} & criterion.needs:
        criterion.boundary(0.0, pool=sample(9, 8 * CLASSES, dtype, classes=CLASSES))
    return criterion


def run(criterion: Criterion, embeddings: Tensor, labels: Tensor) -> Tensor:
    """The loss of a batch, with images if the method needs them."""
    generator = torch.Generator().manual_seed(len(labels))
    images = torch.rand(len(labels), PIXELS, generator=generator).to(embeddings)
    loss: Tensor = criterion(embeddings, labels, images=images if "images" in criterion.needs else None)
    return loss


def snapshot(criterion: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the state."""
    return {name: value.clone() for name, value in criterion.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two states have the same names and bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def train_step(criterion: Criterion, optimizer: torch.optim.Optimizer | None, seed: int) -> Tensor:
    """Train one step on the batch of a seed, and return the gradient with respect to the embeddings."""
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
    """An optimiser of the parameters of the criterion; None if it has no parameters."""
    groups = criterion.param_groups(lr=1e-2)
    return torch.optim.AdamW(groups, lr=1e-3) if groups else None


def check_gradient(subject: Subject) -> None:
    """The gradients of the embeddings and of every parameter are those of the value (float64, fixed random state).

    The check runs in eval mode, where nothing is fitted to the batch. If training mode gives the same value, it must
    give the same gradient. For a declared surrogate gradient, the factors that `core.surrogate.held` marks are frozen
    in the value.
    """
    criterion = make(subject, torch.float64).eval()
    embeddings, labels = sample(dtype=torch.float64)
    inputs = [embeddings.requires_grad_(), *(p for p in criterion.parameters() if p.requires_grad)]
    factors = Factors()

    def value(embeddings: Tensor, *_: Tensor) -> Tensor:
        torch.manual_seed(1)
        loss = run(criterion, embeddings, labels)
        criterion.discard()
        return loss

    def surrogate(*inputs: Tensor) -> Tensor:
        with factors.replay():
            return value(*inputs)

    with factors.record():
        value(*inputs)
    count, declared = len(factors.values), subject.surrogate_gradient
    assert bool(count) == declared, (
        f"surrogate_gradient: got {declared}, expected {bool(count)}: the loss has {count} held factors"
    )
    try:
        gradcheck(surrogate, tuple(inputs), eps=1e-6, atol=1e-5, fast_mode=subject.fast)
    except GradcheckError as error:
        raise AssertionError(
            "the gradient is not that of the value. A factor without gradient must be marked with "
            f"core.surrogate.held and declared with surrogate_gradient=True. {error}"
        ) from error
    in_eval = value(*inputs)
    criterion.train()
    in_training = value(*inputs)
    if torch.equal(in_eval, in_training):
        expected, actual = (torch.autograd.grad(loss, inputs, allow_unused=True) for loss in (in_eval, in_training))
        for eval_gradient, training_gradient in zip(expected, actual, strict=True):
            torch.testing.assert_close(training_gradient, eval_gradient)


class _OpsOnly(References):
    """References that only the reductions of `ops` can read."""

    def normalised(self, queries: Tensor | None = None) -> Tensor:
        raise AssertionError("sums_over: got a loss that reads all references at once, expected one written on ops")


def check_reduction(subject: Subject) -> None:
    """The loss sums over what its row states, and is written on `ops`. A row without `sums_over` states nothing.

    A sum over the classes for each query makes queries independent: the gradient with respect to a query does not
    depend on the other queries. A sum over the batch for each class makes classes independent in the same way.
    """
    if subject.sums_over is None:
        return
    objective = make(subject, torch.float64).objective
    assert isinstance(objective, Compare), f"sums_over: got {type(objective).__name__}, expected a Compare"
    loss, per_class = objective.loss, objective.source.per_class or 1
    has_of_class = traits(loss).of_class is not None
    assert has_of_class == subject.grouped, (
        f"grouped: got {subject.grouped}, expected {has_of_class}: it states whether the loss has `of_class`"
    )
    queries, labels = sample(dtype=torch.float64)
    generator = torch.Generator().manual_seed(4)
    vectors = torch.randn(CLASSES * per_class, DIM, generator=generator, dtype=torch.float64)
    reference_labels = torch.arange(CLASSES).repeat_interleave(per_class)

    def gradients(queries: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        inputs = queries.clone().requires_grad_(), vectors.clone().requires_grad_()
        normalised = torch.nn.functional.normalize(inputs[0])
        with using("chunked"):
            refs = _OpsOnly(inputs[1], reference_labels, per_class, normalise="l2")
            return torch.autograd.grad(loss(normalised, labels, refs), inputs)

    others = torch.randn(queries.shape, generator=generator, dtype=torch.float64)
    if subject.sums_over == "classes":
        before, after = (gradients(each, vectors)[0][0] for each in (queries, torch.cat([queries[:1], others[1:]])))
    else:
        changed = torch.cat([vectors[:per_class], -vectors[per_class:]])
        before, after = (gradients(queries, each)[1][:per_class] for each in (vectors, changed))
    message = (
        f"sums_over: got {subject.sums_over!r}, but the loss does not sum over it; expected what it sums over, or None"
    )
    torch.testing.assert_close(after, before, msg=message)


def check_batch_of_one(subject: Subject) -> None:
    """A batch of one sample has a finite loss and a finite gradient."""
    criterion = make(subject)
    embeddings, labels = sample()
    single = embeddings[:1].clone().requires_grad_()
    loss = run(criterion, single, labels[:1])
    assert loss.ndim == 0, f"the loss has shape {tuple(loss.shape)}"
    assert loss.isfinite(), f"the loss is {loss.item()}"
    if loss.requires_grad:
        loss.backward()
        assert single.grad is None or single.grad.isfinite().all(), "the gradient is not finite"


def check_zero_embedding(subject: Subject) -> None:
    """An embedding of zeros (a dead encoder) and equal embeddings have finite gradients."""
    criterion = make(subject)
    embeddings, labels = sample()
    embeddings[0] = 0
    embeddings[4] = embeddings[8]
    run(criterion, embeddings.requires_grad_(), labels).backward()
    assert embeddings.grad is not None, "the embeddings have no gradient"
    assert embeddings.grad.isfinite().all(), "the gradient is not finite"


def check_not_finite(subject: Subject) -> None:
    """Embeddings with NaN or infinity have a loss that is not finite; those of a length that overflows are refused.

    Without the checks of a careful criterion, their loss is not finite either.
    """
    row, number = slice(0, 1), (0, 2)
    bad_values: list[tuple[str, Any, float]] = [
        ("NaN in one row", row, torch.nan),
        ("NaN in all rows", slice(None), torch.nan),
        ("infinity in one number", number, torch.inf),
        ("minus infinity in one number", number, -torch.inf),
        ("a row of 1e30", row, 1e30),
    ]
    for impl in ("plain", "chunked"):
        criterion = make(subject)
        for name, place, value in bad_values:
            embeddings, labels = sample()
            embeddings[place] = value
            criterion.careful = not overflows(value)
            if overflows(value):
                check_refused(criterion, embeddings, labels)
            with using(impl):
                loss = run(criterion, embeddings.requires_grad_(), labels)
            criterion.discard()
            assert not loss.isfinite(), f"{name}: the loss is {loss.item()} ({impl})"
            assert not any(term.isfinite() for term in criterion.terms.values()), f"{name}: a term is finite ({impl})"


def overflows(value: float) -> bool:
    """Whether the square of a finite number is infinite in float32."""
    return math.isfinite(value) and value**2 > torch.finfo(torch.float32).max


def check_refused(criterion: Criterion, embeddings: Tensor, labels: Tensor) -> None:
    """A careful criterion refuses the embeddings, and is then as it was."""
    before, pending = criterion.careful, criterion.pending
    criterion.careful = True
    try:
        run(criterion, embeddings, labels)
    except ValueError as error:
        assert str(error).startswith("embeddings: got numbers up to"), f"the message is {error}"
    else:
        raise AssertionError("embeddings whose length overflows are not refused")
    finally:
        criterion.careful = before
    assert criterion.pending == pending, "a refused batch has left something behind"


def check_empty_batch(subject: Subject) -> None:
    """An empty batch has a finite loss: 0, plus terms that compare no samples. Its commit leaves no NaN in the state.

    The check is repeated after a training step, because a memory may hold rows by then.
    """
    criterion = make(subject)
    embeddings, labels = sample()
    for _ in range(2):
        loss = run(criterion, embeddings[:0].clone().requires_grad_(), labels[:0])
        assert loss.ndim == 0, f"the loss has shape {tuple(loss.shape)}"
        assert loss.isfinite(), f"the loss is {loss.item()}"
        compared = [value for name, value in criterion.terms.items() if name.split(".")[-1] == "loss"]
        assert not any(compared), "the loss of no samples is not 0"
        if loss.requires_grad:
            loss.backward()
        gradients = [p.grad for p in criterion.parameters() if p.grad is not None]
        assert all(gradient.isfinite().all() for gradient in gradients), "a gradient is not finite"
        criterion.commit(lr=1e-2, network_lr=1e-3)
        assert all(not value.isnan().any() for value in criterion.state_dict().values()), "the state holds NaN"
        train_step(criterion, None, 0)


def check_copies(subject: Subject) -> None:
    """A copy (deepcopy, pickle) has the same state and no pending changes; neither changes the other afterwards."""
    for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        criterion = make(subject)
        train_step(criterion, None, 0)
        embeddings, labels = sample(1)
        run(criterion, embeddings.requires_grad_(), labels).backward()
        criterion.zero_grad(set_to_none=True)
        before, twin = snapshot(criterion), copied(criterion)
        assert twin.pending == 0, "the copy has pending changes of the original"
        assert same(before, snapshot(twin)), "the state of the copy differs"
        twin.commit(lr=1e-2, network_lr=1e-3)
        train_step(twin, None, 2)
        assert criterion.pending == 1, "the copy took the pending changes of the original"
        assert same(before, snapshot(criterion)), "a commit of the copy changed the original"
        after = snapshot(twin)
        criterion.commit(lr=1e-2, network_lr=1e-3)
        assert criterion.step == 2, f"the original counts {criterion.step} steps, expected 2"
        assert same(after, snapshot(twin)), "a commit of the original changed the copy"


def check_labels(subject: Subject) -> None:
    """Bad labels (range, type, number) and embeddings of another width raise an error that names the argument."""
    criterion = make(subject)
    embeddings, labels = sample()
    bad_batches: list[tuple[Any, Any, str]] = [
        (embeddings, labels.float(), "labels"),
        (embeddings, labels[1:], "labels"),
        (embeddings[0], labels[:1], "embeddings"),
    ]
    if criterion.objective.classes is not None:
        bad_batches += [(embeddings, labels - 1, "labels"), (embeddings, labels + CLASSES, "labels")]
    if criterion.objective.dim is not None:
        bad_batches += [(embeddings[:, 1:], labels, "embeddings")]
    for bad_embeddings, bad_labels, argument in bad_batches:
        try:
            criterion(bad_embeddings, bad_labels)
        except ValueError as error:
            assert str(error).startswith(argument), f"the message does not begin with {argument!r}: {error}"
        else:
            raise AssertionError(f"bad {argument} are accepted, labels of shape {tuple(bad_labels.shape)}")
    assert criterion.pending == 0, "a refused batch left something to commit"


def check_order(subject: Subject) -> None:
    """The loss does not depend on the order of the batch."""
    criterion = make(subject, torch.float64).eval()
    embeddings, labels = sample(dtype=torch.float64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(1)
    in_order = run(criterion, embeddings, labels)
    torch.manual_seed(1)
    torch.testing.assert_close(run(criterion, embeddings[order], labels[order]), in_order)


def check_half(subject: Subject) -> None:
    """Embeddings in bfloat16 give a float32 loss, close to the loss of the same numbers in float32."""
    criterion = make(subject).eval()
    embeddings, labels = sample()
    torch.manual_seed(1)
    full = run(criterion, embeddings.bfloat16().float(), labels)
    torch.manual_seed(1)
    half = run(criterion, embeddings.bfloat16(), labels)
    assert half.dtype == torch.float32, f"the loss has type {half.dtype}"
    torch.testing.assert_close(half, full)


def check_commit(subject: Subject) -> None:
    """State changes only in commit: not in forward, in eval mode, without gradients or after discard."""
    criterion = make(subject)
    embeddings, labels = sample()
    before = snapshot(criterion)
    run(criterion, embeddings.clone().requires_grad_(), labels).backward()
    criterion.zero_grad(set_to_none=True)
    assert criterion.pending == 1, "forward left nothing to commit"
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
    assert criterion.step == 1, f"one commit after two passes counts as {criterion.step} steps"
    assert all(not value.requires_grad for value in criterion.state_dict().values()), "the state has a gradient"


STATE_HINT = "is all state a parameter or a persistent buffer, and is what `commit` stores detached?"


def check_resume(subject: Subject) -> None:
    """A criterion that is saved with safetensors after a few steps and loaded again continues bit for bit."""
    original = make(subject)
    optimizer = optimizer_of(original)
    for seed in range(3):
        train_step(original, optimizer, seed)
    torch.manual_seed(5)
    resumed = make(subject)
    resumed.load_state_dict(load(save({k: v.contiguous() for k, v in original.state_dict().items()})))
    resumed_optimizer = optimizer_of(resumed)
    if optimizer is not None and resumed_optimizer is not None:
        resumed_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3, 6):
        gradient, resumed_gradient = train_step(original, optimizer, seed), train_step(resumed, resumed_optimizer, seed)
        assert torch.equal(gradient, resumed_gradient), f"the gradients differ in step {seed}; {STATE_HINT}"
    assert same(snapshot(original), snapshot(resumed)), f"the states differ; {STATE_HINT}"
    assert resumed.step == 6, f"the resumed criterion counts {resumed.step} steps, expected 6"


def check_groups(subject: Subject) -> None:
    """Every trained parameter is in exactly one group. No group and no state has parameters of a bound encoder."""
    criterion = make(subject)
    names = set(criterion.state_dict())
    encoder = Toy()
    criterion.bind(encoder)
    in_groups = [id(p) for group in criterion.param_groups(lr=1.0, network_lr=0.1) for p in group["params"]]
    trained = [id(p) for p in criterion.parameters() if p.requires_grad]
    assert sorted(in_groups) == sorted(trained), f"{len(trained)} trained parameters, {len(in_groups)} in groups"
    assert not {id(p) for p in encoder.parameters()} & set(in_groups), "the encoder's parameters are in the groups"
    added = set(criterion.state_dict()) - names
    assert not any(name.endswith(("weight", "bias")) for name in added), "the encoder's parameters are in the state"


def _named(name: str, check: Callable[[Subject], None]) -> Callable[[Build], None]:
    """Wrap a check so that its failures name the method and the check."""

    @functools.wraps(check)
    def named(build: Build) -> None:
        subject = builder(build)
        try:
            check(subject)
        except Exception as error:
            message = " ".join(str(error).split()) or type(error).__name__
            excerpt = message[:MAX_MESSAGE_LENGTH] + ("..." if len(message) > MAX_MESSAGE_LENGTH else "")
            raise AssertionError(f"{subject.name} fails the check {name!r}: {excerpt}") from error

    return named


CHECKS: dict[str, Callable[[Build], None]] = {
    name: _named(name, check)
    for name, check in {
        "commit": check_commit,
        "gradient": check_gradient,
        "reduction": check_reduction,
        "batch of one": check_batch_of_one,
        "zero embedding": check_zero_embedding,
        "not finite": check_not_finite,
        "empty batch": check_empty_batch,
        "copies": check_copies,
        "labels": check_labels,
        "order": check_order,
        "half precision": check_half,
        "resume": check_resume,
        "parameter groups": check_groups,
    }.items()
}
"""every check by name; the contract suite runs each of them on each method"""
