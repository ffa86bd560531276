"""SoftTriple (Qian et al., ICCV 2019)."""

from __future__ import annotations

from proxymetric.core.pieces import Objective
from proxymetric.losses import SoftTriple, Spread
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.papers.groups import compare_groups, of_class
from proxymetric.sources import proxies


@about(
    paper="Qian et al. 2019, SoftTriple Loss: Deep Metric Learning Without Triplet Sampling",
    choose="when images of a class look very different",
    sums_over="classes",
    grouped=True,
)
@assembled(SoftTriple, of_class, Spread, proxies, per_class=10, init="kaiming-uniform")
def soft_triple(build: Builder) -> Objective:
    """A softmax over classes of K centres, which a regulariser draws together. Losses: `SoftTriple`, `Spread`.

    The defaults of (scale, gamma, tau, margin) are the paper's for CUB. CCP's study has (17.69, 19.18, 0.0669, 0.3588)
    on Cars and (100, 47.9, 0.2, 0.3145) on SOP.

    Args:
        scale: > 0; lambda in the paper.
        per_class: K centres per class; 10 on CUB and Cars.
        init: initialisation of the centres, a name of `sources.INITIALISATIONS`; "kaiming-uniform" in the released
            code.
    """
    return compare_groups(build, SoftTriple)
