"""Proxy-ISA's weighting: a class's informative samples count more, its easy ones and outliers less."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from proxymetric.checks import above_zero, at_least_zero, number
from proxymetric.core.class_shards import all_reduce_sum
from proxymetric.core.pair_weights import PairWeights, StepFunction
from proxymetric.core.pieces import Commit, Context, References, Weighting
from proxymetric.core.tally import Counts
from proxymetric.ops import Similarity
from proxymetric.weightings.class_queue import AT_ONCE, ONE, ClassQueue

PENALTIES = ("none", "1/E", "nu", "sigma")


class InformativeSamples(Weighting):
    """A band of similarities below what a class has learned is informative; what lies outside counts less (Li 2022).

    For each class, with n samples seen so far and S the scaled mean similarity of its remembered samples to its proxy::

        E     = (1 - beta^n) / (1 - beta),  beta = (V - 1)/V       effective number, the class's progress      (Eq. 8)
        nu    = 1 / (1 + ln(1 + E))                                                                            (Eq. 14)
        sigma = 1 + (1 + e^-tau)(nu - 1) / (1 + e^(V - E - tau))   stays at 1 until E is near V, falls to nu   (Eq. 17)
        S     = h mean over the memory's samples of the class of s                                             (Eq. 10)
        eta   = (1 + k (1 - S)) nu + lam                           length of the informative band              (Eq. 15)
        w+    = 1 + sigma  where S - eta <= s <= S, else sigma                                                 (Eq. 16)
        w-    = 1 / max(1, E)  where s < S - eta, else 1

    w multiplies the exponent of the loss and carries no gradient. Positive weights are 1 until the filter starts; from
    then on outliers (s < S - eta) are neither counted nor remembered. With K proxies a class, s is the class similarity
    (a loss that compares with each proxy alone weighs each by its own s; outliers and S go by the nearest). A class
    without remembered samples keeps its S.

    volume: V > 1, 100 in the paper. h: 0.15. k: 0.9 (released code: 0.4 on Cars, 0.1 on In-Shop). lam: 0.1. tau: 1.5.
    memory: T embeddings kept (the paper names none; its code 55,000). memory_epoch, filter_epoch: epochs before each
    starts; the paper's second and third epoch are 1 and 2 (released code: 2 and 3). initial_hardness: S before the
    memory starts (the paper names none; its code 1). positive, negative: the penalty on either side, one of "none",
    "1/E", "nu", "sigma" (the paper's Table 3). of_class: how K proxies make one similarity.

    >>> weighting = InformativeSamples(classes=2, dim=4)
    >>> weighting.rule(filtering=False).negative(torch.tensor([[0.9, 0.0]]))
    tensor([[1., 1.]])
    """

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
            if penalty not in PENALTIES:
                raise ValueError(f"{name}: got {penalty!r}, expected one of {', '.join(PENALTIES)}")
        self.volume, self.h, self.k, self.lam, self.tau = volume, h, k, lam, tau
        self.memory_epoch, self.filter_epoch = memory_epoch, filter_epoch
        self.positive, self.negative, self.of_class = positive, negative, of_class.check()
        self.register_buffer("count", torch.zeros(classes, dtype=torch.int64))
        self.register_buffer("effective", torch.zeros(classes))
        self.register_buffer("hardness", torch.full((classes,), float(initial_hardness)))
        self.queue = ClassQueue(memory, dim, classes)
        self.tally = Counts("judged", "filtered", "informative")
        """samples since the last evaluation: those that met the filter, and what it said of them"""

    def forward(self, ctx: Context, queries: Tensor, refs: References) -> tuple[PairWeights, Commit]:
        if refs.per_class is None:
            raise ValueError(
                "weighting: informative samples are judged by their class's proxies; expected a proxy method"
            )
        epoch = ctx.progress.epoch
        if epoch is None:
            raise ValueError(
                "weighting: its memory and filter start by epochs; expected steps_per_epoch=... or criterion.epoch(i)"
            )
        remembering, filtering = epoch >= self.memory_epoch, epoch >= self.filter_epoch
        labels = ctx.batch.labels
        proxies = _Proxies(labels, refs, queries, len(self.count), self.of_class)
        kept, found = None, dict[str, Tensor | int]()
        if filtering:
            similarity = proxies.similarity(queries, labels)
            kept = similarity >= (self.hardness - self.band())[labels]
            informative = kept & (similarity <= self.hardness[labels])
            found = {"judged": len(labels), "filtered": (~kept).sum(), "informative": informative.sum()}

        @torch.no_grad()
        def commit() -> None:
            rows = slice(None) if kept is None else kept.nonzero().squeeze(1)  # the one wait for the device
            self.tally.add(**found)
            self._count(labels[rows])
            if remembering:
                self.queue.remember(queries[rows], labels[rows])
                self._measure(labels, proxies)

        return self.rule(filtering), commit

    def rule(self, filtering: bool) -> PairWeights:
        """The weights as thresholds and levels per class, from the state as it is."""
        low = (self.hardness - self.band())[:, None]
        high = torch.nextafter(self.hardness, self.hardness.new_full((), math.inf))[:, None]  # S itself still belongs
        least = self._penalty(self.positive)[:, None]
        everywhere = StepFunction(low[:, :0], torch.ones_like(least))
        inside = StepFunction(torch.cat([low, high], 1), torch.cat([least, 1 + least, least], 1))
        below = self._penalty(self.negative)[:, None]
        return PairWeights(
            inside if filtering and self.positive != "none" else everywhere,
            StepFunction(low, torch.cat([below, torch.ones_like(below)], 1)) if self.negative != "none" else everywhere,
        )

    def band(self) -> Tensor:
        """eta (C,): how far below S a sample is still informative."""
        return (1 + self.k * (1 - self.hardness)) * self._penalty("nu") + self.lam

    def _penalty(self, kind: str) -> Tensor:
        """What a pair outside the band is weighted by, (C,): one of the functions of E in Table 3."""
        if kind == "none":
            return torch.ones_like(self.effective)
        if kind == "1/E":
            return 1 / self.effective.clamp(min=1)
        nu = 1 / (1 + torch.log1p(self.effective))
        if kind == "nu":
            return nu
        late = torch.sigmoid(self.effective + self.tau - self.volume)
        return 1 + (1 + math.exp(-self.tau)) * (nu - 1) * late

    def _count(self, labels: Tensor) -> None:
        self.count.index_add_(0, labels, torch.ones_like(labels))
        # In this form a volume of a million loses no digits: beta^n is close to 1 there.
        grown = -self.volume * torch.expm1(self.count.double() * math.log1p(-1 / self.volume))
        self.effective.copy_(grown)

    def _measure(self, labels: Tensor, proxies: _Proxies) -> None:
        """S of the batch's classes that have remembered samples, against the proxies that this step's loss saw."""
        if proxies.single and self.queue.has_sums:
            # A class that is in the batch twice is measured twice, alike: cheaper than to wait for the distinct ones.
            mean = proxies.similarity(self.queue.means(labels), labels)
            measured = torch.where(
                self.queue.number[labels] > 0, self.h * mean.to(self.hardness), self.hardness[labels]
            )
            self.hardness[labels] = measured
            return
        present = torch.zeros(len(self.count), dtype=torch.bool, device=labels.device)
        present[labels] = True
        rows = present[self.queue.labels[: len(self.queue)]].nonzero().squeeze(1)
        total = torch.zeros_like(self.count)  # in whole parts, which add up alike in any order
        for some in rows.split(max(1, AT_ONCE // proxies.numbers)):
            of = self.queue.labels[some]
            similarity = proxies.similarity(self.queue.vectors[some], of)
            total.index_add_(0, of, (similarity.double() * ONE).round().long())
        there = present & (self.queue.number > 0)
        mean = (total.double() / (ONE * self.queue.number.clamp(min=1))).to(self.hardness)
        self.hardness.copy_(torch.where(there, self.h * mean, self.hardness))

    def figures(self) -> dict[str, float]:
        """What is known of the classes, in the mean over them, and what became of the positives.

        Returns:
            "remembered": samples in the memory. "effective number": E. "learned similarity": S. "mean weight sigma":
            sigma (Eq. 17). Once the filter has started, of the samples it met since the last evaluation,
            "filtered share": those below the band, and "informative share": those inside it.
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
    """The proxies of the classes in one batch as its loss saw them, found by class."""

    def __init__(self, labels: Tensor, refs: References, queries: Tensor, classes: int, of_class: Similarity) -> None:
        assert refs.per_class is not None
        self.of_class = of_class
        there, place = refs.labels[:: refs.per_class], torch.zeros(classes, dtype=torch.int64, device=labels.device)
        place[there] = torch.arange(len(there), device=there.device)
        # Of each sample's class, so a class may be here twice: cheaper than to wait for the distinct ones.
        vectors = refs.vectors.unflatten(0, (-1, refs.per_class))[place[labels]]
        if refs.shard is not None:
            here = (labels >= refs.shard.start) & (labels < refs.shard.stop)
            vectors = all_reduce_sum(vectors * here[:, None, None], refs.shard)
        self.vectors = refs._replace(vectors=vectors, shard=None).normalised(queries)
        self.place = place
        self.place[labels] = torch.arange(len(labels), device=labels.device)
        self.single, self.numbers = refs.per_class == 1, refs.per_class * refs.vectors.shape[1]

    def similarity(self, vectors: Tensor, labels: Tensor) -> Tensor:
        """Of each vector to its own class, (N,)."""
        own = self.vectors[self.place[labels]]
        return self.of_class(torch.einsum("nd,nkd->nk", vectors.to(own), own))
