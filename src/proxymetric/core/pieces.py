"""The architecture of proxymetric, in one file.

A loss is a pure function of embeddings and of the references they are compared with. The references come from a source,
which has a memory. Every change to a memory is returned as a *commit*, a function that runs once the optimiser has
stepped.

=============  ==========================================================================================
piece          what it is
=============  ==========================================================================================
`Loss`         a pure function: queries, their labels, references (and perhaps weights) -> a scalar
`Source`       makes the references: learned proxies, the batch itself, a queue of past embeddings, ...
`Weighting`    weights the pairs of a batch by a rule per class; the weight multiplies the exponent
`Objective`    what training minimises: `Compare(loss, source)`, `Sum(...)`, or a scheme around an objective
=============  ==========================================================================================

Shapes, used everywhere: B queries, C classes, K references per class, R = C K reference rows, D dimensions.

Features that only some sources offer are optional protocols, not members of `Source`: see `core.second_pass` and
`core.capabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from proxymetric.arguments.signatures import one_of
from proxymetric.core.capabilities import traits
from proxymetric.core.class_shards import Shard
from proxymetric.core.normalisation import MIN_DIVISORS, NORMALISATIONS
from proxymetric.core.pair_weights import PairWeights
from proxymetric.core.short_repr import ShortRepr, call_text
from proxymetric.core.tally import ProxyUse, close_tallies

MAX_FLOAT32_PAIRS = 2**24
"""pairs of queries and references up to which bfloat16 references are compared in float32"""
Commit = Callable[[], None]
"""changes the memory of a piece; called once, after the optimiser has stepped"""


def nothing() -> None:
    """The commit of a piece that remembers nothing."""


class NearestRows:
    """A by-product of a reduction that has all similarities: (B,) the nearest row of each query's own class."""

    rows: Tensor | None = None


class References(NamedTuple):
    """The vectors that queries are compared with.

    A loss reads `vectors`, which are ready to compare. The reductions in `ops` read `rows`, and normalise them as they
    go, without a copy of all rows.

    Example:
        >>> references = References(torch.tensor([[3.0, 4.0]]), torch.tensor([0]), normalise="l2")
        >>> references.vectors
        tensor([[0.6000, 0.8000]])
    """

    rows: Tensor
    """(R, D) as the source made them: the normalisation `normalise` is still to be applied"""
    labels: Tensor
    """(R,) class of each row"""
    per_class: int | None = None
    """K, if the rows are ordered by class with K rows for each class; else None"""
    same: Tensor | None = None
    """(B, R) bool: the row is the query itself, so the two are not a pair; None: no row is, unless `are_queries`"""
    normalise: str | None = None
    """the normalisation that the rows still need, a key of `NORMALISATIONS`; None: none"""
    shard: Shard | None = None
    """the classes of these rows, if other processes hold the rows of other classes; None: all rows are here"""
    all_classes: bool = False
    """whether the rows are the K rows of class 0, of class 1 and so on, of every class that a label may have"""
    are_queries: bool = False
    """whether the rows are the queries themselves, before their normalisation"""
    nearest: NearestRows | None = None
    """where a reduction may leave which row of its class is nearest to each query, if it has the similarities"""
    dtype: torch.dtype | None = None
    """the type of the queries, in which `vectors` are; None: that of the rows"""

    @property
    def all_rows(self) -> int:
        """R, the number of rows in all processes."""
        return len(self.labels) if self.shard is None else self.shard.classes * (self.per_class or 1)

    @property
    def vectors(self) -> Tensor:
        """(R, D) the rows, ready to compare: normalised as the queries are, and of their type.

        They are computed at each access; keep them in a variable.

        Raises:
            ValueError: the rows are divided among processes.
        """
        if self.shard is not None:
            raise ValueError(
                "shard: got references divided among processes, expected all references in this process; "
                "only losses that use the reductions of `ops` can be sharded"
            )
        rows = self.rows if self.dtype is None else self.rows.to(self.dtype)
        return rows if self.normalise is None else NORMALISATIONS[self.normalise](rows)

    def normalised(self, queries: Tensor) -> Tensor:
        """`vectors` for these queries: in their type, and the queries themselves if the rows are the queries.

        This spares a loss that compares a batch with itself a second normalisation.

        Args:
            queries: (B, D), normalised.

        Returns:
            (R, D).

        Raises:
            ValueError: the rows are divided among processes.
        """
        if self.are_queries and self.shard is None:
            return queries
        return self._replace(dtype=queries.dtype).vectors

    def positives(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Masks of the positive and of the negative pairs; a query is not a pair with itself.

        Args:
            labels: (B,) labels of the queries.

        Returns:
            Two (B, R) bool tensors: query and row have the same class, and they have different classes.
        """
        match = labels[:, None] == self.labels[None, :]
        if self.are_queries:
            negative = ~match
            return match.fill_diagonal_(False), negative
        if self.same is None:
            return match, ~match
        return match & ~self.same, ~match & ~self.same


class Batch(NamedTuple):
    """One batch of the training data."""

    images: Tensor | None
    """(B, 3, H, W), uint8 or float in [0, 1]"""
    labels: Tensor
    """(B,)"""


class Progress(NamedTuple):
    """How far training has come."""

    step: int
    """commits so far"""
    epoch: float | None
    """epochs so far; None if the length of an epoch is not known"""


class Encode(Protocol):
    """The calls of the bound encoder that a piece may make. The encoder computes in the precision of the step."""

    def __call__(self, images: Tensor, /) -> Tensor:
        """Embeddings (B, D) of images."""

    def features(self, images: Tensor, prompts: Sequence[Tensor | None] | None = None, shared: bool = False) -> Tensor:
        """Pooled features (B, F) of images, before the head.

        Args:
            images: (B, 3, H, W).
            prompts: prompt tokens (B, n_i, W) for each block i of a vision transformer, or None for a block.
            shared: True: `prompts` follow the encoder's own prompts; False: `prompts` replace the encoder's prompts.
        """


class Context(NamedTuple):
    """The inputs of one training step."""

    batch: Batch
    embeddings: Tensor
    """(B, D) output of the encoder, not normalised"""
    progress: Progress
    encode: Encode | None = None
    """the bound encoder, for pieces that need another forward pass"""


class Outcome(NamedTuple):
    """The result of one step of an objective."""

    terms: dict[str, Tensor]
    """named scalars; their sum is the loss"""
    commit: Commit = nothing
    """updates the memory once the optimiser has stepped"""

    @property
    def loss(self) -> Tensor:
        """The sum of the terms."""
        return torch.stack(list(self.terms.values())).sum()


Pool = Callable[[int], tuple[Tensor, Tensor]]
"""`pool(count)`: embeddings and labels of `count` random training images per class, from the current encoder"""


class Boundary(NamedTuple):
    """What a run passes to an objective after an evaluation."""

    score: float | None = None
    """validation score, higher is better"""
    pool: Pool | None = None
    """embeddings from which a scheme may pick proxies"""


class Loss(Protocol):
    """A pure function: no parameters, no buffers, no forward pass of a network.

    A loss that is right when processes divide the classes declares `can_shard = True`: it reads the references only
    through the reductions in `ops`, which add up the parts of all processes. Without the declaration,
    `Criterion.shard` refuses the loss. The same holds for a regulariser.
    """

    def __call__(
        self, queries: Tensor, labels: Tensor, refs: References, weight: PairWeights | None = None, /
    ) -> Tensor:
        """The loss, a scalar.

        Args:
            queries: (B, D), normalised.
            labels: (B,) labels of the queries.
            refs: the references; a loss reads them through the reductions in `ops` or as `refs.vectors`.
            weight: weights of the pairs; None: every pair counts the same.
        """


class Energy(NamedTuple):
    """The loss of this batch as a function of the references alone; a source may minimise it.

    The queries have no gradient. A call with references returns the loss.
    """

    loss: Loss
    queries: Tensor
    """(B, D) normalised, without gradient"""
    labels: Tensor
    """(B,)"""
    normalise: str = "l2"
    """the normalisation of the references, a key of `NORMALISATIONS`"""

    def __call__(self, refs: References) -> Tensor:
        return self.loss(self.queries, self.labels, self._completed(refs))

    def closed_forms(self, refs: References) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Closed forms for second-order steps on the vectors, with their lengths held fixed (VCPA, Eqs. 24, 25).

        The loss offers the closed forms with respect to normalised vectors: `closed_forms(queries, labels, refs)`.
        With a fixed length, the chain rule is a division by this length.

        Args:
            refs: labels and layout of the vectors.

        Returns:
            A function of vectors (R, D) that returns the gradient and the diagonal curvature, (R, D) each.

        Raises:
            ValueError: the loss offers no closed forms.
        """
        if not hasattr(self.loss, "closed_forms"):
            raise ValueError(
                f"newton_steps: got a loss without closed-form curvature ({type(self.loss).__name__}), expected "
                "ProxyAnchor or another loss that has it, or newton_steps=0, which trains mu and sigma by gradient"
            )
        of_normalised = self.loss.closed_forms(self.queries, self.labels, self._completed(refs))
        min_length = MIN_DIVISORS[self.normalise]

        def gradient_and_curvature(vectors: Tensor) -> tuple[Tensor, Tensor]:
            shrink = vectors.norm(dim=1, keepdim=True).clamp(min=min_length).reciprocal()
            gradient, curvature = of_normalised(vectors * shrink)
            return gradient * shrink, curvature * shrink.square()

        return gradient_and_curvature

    def _completed(self, refs: References) -> References:
        """The references with what is known about the queries."""
        return refs._replace(normalise=self.normalise, dtype=self.queries.dtype)


class Source(ShortRepr, nn.Module):
    """Makes the references that a batch is compared with, and owns the memory they come from.

    A subclass implements `forward`. The other methods serve schemes that re-pick vectors (`seated`, `reseed`) and
    training that divides classes among processes (`shard`).
    """

    proxies: tuple[str, ...] = ()
    """names of the parameters that are proxies: they have their own learning rate"""
    seats: int = 0
    """vectors per class that a scheme may replace through `reseed`"""
    classes: int | None = None
    """C, if labels must lie in [0, C)"""
    dim: int | None = None
    """D, if embeddings must have this width"""
    per_class: int | None = None
    """K, if each class has K references"""
    takes_several_labels: bool = False
    """whether the references do not depend on the labels, so that queries may have several"""
    part: Shard | None = None
    """the classes whose proxies this process holds; None: all classes"""

    def bind(self, encoder: nn.Module) -> None:
        """Read what the source needs from the encoder; called once, before any state is saved or loaded.

        Args:
            encoder: the encoder that will be trained; it must not become a submodule.
        """

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        """The references of this batch. Called once per step.

        Args:
            ctx: the inputs of the step.
            energy: the loss of this batch as a function of the references.

        Returns:
            The references, and the commit that updates the memory.
        """
        raise NotImplementedError

    def shard(self, shard: Shard) -> None:
        """Keep only the proxies of some classes; other processes hold the others.

        Args:
            shard: the classes that stay here.

        Raises:
            ValueError: the proxies of this source cannot be divided.
        """
        raise ValueError(
            f"shard: got {type(self).__name__}, whose proxies cannot be divided among processes, "
            "expected LearnedProxies"
        )

    def seated(self) -> Tensor:
        """A copy of the vectors in the seats, (C * seats, D), without gradient.

        Raises:
            ValueError: the source has no seats.
        """
        raise ValueError(f"source: got {type(self).__name__}, which has no seats, expected a source with seats to read")

    def reseed(self, vectors: Tensor) -> None:
        """Replace the vectors in the seats.

        Args:
            vectors: (C * seats, D).

        Raises:
            ValueError: the source has no seats.
        """
        raise ValueError(
            f"source: got {type(self).__name__}, which has no seats, expected a source with seats to replace"
        )


class Weighting(ShortRepr, nn.Module):
    """Weights the pairs of a batch, from what it remembers of the classes."""

    asks: str | None = None
    """the attribute that a loss must have to make use of this weighting; None: any loss with weighted exponents"""
    classes: int | None = None
    """the number of classes that it remembers; None: any number"""
    takes_several_labels: bool = False
    """whether a query may have several labels: a mask (B, C) instead of labels (B,)"""

    def check(self, loss: Loss, source: Source) -> None:
        """Refuse a loss or a source that does not fit this weighting.

        Args:
            loss: the loss that it weights.
            source: the source of the references.

        Raises:
            ValueError: the loss makes no use of the weights, or the numbers of classes differ.
        """
        if self.asks is not None and not getattr(loss, self.asks, False):
            raise ValueError(
                f"weighting: got {type(self).__name__} for {type(loss).__name__}, which makes no use of it, "
                f"expected a loss that states `{self.asks}`"
            )
        if source.classes is not None and self.classes not in (None, source.classes):
            raise ValueError(
                f"weighting: got {type(self).__name__} with classes={self.classes}, expected classes="
                f"{source.classes}, as {type(source).__name__} has"
            )

    def forward(self, ctx: Context, queries: Tensor, refs: References) -> tuple[PairWeights, Commit]:
        """The weights of this batch's pairs.

        Args:
            ctx: the inputs of the step.
            queries: (B, D), normalised, without gradient.
            refs: the references, without gradient. `refs.rows` may share memory with a parameter: a commit that
                needs the rows must copy them now, before the optimiser steps.

        Returns:
            The weights, and the commit that updates the memory.
        """
        raise NotImplementedError


class Objective(ShortRepr, nn.Module):
    """What training minimises."""

    normalise: str = "l2"
    """how embeddings are normalised before they are compared, a key of `NORMALISATIONS`"""
    classes: int | None = None
    """C, if labels must lie in [0, C)"""
    dim: int | None = None
    """D, if embeddings must have this width"""
    several_labels: bool = False
    """whether a query may have several labels: a mask (B, C) instead of labels (B,)"""

    def bind(self, encoder: nn.Module) -> None:
        """Read what the objective needs from the encoder; called once, before any state is saved or loaded.

        Args:
            encoder: the encoder that will be trained; it must not become a submodule.
        """

    def forward(self, ctx: Context) -> Outcome:
        """The loss of a batch, and the commit that updates the memory."""
        raise NotImplementedError

    def boundary(self, run: Boundary) -> None:
        """React to an evaluation; called at the start of training and after each evaluation."""


class Compare(Objective):
    """Compares a batch with references: `loss(normal(x), y, normal(refs))`.

    Args:
        loss: any `Loss`.
        source: any `Source`.
        weighting: weights of the pairs; None: every pair counts the same.
        regulariser: a function of the references; its value is added to the loss.
        normalise: "l2" or "ball", for embeddings and references.

    Example:
        >>> from proxymetric import losses, sources
        >>> Compare(losses.Triplet(), sources.InBatch(), normalise="ball")
        Compare(Triplet(margin=0.0961), InBatch(), normalise='ball')
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
        one_of("normalise", normalise, NORMALISATIONS)
        if weighting is not None:
            weighting.check(loss, source)
        self.loss, self.source, self.weighting = loss, source, weighting
        self.regulariser, self.normalise = regulariser, normalise
        self.classes, self.dim = source.classes, source.dim
        stated, per_class = traits(loss), source.per_class or 1
        pieces = (source,) if weighting is None else (source, weighting)
        self.several_labels = stated.has_several_labels and all(piece.takes_several_labels for piece in pieces)
        # Some of a class's K references can be out of use only if the loss reduces them to one similarity per class.
        counts_use = stated.of_class is not None and source.classes is not None and per_class > 1
        self.use = ProxyUse(source.classes or 0, per_class) if counts_use else None

    def bind(self, encoder: nn.Module) -> None:
        self.source.bind(encoder)

    def forward(self, ctx: Context) -> Outcome:
        normalise = NORMALISATIONS[self.normalise]
        labels = ctx.batch.labels
        queries = normalise(ctx.embeddings)
        detached_queries = queries.detach()
        refs, source_commit = self.source(ctx, Energy(self.loss, detached_queries, labels, self.normalise))
        use = self.use if self.training and torch.is_grad_enabled() else None
        nearest = None if use is None else NearestRows()
        refs = refs._replace(normalise=self.normalise, nearest=nearest, dtype=queries.dtype)
        weight = None
        commits = [source_commit]
        if self.weighting is not None:
            detached_refs = refs._replace(rows=refs.rows.detach())
            weight, weighting_commit = self.weighting(ctx, detached_queries, detached_refs)
            commits.append(weighting_commit)

        def commit() -> None:
            for piece_commit in commits:
                piece_commit()

        if refs.rows.dtype == torch.bfloat16:
            queries, refs = _with_bfloat16_rows(queries, refs)
        # The batch can be empty, and so can a memory at the start. Then there are no pairs, and the loss is 0.
        if len(labels) and len(refs.labels):
            value = self.loss(queries, labels, refs, weight)
        else:
            value = queries[:0].sum() + refs.rows[:0].sum()
        if use is not None and nearest is not None:
            rows = nearest.rows
            if rows is None:
                rows = use.nearest(detached_queries, labels, refs.rows, refs.labels, normalise, refs.shard)
            commits.append(partial(use.mark, rows))
        if value.ndim:
            raise ValueError(
                f"loss: got a tensor of shape {tuple(value.shape)} from {type(self.loss).__name__}, expected a scalar"
            )
        terms = {"loss": value}
        if self.regulariser is not None:
            terms["regulariser"] = self.regulariser(refs)
        return Outcome(terms, commit)

    def boundary(self, run: Boundary) -> None:
        close_tallies(self)


def _with_bfloat16_rows(queries: Tensor, refs: References) -> tuple[Tensor, References]:
    """Queries and bfloat16 references in the type in which they are compared.

    Many pairs: the products are bfloat16; exponents and sums stay float32 (`ops`). Few pairs take as long as their
    launches, and float32 has fewer.
    """
    if len(queries) * len(refs.labels) <= MAX_FLOAT32_PAIRS:
        return queries, refs._replace(rows=refs.rows.float())
    return queries.to(torch.bfloat16), refs._replace(dtype=torch.bfloat16)


class Sum(Objective):
    """A weighted sum of named objectives: `Sum(base=(1.0, a), memory=(0.5, b))`.

    Args:
        **parts: for each name the weight and the objective; all objectives must use the same normalisation.
    """

    def __init__(self, **parts: tuple[float, Objective]) -> None:
        super().__init__()
        for name, given in parts.items():
            if not isinstance(given, tuple) or len(given) != 2 or not isinstance(given[1], Objective):
                raise ValueError(
                    f"{name}: got {type(given).__name__}, expected a weight and an objective: Sum({name}=(1.0, "
                    "Compare(...)))"
                )
        names = {part.normalise for _, part in parts.values()}
        if len(names) != 1:
            raise ValueError(
                f"normalise: got {' and '.join(sorted(names)) or 'no parts'} in a Sum, expected at least one part, and "
                "the same normalisation in all parts"
            )
        self.normalise = names.pop()
        for attribute in ("classes", "dim"):
            values = {name: getattr(part, attribute) for name, (_, part) in parts.items()}
            known = {value for value in values.values() if value is not None}
            if len(known) > 1:
                raise ValueError(f"{attribute}: got {values} in a Sum, expected the same number in all parts")
            setattr(self, attribute, next(iter(known), None))
        self.weights = {name: weight for name, (weight, _) in parts.items()}
        self.parts = nn.ModuleDict({name: part for name, (_, part) in parts.items()})

    def members(self) -> Iterator[tuple[str, Objective]]:
        """The names and the objectives."""
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

    def __repr__(self) -> str:
        return call_text("Sum", *(f"{name}={self.weights[name]} * {part!r}" for name, part in self.members()))
