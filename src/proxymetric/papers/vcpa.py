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
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.base import Base, base_needs, base_objective, split_base
from proxymetric.sources import VariationalProxies


@about(
    paper="Kim et al. 2022, Variational Continual Proxy-Anchor for Deep Metric Learning",
    choose="with few images (MAP@R), or for the certainty of each class; else at most level with proxy-anchor",
    no_plan="has two vectors for each proxy and fits them in Newton steps; it needs more than proxy-anchor",
)
@assembled(ProxyAnchor, VariationalProxies, without=("positive_norm",))
def vcpa(build: Builder, *, base: Base | None = None) -> Objective:
    """Proxy-Anchor against Gaussian proxies that are fitted to each batch. Source: `sources.VariationalProxies`.

    With gradient accumulation, q is fitted in each forward pass and always starts from the q of the last commit; the q
    of the last pass is kept.

    Ablations of the paper: `sample=False`; `tau` from 1e3 to 1e-7; `prior_lag`; Proxy-Anchor with M updates per batch:
    `sample=False, tau=0` with `newton_steps=M, damping=1e-3` or with `newton_steps=0, gradient_steps=M`.

    The paper's training: that of Proxy-Anchor, with tau 0.01 (CUB, Cars), 0.001 and no Newton steps (SOP, In-Shop).

    Args:
        scale: > 0; that of Proxy-Anchor.
        margin: that of Proxy-Anchor. Both terms of the loss are divided by C (Eq. 4).
        base: a method whose loss replaces Proxy-Anchor, a name or a table of its name and arguments. A loss without
            closed-form curvature needs newton_steps=0. Newton steps use a weighted loss without its weights.
    """
    loss, source = build(ProxyAnchor, positive_norm="all"), build(VariationalProxies)
    if base is None:
        compare = Compare(loss, source)
    else:
        if loss != ProxyAnchor(positive_norm="all"):
            raise ValueError(
                f"scale, margin: got {loss.scale}, {loss.margin} with a base, expected them in the table of the base"
            )
        compare = base_objective(base, build.classes, build.dim)
        if compare.source.classes is None:
            raise ValueError(
                f"base: got {base!r}, which has no proxies; expected a proxy method, such as 'proxy-anchor'"
            )
        if "images" in base_needs(base):
            raise ValueError(f"base: got {base!r}, whose proxies are made from images; expected another method")
        if hasattr(compare.source, "uncertainty"):
            raise ValueError(f"base: got {base!r}, whose proxies are Gaussian already; expected another method")
        _check_sets_no_proxies(base, per_class=source.per_class, init=build.numbers["init"], touched="all")
    if (steps := source.newton_steps) and not hasattr(compare.loss, "closed_forms"):
        raise ValueError(
            f"newton_steps: got {steps}, but {type(compare.loss).__name__} offers no closed-form curvature; "
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
