"""The architecture of proxymetric, in one file.

A loss is a pure function of embeddings and the references they are compared with. Where references come from is a
separate thing with a memory. Whatever must be remembered is handed back as a *commit*, run once the optimiser has
moved.

=============  ==========================================================================================
piece          what it is
=============  ==========================================================================================
`Loss`         a pure function: queries, their labels, references (and perhaps a weight) -> a scalar
`Source`       makes the references: learned proxies, the batch itself, a queue of the past, ...
`Weighting`    a rule per class that makes some pairs count more than others (it multiplies the exponent)
`Objective`    what is minimised: `Compare(loss, source)`, `Sum(...)`, or a scheme around another objective
=============  ==========================================================================================

Legend of shapes, used everywhere: B queries, C classes, K references per class, R = C K reference rows, D dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from proxymetric.core.class_shards import Shard
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.second_pass import SecondPass, SecondPassResult
from proxymetric.core.tally import ProxyUse, close_tallies

Commit = Callable[[], None]


def nothing() -> None:
    """The commit of a piece that remembers nothing."""


def unit(vectors: Tensor) -> Tensor:
    """`v / ||v||`, row by row; a zero row stays zero and has a zero gradient.

    >>> unit(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    return nn.functional.normalize(vectors, dim=-1, eps=LEAST["l2"])


def ball(vectors: Tensor) -> Tensor:
    """`v / max(||v||, 1)`, row by row: vectors inside the unit ball are left as they are (CCP's Lipschitz choice).

    >>> ball(torch.tensor([[3.0, 4.0], [0.3, 0.4]]))
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    return nn.functional.normalize(vectors, dim=-1, eps=LEAST["ball"])


LEAST = {"l2": 1e-12, "ball": 1.0}
"""normalising divides a vector by its length, but by no less than this"""
NORMALISATIONS: dict[str, Callable[[Tensor], Tensor]] = {"l2": unit, "ball": ball}


class References(NamedTuple):
    """What queries are compared with."""

    vectors: Tensor
    """(R, D)"""
    labels: Tensor
    """(R,) class of each row"""
    per_class: int | None = None
    """K, when the rows lie class after class, K of each"""
    same: Tensor | None = None
    """(B, R) bool: this row IS the query, so the two are no pair"""
    normalise: str | None = None
    """how the rows are still to be normalised before they are compared, a key of `NORMALISATIONS`; None: not at all"""
    shard: Shard | None = None
    """which classes the rows are of, where other processes hold those of the others; None: all are here"""

    @property
    def all_rows(self) -> int:
        """R, the rows of all processes."""
        return len(self.labels) if self.shard is None else self.shard.classes * (self.per_class or 1)

    def normalised(self, queries: Tensor | None = None) -> Tensor:
        """The rows as they are compared with these queries: of their type, and normalised, in a copy.

        The reductions in `ops` do without this copy, which matters where there are very many rows.
        """
        if self.shard is not None:
            raise ValueError("shard: this loss wants all references at once; expected one that is written on `ops`")
        vectors = self.vectors if queries is None else self.vectors.to(queries.dtype)
        return vectors if self.normalise is None else NORMALISATIONS[self.normalise](vectors)

    def positives(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Which (query, row) pairs are of one class and which of two, (B, R) each; a query is no pair with itself."""
        match = labels[:, None] == self.labels[None, :]
        if self.same is None:
            return match, ~match
        return match & ~self.same, ~match & ~self.same


class Batch(NamedTuple):
    """One batch as it comes from the data: images (B, 3, H, W), uint8 or float in [0, 1], and labels (B,)."""

    images: Tensor | None
    labels: Tensor


class Progress(NamedTuple):
    """Where training stands: commits so far, and epochs so far (None where nobody said how long an epoch is)."""

    step: int
    epoch: float | None


class Encode(Protocol):
    """The encoder as a method may call it: images -> embeddings."""

    def __call__(self, images: Tensor, /) -> Tensor: ...


class Context(NamedTuple):
    """What one step knows."""

    batch: Batch
    embeddings: Tensor
    """(B, D) as the encoder gave them, not normalised"""
    progress: Progress
    encode: Encode | None = None
    """the bound encoder, for methods that need another forward pass"""
    precision: torch.dtype | None = None
    """what the encoder computes in under autocast, which is off inside a method; None: in its own type"""
    seen: SecondPassResult | None = None
    """the second look, where a source had asked for one; without it the source must call `encode` itself"""


class Outcome(NamedTuple):
    """What a step gives: named scalars whose sum is the loss, and what to remember once the optimiser has moved."""

    terms: dict[str, Tensor]
    commit: Commit = nothing

    @property
    def loss(self) -> Tensor:
        return torch.stack(list(self.terms.values())).sum()


Pool = Callable[[int], tuple[Tensor, Tensor]]
"""`pool(count)`: embeddings and labels of `count` random training images of each class, by the encoder as it is now"""


class Boundary(NamedTuple):
    """What is known after an evaluation: the validation score, and where to get embeddings to pick proxies from."""

    score: float | None = None
    pool: Pool | None = None


class Loss(Protocol):
    """A pure function: no parameters, no buffers, no forward pass of a network.

    `queries` (B, D) come normalised; `labels` (B,). Of `refs` it asks the reductions in `ops`, or `refs.normalised`.
    """

    def __call__(
        self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None, /
    ) -> Tensor: ...


class Energy(NamedTuple):
    """The loss of this batch as a function of the references alone, queries detached: what a source may minimise.

    Called with references it gives the loss; `closed_forms` gives what second-order steps need.
    """

    loss: Loss
    queries: Tensor
    """(B, D) normalised, without gradient"""
    labels: Tensor
    normalise: str = "l2"

    def __call__(self, refs: References) -> Tensor:
        return self.loss(self.queries, self.labels, refs._replace(normalise=self.normalise))

    def closed_forms(self, refs: References) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Gradient and diagonal curvature (R, D) as a function of the vectors, their lengths held (VCPA, Eqs. 24, 25).

        The loss offers both in the normalised vectors, `closed_forms(queries, labels, refs)`; with the length held, the
        chain rule is a division by it.
        """
        if not hasattr(self.loss, "closed_forms"):
            raise ValueError(
                f"newton_steps: {type(self.loss).__name__} offers no closed-form curvature; expected a loss that does "
                "(ProxyAnchor), or newton_steps=0, which trains mu and sigma by gradient"
            )
        of_normalised = self.loss.closed_forms(self.queries, self.labels, refs)
        least = LEAST[self.normalise]

        def at(vectors: Tensor) -> tuple[Tensor, Tensor]:
            shrink = vectors.norm(dim=1, keepdim=True).clamp(min=least).reciprocal()
            gradient, curvature = of_normalised(vectors * shrink)
            return gradient * shrink, curvature * shrink.square()

        return at


class Source(nn.Module):
    """Owns references or the means to make them."""

    proxies: tuple[str, ...] = ()
    """names of the parameters that are proxies: they step at the proxies' own rate"""
    called: Mapping[str, str] = {}
    """attribute -> what a report calls the parameters or the table under it; those in `proxies` are else proxies"""
    seats: int = 0
    """vectors per class that a scheme may re-pick through `reseed`"""
    classes: int | None = None
    """C, where labels must lie in [0, C)"""
    dim: int | None = None
    """D, where embeddings must have that width"""
    per_class: int | None = None
    """K, where each class has so many references"""

    def bind(self, encoder: nn.Module) -> None:
        """Meet the encoder, once, before any state is saved or loaded. It must not become a submodule."""

    @property
    def looks(self) -> bool:
        """Whether it wants a second look at the images of a batch."""
        return False

    def look(self, labels: Tensor, mine: slice) -> SecondPass:
        """The second look that is expected; the rows `mine` are those of this process.

        Asked before the step, so that whoever runs the encoder can take both looks in one pass. labels (B,) of all
        processes, in host memory where they can be had there.
        """
        raise NotImplementedError

    def expect(self, labels: Tensor) -> None:
        """The labels of the next batch: what they need from elsewhere may be sent for."""

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        """What to compare this batch with, and what to remember of it. Asked once per step."""
        raise NotImplementedError

    def shard(self, shard: Shard) -> None:
        """Keep the proxies of these classes alone: other processes hold the others."""
        raise ValueError(f"shard: {type(self).__name__} cannot be divided among processes; learned proxies can")

    def seated(self) -> Tensor:
        """The seats' vectors as they are, (C * seats, D), without gradient."""
        raise ValueError(f"{type(self).__name__} has no seats: a scheme cannot read its vectors")

    def reseed(self, vectors: Tensor) -> None:
        """Replace the seats' vectors, (C * seats, D)."""
        raise ValueError(f"{type(self).__name__} has no seats: a scheme cannot re-pick its vectors")


class Weighting(nn.Module):
    """Makes the weight of this batch's pairs from what it remembers of the classes."""

    def forward(self, ctx: Context, queries: Tensor, refs: References) -> tuple[PairWeights, Commit]:
        """`queries` (B, D) come normalised, without gradient; so do `refs.normalised(queries)`.

        `refs.vectors` may be a parameter: what a commit needs of it is copied now, before the optimiser moves.
        """
        raise NotImplementedError


class Objective(nn.Module):
    """What training minimises."""

    normalise: str = "l2"
    """how embeddings are normalised before they are compared: a key of `NORMALISATIONS`"""
    classes: int | None = None
    dim: int | None = None

    def bind(self, encoder: nn.Module) -> None:
        """Meet the encoder, once, before any state is saved or loaded. It must not become a submodule."""

    def forward(self, ctx: Context) -> Outcome:
        raise NotImplementedError

    def boundary(self, run: Boundary) -> None:
        """Called at the start of training and after each evaluation."""


class Compare(Objective):
    """Compare a batch with references: `loss(normal(x), y, normal(refs))`, and perhaps a term on the references alone.

    loss: any `Loss`. source: any `Source`. weighting: a `Weighting` or None. regulariser: a function of the references.
    normalise: "l2" (default) or "ball".
    """

    def __init__(
        self,
        loss: Loss,
        source: Source,
        weighting: Weighting | None = None,
        regulariser: Callable[[References], Tensor] | None = None,
        normalise: str = "l2",
    ) -> None:
        super().__init__()
        if normalise not in NORMALISATIONS:
            raise ValueError(f"normalise: got {normalise!r}, expected one of {', '.join(NORMALISATIONS)}")
        self.loss = loss
        self.source = source
        self.weighting = weighting
        self.regulariser = regulariser
        self.normalise = normalise
        self.classes, self.dim = source.classes, source.dim
        # Only a loss that makes one similarity of a class's K references leaves some of them without use.
        several = hasattr(loss, "of_class") and source.classes is not None and (source.per_class or 1) > 1
        self.use = ProxyUse(source.classes or 0, source.per_class or 1) if several else None

    def bind(self, encoder: nn.Module) -> None:
        self.source.bind(encoder)

    def forward(self, ctx: Context) -> Outcome:
        normal = NORMALISATIONS[self.normalise]
        labels = ctx.batch.labels
        queries = normal(ctx.embeddings)
        still = queries.detach()
        refs, remember = self.source(ctx, Energy(self.loss, still, labels, self.normalise))
        refs = refs._replace(normalise=self.normalise)
        weight, commits = None, [remember]
        if self.weighting is not None:
            weight, weighed = self.weighting(ctx, still, refs._replace(vectors=refs.vectors.detach()))
            commits.append(weighed)
        if self.use is not None and self.training and torch.is_grad_enabled():
            nearest = self.use.nearest(still, labels, refs.vectors, refs.labels, normal, refs.shard)
            commits.append(partial(self.use.mark, nearest))

        def commit() -> None:
            for each in commits:
                each()

        if refs.vectors.dtype == torch.bfloat16:
            # Who makes proxies narrow wants narrow products; exponents and sums stay float32 (`ops`).
            queries = queries.to(torch.bfloat16)
        # A memory that is still empty: nothing to compare with, nothing to learn from.
        terms = {"loss": self.loss(queries, labels, refs, weight) if len(refs.labels) else queries.sum() * 0}
        if self.regulariser is not None:
            terms["regulariser"] = self.regulariser(refs)
        return Outcome(terms, commit)

    def boundary(self, run: Boundary) -> None:
        close_tallies(self)


class Sum(Objective):
    """A weighted sum of named objectives, each asked once: `Sum(base=(1.0, a), memory=(0.5, b))`."""

    def __init__(self, **parts: tuple[float, Objective]) -> None:
        super().__init__()
        kinds = {part.normalise for _, part in parts.values()}
        if len(kinds) != 1:
            raise ValueError(f"Sum: its parts must normalise alike, got {sorted(kinds)}")
        self.normalise = kinds.pop()
        self.classes = next((part.classes for _, part in parts.values() if part.classes is not None), None)
        self.dim = next((part.dim for _, part in parts.values() if part.dim is not None), None)
        self.weights = {name: weight for name, (weight, _) in parts.items()}
        self.parts = nn.ModuleDict({name: part for name, (_, part) in parts.items()})

    def members(self) -> Iterator[tuple[str, Objective]]:
        for name, part in self.parts.items():
            assert isinstance(part, Objective)
            yield name, part

    def bind(self, encoder: nn.Module) -> None:
        for _, part in self.members():
            part.bind(encoder)

    def forward(self, ctx: Context) -> Outcome:
        outcomes: Mapping[str, Outcome] = {name: part(ctx) for name, part in self.members()}
        terms = {
            f"{name}.{term}": self.weights[name] * value
            for name, outcome in outcomes.items()
            for term, value in outcome.terms.items()
        }

        def commit() -> None:
            for outcome in outcomes.values():
                outcome.commit()

        return Outcome(terms, commit)

    def boundary(self, run: Boundary) -> None:
        for _, part in self.members():
            part.boundary(run)
