"""Semantic proxies: features of a class's images, computed with prompts of the class and accumulated over batches."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from proxymetric.arguments.checks import at_least_zero, whole_number
from proxymetric.arguments.signatures import one_of
from proxymetric.core.capabilities import ClassProxies
from proxymetric.core.normalisation import unit
from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing
from proxymetric.core.row_table import RowTable
from proxymetric.core.second_pass import ClassPrompts, SecondPass, SecondPassResult
from proxymetric.core.tally import Counts
from proxymetric.ops import current_settings
from proxymetric.sources.accumulators import accumulator
from proxymetric.sources.learned_proxies import initial
from proxymetric.sources.shared_random import shared_random

CHOICES = {
    "source": ("prompts", "sample", "encoder", "fixed_encoder"),
    "class_prompts": ("only", "with_shared"),
    "normalise_every": ("step", "batch"),
}
"""argument of `SemanticProxies` -> the values it may have"""
MAX_COUNTED_PAIRS = 2**24
"""pairs (sample, class) of a batch up to which nearest proxies are counted"""
COUNTED_PROXIES_PER_CHUNK = 4096
"""proxies that are compared with the batch at once, where `ops.using` sets no other number"""
MAX_BYTES_ON_DEVICE = 2**27
"""bytes of class prompts and their two moments up to which they lie on the device, some 800 classes of a ViT-S: then a
step copies nothing from host memory and back, and the host need not wait for it"""
GATE_UNIT = 2**20
"""gates are summed as whole multiples of 1 / GATE_UNIT: sums of whole numbers do not depend on their order"""


class Turns(NamedTuple):
    """The order in which the samples of a batch are accumulated: in each turn, one sample of every remaining class."""

    classes: Tensor
    """(U,) the classes in the batch, the ones with the most samples first"""
    place: Tensor
    """(B,) the position of each sample's class in `classes`"""
    samples: list[Tensor]
    """in turn t: the sample of each class with more than t samples, (U_t,); these are the first U_t classes"""

    def on(self, device: torch.device) -> Turns:
        """The same tensors on `device`, in one copy that does not synchronise with the GPU."""
        if device.type == "cpu":
            return self
        tensors = [self.classes, self.place, *self.samples]
        packed = torch.cat(tensors)
        packed = packed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else packed.to(device)
        classes, place, *samples = packed.split([len(tensor) for tensor in tensors])
        return Turns(classes, place, samples)


class Accumulation(NamedTuple):
    """How a batch is accumulated."""

    classes: Tensor
    """(U,) the classes in the batch, in host memory: the rows of the prompt table to fetch"""
    turns: Turns
    """on the device of the proxies"""


def turns(labels: Tensor, keys: Tensor) -> Turns:
    """The turns of a batch.

    Args:
        labels: (B,).
        keys: (B,) random numbers; the samples of a class are accumulated in the order of their keys.

    Returns:
        The turns, on the device of the labels.

    Example:
        >>> turns(torch.tensor([7, 3, 3]), keys=torch.tensor([0.1, 0.9, 0.5]))
        Turns(classes=tensor([3, 7]), place=tensor([1, 0, 0]), samples=[tensor([2, 0]), tensor([1])])
    """
    classes, place, counts = labels.unique(return_inverse=True, return_counts=True)
    class_order = _largest_first(counts)
    place = class_order.argsort()[place]
    counts = counts[class_order]
    sample_order = keys.argsort(stable=True)
    sample_order = sample_order[place[sample_order].argsort(stable=True)]
    starts = counts.cumsum(0) - counts
    turn_count = int(counts[0]) if len(counts) else 0
    return Turns(classes[class_order], place, [sample_order[starts[counts > t] + t] for t in range(turn_count)])


def _largest_first(counts: Tensor) -> Tensor:
    """The order of classes by their number of samples, largest first; ties keep their order."""
    return counts.argsort(descending=True, stable=True)


class SemanticProxies(Source):
    """Proxies made from images: a second pass of the encoder per sample, accumulated by class (VPTSP).

    For each image x of class c in the batch, the encoder's blocks run a second time, with prompts of class c. A head
    of this source (LayerNorm, Linear) follows. A cell accumulates the resulting unit vectors of a class one by one, in
    random order, starting from the state that earlier batches left (Ren et al. 2024, Eqs. 3-8)::

        p_i = normal(head(features(x_i, prompts of c))),   P <- normal(cell(P, p_i)),   Q = normal((1 - a) P + a O)

    O are free proxies, one for each class. Gradients flow through the accumulation of this batch, not into earlier
    batches: `commit` stores P without its graph. In eval mode nothing is accumulated and the encoder does not run. If
    several forward passes precede one commit, the last pass of each class is stored. The class prompts (`RowTable`)
    step in `commit`, at the network's learning rate. If they and their moments take more than 128 MiB, they lie in host
    memory, and only the prompts of the batch's classes are copied to the device.

    `bind` requires an encoder with `features(images, prompts=[(B, n_i, W) or None for each block], shared=bool)` and
    `width`, whose backbone has `blocks` and `embed_dim` W. Each training step requires the batch's images.

    Args:
        classes: C.
        dim: D.
        accumulate: the cell, a key of `ACCUMULATORS`: "gru", "ema", "ema-mean", "gru-tanh", "rnn", "lstm",
            "attention".
        lam: weight of the past in the moving averages, in [0, 1]; 0.8 in the released code.
        a: share of the free proxies, in [0, 1] (Eq. 8).
        prompts: m, the prompts of each class in the first block, at least 1.
        depth: number of blocks with class prompts; None: all blocks.
        step: each block has this many prompts fewer than the block before it: block i has `m - step i`, at least 0.
        class_prompts: "only": class prompts replace the encoder's own prompts (the code that made the paper's tables);
            "with_shared": class prompts follow the encoder's own prompts (the paper's text).
        normalise_every: when P, the accumulated proxies, are normalised: after each "step" (Eq. 7) or each "batch"
            (released code).
        normalise_free: True: O, the free proxies, have unit length in Eq. 8, so that a is the ratio of the mixture.
            False (released code): O keeps its length; the share of P is then `(1 - a) / (1 - a + a |O|)`, which starts
            above 1 - a and falls as O grows.
        dropout: on each new state, in [0, 1).
        source: what is accumulated. "prompts": the second pass with class prompts. The others need no class prompts
            (Table 5): "sample": the blocks without prompts and without gradient, then the head; "encoder": the
            batch's embeddings; "fixed_encoder": the embeddings without gradient.

    Example:
        >>> source = SemanticProxies(classes=3, dim=2, source="encoder")
        >>> source.stored.shape, source.free.shape
        (torch.Size([3, 2]), torch.Size([3, 2]))
    """

    proxies = ("free",)
    changed_by_commit = ("stored",)
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
        at_least_zero(a=a, dropout=dropout)
        whole_number(0, step=step)
        if a > 1:
            raise ValueError(f"a: got {a}, expected at most 1")
        if dropout >= 1:
            raise ValueError(f"dropout: got {dropout}, expected less than 1")
        whole_number(1, prompts=prompts, depth=1 if depth is None else depth)
        one_of("source", source, CHOICES["source"])
        one_of("class_prompts", class_prompts, CHOICES["class_prompts"])
        one_of("normalise_every", normalise_every, CHOICES["normalise_every"])
        self.classes = classes
        self.dim = dim
        self.a = a
        self.first_block_prompts = prompts
        self.depth = depth
        self.prompt_decrement = step
        self.shared = class_prompts == "with_shared"
        self.normalise_every = normalise_every
        self.normalise_free = normalise_free
        self.dropout = dropout
        self.source = source
        # Short vectors, as in the released code: unless O is normalised, the share of P is above 1 - a at first.
        self.free = nn.Parameter(initial(classes, dim, 1, "xavier/8"), requires_grad=a > 0)
        self.accumulate = accumulate
        self.cell = accumulator(accumulate, dim, lam)
        self.part_names = {
            "free": "free proxies",
            "cell": type(self.cell).__name__,
            "head": "proxies' own head",
            "prompts": "class prompts",
        }
        extra_state = torch.zeros(classes, (self.cell.parts - 1) * dim)
        self.register_buffer("stored", torch.cat([unit(initial(classes, dim, 1, "xavier")), extra_state], 1))
        self.register_buffer("labels", torch.arange(classes), persistent=False)
        self.tally = Counts("samples", "semantic", "free", "steps", "gate")
        """counts of samples, of samples nearest to P and to O of their class, and of a cell's steps and gates"""
        self.head: nn.Module | None = None
        self.encoder_sizes: tuple[int, int, int] | None = None
        """F, the number of blocks, and W of the bound encoder; None before `bind`"""
        self.per_block: list[int] = []
        """class prompts in each block"""
        self._received: SecondPassResult | None = None

    def bind(self, encoder: nn.Module) -> None:
        """Make the head and the class prompts for this encoder.

        Args:
            encoder: a later call may pass another encoder of the same sizes.

        Raises:
            ValueError: the encoder cannot compute the features, or its sizes differ from those of the first one.
        """
        if self.source in ("encoder", "fixed_encoder"):
            return
        assert self.classes is not None
        assert self.dim is not None
        sizes = _encoder_sizes(encoder, self.source == "prompts")
        if self.encoder_sizes is not None:
            if self.encoder_sizes != sizes:
                raise ValueError(
                    f"encoder: got sizes {sizes} (features, blocks, width), expected {self.encoder_sizes}, "
                    "those of the encoder that was bound first"
                )
            return
        self.encoder_sizes = features, blocks, width = sizes
        linear = nn.Linear(features, self.dim)
        nn.init.xavier_uniform_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.head = nn.Sequential(nn.LayerNorm(features), linear).to(self.free)
        if self.source == "sample":
            return
        depth = blocks if self.depth is None else self.depth
        if depth > blocks:
            raise ValueError(f"depth: got {depth}, expected at most {blocks}, the blocks of this encoder")
        self.per_block = [
            max(self.first_block_prompts - self.prompt_decrement * i, 0) if i < depth else 0 for i in range(blocks)
        ]
        # Xavier-normal for a (C, m, W) tensor, as in the released code: more classes give smaller values.
        spread = math.sqrt(2 / ((self.first_block_prompts + self.classes) * width))
        values = torch.randn(self.classes, sum(self.per_block), width, dtype=self.free.dtype, device="cpu") * spread
        on_host = 3 * values.nbytes > MAX_BYTES_ON_DEVICE
        self.prompts = RowTable(values, rate="network", host=on_host, undo=not on_host)

    @property
    def needs_second_pass(self) -> bool:
        """Whether the features come from a second pass with class prompts (`NeedsSecondPass`)."""
        return self.source == "prompts" and self.head is not None

    def second_pass(self, labels: Tensor, rows: slice) -> SecondPass:
        """The second pass with the class prompts of this batch (`NeedsSecondPass`)."""
        plan = self._plan(labels)
        return SecondPass(self.prompts_of(plan, rows), self.shared, plan)

    def receive(self, result: SecondPassResult | None) -> None:
        """Keep the result of the second pass for the next `forward` (`NeedsSecondPass`)."""
        self._received = result

    def prefetch_batch(self, labels: Tensor) -> None:
        """Copy the class prompts of the next batch to the device (`Prefetches`)."""
        if self.needs_second_pass:
            classes, counts = labels.cpu().unique(return_counts=True)
            self.prompts.prefetch(classes[_largest_first(counts)], self.stored.device)

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        states, commit = self.stored, nothing
        if self.training and torch.is_grad_enabled():
            if self._received is not None:
                assert self.head is not None
                plan = self._received.request.plan
                samples = self.head(self._received.features.to(self.stored.dtype))
            else:
                plan = self._plan(ctx.batch.labels)
                samples = self._samples(ctx, plan)
            new_states, gates = self._new_states(unit(samples), plan.turns)
            batch_classes = plan.turns.classes
            detached_states = new_states.detach()
            states = self.stored.index_copy(0, batch_classes, new_states)
            counts = self._batch_counts(energy, gates)

            @torch.no_grad()
            def commit() -> None:
                self.stored[batch_classes] = detached_states
                self.tally.add(**counts)

        return References(self._mixture(states), self.labels, 1, all_classes=True), commit

    def _mixture(self, states: Tensor) -> Tensor:
        """The proxies (C, D): P, mixed with O (Eq. 8)."""
        vectors = states[:, : self.dim]
        return torch.lerp(vectors, self._free_in_mixture(), self.a) if self.a else vectors

    def class_proxies(self) -> ClassProxies:
        """The proxies as they were stored last (`HasClassProxies`)."""
        return ClassProxies(self._mixture(self.stored).detach().clone(), self.labels)

    def _free_in_mixture(self) -> Tensor:
        """O as it enters Eq. 8."""
        return unit(self.free) if self.normalise_free else self.free

    @torch.no_grad()
    def _batch_counts(self, energy: Energy, gates: list[Tensor]) -> dict[str, Tensor | int]:
        """The counts that this batch adds to the tally. P is the state before the batch and has none of its images."""
        labels, counts = energy.labels, dict[str, Tensor | int]()
        if len(labels) * len(self.stored) <= MAX_COUNTED_PAIRS:
            counts = {"samples": len(labels)}
            for name, proxies in (("semantic", self.stored[:, : self.dim]), ("free", self.free)):
                if name == "semantic" or self.a:
                    counts[name] = (_nearest(energy.queries.to(proxies), proxies) == labels).sum()
        if gates:
            total = torch.stack([gate.mean(1, dtype=torch.float32).sum() for gate in gates]).sum()
            counts |= {"steps": sum(map(len, gates)), "gate": (total * GATE_UNIT).round().long()}
        return counts

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """Numbers about the accumulated proxies P and the free proxies O.

        Returns:
            "semantic cosine": mean cosine between P of two classes. If O has a share: "free length": mean length of O;
            "semantic share": mean of `|(1 - a) P| / (|(1 - a) P| + |a O|)`, with O as in Eq. 8. Over the batches since
            the last evaluation: "semantic accuracy" and "free accuracy", the shares of samples nearest to P (from
            before the batch) and to O of their own class; "gate z": the GRU's mean weight of the new state.
        """
        figures: dict[str, float | None] = {}
        proxies, count = unit(self.stored[:, : self.dim].float()), len(self.stored)
        if count > 1:
            sum_of_cosines = proxies.sum(0).square().sum() - proxies.square().sum()
            figures["semantic cosine"] = float(sum_of_cosines) / (count * (count - 1))
        if self.a:
            semantic_lengths = (1 - self.a) * proxies.norm(dim=1)
            free_lengths = self.a * self._free_in_mixture().float().norm(dim=1)
            figures["free length"] = float(self.free.float().norm(dim=1).mean())
            figures["semantic share"] = float((semantic_lengths / (semantic_lengths + free_lengths)).mean())
            figures["free accuracy"] = self.tally.share("free", "samples")
        figures["semantic accuracy"] = self.tally.share("semantic", "samples")
        gate = self.tally.share("gate", "steps")
        figures["gate z"] = None if gate is None else gate / GATE_UNIT
        return {name: value for name, value in figures.items() if value is not None}

    def _plan(self, labels: Tensor) -> Accumulation:
        """The plan of a batch; it is made in host memory, where a large prompt table lies."""
        host_labels = labels.cpu()
        host_turns = turns(host_labels, self._random(len(host_labels)))
        return Accumulation(host_turns.classes, host_turns.on(self.stored.device))

    def _samples(self, ctx: Context, plan: Accumulation) -> Tensor:
        """The vector of each sample before it is normalised and accumulated, (B, D)."""
        if self.source == "encoder":
            return ctx.embeddings.to(self.stored)
        if self.source == "fixed_encoder":
            return ctx.embeddings.detach().to(self.stored)
        images = ctx.batch.images
        if self.head is None or ctx.encode is None:
            raise ValueError("encoder: got none, expected criterion.bind(encoder) before the first step")
        if images is None or len(images) != len(ctx.batch.labels):
            raise ValueError(
                f"images: got {'none' if images is None else len(images)} for {len(ctx.batch.labels)} labels, expected "
                "one for each: criterion(embeddings, labels, images=images)"
            )
        if self.source == "prompts":
            prompts = self.prompts_of(plan).of_blocks()
            features = ctx.encode.features(images, prompts=prompts, shared=self.shared)
        else:
            blocks = 0 if self.encoder_sizes is None else self.encoder_sizes[1]
            # A list of None removes the prompts of a vision transformer. Other encoders have no prompts.
            with torch.no_grad():
                features = ctx.encode.features(images, prompts=[None] * blocks or None)
        return self.head(features.to(self.stored.dtype))

    def prompts_of(self, plan: Accumulation, rows: slice | None = None) -> ClassPrompts:
        """The class prompts of each sample.

        Args:
            plan: of the batch.
            rows: return prompts for these samples only, because other processes encode the others; None: for all.
        """
        values = self.prompts.take(plan.classes, self.stored.device, per_process=rows is not None)
        return ClassPrompts(values, plan.turns.place[rows or slice(None)], self.per_block)

    def _new_states(self, samples: Tensor, plan: Turns) -> tuple[Tensor, list[Tensor]]:
        """The new states (U, S) of the batch's classes, from unit samples (B, D), and the gates of the cell."""
        states, gates = self.stored[plan.classes], list[Tensor]()
        if not plan.samples:
            return states, gates
        if self.cell.whole:
            index = nn.utils.rnn.pad_sequence(plan.samples, padding_value=-1)
            return self._normalised(self._with_dropout(self.cell(states, samples[index], index >= 0))), gates
        inputs = self.cell.read(samples)
        for index in plan.samples:
            new_states, gate = self.cell.gated(states[: len(index)], inputs[index])
            new_states = self._with_dropout(new_states)
            gates += [] if gate is None else [gate.detach()]
            if self.normalise_every == "step":
                new_states = self._normalised(new_states)
            states = new_states if len(new_states) == len(states) else torch.cat([new_states, states[len(index) :]])
        return (self._normalised(states) if self.normalise_every == "batch" else states), gates

    def _normalised(self, state: Tensor) -> Tensor:
        """The states with their proxies, the first D values, at unit length."""
        if self.cell.parts == 1:
            return unit(state)
        return torch.cat([unit(state[:, : self.dim]), state[:, self.dim :]], 1)

    def _with_dropout(self, state: Tensor) -> Tensor:
        """Inverted dropout on the proxies, the first D values of the states."""
        if not self.dropout:
            return state
        mask = self._random(len(state), state.shape[1]) >= self.dropout
        mask[:, self.dim :] = True
        factor = torch.ones(state.shape[1])
        factor[: self.dim] /= 1 - self.dropout
        return state * (mask * factor).to(state)

    def _random(self, *shape: int) -> Tensor:
        """Random numbers in [0, 1), the same in all processes."""
        return shared_random(*shape, device=self.stored.device)


def _encoder_sizes(encoder: Any, needs_prompts: bool) -> tuple[int, int, int]:
    """F of an encoder, and blocks and token width of its vision transformer (0 and 0 for other backbones)."""
    backbone = getattr(encoder, "backbone", encoder)
    blocks, width = getattr(backbone, "blocks", None), getattr(backbone, "embed_dim", None)
    if not hasattr(encoder, "features") or not hasattr(encoder, "width"):
        raise ValueError(
            f"encoder: got {type(encoder).__name__}, which has no features(images, prompts=..., shared=...) and width, "
            "expected an encoder of this package, or source='encoder', which uses the embeddings"
        )
    if blocks is not None and isinstance(width, int) and getattr(encoder, "is_vit", True):
        return int(encoder.width), len(blocks), width
    if needs_prompts:
        raise ValueError(
            f"encoder: got {type(backbone).__name__}, which takes no prompts, expected a vision transformer such as "
            "vit_small_patch16_224, or source='sample'"
        )
    return int(encoder.width), 0, 0


def _nearest(queries: Tensor, proxies: Tensor) -> Tensor:
    """The nearest proxy of each query by cosine (B,), found chunk by chunk."""
    first, *others = proxies.split(current_settings().rows or COUNTED_PROXIES_PER_CHUNK)
    largest, nearest = _largest_cosines(queries, first)
    start = len(first)
    for chunk in others:
        cosines, places = _largest_cosines(queries, chunk)
        nearest = torch.where(cosines > largest, places + start, nearest)
        largest, start = torch.maximum(largest, cosines), start + len(chunk)
    return nearest


def _largest_cosines(queries: Tensor, proxies: Tensor) -> tuple[Tensor, Tensor]:
    """The largest cosine of each query (B,), times the length of the query, and the proxy that has it (B,)."""
    largest, places = (queries @ proxies.mT / proxies.norm(dim=1).clamp(min=1e-12)).max(1)
    return largest, places
