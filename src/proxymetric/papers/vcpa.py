"""VCPA: variational continual proxy-anchor (Kim, Guerrero, Pham & Pavlovic, AISTATS 2022).

The paper leaves open how mu and sigma are trained where it takes no Newton steps (SOP, In-Shop): here as ordinary
parameters (mu, log sigma) at the proxies' rate. With one gradient step a batch from a warm start the KL has no gradient
there, unless it refers to an older q: `prior_lag`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.core.pieces import Compare, Objective, References
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.about import about
from proxymetric.papers.base import Base, base_needs, base_objective, named
from proxymetric.sources import VariationalProxies


@about(
    paper="Kim et al. 2022, Variational Continual Proxy-Anchor for Deep Metric Learning",
    choose="to know how sure it is of each class; tau must fit: watch the sigmas in the log",
)
def vcpa(
    classes: int,
    dim: int,
    *,
    scale: float = 32.0,
    margin: float = 0.1,
    tau: float = 0.01,
    newton_steps: int = 10,
    gradient_steps: int = 0,
    gradient_lr: float = 1e-2,
    sample: bool = True,
    floor: float = 1e-5,
    halving: bool = False,
    damping: float = 0.0,
    prior_lag: int = 1,
    per_class: int = 1,
    init: str | None = None,
    base: Base | None = None,
) -> Objective:
    """Proxy-Anchor against Gaussian proxies that settle on each batch. Source: `sources.VariationalProxies`.

    scale, margin: of Proxy-Anchor, both terms divided by C (Eq. 4). base: another method's loss instead, a name or a
    table of its name and arguments; losses without a closed-form curvature want newton_steps=0, and of a weighted one
    Newton's steps see the loss without its weights. The rest are arguments of the source. Ablations: `sample=False`;
    `tau` from 1e3 to 1e-7; `prior_lag`; Proxy-Anchor with M updates a batch: `sample=False, tau=0` with
    `newton_steps=M, damping=1e-3` or `newton_steps=0, gradient_steps=M`.

    With gradient accumulation q settles on each pass from where the step began, and the last one's is kept.

    The paper's training: Proxy-Anchor's, with tau 0.01 (CUB, Cars), 0.001 and no Newton steps (SOP, In-Shop).
    """
    source = VariationalProxies(
        classes, dim, per_class, tau=tau, newton_steps=newton_steps, gradient_steps=gradient_steps,
        gradient_lr=gradient_lr, sample=sample, floor=floor, halving=halving, damping=damping, prior_lag=prior_lag,
        init=init,
    )  # fmt: skip
    if base is None:
        first = Compare(ProxyAnchor(scale, margin, positive_norm="all"), source)
    else:
        if (scale, margin) != (32.0, 0.1):
            raise ValueError("scale, margin: they are Proxy-Anchor's own here; beside a base, expected in its table")
        first = base_objective(base, classes, dim)
        if first.source.classes is None:
            raise ValueError(
                f"base: got {base!r}, which has no proxies; expected a proxy method, such as 'proxy-anchor'"
            )
        if "images" in base_needs(base):
            raise ValueError(f"base: got {base!r}, whose proxies are made of the images; expected another method")
        if hasattr(first.source, "uncertainty"):
            raise ValueError(f"base: got {base!r}, whose proxies are Gaussian already; expected another method")
        _leaves_proxies_to_us(base, per_class=per_class, init=init, touched="all")
    if newton_steps and not hasattr(first.loss, "closed_forms"):
        raise ValueError(
            f"newton_steps: got {newton_steps}, but {type(first.loss).__name__} offers no closed-form curvature; "
            "expected 0, which trains mu and sigma by gradient"
        )
    terms = [term for term in (first.regulariser, None if source.settles else source.divergence) if term is not None]
    regulariser = terms[0] if len(terms) == 1 else Together(tuple(terms)) if terms else None
    return Compare(first.loss, source, first.weighting, regulariser, first.normalise)


def _leaves_proxies_to_us(base: Base, **ours: object) -> None:
    """Refuse a base that is told of proxies what vcpa's own are not: they would be put aside in silence."""
    name, told = named(base)
    for key, own in ours.items():
        if told.get(key, own) != own:
            raise ValueError(f"base: {name} got {key}={told[key]!r}, but its proxies are vcpa's; expected {key} there")
    if isinstance(told.get("base"), str | dict):
        _leaves_proxies_to_us(told["base"], **ours)


@dataclass(frozen=True)
class Together:
    """Several terms on the references as one."""

    terms: tuple[Callable[[References], Tensor], ...]

    def __call__(self, refs: References) -> Tensor:
        return torch.stack([term(refs) for term in self.terms]).sum()
