"""Alternating projections: solve a proxy problem, pick new proxies where the old ones cover badly, solve again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.checks import at_least_zero, whole_number
from proxymetric.core.pieces import NORMALISATIONS, Boundary, Context, Objective, Outcome, Pool, Source
from proxymetric.metrics.geometry import covering_radius, inter_class_distance
from proxymetric.schemes.k_center import k_center
from proxymetric.schemes.proximal import proximal

GAIN = 1e-5
"""a score must be better by this much to count as better"""
LOOK = 200
"""classes whose geometry is measured at a projection"""


class AlternatingProjections(Objective):
    """Repeat: solve the wrapped objective near the last solution, then re-pick its proxies (CCP, Algorithms 1 and 2).

    Within a problem the loss is `objective + lam/2 |theta - theta*|^2`, theta the bound encoder's parameters. A problem
    has converged when the validation score has not improved for `patience` evaluations. Then theta* := theta and
    rho* := the proxies; of `pool` random samples a class, those farthest from rho* and from each other become the new
    proxies (`k_center`, between vectors as they are compared). The wrapped source must have seats; how many a class
    has, it says itself.

    It needs `bind(encoder)` before state is saved or loaded, and `boundary(score, pool)` at the start and after each
    evaluation, with scores of classes that are not trained on.

    lam: >= 0, 2e-4 in the paper. first_lam: of the first problem (None: lam; released code 0). pool: b samples a class,
    at least the seats; equal to them, or 1: random proxies. patience: 3. anchor: theta* and rho* are the problem's
    "last" (the paper) or its "best" ones (released code). roll_back: the network's parameters (not the averages of a
    BatchNorm that is not frozen) go on from theta* instead of from where they are (with anchor="best"). start: the
    first converged proxies are "random" samples (the paper) or "zero" (released code: the largest sample is picked
    first). alternate: False solves one problem only, with the first picks (the paper's Loss-Proxy ablation).
    """

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
        for name, value, known in (("anchor", anchor, ("last", "best")), ("start", start, ("random", "zero"))):
            if value not in known:
                raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(known)}")
        whole_number(1, patience=patience, pool=pool)
        if roll_back and anchor != "best":
            raise ValueError(
                "roll_back: got true with anchor='last', where there is nothing to go back to; expected 'best'"
            )
        seated = [module for module in objective.modules() if isinstance(module, Source) and module.seats]
        if len(seated) != 1:
            raise ValueError(f"objective: got {len(seated)} sources whose proxies can be re-picked, expected one")
        self.seats = seated[0].seats
        if pool != 1 and pool < self.seats:
            raise ValueError(
                f"pool: got {pool}, expected at least the {self.seats} proxies of a class, or 1 for random ones"
            )
        self.objective, self.normalise = objective, objective.normalise
        self.classes, self.dim = objective.classes, objective.dim
        self.lam, self.first_lam = lam, lam if first_lam is None else first_lam
        self.pool, self.patience, self.anchor, self.roll_back = max(pool, self.seats), patience, anchor, roll_back
        self.start, self.alternate = start, alternate
        self._source, self._encoder = seated, list[nn.Module]()  # in lists, so as not to become submodules
        self.problem = 0
        """problems begun so far"""
        self.stale = 0
        """evaluations since the problem's best"""
        self.best_score = -math.inf
        self.radius = self.apart = self.moved = 0.0
        self.register_buffer("rho", torch.zeros_like(seated[0].seated()))
        self.register_buffer("best_rho", torch.zeros_like(self.rho))
        self.register_buffer("picked", torch.zeros_like(self.rho))  # the proxies that the problem began with
        self.theta = nn.Module()
        """theta*"""
        self.best_theta = nn.Module()
        """theta at the problem's best evaluation, where anchor="best" wants it"""

    def bind(self, encoder: nn.Module) -> None:
        self._encoder[:] = [encoder]
        self.theta, self.best_theta = nn.Module(), nn.Module()
        for name, value in self._trained():
            self.theta.register_buffer(name, value.detach().clone())
            if self.anchor == "best":
                self.best_theta.register_buffer(name, value.detach().clone())
        self.objective.bind(encoder)

    def forward(self, ctx: Context) -> Outcome:
        if not self.problem:
            raise ValueError("boundary: the first proxies are picked there; expected one call before the first step")
        outcome: Outcome = self.objective(ctx)
        lam = self.first_lam if self.problem <= 1 else self.lam
        if lam and not self._encoder:
            raise ValueError("bind: the proximal term needs the encoder's parameters; expected bind(encoder) before")
        moving = list(self._beside(self.theta))
        if not lam or not moving:
            return outcome
        term = proximal([value for value, _ in moving], [copy for _, copy in moving], lam)
        return outcome._replace(terms={**outcome.terms, "proximal": term})

    def boundary(self, run: Boundary) -> None:
        self.objective.boundary(run)
        if self.problem == 0:
            self._project(run.pool)
            return
        self.moved = float((self._source[0].seated() - self.picked).norm() / self.picked.norm().clamp(min=1e-12))
        if run.score is None:
            raise ValueError("score: alternating projections wait for it to stop improving; expected a number")
        if run.score > self.best_score + GAIN:
            self.best_score, self.stale = run.score, 0
            if self.anchor == "best":
                self._keep(self.best_theta)
                self.best_rho.copy_(self._source[0].seated())
        else:
            self.stale += 1
        if self.stale >= self.patience and self.alternate:
            self._project(run.pool)

    @torch.no_grad()
    def _project(self, pool: Pool | None) -> None:
        """Take what the problem ended with as theta* and rho*, pick new proxies, and begin the next problem."""
        if pool is None:
            raise ValueError("pool: new proxies are picked from it; expected embeddings of training images")
        source, first = self._source[0], self.problem == 0
        if self.anchor == "best" and not first:
            for name, value in self.theta.named_buffers():
                value.copy_(self.best_theta.get_buffer(name))
            self.rho.copy_(self.best_rho)
            if self.roll_back:
                for value, copy in self._beside(self.theta):
                    value.copy_(copy)
        else:
            self._keep(self.theta)
            self.rho.copy_(source.seated())
        converged = self.rho.unflatten(0, (-1, self.seats))
        extra = self.seats if first and self.start == "random" else 0
        samples, there = self._grouped(*pool(extra + self.pool), extra + self.pool)
        if first:
            converged = samples[:, :extra] if extra else torch.zeros_like(converged)
            samples = samples[:, extra:]
        normal = NORMALISATIONS[self.normalise]
        picks = k_center(normal(samples), normal(converged), self.seats)
        picked = samples.gather(1, picks[:, :, None].expand(-1, -1, samples.shape[2]))
        # A class of which no image could be read keeps what it has.
        source.reseed(torch.where(there[:, None, None], picked, source.seated().view_as(picked)).flatten(0, 1))
        self.picked.copy_(source.seated())
        self._look(normal(samples[there]))
        self.problem, self.stale, self.best_score = self.problem + 1, 0, -math.inf

    def _grouped(self, embeddings: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """A pool as (C, count, D), smaller classes repeated; and which classes have any sample."""
        assert self.classes is not None
        if embeddings.shape != (len(labels), self.rho.shape[1]) or not len(labels):
            raise ValueError(
                f"pool: got embeddings {tuple(embeddings.shape)} and {len(labels)} labels, "
                f"expected (n, {self.rho.shape[1]}) and n of them"
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

    def _look(self, samples: Tensor) -> None:
        """How wide the classes of the pool are and how far apart, of an even choice of at most `LOOK` classes."""
        some = samples[:: -(-len(samples) // LOOK)]
        labels = torch.arange(len(some), device=some.device).repeat_interleave(some.shape[1])
        self.radius = covering_radius(some.flatten(0, 1), labels, distance="euclidean")
        if len(some) > 1:
            self.apart = inter_class_distance(some.flatten(0, 1), labels, distance="euclidean")

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        """The encoder's trained parameters by the names of their copies."""
        for name, value in self._encoder[0].named_parameters() if self._encoder else ():
            if value.requires_grad:
                yield name.replace(".", "/") + "*", value

    def _beside(self, copies: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """The encoder's trained parameters with their copies."""
        known = dict(copies.named_buffers())
        for name, value in self._trained():
            if name not in known:
                raise ValueError(
                    f"bind: {name[:-1].replace('/', '.')} has become trainable since; "
                    "expected bind(encoder) with all that will be trained"
                )
            yield value, known[name]

    def _keep(self, copies: nn.Module) -> None:
        for value, copy in self._beside(copies):
            copy.copy_(value.detach())

    def get_extra_state(self) -> Tensor:
        state = [self.problem, self.stale, self.best_score, self.radius, self.apart, self.moved]
        return torch.tensor(state, dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        problem, stale, self.best_score, self.radius, self.apart, self.moved = state.tolist()
        self.problem, self.stale = int(problem), int(stale)

    def figures(self) -> dict[str, float]:
        """Where the alternation stands.

        Returns:
            "problem": problems begun. "problems solved": those that have converged. "covering radius",
            "inter-class distance": of the pool at the last pick; "radius over distance": their ratio. "proxies moved":
            how far the proxies were at the last evaluation from where the problem that it met had picked them,
            `|rho - picked| / |picked|` over all of them.
        """
        found = {
            "problem": float(self.problem),
            "problems solved": float(max(self.problem - 1, 0)),
            "covering radius": self.radius,
            "inter-class distance": self.apart,
            "proxies moved": self.moved,
        }
        return found | ({"radius over distance": self.radius / self.apart} if self.apart else {})
