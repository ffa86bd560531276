"""Alternating projections: solve a proxy problem, pick new proxies where the old ones cover a class poorly, repeat."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.arguments.checks import at_least_zero, whole_number
from proxymetric.arguments.signatures import one_of
from proxymetric.core.k_center import k_center
from proxymetric.core.normalisation import NORMALISATIONS
from proxymetric.core.pieces import Boundary, Context, Objective, Outcome, Pool, Source
from proxymetric.metrics.geometry import covering_radius, inter_class_distance
from proxymetric.schemes.proximal import proximal

MIN_GAIN = 1e-5
"""by how much a score must exceed the best one to count as better"""
MAX_MEASURED_CLASSES = 200
"""the largest number of classes whose geometry is measured at a projection"""


class _Copies(nn.Module):
    """Copies of the trained parameters of an encoder, as buffers. They change at evaluations, not in a commit."""

    changed_by_commit = ()


class AlternatingProjections(Objective):
    """Repeat: solve the wrapped objective near the last solution, then re-pick its proxies (CCP, Algorithms 1 and 2).

    Within a problem the loss is `objective + lam/2 |theta - theta*|^2`, where theta are the parameters of the bound
    encoder. A problem has converged when the validation score has not improved for `patience` evaluations. Then theta*
    := theta and rho* := the proxies. Of `pool` random samples of each class, those farthest from rho* and from each
    other become the new proxies (`k_center`, on vectors as the loss compares them). The number of proxies of a class is
    the `seats` of the wrapped source.

    The scheme needs `bind(encoder)` before state is saved or loaded, and `boundary(score, pool)` at the start and after
    each evaluation, with scores on classes that are not trained.

    Args:
        objective: what is minimised; exactly one of its sources must have seats.
        lam: >= 0; weight of the proximal term; 2e-4 in the paper.
        first_lam: the same for the first problem; None: lam (released code: 0).
        pool: b samples of each class to pick from, at least the seats; 12 on CUB and Cars, 7 on SOP and In-Shop. b
            equal to the seats, or 1, gives random proxies.
        patience: evaluations without a better score after which a problem has converged.
        anchor: the proximal term is anchored at the "last" (the paper) or the "best" evaluation of the problem
            (released code), which gives theta* and rho*.
        roll_back: whether the parameters of the network return to this solution, theta*; only with anchor="best".
            Running averages of a BatchNorm layer do not return.
        start: the first converged proxies are "random" samples (the paper) or "zero" (released code, where the sample
            with the largest norm is picked first).
        alternate: False solves one problem only, with the first picks (the paper's Loss-Proxy ablation).
    """

    changed_by_commit = ()
    rho: Tensor
    best_rho: Tensor
    picked: Tensor

    def __init__(
        self,
        objective: Objective,
        *,
        lam: float = 2e-4,
        first_lam: float | None = None,
        pool: int = 12,
        patience: int = 3,
        anchor: str = "last",
        roll_back: bool = False,
        start: str = "random",
        alternate: bool = True,
    ) -> None:
        super().__init__()
        at_least_zero(lam=lam, first_lam=lam if first_lam is None else first_lam)
        one_of("anchor", anchor, ("last", "best"))
        one_of("start", start, ("random", "zero"))
        whole_number(1, patience=patience, pool=pool)
        if roll_back and anchor != "best":
            raise ValueError(
                "roll_back: got True with anchor='last', which stores no solution to return to; expected anchor='best'"
            )
        sources = [module for module in objective.modules() if isinstance(module, Source) and module.seats]
        if len(sources) != 1:
            raise ValueError(f"objective: got {len(sources)} sources whose proxies can be re-picked, expected one")
        self.seats = sources[0].seats
        if pool != 1 and pool < self.seats:
            raise ValueError(
                f"pool: got {pool}, expected at least {self.seats}, the number of proxies of a class, or 1 for random "
                "proxies"
            )
        self.objective, self.normalise = objective, objective.normalise
        self.classes, self.dim = objective.classes, objective.dim
        self.lam, self.first_lam = lam, lam if first_lam is None else first_lam
        self.pool, self.patience, self.anchor, self.roll_back = max(pool, self.seats), patience, anchor, roll_back
        self.start, self.alternate = start, alternate
        self._source, self._encoder = sources, list[nn.Module]()  # in lists, so that they do not become submodules
        self.problem = 0
        """problems begun so far"""
        self.stale = 0
        """evaluations since the best one of the problem"""
        self.best_score = -math.inf
        self.radius = self.class_distance = self.moved = 0.0
        self.register_buffer("rho", torch.zeros_like(sources[0].seated()))
        self.register_buffer("best_rho", torch.zeros_like(self.rho))
        self.register_buffer("picked", torch.zeros_like(self.rho))  # the proxies that the problem began with
        self.theta = _Copies()
        """theta*"""
        self.best_theta = _Copies()
        """theta at the best evaluation of the problem, for anchor="best"; else empty"""

    def bind(self, encoder: nn.Module) -> None:
        self._encoder[:] = [encoder]
        self.theta, self.best_theta = _Copies(), _Copies()
        for name, value in self._trained():
            self.theta.register_buffer(name, value.detach().clone())
            if self.anchor == "best":
                self.best_theta.register_buffer(name, value.detach().clone())
        self.objective.bind(encoder)

    def forward(self, ctx: Context) -> Outcome:
        if not self.problem:
            raise ValueError(
                "boundary: got no call, expected boundary(...) before the first step: it picks the first proxies"
            )
        outcome: Outcome = self.objective(ctx)
        lam = self.first_lam if self.problem <= 1 else self.lam
        if lam and not self._encoder:
            raise ValueError("bind: got no encoder, expected bind(encoder) before the first step for the proximal term")
        pairs = list(self._with_copies(self.theta))
        if not lam or not pairs:
            return outcome
        term = proximal([value for value, _ in pairs], [copy for _, copy in pairs], lam)
        return outcome._replace(terms={**outcome.terms, "proximal": term})

    def boundary(self, run: Boundary) -> None:
        self.objective.boundary(run)
        if self.problem == 0:
            self._project(run.pool)
            return
        self.moved = float((self._source[0].seated() - self.picked).norm() / self.picked.norm().clamp(min=1e-12))
        if run.score is None:
            raise ValueError("score: got None, expected a number: a problem ends when the score stops improving")
        if run.score > self.best_score + MIN_GAIN:
            self.best_score, self.stale = run.score, 0
            if self.anchor == "best":
                self._copy_to(self.best_theta)
                self.best_rho.copy_(self._source[0].seated())
        else:
            self.stale += 1
        if self.stale >= self.patience and self.alternate:
            self._project(run.pool)

    @torch.no_grad()
    def _project(self, pool: Pool | None) -> None:
        """Take the solution of the problem as theta* and rho*, pick new proxies, and begin the next problem."""
        if pool is None:
            raise ValueError("pool: got None, expected embeddings of training images to pick new proxies from")
        source, is_first = self._source[0], self.problem == 0
        if self.anchor == "best" and not is_first:
            for name, value in self.theta.named_buffers():
                value.copy_(self.best_theta.get_buffer(name))
            self.rho.copy_(self.best_rho)
            if self.roll_back:
                for value, copy in self._with_copies(self.theta):
                    value.copy_(copy)
        else:
            self._copy_to(self.theta)
            self.rho.copy_(source.seated())
        converged = self.rho.unflatten(0, (-1, self.seats))
        extra_count = self.seats if is_first and self.start == "random" else 0
        count = extra_count + self.pool
        samples, has_samples = self._group_by_class(*pool(count), count)
        if is_first:
            converged = samples[:, :extra_count] if extra_count else torch.zeros_like(converged)
            samples = samples[:, extra_count:]
        normalise = NORMALISATIONS[self.normalise]
        picks = k_center(normalise(samples), normalise(converged), self.seats)
        picked = samples.gather(1, picks[:, :, None].expand(-1, -1, samples.shape[2]))
        # A class without a readable image keeps its proxies.
        proxies = torch.where(has_samples[:, None, None], picked, source.seated().view_as(picked))
        source.reseed(proxies.flatten(0, 1))
        self.picked.copy_(source.seated())
        self._measure(normalise(samples[has_samples]))
        self.problem, self.stale, self.best_score = self.problem + 1, 0, -math.inf

    def _group_by_class(self, embeddings: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """A pool as (C, count, D), where samples of smaller classes repeat; and which classes have any sample, (C,)."""
        assert self.classes is not None
        if embeddings.shape != (len(labels), self.rho.shape[1]) or not len(labels):
            raise ValueError(
                f"pool: got embeddings {tuple(embeddings.shape)} and {len(labels)} labels, "
                f"expected (n, {self.rho.shape[1]}) and n labels, at least one"
            )
        if not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise ValueError(
                f"pool: got labels from {int(labels.min())} to {int(labels.max())}, expected 0 to {self.classes - 1}"
            )
        vectors = embeddings.to(self.rho)
        labels = labels.to(vectors.device)
        order = labels.argsort(stable=True)
        counts = torch.bincount(labels, minlength=self.classes)
        place = torch.arange(count, device=labels.device) % counts.clamp(min=1)[:, None]
        rows = (counts.cumsum(0) - counts)[:, None] + place
        return vectors[order[rows.clamp(max=len(order) - 1)]], counts > 0

    def _measure(self, samples: Tensor) -> None:
        """Measure the covering radius and the inter-class distance of the pool.

        At most `MAX_MEASURED_CLASSES` classes are measured, evenly chosen.
        """
        subset = samples[:: -(-len(samples) // MAX_MEASURED_CLASSES)]
        labels = torch.arange(len(subset), device=subset.device).repeat_interleave(subset.shape[1])
        self.radius = covering_radius(subset.flatten(0, 1), labels, distance="euclidean")
        if len(subset) > 1:
            self.class_distance = inter_class_distance(subset.flatten(0, 1), labels, distance="euclidean")

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """The trained parameters of the encoder, with the names of their copies."""
        for name, value in self._encoder[0].named_parameters() if self._encoder else ():
            if value.requires_grad:
                yield name.replace(".", "/") + "*", value

    def _with_copies(self, copies: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """The trained parameters of the encoder, each with its copy."""
        buffers = dict(copies.named_buffers())
        for name, value in self._trained():
            if name not in buffers:
                raise ValueError(
                    f"bind: got {name[:-1].replace('/', '.')}, which became trainable after bind(encoder); expected "
                    "bind(encoder) after all parameters that will be trained are trainable"
                )
            yield value, buffers[name]

    def _copy_to(self, copies: nn.Module) -> None:
        """Store the trained parameters of the encoder."""
        for value, copy in self._with_copies(copies):
            copy.copy_(value.detach())

    def get_extra_state(self) -> Tensor:
        state = [self.problem, self.stale, self.best_score, self.radius, self.class_distance, self.moved]
        return torch.tensor(state, dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        problem, stale, self.best_score, self.radius, self.class_distance, self.moved = state.tolist()
        self.problem, self.stale = int(problem), int(stale)

    def figures(self) -> dict[str, float]:
        """The state of the alternation.

        Returns:
            "problem": problems begun. "problems solved": problems that have converged. "covering radius" and
            "inter-class distance": of the pool at the last pick. "radius over distance": their ratio. "proxies moved":
            how far all proxies had moved since the problem began, at the last evaluation: `|rho - picked| / |picked|`.
        """
        figures = {
            "problem": float(self.problem),
            "problems solved": float(max(self.problem - 1, 0)),
            "covering radius": self.radius,
            "inter-class distance": self.class_distance,
            "proxies moved": self.moved,
        }
        if self.class_distance:
            figures["radius over distance"] = self.radius / self.class_distance
        return figures
