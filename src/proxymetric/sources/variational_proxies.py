"""Gaussian proxies: a mean and a spread for every class, carried from batch to batch as a posterior."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from proxymetric.checks import above_zero, at_least_zero, whole_number
from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing, unit
from proxymetric.precision import full_precision
from proxymetric.sources.gaussian_steps import Gaussian, Moments, descend, divergence, newton
from proxymetric.sources.learned_proxies import initial

FIGURE_ROWS = 200
"""proxies whose uncertainty is measured for `figures`, at most"""
FIGURE_DRAWS = 100
"""draws of each for that"""


class VariationalProxies(Source):
    """Proxies `N(mu, diag sigma^2)` that settle on each batch before the network moves (VCPA; Kim et al. 2022).

    At each step q starts from where the last batch left it and takes `newton_steps` steps on::

        tau KL(q || q_before) + L(batch; p),   p = mu + sigma eps,  fresh eps at each step             (Eqs. 12, 28, 29)

    with the closed forms of `inner.newton`. The loss of the step is then L at one more fresh sample of the new q, which
    is kept in `commit`. The KL keeps q near what earlier batches said; the noise keeps samples off the borders. In eval
    mode q does not move. Of several forward passes before one commit, the last one's q is kept.

    tau: weight of the KL, >= 0 (0.01 on CUB, 0.001 on SOP and In-Shop). newton_steps: M, 10 in the paper; 0 makes mu
    and log sigma ordinary parameters, trained by the run's optimiser on tau KL + L (the paper's choice for SOP, In-
    Shop). gradient_steps, gradient_lr: instead of Newton's, so many steps of Adam on the batch. sample: False compares
    with mu alone. floor: least sigma. halving: sigma falls to no less than its half in one step, since with a small tau
    the first batches would drive it to the floor, where the KL holds mu fast (`figures` count that); with a tau far
    below 0.001 it lets sigma run away instead. damping: added to the curvature. prior_lag: the KL refers to q of so
    many batches ago (1: the paper). init: of mu, "zero" or a name of `INITIALISATIONS`; None is "zero", or "kaiming"
    where there is no noise to tell classes apart.

    >>> source = VariationalProxies(classes=3, dim=2)
    >>> source.mu.shape, float(source.q().sigma.mean())
    (torch.Size([3, 2]), 1.0)
    """

    per_class: int
    mu: Tensor
    sigma: Tensor
    first: Tensor
    second: Tensor
    steps: Tensor
    labels: Tensor
    clamps: Tensor
    turn: Tensor
    past_mu: Tensor
    past_sigma: Tensor

    def __init__(
        self,
        classes: int,
        dim: int,
        per_class: int = 1,
        *,
        tau: float = 0.01,
        newton_steps: int = 10,
        gradient_steps: int = 0,
        gradient_lr: float = 1e-2,
        sample: bool = True,
        floor: float = 1e-5,
        halving: bool = False,
        damping: float = 0.0,
        prior_lag: int = 1,
        init: str | None = None,
    ) -> None:
        super().__init__()
        at_least_zero(tau=tau, damping=damping)
        whole_number(newton_steps=newton_steps, gradient_steps=gradient_steps)
        above_zero(floor=floor, gradient_lr=gradient_lr)
        if newton_steps and gradient_steps:
            raise ValueError(
                f"gradient_steps: got {gradient_steps} beside newton_steps={newton_steps}, expected one kind"
            )
        if newton_steps and not tau + damping:
            raise ValueError("tau: got 0 with Newton steps, expected it above 0, or a damping above 0")
        whole_number(1, prior_lag=prior_lag)
        if (halving or damping) and not newton_steps:
            raise ValueError("halving, damping: they belong to Newton steps, and newton_steps is 0")
        if init is None:
            init = "zero" if sample else "kaiming"
        if init == "zero" and not sample:
            raise ValueError("init: got 'zero' without noise, where no two classes differ; expected 'kaiming'")
        self.classes, self.dim, self.per_class, self.seats = classes, dim, per_class, per_class
        self.tau, self.newton_steps, self.sample, self.prior_lag = tau, newton_steps, sample, prior_lag
        self.gradient_steps, self.gradient_lr = gradient_steps, gradient_lr
        self.floor, self.halving, self.damping = floor, halving, damping
        mu = initial(classes, dim, per_class, "kaiming" if init == "zero" else init)
        if init == "zero":
            mu.zero_()
        self.settles = newton_steps + gradient_steps > 0
        if self.settles:
            self.register_buffer("mu", mu)
            self.register_buffer("sigma", torch.ones_like(mu))
        else:
            self.proxies = ("mu", "log_sigma")
            self.mu = nn.Parameter(mu)
            self.log_sigma = nn.Parameter(torch.zeros_like(mu))
        if gradient_steps:
            self.register_buffer("first", torch.zeros(2, *mu.shape))
            self.register_buffer("second", torch.zeros(2, *mu.shape))
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("labels", torch.arange(classes).repeat_interleave(per_class), persistent=False)
        self.register_buffer("clamps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turn", torch.zeros((), dtype=torch.int64))
        self.register_buffer("past_mu", mu.detach().expand(prior_lag - 1, -1, -1).clone())
        self.register_buffer("past_sigma", torch.ones_like(self.past_mu))
        self._last = -1

    def q(self) -> Gaussian:
        """The Gaussians as they are, (C K, D) each."""
        return Gaussian(self.mu, self.sigma if self.settles else self.log_sigma.exp().clamp(min=self.floor))

    def prior(self) -> Gaussian:
        """What the KL refers to: q as it was `prior_lag` batches ago, without gradient."""
        if self.prior_lag == 1:
            mu, sigma = self.q()
            return Gaussian(mu.detach(), sigma.detach())
        oldest = self.turn % (self.prior_lag - 1)
        return Gaussian(self.past_mu[oldest].clone(), self.past_sigma[oldest].clone())

    def divergence(self, refs: References | None = None) -> Tensor:
        """`tau KL(q || prior)`: a regulariser for `Compare` where the run's optimiser moves q."""
        return self.tau * divergence(self.q(), self.prior())

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        q, commit = self.q(), nothing
        if self.training and torch.is_grad_enabled():
            before = Gaussian(q.mu.detach().clone(), q.sigma.detach().clone())
            changes: dict[str, Tensor] = {}
            if self.settles:
                changes = self._settled(before, energy)
                q = Gaussian(changes["mu"], changes["sigma"])

            @torch.no_grad()
            def commit() -> None:
                for name, value in changes.items():
                    self.get_buffer(name).copy_(value)
                if self._last != ctx.progress.step:  # several passes before one commit are one batch
                    self._last = ctx.progress.step
                    self._pass(before)

        vectors = q.mu + q.sigma * self._noise() if self.sample else q.mu
        return References(vectors, self.labels, self.per_class), commit

    @torch.no_grad()
    def _settled(self, before: Gaussian, energy: Energy) -> dict[str, Tensor]:
        """What the buffers become once q has settled on this batch."""

        def refs(vectors: Tensor) -> References:
            return References(vectors, self.labels, self.per_class)

        prior = self.prior()
        if self.newton_steps:
            energy = energy._replace(queries=energy.queries.to(before.mu))
            with full_precision(before.mu.device.type):
                closed_forms = energy.closed_forms(refs(before.mu))
                settled, clamps = newton(
                    before, prior, self._noise, closed_forms, steps=self.newton_steps, tau=self.tau,
                    floor=self.floor, halving=self.halving, damping=self.damping,
                )  # fmt: skip
            return {"mu": settled.mu, "sigma": settled.sigma, "clamps": self.clamps + clamps}
        moments = Moments(self.first, self.second, self.steps)
        settled, moments = descend(
            before, prior, self._noise, lambda vectors: energy(refs(vectors)).to(vectors), moments,
            steps=self.gradient_steps, lr=self.gradient_lr, tau=self.tau, floor=self.floor,
        )  # fmt: skip
        return {"mu": settled.mu, "sigma": settled.sigma, **moments._asdict()}

    def _noise(self) -> Tensor:
        """Fresh eps (C K, D), the same on every process; zeros where nothing is sampled."""
        if not self.sample:
            return torch.zeros_like(self.mu)
        eps = torch.randn_like(self.mu, requires_grad=False)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast(eps, 0)
        return eps

    def _pass(self, before: Gaussian) -> None:
        """The q that this step began with becomes the newest of the past ones."""
        if self.prior_lag > 1:
            oldest = self.turn % (self.prior_lag - 1)
            self.past_mu[oldest], self.past_sigma[oldest] = before
        self.turn += 1

    def seated(self) -> Tensor:
        return self.mu.detach().clone()

    @torch.no_grad()
    def reseed(self, vectors: Tensor) -> None:
        """The vectors become the means; every sigma goes back to 1, and the past forgets what was before."""
        self.mu.copy_(vectors)
        for name in ("first", "second", "steps") if self.gradient_steps else ():
            self.get_buffer(name).zero_()
        if self.settles:
            self.sigma.fill_(1)
        else:
            self.log_sigma.zero_()
        self.past_mu.copy_(self.mu.expand_as(self.past_mu))
        self.past_sigma.fill_(1)

    @torch.no_grad()
    def uncertainty(self, draws: int = 1000) -> Tensor:
        """How unsure q is of each class, (C,): the summed standard deviations of normalised draws (Eq. 30).

        The same draws of the same q give the same figures: they do not touch the global random state. Of K proxies a
        class, the mean.

        >>> round(float(VariationalProxies(classes=1, dim=512).uncertainty()[0]), 1)
        22.6
        """
        whole_number(2, draws=draws)
        return self._uncertainty(self.q(), draws).view(-1, self.per_class).mean(1)

    @staticmethod
    def _uncertainty(q: Gaussian, draws: int) -> Tensor:
        """Eq. 30 of each row of q, (R,)."""
        generator = torch.Generator(q.mu.device).manual_seed(0)
        found = []
        for mu, sigma in zip(*q, strict=True):
            eps = torch.randn(draws, len(mu), generator=generator, device=mu.device, dtype=mu.dtype)
            found.append(unit(mu + sigma * eps).std(0).sum())
        return torch.stack(found)

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """How wide the Gaussians are.

        Returns:
            "mean sigma": over all classes and dimensions. "mean uncertainty": Eq. 30 in the mean over an even choice of
            at most 200 proxies, from 100 draws of each, the same at each call. "sigmas clamped": how often a sigma
            met its floor since training began.
        """
        mu, sigma = self.q()
        step = -(-len(mu) // FIGURE_ROWS)
        return {
            "mean sigma": float(sigma.mean()),
            "mean uncertainty": float(self._uncertainty(Gaussian(mu[::step], sigma[::step]), FIGURE_DRAWS).mean()),
            "sigmas clamped": float(self.clamps),
        }
