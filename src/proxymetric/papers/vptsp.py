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
def vptsp_m(
    classes: int,
    dim: int,
    *,
    scale: float = 32.0,
    margin: float = 0.1,
    positive_norm: str = "all",
    accumulate: str = "ema",
    lam: float = 0.8,
    a: float = 0.5,
    prompts: int = 3,
    depth: int | None = None,
    step: int = 0,
    class_prompts: str = "only",
    normalise_every: str = "step",
    normalise_free: bool = False,
    dropout: float = 0.0,
    source: str = "prompts",
) -> Objective:
    """Proxy-Anchor against moving averages of features made with class prompts. Source: `sources.SemanticProxies`.

    The settings of the paper's text are `positive_norm="present", class_prompts="with_shared"`. `vptsp_g` describes
    the paper's training and its numbers for each benchmark.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; that of Proxy-Anchor, 32 by default.
        margin: that of Proxy-Anchor, 0.1 by default.
        positive_norm: what the sum over positives is divided by: "all" classes (the code) or those "present" (Eq. 2).
        accumulate: "ema" adds the samples of a class one by one, "ema-mean" adds their mean (the released code).
        lam: weight of the past in the moving average, in [0, 1]; 0.8 in the released code.
        a: in [0, 1]; share of the free proxies (Eq. 8).
        prompts: m prompts for each class in the first block.
        depth: how many of the first blocks have class prompts; None: all.
        step: each block has this many prompts fewer than the block before it.
        class_prompts: "only": without the prompts of the encoder (the code); "with_shared": with them (the text).
        normalise_every: "step" (Eq. 7) or "batch" (the released code).
        normalise_free: True normalises the free proxies in Eq. 8, which makes `a` the true ratio of the mixture.
        dropout: in [0, 1), on the accumulated state.
        source: "prompts"; "sample", "encoder" or "fixed_encoder", with a=0, for Table 5.
    """
    _check_accumulate(accumulate, MOVING_AVERAGES, other_method="vptsp-g")
    proxies = SemanticProxies(
        classes,
        dim,
        accumulate=accumulate,
        lam=lam,
        a=a,
        prompts=prompts,
        depth=depth,
        step=step,
        class_prompts=class_prompts,
        normalise_every=normalise_every,
        normalise_free=normalise_free,
        dropout=dropout,
        source=source,
    )
    return Compare(ProxyAnchor(scale, margin, positive_norm), proxies)


@about(
    paper=PAPER,
    choose="the paper's best; on CUB and Cars here below free proxies in MAP@R",
    needs=("encoder", "images"),
    samples_per_class=2,
    no_plan=NO_PLAN,
)
def vptsp_g(
    classes: int,
    dim: int,
    *,
    scale: float = 32.0,
    margin: float = 0.1,
    positive_norm: str = "all",
    accumulate: str = "gru",
    a: float = 0.5,
    prompts: int = 3,
    depth: int | None = None,
    step: int = 0,
    class_prompts: str = "only",
    normalise_every: str = "step",
    normalise_free: bool = False,
    dropout: float = 0.0,
    source: str = "prompts",
) -> Objective:
    """Proxy-Anchor against a GRU's state over features made with class prompts. Source: `sources.SemanticProxies`.

    The settings of the paper's text are `positive_norm="present", class_prompts="with_shared"`.

    The paper's training (ViT-S/16, CUB): frozen backbone with 10 prompts in each block and all biases trained, SGD
    5e-3, the free proxies 0.1, no warm-up, no clip, 64 images of 32 classes. a: CUB 0.5; Cars 0.7 with 50 prompts in 8
    blocks, step 2; SOP 0.2 with 5 prompts; In-Shop 0.2 with 80 prompts (SOP and In-Shop with dropout 0.1).

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; that of Proxy-Anchor, 32 by default.
        margin: that of Proxy-Anchor, 0.1 by default.
        positive_norm: what the sum over positives is divided by: "all" classes (the code) or those "present" (Eq. 2).
        accumulate: the cell, "gru"; "gru-tanh", "rnn", "lstm" or "attention" for Table 7.
        a: in [0, 1]; share of the free proxies (Eq. 8).
        prompts: m prompts for each class in the first block.
        depth: how many of the first blocks have class prompts; None: all.
        step: each block has this many prompts fewer than the block before it.
        class_prompts: "only": without the prompts of the encoder (the code); "with_shared": with them (the text).
        normalise_every: "step" (Eq. 7) or "batch" (the released code).
        normalise_free: True normalises the free proxies in Eq. 8, which makes `a` the true ratio of the mixture.
        dropout: in [0, 1), on the accumulated state.
        source: "prompts"; "sample", "encoder" or "fixed_encoder", with a=0, for Table 5.
    """
    _check_accumulate(accumulate, LEARNED_CELLS, other_method="vptsp-m")
    proxies = SemanticProxies(
        classes,
        dim,
        accumulate=accumulate,
        a=a,
        prompts=prompts,
        depth=depth,
        step=step,
        class_prompts=class_prompts,
        normalise_every=normalise_every,
        normalise_free=normalise_free,
        dropout=dropout,
        source=source,
    )
    return Compare(ProxyAnchor(scale, margin, positive_norm), proxies)


def _check_accumulate(accumulate: str, cells: tuple[str, ...], other_method: str) -> None:
    """Raise an error for a cell that the method does not have; name the other method if it has the cell."""
    if accumulate not in cells and accumulate in (*MOVING_AVERAGES, *LEARNED_CELLS):
        raise ValueError(
            f"accumulate: got {accumulate!r}, a cell of {other_method}; expected one of {', '.join(cells)}"
        )
    one_of("accumulate", accumulate, cells)
