"""How Gaussian proxies settle on one batch: Newton's closed forms, or first-order steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """`N(mu, diag sigma^2)`, one for each row: (R, D) each."""

    mu: Tensor
    sigma: Tensor


def divergence(q: Gaussian, prior: Gaussian) -> Tensor:
    """`KL(q || prior)`, summed over rows and dimensions (VCPA, Eqs. 15 and 16, with the constant).

    >>> one = Gaussian(torch.zeros(1, 2), torch.ones(1, 2))
    >>> divergence(Gaussian(torch.ones(1, 2), torch.ones(1, 2)), one)
    tensor(1.)
    """
    ratio = q.sigma / prior.sigma
    return 0.5 * (ratio.square() + ((q.mu - prior.mu) / prior.sigma).square() - 1 - 2 * ratio.log()).sum()


def newton(
    q: Gaussian,
    prior: Gaussian,
    noise: Callable[[], Tensor],
    closed_forms: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    steps: int,
    tau: float,
    floor: float = 1e-5,
    halving: bool = False,
    damping: float = 0.0,
) -> tuple[Gaussian, Tensor]:
    """`steps` Newton steps on `tau KL(q || prior) + L(mu + sigma eps)`, and how often a sigma met its floor.

    With g and h the gradient and the diagonal curvature of L in the sample p (`closed_forms`), multiplied through by
    tau so that a small one divides nothing (VCPA, Eqs. 21, 22 and 26 to 29)::

        mu    -= (tau (mu - mu') / sigma'^2 + g) / (tau / sigma'^2 + h)
        sigma -= (tau (sigma / sigma'^2 - 1 / sigma) + eps g) / (tau (1 / sigma'^2 + 1 / sigma^2) + eps^2 h)
    """
    mu, sigma = q
    firmness = tau * prior.sigma.reciprocal().square()
    solid, lowest = firmness + damping, sigma.new_full((), floor)
    clamped = []
    for _ in range(steps):
        eps, inverse = noise(), sigma.reciprocal()  # each line below is one kernel: launching them is what this costs
        gradient, curvature = closed_forms(torch.addcmul(mu, sigma, eps))
        pull = torch.addcmul(gradient, mu - prior.mu, firmness)
        stretch = torch.addcmul(torch.sub(sigma * firmness, inverse, alpha=tau), eps, gradient)
        stiffness = torch.addcmul(solid, eps.square(), curvature).addcmul_(inverse, inverse, value=tau)
        mu = torch.addcdiv(mu, pull, solid + curvature, value=-1)
        moved = torch.addcdiv(sigma, stretch, stiffness, value=-1)
        least = torch.maximum(sigma / 2, lowest) if halving else lowest
        clamped.append(moved < least)
        sigma = torch.maximum(moved, least)
    return Gaussian(mu, sigma), torch.stack(clamped).sum()


class Moments(NamedTuple):
    """Adam's memory of (mu, log sigma): first and second moments (2, R, D), and how many steps made them."""

    first: Tensor
    second: Tensor
    steps: Tensor


def descend(
    q: Gaussian,
    prior: Gaussian,
    noise: Callable[[], Tensor],
    energy: Callable[[Tensor], Tensor],
    moments: Moments,
    *,
    steps: int,
    lr: float,
    tau: float,
    floor: float = 1e-5,
) -> tuple[Gaussian, Moments]:
    """`steps` steps of Adam on the same function, in mu and log sigma: the first-order comparison of VCPA's Fig. 5."""
    place = torch.stack([q.mu, q.sigma.log()]).requires_grad_()
    optimizer = torch.optim.Adam([place], lr=lr)
    optimizer.state[place] = {
        "step": moments.steps.to("cpu", torch.float32),
        "exp_avg": moments.first.clone(),
        "exp_avg_sq": moments.second.clone(),
    }
    with torch.enable_grad():
        for _ in range(steps):
            now = Gaussian(place[0], place[1].exp().clamp(min=floor))
            value = energy(now.mu + now.sigma * noise()) + tau * divergence(now, prior)
            (place.grad,) = torch.autograd.grad(value, place)
            optimizer.step()
    state = optimizer.state[place]
    settled = Gaussian(place[0].detach(), place[1].detach().exp().clamp(min=floor))
    return settled, Moments(state["exp_avg"], state["exp_avg_sq"], moments.steps + steps)
