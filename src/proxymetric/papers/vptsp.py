"""VPTSP: semantic proxies from visual prompts (Ren, Chen, Wang & Hua, ICLR 2024).

The text appends the class prompts to the encoder's own and divides the first sum of the loss by the classes present;
the code that made its tables uses the class prompts alone and divides by all classes, and so does this by default.
"""

from __future__ import annotations

from collections.abc import Sequence

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import ProxyAnchor
from proxymetric.papers.about import about
from proxymetric.sources import SemanticProxies

PAPER = (
    "Ren et al. 2024, Learning Semantic Proxies from Visual Prompts for Parameter-Efficient Fine-Tuning in Deep "
    "Metric Learning"
)
MOVING = ("ema", "ema-mean")
LEARNED = ("gru", "gru-tanh", "rnn", "lstm", "attention")


@about(
    paper=PAPER,
    choose="with prompts in a frozen vision transformer: level with free proxies or above; wants a fast proxy_lr",
    needs=("encoder", "images"),
    samples_per_class=2,
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
    """Proxy-Anchor against moving averages of what class prompts see. Source: `sources.SemanticProxies`.

    scale, margin, positive_norm: of Proxy-Anchor ("present": Eq. 2). accumulate: "ema" takes the samples of a class one
    after the other, "ema-mean" their mean at once, as released. normalise_free: True makes `a` a true ratio. The rest
    are arguments of the source. The text's reading: `positive_norm="present", class_prompts="with_shared"`.

    The paper's training, and its numbers for each benchmark: see `vptsp_g`.
    """
    _one_of(accumulate, MOVING, "vptsp-g")
    proxies = SemanticProxies(
        classes, dim, accumulate=accumulate, lam=lam, a=a, prompts=prompts, depth=depth, step=step,
        class_prompts=class_prompts, normalise_every=normalise_every, normalise_free=normalise_free, dropout=dropout,
        source=source,
    )  # fmt: skip
    return Compare(ProxyAnchor(scale, margin, positive_norm), proxies)


@about(
    paper=PAPER,
    choose="the paper's best; here its first hits are no better than vptsp-m's, whose memory has nothing to learn",
    needs=("encoder", "images"),
    samples_per_class=2,
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
    """Proxy-Anchor against what a GRU keeps of what class prompts see. Source: `sources.SemanticProxies`.

    scale, margin, positive_norm: of Proxy-Anchor ("present": Eq. 2). accumulate: "gru"; "gru-tanh", "rnn", "lstm" or
    "attention" for Table 7. source: "prompts"; "sample", "encoder" or "fixed_encoder", with a=0, for Table 5.
    normalise_free: True makes `a` a true ratio. The rest are arguments of the source; `normalise_every="batch"` is the
    released code's. The text's reading: `positive_norm="present", class_prompts="with_shared"`.

    The paper's training (ViT-S/16, CUB): frozen backbone with 10 prompts a block and all biases trained, SGD 5e-3, the
    free proxies 0.1, no warm-up, no clip, 64 images of 32 classes. a: CUB 0.5, Cars 0.7 with 50 prompts in 8 blocks,
    step 2, SOP 0.2 with 5, In-Shop 0.2 with 80 (both dropout 0.1).
    """
    _one_of(accumulate, LEARNED, "vptsp-m")
    proxies = SemanticProxies(
        classes, dim, accumulate=accumulate, a=a, prompts=prompts, depth=depth, step=step,
        class_prompts=class_prompts, normalise_every=normalise_every, normalise_free=normalise_free, dropout=dropout,
        source=source,
    )  # fmt: skip
    return Compare(ProxyAnchor(scale, margin, positive_norm), proxies)


def _one_of(accumulate: str, known: Sequence[str], other: str) -> None:
    if accumulate not in known:
        hint = f"; {other} has that" if accumulate in (*MOVING, *LEARNED) else ""
        raise ValueError(f"accumulate: got {accumulate!r}, expected one of {', '.join(known)}{hint}")
