"""Figures of a run: a self-contained HTML report and its parts, and the figure of the CCP paper."""

from proxymetric.plots.ccp_stages import CcpStage, draw_ccp_stages
from proxymetric.plots.certainty import Certainty, ClassSamples
from proxymetric.plots.confusion import ConfusedPair
from proxymetric.plots.gallery import GalleryHit, GalleryRow, gallery_rows, pick_queries
from proxymetric.plots.report import write_report
from proxymetric.plots.scatter import Scatter, tsne
from proxymetric.plots.small_vectors import small_vectors_figure, small_vectors_svg, write_small_vectors

__all__ = [
    "CcpStage",
    "Certainty",
    "ClassSamples",
    "ConfusedPair",
    "GalleryHit",
    "GalleryRow",
    "Scatter",
    "draw_ccp_stages",
    "gallery_rows",
    "pick_queries",
    "small_vectors_figure",
    "small_vectors_svg",
    "tsne",
    "write_report",
    "write_small_vectors",
]
