"""Steps of Gaussian proxies on one batch: Newton steps in closed form, or first-order steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Gaussian(NamedTuple):
    """`N(mu, diag sigma^2)` for each row; both tensors are (R, D)."""

    mu: Tensor
    sigma: Tensor


def divergence(q: Gaussian, prior: Gaussian) -> Tensor:
    """`KL(q || prior)`, summed over rows and dimensions (VCPA, Eqs. 15 and 16, with the constant).

    Example:
        >>> standard = Gaussian(torch.zeros(1, 2), torch.ones(1, 2))
        >>> divergence(Gaussian(torch.ones(1, 2), torch.ones(1, 2)), standard)
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
    """Take Newton steps on `tau KL(q || prior) + L(mu + sigma eps)`.

    g and h are the gradient and the diagonal curvature of L at the sample `p = mu + sigma eps`. The numerators and
    denominators of the paper's fractions (VCPA, Eqs. 21, 22 and 26 to 29) are multiplied by tau, so that nothing is
    divided by a small tau::

        mu    -= (tau (mu - mu') / sigma'^2 + g) / (tau / sigma'^2 + h)
        sigma -= (tau (sigma / sigma'^2 - 1 / sigma) + eps g) / (tau (1 / sigma'^2 + 1 / sigma^2) + eps^2 h)

    Args:
        q: the Gaussians before the steps.
        prior: mu' and sigma'.
        noise: a function that draws new eps (R, D) at each call, one call per step.
        closed_forms: a function of p that returns g and h, (R, D) each.
        steps: number of steps.
        tau: weight of the KL divergence, at least 0.
        floor: smallest sigma.
        halving: whether each step is limited so that sigma keeps at least half its value.
        damping: added to both denominators, at least 0.

    Returns:
        The Gaussians after the steps, and how often a sigma was raised to its lower limit.
    """
    mu, sigma = q
    prior_curvature = tau * prior.sigma.reciprocal().square()
    damped_curvature = prior_curvature + damping
    lowest = sigma.new_full((), floor)
    clamped = []
    for _ in range(steps):
        # Fused operations: the cost of this loop is the number of kernels that it launches.
        eps, inverse = noise(), sigma.reciprocal()
        gradient, curvature = closed_forms(torch.addcmul(mu, sigma, eps))
        mu_gradient = torch.addcmul(gradient, mu - prior.mu, prior_curvature)
        sigma_gradient = torch.addcmul(torch.sub(sigma * prior_curvature, inverse, alpha=tau), eps, gradient)
        sigma_curvature = torch.addcmul(damped_curvature, eps.square(), curvature)
        sigma_curvature = sigma_curvature.addcmul_(inverse, inverse, value=tau)
        mu = torch.addcdiv(mu, mu_gradient, damped_curvature + curvature, value=-1)
        new_sigma = torch.addcdiv(sigma, sigma_gradient, sigma_curvature, value=-1)
        limit = torch.maximum(sigma / 2, lowest) if halving else lowest
        clamped.append(new_sigma < limit)
        sigma = torch.maximum(new_sigma, limit)
    return Gaussian(mu, sigma), torch.stack(clamped).sum()


class Moments(NamedTuple):
    """Adam's state for (mu, log sigma): first and second moments (2, R, D), and the number of steps."""

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
    """Take Adam steps on the function of `newton`, in mu and log sigma: the first-order comparison of VCPA's Fig. 5.

    Args:
        q: the Gaussians before the steps.
        prior: the prior of the KL divergence.
        noise: a function that draws new eps (R, D) at each call, one call per step.
        energy: L as a function of the sample `mu + sigma eps`.
        moments: Adam's state before the steps.
        steps: number of steps.
        lr: learning rate of Adam.
        tau: weight of the KL divergence, at least 0.
        floor: smallest sigma.

    Returns:
        The Gaussians and Adam's state after the steps.
    """
    parameters = torch.stack([q.mu, q.sigma.log()]).requires_grad_()
    optimizer = torch.optim.Adam([parameters], lr=lr)
    optimizer.state[parameters] = {
        "step": moments.steps.to("cpu", torch.float32),
        "exp_avg": moments.first.clone(),
        "exp_avg_sq": moments.second.clone(),
    }
    with torch.enable_grad():
        for _ in range(steps):
            new_q = Gaussian(parameters[0], parameters[1].exp().clamp(min=floor))
            value = energy(new_q.mu + new_q.sigma * noise()) + tau * divergence(new_q, prior)
            (parameters.grad,) = torch.autograd.grad(value, parameters)
            optimizer.step()
    state = optimizer.state[parameters]
    mu, log_sigma = parameters.detach()
    return Gaussian(mu, log_sigma.exp().clamp(min=floor)), Moments(
        state["exp_avg"], state["exp_avg_sq"], moments.steps + steps
    )
