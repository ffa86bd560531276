"""The multi-proxies anchor family (Saeki, Kawahara & Aman, 2023).

The paper does not state a scale, an initialisation or a weight decay. Here the scale is 32, as in Proxy-Anchor, and the
initialisation is that of SoftTriple, whose proxies the family uses. The paper's K is 10 on CUB and Cars, 2 on SOP.
"""

from __future__ import annotations

from proxymetric.core.pieces import Objective
from proxymetric.losses import MPA, MPAAP, MPADW, Spread
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.groups import compare_groups, of_class
from proxymetric.sources import proxies

PAPER = "Saeki et al. 2023, Multi Proxy Anchor Family Loss for Several Types of Gradients"


@about(
    paper=PAPER,
    choose="when images of a class look very different; on CUB here level with proxy-anchor in R@1, below in MAP@R",
    sums_over="batch",
    grouped=True,
)
@assembled(MPA, of_class, Spread, proxies, per_class=10, init="kaiming-uniform")
def mpa(build: Builder) -> Objective:
    """Proxy-Anchor on classes of K proxies, summed for each class. Losses: `MPA`, `Spread`.

    Args:
        per_class: K proxies per class; 10 on CUB and Cars, 2 on SOP.
    """
    return compare_groups(build, MPA)


@about(
    paper=PAPER,
    choose="over mpa for small batches, according to its paper: a sample's loss does not depend on the others",
    sums_over="classes",
    grouped=True,
)
@assembled(MPADW, of_class, Spread, proxies, per_class=10, init="kaiming-uniform")
def mpa_dw(build: Builder) -> Objective:
    """MPA with the sums taken for each sample instead of each class. Losses: `MPADW`, `Spread`.

    Args:
        per_class: K proxies per class; 10 on CUB and Cars, 2 on SOP.
    """
    return compare_groups(build, MPADW)


@about(
    paper=PAPER,
    choose="over mpa on Cars in its paper; here level with it",
    sums_over="classes",
    grouped=True,
)
@assembled(MPAAP, of_class, Spread, proxies, per_class=10, init="kaiming-uniform")
def mpa_ap(build: Builder) -> Objective:
    """A sum over the sample's own class and all others in one logarithm. Losses: `MPAAP`, `Spread`.

    Args:
        per_class: K proxies per class; 10 on CUB and Cars, 2 on SOP.
    """
    return compare_groups(build, MPAAP)
