"""VPTSP: semantic proxies from visual prompts (Ren, Chen, Wang & Hua, ICLR 2024).

The text of the paper and the code that made its tables differ. The text appends the class prompts to the prompts of the
encoder, and divides the first sum of the loss by the number of classes present. The code uses the class prompts alone
and divides by the number of all classes. The defaults here are those of the code.
"""

from __future__ import annotations

from proxymetric.arguments.signatures import one_of
from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.sources import SemanticProxies

PAPER = (
    "Ren et al. 2024, Learning Semantic Proxies from Visual Prompts for Parameter-Efficient Fine-Tuning in Deep "
    "Metric Learning"
)
NO_PLAN = "makes its proxies from images and prompts"
MOVING_AVERAGES = ("ema", "ema-mean")
LEARNED_CELLS = ("gru", "gru-tanh", "rnn", "lstm", "attention")


@about(
    paper=PAPER,
    choose="for prompts in a frozen vision transformer; here not above free proxies at 160 pixels",
    needs=("encoder", "images"),
    samples_per_class=2,
    no_plan=NO_PLAN,
)
@assembled(ProxyAnchor, SemanticProxies, positive_norm="all", accumulate="ema")
def vptsp_m(build: Builder) -> Objective:
    """Proxy-Anchor against moving averages of features made with class prompts. Source: `sources.SemanticProxies`.

    The settings of the paper's text are `positive_norm="present", class_prompts="with_shared"`. `vptsp_g` describes
    the paper's training and its numbers for each benchmark.

    Args:
        scale: > 0; that of Proxy-Anchor.
        margin: that of Proxy-Anchor.
        positive_norm: what the sum over positives is divided by: "all" classes (the code) or those "present" (Eq. 2).
        accumulate: "ema" adds the samples of a class one by one, "ema-mean" adds their mean (the released code).
    """
    _check_accumulate(build.numbers["accumulate"], MOVING_AVERAGES, other_method="vptsp-g")
    return Compare(build(ProxyAnchor), build(SemanticProxies))


@about(
    paper=PAPER,
    choose="the paper's best; on CUB and Cars here below free proxies in MAP@R",
    needs=("encoder", "images"),
    samples_per_class=2,
    no_plan=NO_PLAN,
)
@assembled(ProxyAnchor, SemanticProxies, without=("lam",), positive_norm="all")
def vptsp_g(build: Builder) -> Objective:
    """Proxy-Anchor against a GRU's state over features made with class prompts. Source: `sources.SemanticProxies`.

    The settings of the paper's text are `positive_norm="present", class_prompts="with_shared"`.

    The paper's training (ViT-S/16, CUB): frozen backbone with 10 prompts in each block and all biases trained, SGD
    5e-3, the free proxies 0.1, no warm-up, no clip, 64 images of 32 classes. a: CUB 0.5; Cars 0.7 with 50 prompts in 8
    blocks, step 2; SOP 0.2 with 5 prompts; In-Shop 0.2 with 80 prompts (SOP and In-Shop with dropout 0.1).

    Args:
        scale: > 0; that of Proxy-Anchor.
        margin: that of Proxy-Anchor.
        positive_norm: what the sum over positives is divided by: "all" classes (the code) or those "present" (Eq. 2).
        accumulate: the cell, "gru"; "gru-tanh", "rnn", "lstm" or "attention" for Table 7.
    """
    _check_accumulate(build.numbers["accumulate"], LEARNED_CELLS, other_method="vptsp-m")
    return Compare(build(ProxyAnchor), build(SemanticProxies))


def _check_accumulate(accumulate: str, cells: tuple[str, ...], other_method: str) -> None:
    """Raise an error for a cell that the method does not have; name the other method if it has the cell."""
    if accumulate not in cells and accumulate in (*MOVING_AVERAGES, *LEARNED_CELLS):
        raise ValueError(
            f"accumulate: got {accumulate!r}, a cell of {other_method}; expected one of {', '.join(cells)}"
        )
    one_of("accumulate", accumulate, cells)
