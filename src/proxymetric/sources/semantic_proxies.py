"""Semantic proxies: what a vision transformer with prompts of their own says of a class's images, accumulated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from proxymetric.checks import at_least_zero, whole_number
from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing, unit
from proxymetric.core.second_pass import ClassPrompts, SecondPass
from proxymetric.core.tally import Counts
from proxymetric.sources.accumulators import accumulator
from proxymetric.sources.learned_proxies import initial
from proxymetric.sources.row_table import RowTable
from proxymetric.sources.shared_random import shared_random

CHOICES = {
    "source": ("prompts", "sample", "encoder", "fixed_encoder"),
    "class_prompts": ("only", "with_shared"),
    "normalise_every": ("step", "batch"),
}
"""arguments of `SemanticProxies` that are one of a few words"""
MAX_COUNTED_PAIRS = 2**24
"""samples times classes of a batch up to which nearest proxies are counted"""
GATE_UNIT = 2**20
"""gates are added up in whole parts of this size, which add up alike in any order"""


class Turns(NamedTuple):
    """In which order the samples of a batch are taken in: class by class side by side, one sample of each at a time."""

    classes: Tensor
    """(U,) the classes present, those with the most samples first"""
    place: Tensor
    """(B,) where among them the class of each sample stands"""
    samples: list[Tensor]
    """turn t: the sample of each class that has more than t, (U_t,); these are the first U_t classes"""

    def on(self, device: torch.device) -> Turns:
        """The same on `device`, in one copy that an accelerator need not be waited for."""
        if device.type == "cpu":
            return self
        parts = [self.classes, self.place, *self.samples]
        packed = torch.cat(parts)
        packed = packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed.to(device)
        classes, place, *samples = packed.split([len(part) for part in parts])
        return Turns(classes, place, samples)


class Plan(NamedTuple):
    """The turns of a batch, and in host memory the classes whose prompts are to be fetched."""

    classes: Tensor
    turns: Turns


def turns(labels: Tensor, keys: Tensor) -> Turns:
    """The turns of a batch, the samples of a class in the order of their keys (B,).

    >>> turns(torch.tensor([7, 3, 3]), keys=torch.tensor([0.1, 0.9, 0.5]))
    Turns(classes=tensor([3, 7]), place=tensor([1, 0, 0]), samples=[tensor([2, 0]), tensor([1])])
    """
    present, place, counts = labels.unique(return_inverse=True, return_counts=True)
    most_first = _most_first(counts)
    place = most_first.argsort()[place]
    counts = counts[most_first]
    order = keys.argsort(stable=True)
    order = order[place[order].argsort(stable=True)]
    first = counts.cumsum(0) - counts
    longest = int(counts[0]) if len(counts) else 0
    return Turns(present[most_first], place, [order[first[counts > t] + t] for t in range(longest)])


def _most_first(counts: Tensor) -> Tensor:
    """The order of classes that have so many samples each; of equal ones as they stand."""
    return counts.argsort(descending=True, stable=True)


class SemanticProxies(Source):
    """Proxies that are made of images: a tower of its own sees each sample, a cell accumulates them by class (VPTSP).

    For each image x of class c in the batch, the encoder's own blocks run once more with prompts of that class, and a
    head of this source's own (LayerNorm, Linear) follows; the results of a class, unit vectors, are taken in one after
    the other, in random order, from where earlier batches left the class (Ren et al. 2024, Eqs. 3-8)::

        p_i = normal(head(features(x_i, prompts of c))),   P <- normal(cell(P, p_i)),   Q = normal((1 - a) P + a O)

    O are free proxies, one for each class. Gradients go through the steps of this batch, not into earlier ones: P is
    remembered in `commit`, as numbers. In eval mode nothing is taken in, and the encoder is not asked. Of several
    forward passes before one commit, a class's last one is kept. The class prompts lie in host memory (`RowTable`), and
    step in `commit` at the network's rate; only those of the batch's classes are ever on an accelerator.

    It meets the encoder in `bind`: `features(images, prompts=[(B, n_i, W) or None for each block], shared=bool)`,
    `width`, and of its backbone `blocks` and `embed_dim` W. It wants the batch's images.

    accumulate: a name of `ACCUMULATORS`: "gru", "ema", "ema-mean", "gru-tanh", "rnn", "lstm", "attention". lam: of the
    moving averages. a: share of the free proxies, in [0, 1]. prompts: m for each class in the first block; block i has
    `m - step i`, down to 0, and only the first `depth` blocks have any (None: all). class_prompts: "only" (the code
    that made the tables) or "with_shared", behind the prompts of the encoder (the text). normalise_every: "step"
    (Eq. 7) or "batch" (released code). normalise_free: True brings O to unit length in Eq. 8, so that a is the ratio in
    which P and O are mixed; False (released code) leaves O as long as training makes it, and the share of P is then
    `(1 - a) / (1 - a + a |O|)`: it starts above 1 - a and falls as O grows. dropout: on a state that has moved, in
    [0, 1). source: "prompts"; without class prompts (Table 5) "sample", the blocks as they are, without gradient, and
    the head; "encoder", the batch's embeddings themselves; "fixed_encoder", these without gradient.

    >>> source = SemanticProxies(classes=3, dim=2, source="encoder")
    >>> source.stored.shape, source.free.shape
    (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    proxies = ("free",)
    stored: Tensor
    labels: Tensor
    prompts: RowTable

    def __init__(
        self,
        classes: int,
        dim: int,
        *,
        accumulate: str = "gru",
        lam: float = 0.8,
        a: float = 0.5,
        prompts: int = 3,
        depth: int | None = None,
        step: int = 0,
        class_prompts: str = "only",
        normalise_every: str = "step",
        normalise_free: bool = False,
        dropout: float = 0.0,
        source: str = "prompts",
    ) -> None:
        super().__init__()
        at_least_zero(a=a, dropout=dropout, step=step)
        for name, value, most in (("a", a, a <= 1), ("dropout", dropout, dropout < 1)):
            if not most:
                raise ValueError(f"{name}: got {value}, expected {'at most' if name == 'a' else 'less than'} 1")
        whole_number(1, prompts=prompts, depth=1 if depth is None else depth)
        for name, word in (("source", source), ("class_prompts", class_prompts), ("normalise_every", normalise_every)):
            if word not in CHOICES[name]:
                raise ValueError(f"{name}: got {word!r}, expected one of {', '.join(CHOICES[name])}")
        self.classes, self.dim, self.a = classes, dim, a
        self.most, self.depth, self.less = prompts, depth, step
        self.shared = class_prompts == "with_shared"
        self.normalise_every, self.normalise_free = normalise_every, normalise_free
        self.dropout, self.source = dropout, source
        # Short, as released: unless they are normalised, the accumulated ones weigh more than 1 - a at first.
        self.free = nn.Parameter(initial(classes, dim, 1, "xavier/8"), requires_grad=a > 0)
        self.cell = accumulator(accumulate, dim, lam)
        own = {"head": "proxies' own head", "prompts": "class prompts"}
        self.called = {"free": "free proxies", "cell": type(self.cell).__name__, **own}
        rest = torch.zeros(classes, (self.cell.parts - 1) * dim)
        self.register_buffer("stored", torch.cat([unit(initial(classes, dim, 1, "xavier")), rest], 1))
        self.register_buffer("labels", torch.arange(classes), persistent=False)
        self.tally = Counts("samples", "semantic", "free", "steps", "gate")
        """since the last evaluation: samples, those nearest to P and to O of their class, a cell's steps and gates"""
        self.head: nn.Module | None = None
        self.met: tuple[int, int, int] | None = None
        """F, the number of blocks, and W of the encoder that was bound"""
        self.per_block: list[int] = []

    def bind(self, encoder: nn.Module) -> None:
        """Make the head and the class prompts for this encoder; another one of the same sizes may follow."""
        if self.source in ("encoder", "fixed_encoder"):
            return
        assert self.classes is not None
        assert self.dim is not None
        sizes = _sizes(encoder, self.source == "prompts")
        if self.met is not None and self.met != sizes:
            raise ValueError(f"encoder: got one of {sizes} (features, blocks, width), expected {self.met} as at first")
        if self.met is not None:
            return
        self.met = features, blocks, width = sizes
        linear = nn.Linear(features, self.dim)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.head = nn.Sequential(nn.LayerNorm(features), linear).to(self.free)
        if self.source == "sample":
            return
        deep = blocks if self.depth is None else self.depth
        if deep > blocks:
            raise ValueError(f"depth: got {deep}, expected at most {blocks}, the blocks of this encoder")
        self.per_block = [max(self.most - self.less * i, 0) if i < deep else 0 for i in range(blocks)]
        # Xavier-normal of a (C, m, W) tensor, as released: the more classes, the smaller.
        spread = math.sqrt(2 / ((self.most + self.classes) * width))
        values = torch.randn(self.classes, sum(self.per_block), width, dtype=self.free.dtype, device="cpu") * spread
        self.prompts = RowTable(values, rate="network", host=True)

    @property
    def looks(self) -> bool:
        return self.source == "prompts" and self.head is not None

    def look(self, labels: Tensor, mine: slice) -> SecondPass:
        """The tower with the class prompts, for who can run it in one pass with the encoder's own."""
        plan = self._planned(labels)
        return SecondPass(self.prompts_of(plan, mine), self.shared, self, plan)

    def expect(self, labels: Tensor) -> None:
        if self.looks:
            present, counts = labels.cpu().unique(return_counts=True)
            self.prompts.expect(present[_most_first(counts)], self.stored.device)

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        states, commit = self.stored, nothing
        if self.training and torch.is_grad_enabled():
            if ctx.seen is not None and ctx.seen.look.by is self:
                assert self.head is not None
                plan = ctx.seen.look.plan
                samples = self.head(ctx.seen.features.to(self.stored.dtype))
            else:
                plan = self._planned(ctx.batch.labels)
                samples = self._samples(ctx, plan)
            moved, gates = self._accumulated(unit(samples), plan.turns)
            present, kept = plan.turns.classes, moved.detach()
            states = self.stored.index_copy(0, present, moved)
            counts = self._counted(energy, gates)

            @torch.no_grad()
            def commit() -> None:
                self.stored[present] = kept
                self.tally.add(**counts)

        vectors = states[:, : self.dim]
        if self.a:
            vectors = torch.lerp(vectors, self._mixed(), self.a)
        return References(vectors, self.labels, 1), commit

    def _mixed(self) -> Tensor:
        """O as it enters Eq. 8."""
        return unit(self.free) if self.normalise_free else self.free

    @torch.no_grad()
    def _counted(self, energy: Energy, gates: list[Tensor]) -> dict[str, Tensor | int]:
        """What this batch adds to the tally; P as it was before the batch, which cannot know these very images."""
        labels, counts = energy.labels, dict[str, Tensor | int]()
        if len(labels) * len(self.stored) <= MAX_COUNTED_PAIRS:
            counts = {"samples": len(labels)}
            for name, proxies in (("semantic", self.stored[:, : self.dim]), ("free", self.free)):
                if name == "semantic" or self.a:
                    cosines = energy.queries.to(proxies) @ proxies.mT / proxies.norm(dim=1).clamp(min=1e-12)
                    counts[name] = (cosines.argmax(1) == labels).sum()
        if gates:
            total = torch.stack([gate.mean(1, dtype=torch.float32).sum() for gate in gates]).sum()
            counts |= {"steps": sum(map(len, gates)), "gate": (total * GATE_UNIT).round().long()}
        return counts

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """How the accumulated proxies P and the free ones O stand to each other.

        Returns:
            "semantic cosine": mean cosine between P of two classes. Where O has a share: "free length": mean length of
            O; "semantic share": mean of `|(1 - a) P| / (|(1 - a) P| + |a O|)`, with O as it enters Eq. 8. Of the
            batches since the last evaluation: "semantic accuracy" and "free accuracy", how many samples are nearest to
            P (as it was before the batch) and to O of their own class; "gate z": the GRU's mean share of the new.
        """
        found: dict[str, float | None] = {}
        proxies, count = unit(self.stored[:, : self.dim].float()), len(self.stored)
        if count > 1:
            sum_of_all = proxies.sum(0).square().sum() - proxies.square().sum()
            found["semantic cosine"] = float(sum_of_all) / (count * (count - 1))
        if self.a:
            ours, theirs = (1 - self.a) * proxies.norm(dim=1), self.a * self._mixed().float().norm(dim=1)
            found["free length"] = float(self.free.float().norm(dim=1).mean())
            found["semantic share"] = float((ours / (ours + theirs)).mean())
            found["free accuracy"] = self.tally.share("free", "samples")
        found["semantic accuracy"] = self.tally.share("semantic", "samples")
        gate = self.tally.share("gate", "steps")
        found["gate z"] = None if gate is None else gate / GATE_UNIT
        return {name: value for name, value in found.items() if value is not None}

    def _planned(self, labels: Tensor) -> Plan:
        """The turns of a batch; the rows lie on the host, and so all that is planned is planned there."""
        of = labels.cpu()
        found = turns(of, self._drawn(len(of)))
        return Plan(found.classes, found.on(self.stored.device))

    def _samples(self, ctx: Context, plan: Plan) -> Tensor:
        """What the tower says of each image of the batch, (B, D)."""
        if self.source == "encoder":
            return ctx.embeddings.to(self.stored)
        if self.source == "fixed_encoder":
            return ctx.embeddings.detach().to(self.stored)
        images, encoder = ctx.batch.images, ctx.encode
        if self.head is None or encoder is None:
            raise ValueError("encoder: semantic proxies see images through it; expected criterion.bind(encoder) first")
        if images is None or len(images) != len(ctx.batch.labels):
            raise ValueError(
                f"images: got {'none' if images is None else len(images)} for {len(ctx.batch.labels)} labels; semantic "
                "proxies want that of each: criterion(embeddings, labels, images=images)"
            )
        tower: Any = encoder
        kind = images.device.type
        own = self.source == "prompts"
        blocks = 0 if self.met is None else self.met[1]
        # A list without a prompt keeps a vision transformer's own out; another encoder has none.
        prompts = self.prompts_of(plan).of_blocks() if own else [None] * blocks or None
        with (
            torch.autocast(kind, ctx.precision, enabled=ctx.precision is not None),
            torch.set_grad_enabled(own),
        ):
            features = tower.features(images, prompts=prompts, shared=own and self.shared)
        return self.head(features.to(self.stored.dtype))

    def prompts_of(self, plan: Plan, mine: slice | None = None) -> ClassPrompts:
        """The prompts of each sample's class; `mine`: for these samples alone, other processes see the others."""
        rows = self.prompts.take(plan.classes, self.stored.device, apart=mine is not None)
        return ClassPrompts(rows, plan.turns.place[mine or slice(None)], self.per_block)

    def _accumulated(self, samples: Tensor, plan: Turns) -> tuple[Tensor, list[Tensor]]:
        """The states of the classes present after the batch, (U, S), from unit samples (B, D); and the cell's gates."""
        state, gates = self.stored[plan.classes], list[Tensor]()
        if self.cell.whole:
            index = nn.utils.rnn.pad_sequence(plan.samples, padding_value=-1)
            return self._normal(self._dropped(self.cell(state, samples[index], index >= 0))), gates
        read = self.cell.read(samples)
        for index in plan.samples:
            moved, gate = self.cell.gated(state[: len(index)], read[index])
            moved = self._dropped(moved)
            gates += [] if gate is None else [gate.detach()]
            if self.normalise_every == "step":
                moved = self._normal(moved)
            state = moved if len(moved) == len(state) else torch.cat([moved, state[len(index) :]])
        return (self._normal(state) if self.normalise_every == "batch" else state), gates

    def _normal(self, state: Tensor) -> Tensor:
        """The proxy of each state, its first D, at unit length."""
        if self.cell.parts == 1:
            return unit(state)
        return torch.cat([unit(state[:, : self.dim]), state[:, self.dim :]], 1)

    def _dropped(self, state: Tensor) -> Tensor:
        """The state with a share of its proxy's numbers at 0 and the others larger for it."""
        if not self.dropout:
            return state
        keep = self._drawn(len(state), state.shape[1]) >= self.dropout
        keep[:, self.dim :] = True
        factor = torch.ones(state.shape[1])
        factor[: self.dim] /= 1 - self.dropout
        return state * (keep * factor).to(state)

    def _drawn(self, *shape: int) -> Tensor:
        return shared_random(*shape, device=self.stored.device)


def _sizes(encoder: Any, prompted: bool) -> tuple[int, int, int]:
    """F of an encoder, and the number of blocks and the width of the tokens of its vision transformer, 0 without."""
    backbone = getattr(encoder, "backbone", encoder)
    blocks, width = getattr(backbone, "blocks", None), getattr(backbone, "embed_dim", None)
    if not hasattr(encoder, "features") or not hasattr(encoder, "width"):
        raise ValueError(
            f"encoder: {type(encoder).__name__} has no features(images, prompts=..., shared=...) and width; expected "
            "an "
            "encoder of this package, or source='encoder', which takes the embeddings as they are"
        )
    if blocks is not None and isinstance(width, int) and getattr(encoder, "is_vit", True):
        return int(encoder.width), len(blocks), width
    if prompted:
        raise ValueError(
            f"encoder: {type(backbone).__name__} takes no prompts; expected a vision transformer, such as "
            "vit_small_patch16_224, or source='sample'"
        )
    return int(encoder.width), 0, 0
