"""Gaussian proxies: a mean and a standard deviation for every class, carried from batch to batch as a posterior."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.arguments.checks import above_zero, at_least_zero, whole_number
from proxymetric.core.capabilities import ClassProxies
from proxymetric.core.normalisation import unit
from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing
from proxymetric.sources.gaussian_steps import Gaussian, Moments, descend, divergence, newton
from proxymetric.sources.learned_proxies import initial
from proxymetric.system.precision import full_precision

FIGURE_ROWS = 200
"""largest number of proxies whose uncertainty `figures` measures"""
FIGURE_DRAWS = 100
"""random vectors that `figures` draws for each of these proxies"""


class VariationalProxies(Source):
    """Proxies `N(mu, diag sigma^2)` that move on each batch before the network does (VCPA; Kim et al. 2022).

    At each step q starts from its state after the last batch and takes `newton_steps` steps on::

        tau KL(q || q_before) + L(batch; p),   p = mu + sigma eps,  fresh eps at each step             (Eqs. 12, 28, 29)

    with the closed forms of `gaussian_steps.newton`. The loss of the step is L at one more sample of the new q, and
    `commit` stores this q. The KL divergence keeps q close to the posterior of earlier batches; the noise keeps samples
    away from class borders. In eval mode q does not move. If several forward passes precede one commit, the q of the
    last pass is stored.

    Args:
        classes: C.
        dim: D.
        per_class: K proxies per class.
        tau: >= 0; weight of the KL divergence; 0.01 on CUB and Cars, 0.001 on SOP and In-Shop.
        newton_steps: M Newton steps on q per batch; 10 in the paper. 0 makes mu and log sigma ordinary parameters,
            which the run's optimiser trains on tau KL + L (the paper's choice for SOP and In-Shop).
        gradient_steps: Adam steps on q per batch, instead of Newton steps.
        gradient_lr: > 0; learning rate of these Adam steps.
        sample: whether the proxies are drawn from q; False compares with mu, without noise.
        floor: > 0; the smallest sigma.
        halving: whether each step is limited so that sigma keeps at least half its value. Without this limit and with a
            small tau, the first batches drive sigma to its floor, where the KL divergence holds mu fixed (`figures`
            counts this). With a tau far below 0.001, sigma diverges instead.
        damping: >= 0; added to the curvature in a Newton step.
        prior_lag: number of batches, at least 1: the prior of the KL divergence is q of that many batches ago (the
            paper: 1).
        init: the first mu: "zero" or a name of `INITIALISATIONS`. None: "zero", or "kaiming" if sample is False,
            because without noise the classes would never differ.

    Example:
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
                f"gradient_steps: got {gradient_steps} with newton_steps={newton_steps}, expected one of them to be 0"
            )
        if newton_steps and not tau + damping:
            raise ValueError(f"tau: got {tau} with Newton steps, expected a number above 0, or a damping above 0")
        whole_number(1, prior_lag=prior_lag)
        if (halving or damping) and not newton_steps:
            raise ValueError(
                f"halving, damping: got {halving}, {damping} with newton_steps=0, expected False and 0, or Newton steps"
            )
        if init is None:
            init = "zero" if sample else "kaiming"
        if init == "zero" and not sample:
            raise ValueError(
                "init: got 'zero' with sample=False, where the proxies of all classes stay equal, expected another "
                "name, such as 'kaiming'"
            )
        self.classes = classes
        self.dim = dim
        self.per_class = per_class
        self.seats = per_class
        self.tau = tau
        self.newton_steps = newton_steps
        self.gradient_steps = gradient_steps
        self.gradient_lr = gradient_lr
        self.sample = sample
        self.floor = floor
        self.halving = halving
        self.damping = damping
        self.prior_lag = prior_lag
        mu = initial(classes, dim, per_class, "kaiming" if init == "zero" else init)
        if init == "zero":
            mu.zero_()
        self.settles = newton_steps + gradient_steps > 0
        """True: q moves in `forward` and is stored in `commit`; False: the run's optimiser trains it"""
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
        self._last_step = -1
        """the last training step that stored a q in the past"""
        settled = ("mu", "sigma") if self.settles else ()
        moments = ("first", "second", "steps") if gradient_steps else ()
        self.changed_by_commit = (*settled, *moments, "clamps", "turn", "past_mu", "past_sigma", "_last_step")

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._last_step = -1  # the next step is a new one, even if it has the number of the last one

    def q(self) -> Gaussian:
        """The current Gaussians; mu and sigma are (C K, D)."""
        return Gaussian(self.mu, self.sigma if self.settles else self.log_sigma.exp().clamp(min=self.floor))

    def prior(self) -> Gaussian:
        """The prior of the KL divergence: q of `prior_lag` batches ago, without gradient."""
        if self.prior_lag == 1:
            mu, sigma = self.q()
            return Gaussian(mu.detach(), sigma.detach())
        oldest = self._oldest()
        return Gaussian(self.past_mu.index_select(0, oldest)[0], self.past_sigma.index_select(0, oldest)[0])

    def divergence(self, refs: References | None = None) -> Tensor:
        """`tau KL(q || prior)`: the regulariser for `Compare` if the run's optimiser trains q."""
        return self.tau * divergence(self.q(), self.prior())

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        q, commit = self.q(), nothing
        if self.training and torch.is_grad_enabled():
            q_before = Gaussian(q.mu.detach().clone(), q.sigma.detach().clone())
            changes: dict[str, Tensor] = {}
            if self.settles:
                changes = self._settle(q_before, energy)
                q = Gaussian(changes["mu"], changes["sigma"])

            @torch.no_grad()
            def commit() -> None:
                for name, value in changes.items():
                    self.get_buffer(name).copy_(value)
                if self._last_step != ctx.progress.step:  # several passes before one commit count as one batch
                    self._last_step = ctx.progress.step
                    self._store_past(q_before)

        vectors = q.mu + q.sigma * self._noise() if self.sample else q.mu
        return References(vectors, self.labels, self.per_class, all_classes=True), commit

    @torch.no_grad()
    def _settle(self, q_before: Gaussian, energy: Energy) -> dict[str, Tensor]:
        """The new values of the buffers, after q has moved on this batch."""

        def refs(vectors: Tensor) -> References:
            return References(vectors, self.labels, self.per_class)

        prior = self.prior()
        if self.newton_steps:
            energy = energy._replace(queries=energy.queries.to(q_before.mu))
            with full_precision(q_before.mu.device.type):
                closed_forms = energy.closed_forms(refs(q_before.mu))
                settled, clamps = newton(
                    q_before,
                    prior,
                    self._noise,
                    closed_forms,
                    steps=self.newton_steps,
                    tau=self.tau,
                    floor=self.floor,
                    halving=self.halving,
                    damping=self.damping,
                )
            return {"mu": settled.mu, "sigma": settled.sigma, "clamps": self.clamps + clamps}
        moments = Moments(self.first, self.second, self.steps)
        settled, moments = descend(
            q_before,
            prior,
            self._noise,
            lambda vectors: energy(refs(vectors)).to(vectors),
            moments,
            steps=self.gradient_steps,
            lr=self.gradient_lr,
            tau=self.tau,
            floor=self.floor,
        )
        return {"mu": settled.mu, "sigma": settled.sigma, **moments._asdict()}

    def _noise(self) -> Tensor:
        """Fresh eps (C K, D), the same in every process; zeros if sample is False."""
        if not self.sample:
            return torch.zeros_like(self.mu)
        eps = torch.randn_like(self.mu, requires_grad=False)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.broadcast(eps, 0)
        return eps

    def _store_past(self, q_before: Gaussian) -> None:
        """Replace the oldest stored q by the q from before this step."""
        if self.prior_lag > 1:
            oldest = self._oldest()
            self.past_mu.index_copy_(0, oldest, q_before.mu[None])
            self.past_sigma.index_copy_(0, oldest, q_before.sigma[None])
        self.turn += 1

    def _oldest(self) -> Tensor:
        """The place of the oldest stored q, (1,); an index without dimensions would synchronise with the GPU."""
        return (self.turn % (self.prior_lag - 1)).view(1)

    def seated(self) -> Tensor:
        return self.mu.detach().clone()

    def class_proxies(self) -> ClassProxies:
        """The means and standard deviations of q (`HasClassProxies`)."""
        return ClassProxies(self.seated(), self.labels, self.q().sigma.detach().clone())

    @torch.no_grad()
    def reseed(self, vectors: Tensor) -> None:
        """Set the means to the vectors and every sigma to 1, in the current q and in every stored q.

        Args:
            vectors: (C * seats, D).
        """
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
        """The uncertainty of q about each class, (C,): the summed standard deviations of normalised draws (Eq. 30).

        For K proxies per class it is their mean. The draws have a fixed seed and do not change the global random state,
        so that the same q gives the same result.

        Args:
            draws: random vectors drawn for each proxy, at least 2.

        Example:
            >>> round(float(VariationalProxies(classes=1, dim=512).uncertainty()[0]), 1)
            22.6
        """
        whole_number(2, draws=draws)
        return self._uncertainty(self.q(), draws).view(-1, self.per_class).mean(1)

    @staticmethod
    def _uncertainty(q: Gaussian, draws: int) -> Tensor:
        """Eq. 30 for each row of q, (R,)."""
        generator = torch.Generator(q.mu.device).manual_seed(0)
        uncertainties = []
        for mu, sigma in zip(*q, strict=True):
            eps = torch.randn(draws, len(mu), generator=generator, device=mu.device, dtype=mu.dtype)
            uncertainties.append(unit(mu + sigma * eps).std(0).sum())
        return torch.stack(uncertainties)

    @torch.no_grad()
    def figures(self) -> dict[str, float]:
        """Numbers about the width of the Gaussians.

        Returns:
            "mean sigma": over all classes and dimensions. "mean uncertainty": Eq. 30, averaged over at most 200 evenly
            spaced proxies with 100 draws each, the same at each call. "sigmas clamped": how often a sigma was raised to
            its lower limit since training began.
        """
        mu, sigma = self.q()
        stride = -(-len(mu) // FIGURE_ROWS)
        return {
            "mean sigma": float(sigma.mean()),
            "mean uncertainty": float(self._uncertainty(Gaussian(mu[::stride], sigma[::stride]), FIGURE_DRAWS).mean()),
            "sigmas clamped": float(self.clamps),
        }
