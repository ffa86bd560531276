"""The catalogue: one paper per file, one line per method below. To add yours: write the file, add the line."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from proxymetric.criterion import Criterion
from proxymetric.papers.about import About, Method
from proxymetric.papers.base import base_needs
from proxymetric.papers.ccp import ccp
from proxymetric.papers.contrastive import contrastive, margin_contrastive
from proxymetric.papers.margin_softmax import arcface, cosface, norm_softmax
from proxymetric.papers.moco import moco
from proxymetric.papers.mpa import mpa, mpa_ap, mpa_dw
from proxymetric.papers.multi_similarity import multi_similarity
from proxymetric.papers.proxy_anchor import proxy_anchor
from proxymetric.papers.proxy_isa import proxy_isa
from proxymetric.papers.proxy_nca import proxy_nca, proxy_nca_pp
from proxymetric.papers.soft_triple import soft_triple
from proxymetric.papers.triplet import triplet
from proxymetric.papers.vcpa import vcpa
from proxymetric.papers.vptsp import vptsp_g, vptsp_m
from proxymetric.papers.xbm import xbm

CATALOGUE: dict[str, Method] = {
    "proxy-anchor": proxy_anchor,
    "proxy-nca": proxy_nca,
    "proxy-nca++": proxy_nca_pp,
    "norm-softmax": norm_softmax,
    "cosface": cosface,
    "arcface": arcface,
    "soft-triple": soft_triple,
    "mpa": mpa,
    "mpa-dw": mpa_dw,
    "mpa-ap": mpa_ap,
    "contrastive": contrastive,
    "margin-contrastive": margin_contrastive,
    "triplet": triplet,
    "multi-similarity": multi_similarity,
    "proxy-isa": proxy_isa,
    "vcpa": vcpa,
    "vptsp-m": vptsp_m,
    "vptsp-g": vptsp_g,
    "ccp": ccp,
    "xbm": xbm,
    "moco": moco,
}

__all__ = ["CATALOGUE", "About", "Method", "lookup", "method", "methods", "needs", "options"]


def methods() -> list[str]:
    """The names that `method` knows.

    >>> "mpa-ap" in methods()
    True
    """
    return list(CATALOGUE)


def lookup(name: str) -> Method:
    """The catalogue's row of that name, or a sentence with the nearest right one."""
    if name not in CATALOGUE:
        near = difflib.get_close_matches(str(name).lower().replace("_", "-"), CATALOGUE, 1, 0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(CATALOGUE)}"
        raise ValueError(f"method: there is no {name!r}; {hint}")
    return CATALOGUE[name]


def options(name: str) -> Mapping[str, inspect.Parameter]:
    """What a method can be told beyond classes and dim, with defaults."""
    return {
        key: value for key, value in inspect.signature(lookup(name)).parameters.items() if key not in ("classes", "dim")
    }


def needs(name: str, arguments: Mapping[str, Any]) -> frozenset[str]:
    """What a method told these arguments needs beyond embeddings and labels: its own needs and its base's.

    >>> sorted(needs("ccp", {"base": "proxy-isa"}))
    ['encoder', 'epochs', 'pool', 'validation']
    """
    own = frozenset(lookup(name).about.needs)
    known = options(name)
    base = arguments.get("base", known["base"].default) if "base" in known else None
    return own | base_needs(base) if isinstance(base, str | dict) else own  # multi-similarity has a number there


def method(name: str, *, classes: int, dim: int, steps_per_epoch: int | None = None, **arguments: object) -> Criterion:
    """A method of the catalogue as a criterion for a training loop of your own.

    name: one of `methods()`. classes: number of training classes. dim: width of the embeddings. steps_per_epoch: for
    methods with a schedule that counts in epochs. Any other argument is the method's own; an unknown one is refused.

    >>> criterion = method("proxy-anchor", classes=100, dim=64, margin=0.2)
    >>> [group["name"] for group in criterion.param_groups(lr=1e-2)]
    ['proxies']
    """
    build = lookup(name)
    known = options(name)
    for key in arguments:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1, 0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(known)}"
            raise ValueError(f"{key}: {name} takes no such argument; {hint}")
    return Criterion(
        build(classes, dim, **arguments), needs=needs(name, arguments), steps_per_epoch=steps_per_epoch, name=name
    )
