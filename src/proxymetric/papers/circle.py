"""Circle loss (Sun, Cheng, Zhang, Zhang, Zheng, Wang & Wei, CVPR 2020)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import Circle
from proxymetric.papers.about import NO_PROXIES, about
from proxymetric.sources import InBatch


@about(
    paper="Sun et al. 2020, Circle Loss: A Unified Perspective of Pair Similarity Optimization",
    choose="a pair loss that weights each pair by its distance from the optimum",
    samples_per_class=4,
    surrogate_gradient=True,
    no_plan=NO_PROXIES,
)
def circle(classes: int, dim: int, *, scale: float = 80.0, margin: float = 0.4, normalise: str = "l2") -> Objective:
    """Pairs of the batch, each weighted by the distance of its similarity from the optimum. Loss: `losses.Circle`.

    Args:
        classes: number of training classes; the loss has no proxies and ignores it.
        dim: width of the embeddings; ignored as well.
        scale: > 0; gamma in the paper. 80 for fine-grained retrieval, 256 for faces.
        margin: m in the paper. 0.4 for fine-grained retrieval, 0.25 for faces.
        normalise: "l2" or "ball", a key of `NORMALISATIONS`.
    """
    return Compare(Circle(scale, margin), InBatch(), normalise=normalise)
