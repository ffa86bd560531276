"""The weighting of Proxy-ISA: informative samples of a class count more, easy samples and outliers less."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from proxymetric.arguments.checks import above_zero, at_least_zero, number
from proxymetric.arguments.signatures import one_of
from proxymetric.core.class_shards import all_reduce_sum
from proxymetric.core.pair_weights import PairWeights, StepFunction
from proxymetric.core.pieces import Commit, Context, References, Weighting
from proxymetric.core.similarity import Similarity
from proxymetric.core.tally import Counts
from proxymetric.weightings.class_queue import MAX_ENTRIES_PER_CHUNK, UNITS_PER_ONE, ClassQueue

PENALTIES = ("none", "1/E", "nu", "sigma")


class InformativeSamples(Weighting):
    """Pairs in a band below the learned similarity of a class are informative; others count less (Li et al. 2022).

    For each class, with n samples so far and S the scaled mean similarity of its remembered samples to its proxy::

        E     = (1 - beta^n) / (1 - beta),  beta = (V - 1)/V       effective number of samples                 (Eq. 8)
        nu    = 1 / (1 + ln(1 + E))                                                                            (Eq. 14)
        sigma = 1 + (1 + e^-tau)(nu - 1) / (1 + e^(V - E - tau))   stays at 1 until E is near V, falls to nu   (Eq. 17)
        S     = h mean over the memory's samples of the class of s                                             (Eq. 10)
        eta   = (1 + k (1 - S)) nu + lam                           length of the informative band              (Eq. 15)
        w+    = 1 + sigma  where S - eta <= s <= S, else sigma                                                 (Eq. 16)
        w-    = 1 / max(1, E)  where s < S - eta, else 1

    w multiplies the exponent of the loss and has no gradient. Positive weights are 1 until the filter starts. From then
    on, outliers (s < S - eta) are neither counted nor remembered. A class without remembered samples keeps its S.

    With K proxies of a class, s is the similarity to the class. A loss that compares with each proxy separately weights
    each pair by its own s; outliers and S then use the nearest proxy of the class.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        volume: V > 1; 100 in the paper.
        h: > 0; scale of the learned similarity S (Eq. 10).
        k: >= 0; how the band grows as S falls (Eq. 15); released code: 0.4 on Cars, 0.1 on In-Shop.
        lam: >= 0; added to the length of the band (Eq. 15).
        tau: >= 0; shifts where sigma falls (Eq. 17).
        memory: T embeddings kept; the paper does not state it, its code has 55,000.
        memory_epoch: epochs before the memory starts; 1 is the paper's second epoch (released code: 2).
        filter_epoch: epochs before the filter starts; 2 is the paper's third epoch (released code: 3).
        initial_hardness: S before the memory starts; the paper does not state it, its code has 1.
        positive: penalty on positive pairs outside the band: "none", "1/E", "nu" or "sigma" (Table 3).
        negative: penalty on negative pairs below the band, one of the same names.
        of_class: how the K proxies of a class are combined into one similarity.

    Example:
        >>> weighting = InformativeSamples(classes=2, dim=4)
        >>> weighting.rule(filtering=False).negative(torch.tensor([[0.9, 0.0]]))
        tensor([[1., 1.]])
    """

    changed_by_commit = ("count", "effective", "hardness")
    count: Tensor
    effective: Tensor
    hardness: Tensor

    def __init__(
        self,
        classes: int,
        dim: int,
        *,
        volume: float = 100.0,
        h: float = 0.15,
        k: float = 0.9,
        lam: float = 0.1,
        tau: float = 1.5,
        memory: int = 55_000,
        memory_epoch: float = 1,
        filter_epoch: float = 2,
        initial_hardness: float = 1.0,
        positive: str = "sigma",
        negative: str = "1/E",
        of_class: Similarity = Similarity("max"),  # noqa: B008 - a tuple
    ) -> None:
        super().__init__()
        above_zero(h=h)
        at_least_zero(k=k, lam=lam, tau=tau, memory_epoch=memory_epoch, filter_epoch=filter_epoch)
        number(initial_hardness=initial_hardness, volume=volume)
        if not volume > 1:
            raise ValueError(f"volume: got {volume}, expected a number above 1")
        for name, penalty in (("positive", positive), ("negative", negative)):
            one_of(name, penalty, PENALTIES)
        self.classes = classes
        self.volume, self.h, self.k, self.lam, self.tau = volume, h, k, lam, tau
        self.memory_epoch, self.filter_epoch = memory_epoch, filter_epoch
        self.positive, self.negative, self.of_class = positive, negative, of_class.check()
        self.register_buffer("count", torch.zeros(classes, dtype=torch.int64))
        self.register_buffer("effective", torch.zeros(classes))
        self.register_buffer("hardness", torch.full((classes,), float(initial_hardness)))
        self.queue = ClassQueue(memory, dim, classes)
        self.tally = Counts("judged", "filtered", "informative")
        """samples since the last evaluation: those that the filter judged, dropped, and found informative"""

    def forward(self, ctx: Context, queries: Tensor, refs: References) -> tuple[PairWeights, Commit]:
        if refs.per_class is None:
            raise ValueError(
                "weighting: got references that are not grouped by class, expected a method with proxies of each class"
            )
        epoch = ctx.progress.epoch
        if epoch is None:
            raise ValueError(
                "epoch: got None, expected steps_per_epoch=... or criterion.epoch(i): the memory and the filter start "
                "at an epoch"
            )
        remembering, filtering = epoch >= self.memory_epoch, epoch >= self.filter_epoch
        labels = ctx.batch.labels
        proxies = _Proxies(labels, refs, queries, len(self.count), self.of_class)
        passes_filter, counts = None, dict[str, Tensor | int]()
        if filtering:
            similarity = proxies.similarity(queries, labels)
            passes_filter = similarity >= (self.hardness - self.band())[labels]
            informative = passes_filter & (similarity <= self.hardness[labels])
            counts = {"judged": len(labels), "filtered": (~passes_filter).sum(), "informative": informative.sum()}

        @torch.no_grad()
        def commit() -> None:
            # The rows that pass the filter are not selected: their number would synchronise with the GPU.
            self.tally.add(**counts)
            self._count(labels, passes_filter)
            if remembering:
                self.queue.remember(queries, labels, passes_filter)
                self._measure(labels, proxies)

        return self.rule(filtering), commit

    def rule(self, filtering: bool) -> PairWeights:
        """The weights in the current state, as thresholds and levels for each class.

        Args:
            filtering: whether the filter has started; before that, all positive weights are 1.
        """
        low = (self.hardness - self.band())[:, None]
        high = torch.nextafter(self.hardness, self.hardness.new_full((), math.inf))[:, None]  # the band includes S
        outer_weight = self._penalty(self.positive)[:, None]
        constant = StepFunction(low[:, :0], torch.ones_like(outer_weight))
        band = StepFunction(torch.cat([low, high], 1), torch.cat([outer_weight, 1 + outer_weight, outer_weight], 1))
        low_weight = self._penalty(self.negative)[:, None]
        below_band = StepFunction(low, torch.cat([low_weight, torch.ones_like(low_weight)], 1))
        return PairWeights(
            band if filtering and self.positive != "none" else constant,
            below_band if self.negative != "none" else constant,
        )

    def band(self) -> Tensor:
        """eta (C,): the length of the informative band below S."""
        return (1 + self.k * (1 - self.hardness)) * self._penalty("nu") + self.lam

    def _penalty(self, kind: str) -> Tensor:
        """The weight of a pair outside the band, (C,): one of the functions of E in Table 3."""
        if kind == "none":
            return torch.ones_like(self.effective)
        if kind == "1/E":
            return 1 / self.effective.clamp(min=1)
        nu = 1 / (1 + torch.log1p(self.effective))
        if kind == "nu":
            return nu
        saturation = torch.sigmoid(self.effective + self.tau - self.volume)
        return 1 + (1 + math.exp(-self.tau)) * (nu - 1) * saturation

    def _count(self, labels: Tensor, passes_filter: Tensor | None = None) -> None:
        """Count the samples that pass the filter (None: all), and update the effective number E of each class."""
        self.count.index_add_(0, labels, torch.ones_like(labels) if passes_filter is None else passes_filter.long())
        # 1 - beta^n by expm1: it keeps all digits for large volumes, where beta^n is close to 1.
        effective = -self.volume * torch.expm1(self.count.double() * math.log1p(-1 / self.volume))
        self.effective.copy_(effective)

    def _measure(self, labels: Tensor, proxies: _Proxies) -> None:
        """Update S of the classes in the batch, with the proxies that the loss of this step was computed with."""
        if proxies.single and self.queue.has_sums:
            # A class with several samples is measured once for each sample, with the same result. Finding the distinct
            # classes would synchronise with the GPU.
            mean = proxies.similarity(self.queue.means(labels), labels)
            has_rows = self.queue.number[labels] > 0
            self.hardness[labels] = torch.where(has_rows, self.h * mean.to(self.hardness), self.hardness[labels])
            return
        in_batch = torch.zeros(len(self.count), dtype=torch.bool, device=labels.device)
        in_batch[labels] = True
        rows = in_batch[self.queue.labels[: len(self.queue)]].nonzero().squeeze(1)
        total = torch.zeros_like(self.count)  # integers: their sum does not depend on the order
        for chunk in rows.split(max(1, MAX_ENTRIES_PER_CHUNK // proxies.entries_per_class)):
            chunk_labels = self.queue.labels[chunk]
            similarity = proxies.similarity(self.queue.vectors[chunk], chunk_labels)
            total.index_add_(0, chunk_labels, (similarity.double() * UNITS_PER_ONE).round().long())
        is_measured = in_batch & (self.queue.number > 0)
        mean = (total.double() / (UNITS_PER_ONE * self.queue.number.clamp(min=1))).to(self.hardness)
        self.hardness.copy_(torch.where(is_measured, self.h * mean, self.hardness))

    def figures(self) -> dict[str, float]:
        """The state of the weighting, averaged over the classes, and the shares of the filter.

        Returns:
            "remembered": samples in the memory. "effective number": E. "learned similarity": S. "mean weight sigma":
            sigma (Eq. 17). Once the filter has started, also its shares of the samples since the last evaluation:
            "filtered share" below the band and "informative share" inside it.
        """
        shares = {
            f"{part} share": share
            for part in ("filtered", "informative")
            if (share := self.tally.share(part, "judged")) is not None
        }
        return {
            "remembered": float(len(self.queue)),
            "effective number": float(self.effective.mean()),
            "learned similarity": float(self.hardness.mean()),
            "mean weight sigma": float(self._penalty("sigma").mean()),
        } | shares


class _Proxies:
    """The proxies of the classes in one batch, as the loss uses them, looked up by class."""

    def __init__(self, labels: Tensor, refs: References, queries: Tensor, classes: int, of_class: Similarity) -> None:
        assert refs.per_class is not None
        self.of_class = of_class
        held_classes = refs.labels[:: refs.per_class]
        place = torch.zeros(classes, dtype=torch.int64, device=labels.device)
        place[held_classes] = torch.arange(len(held_classes), device=held_classes.device)
        # One entry for each sample, so a class may occur twice. Finding the distinct classes would synchronise with
        # the GPU.
        rows = refs.rows.unflatten(0, (-1, refs.per_class))[place[labels]]
        if refs.shard is not None:
            is_held = (labels >= refs.shard.start) & (labels < refs.shard.stop)
            rows = all_reduce_sum(rows * is_held[:, None, None], refs.shard)
        self.vectors = refs._replace(rows=rows, shard=None).normalised(queries)
        self.place = place
        self.place[labels] = torch.arange(len(labels), device=labels.device)
        self.single = refs.per_class == 1
        self.entries_per_class = refs.per_class * refs.rows.shape[1]

    def similarity(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """The similarity of each vector (N, D) to its class, (N,)."""
        proxies = self.vectors[self.place[labels]]
        return self.of_class(torch.einsum("nd,nkd->nk", vectors.to(proxies), proxies))
