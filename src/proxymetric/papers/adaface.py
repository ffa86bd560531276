"""AdaFace (Kim, Jain & Liu, CVPR 2022)."""

from __future__ import annotations

from proxymetric.core.pieces import Compare, Objective
from proxymetric.losses import AdaFace
from proxymetric.papers.about import about
from proxymetric.papers.assembled import Builder, assembled
from proxymetric.sources import proxies
from proxymetric.weightings import EmbeddingLengths


@about(
    paper="Kim et al. 2022, AdaFace: Quality Adaptive Margin for Face Recognition",
    choose="faces, if the quality of images varies",
    sums_over="classes",
    surrogate_gradient=True,
)
@assembled(AdaFace, EmbeddingLengths, proxies, without=("per_class",))
def adaface(build: Builder) -> Objective:
    """Softmax cross entropy with a margin by the length of the embedding. Loss: `losses.AdaFace`.

    Mean and deviation of the lengths are kept by `weightings.EmbeddingLengths`. On a GPU, small problems run without
    the fused kernel of the softmax family: the margins differ from query to query.
    """
    return Compare(build(AdaFace), build(proxies), build(EmbeddingLengths))
