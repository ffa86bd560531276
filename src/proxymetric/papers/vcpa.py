"""VCPA: variational continual proxy-anchor (Kim, Guerrero, Pham & Pavlovic, AISTATS 2022).

The paper does not state how mu and sigma are trained on SOP and In-Shop, where it takes no Newton steps. Here they are
ordinary parameters (mu, log sigma) that train at the learning rate of proxies. With one gradient step per batch from q
itself, the KL divergence has a gradient of 0, unless its prior is an older q (`prior_lag`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from proxymetric.core.pieces import Compare, Objective, References
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.about import about
from proxymetric.papers.base import Base, base_needs, base_objective, split_base
from proxymetric.sources import VariationalProxies


@about(
    paper="Kim et al. 2022, Variational Continual Proxy-Anchor for Deep Metric Learning",
    choose="with few images (MAP@R), or for the certainty of each class; else at most level with proxy-anchor",
    no_plan="has two vectors for each proxy and fits them in Newton steps; it needs more than proxy-anchor",
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
    """Proxy-Anchor against Gaussian proxies that are fitted to each batch. Source: `sources.VariationalProxies`.

    With gradient accumulation, q is fitted in each forward pass and always starts from the q of the last commit; the q
    of the last pass is kept.

    Ablations of the paper: `sample=False`; `tau` from 1e3 to 1e-7; `prior_lag`; Proxy-Anchor with M updates per batch:
    `sample=False, tau=0` with `newton_steps=M, damping=1e-3` or with `newton_steps=0, gradient_steps=M`.

    The paper's training: that of Proxy-Anchor, with tau 0.01 (CUB, Cars), 0.001 and no Newton steps (SOP, In-Shop).

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; that of Proxy-Anchor, 32 by default.
        margin: that of Proxy-Anchor, 0.1 by default. Both terms of the loss are divided by C (Eq. 4).
        tau: >= 0; weight of the KL divergence; 0.01 on CUB and Cars, 0.001 on SOP and In-Shop.
        newton_steps: Newton steps on q per batch; 10 in the paper (CUB, Cars). 0 trains mu and sigma by gradient.
        gradient_steps: steps of Adam on q per batch, instead of Newton steps.
        gradient_lr: > 0; the learning rate of the Adam steps.
        sample: whether the proxies are drawn from q; False compares with mu.
        floor: > 0; the smallest sigma.
        halving: whether each Newton step is limited so that sigma keeps at least half its value.
        damping: >= 0; added to the curvature in a Newton step.
        prior_lag: the prior of the KL divergence is the q of this many batches ago; 1 in the paper.
        per_class: K proxies per class.
        init: initialisation of mu, "zero" or a name of `sources.INITIALISATIONS`; None: "zero", or "kaiming" without
            sampling.
        base: a method whose loss replaces Proxy-Anchor, a name or a table of its name and arguments. A loss without
            closed-form curvature needs newton_steps=0. Newton steps use a weighted loss without its weights.
    """
    source = VariationalProxies(
        classes,
        dim,
        per_class,
        tau=tau,
        newton_steps=newton_steps,
        gradient_steps=gradient_steps,
        gradient_lr=gradient_lr,
        sample=sample,
        floor=floor,
        halving=halving,
        damping=damping,
        prior_lag=prior_lag,
        init=init,
    )
    if base is None:
        compare = Compare(ProxyAnchor(scale, margin, positive_norm="all"), source)
    else:
        if (scale, margin) != (32.0, 0.1):
            raise ValueError(
                f"scale, margin: got {scale}, {margin} with a base, expected them in the table of the base"
            )
        compare = base_objective(base, classes, dim)
        if compare.source.classes is None:
            raise ValueError(
                f"base: got {base!r}, which has no proxies; expected a proxy method, such as 'proxy-anchor'"
            )
        if "images" in base_needs(base):
            raise ValueError(f"base: got {base!r}, whose proxies are made from images; expected another method")
        if hasattr(compare.source, "uncertainty"):
            raise ValueError(f"base: got {base!r}, whose proxies are Gaussian already; expected another method")
        _check_sets_no_proxies(base, per_class=per_class, init=init, touched="all")
    if newton_steps and not hasattr(compare.loss, "closed_forms"):
        raise ValueError(
            f"newton_steps: got {newton_steps}, but {type(compare.loss).__name__} offers no closed-form curvature; "
            "expected 0, which trains mu and sigma by gradient"
        )
    divergence = None if source.settles else source.divergence
    terms = [term for term in (compare.regulariser, divergence) if term is not None]
    regulariser = terms[0] if len(terms) == 1 else TermSum(tuple(terms)) if terms else None
    return Compare(compare.loss, source, compare.weighting, regulariser, compare.normalise)


def _check_sets_no_proxies(base: Base, **vcpa_arguments: object) -> None:
    """Raise an error for a base whose table describes other proxies than those of vcpa, which would be ignored."""
    name, arguments = split_base(base)
    for key, value in vcpa_arguments.items():
        if arguments.get(key, value) != value:
            raise ValueError(
                f"base: got {key}={arguments[key]!r} for {name}, whose proxies are replaced by vcpa's; "
                f"expected {key} as an argument of vcpa"
            )
    if isinstance(arguments.get("base"), str | dict):
        _check_sets_no_proxies(arguments["base"], **vcpa_arguments)


@dataclass(frozen=True)
class TermSum:
    """The sum of several terms on the references.

    Args:
        terms: functions of the references.
    """

    terms: tuple[Callable[[References], Tensor], ...]

    def __call__(self, refs: References) -> Tensor:
        return torch.stack([term(refs) for term in self.terms]).sum()
