"""AdaFace (Kim, Jain & Liu, CVPR 2022)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import AdaFace
from proxymetric.papers.about import about
from proxymetric.sources import proxies
from proxymetric.weightings import EmbeddingLengths


@about(
    paper="Kim et al. 2022, AdaFace: Quality Adaptive Margin for Face Recognition",
    choose="faces, if the quality of images varies",
    sums_over="classes",
    surrogate_gradient=True,
)
def adaface(
    classes: int,
    dim: int,
    *,
    scale: float = 64.0,
    margin: float = 0.4,
    h: float = 0.333,
    rate: float = 0.01,
    init: str = "kaiming",
    touched: str | float = "all",
) -> Objective:
    """Softmax cross entropy with a margin by the length of the embedding. Loss: `losses.AdaFace`.

    Mean and deviation of the lengths are kept by `weightings.EmbeddingLengths`. On a GPU, small problems run without
    the fused kernel of the softmax family: the margins differ from query to query.

    Args:
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        scale: > 0; 64 in the paper.
        margin: in [0, 1]; 0.4 in the paper.
        h: > 0; how fast the margin changes with the length; 0.333 in the paper.
        rate: in (0, 1]; share of a batch in the running mean and deviation of lengths; 0.01 in the paper.
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: which proxies a step compares with and moves: "all", "batch" or a share (`sources.proxies`).
    """
    return Compare(AdaFace(scale, margin), proxies(classes, dim, 1, init, touched), EmbeddingLengths(classes, h, rate))
