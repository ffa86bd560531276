"""Pictures of a run: one self-contained HTML page, and the parts it is made of."""

from proxymetric.plots.certainty import Certainty, ClassSamples
from proxymetric.plots.confusion import ConfusedPair
from proxymetric.plots.gallery import GalleryHit, GalleryRow, gallery_rows, pick_queries
from proxymetric.plots.projections import Stage, draw_projections
from proxymetric.plots.report import write_report
from proxymetric.plots.scatter import Scatter, tsne

__all__ = [
    "Certainty",
    "ClassSamples",
    "ConfusedPair",
    "GalleryHit",
    "GalleryRow",
    "Scatter",
    "Stage",
    "draw_projections",
    "gallery_rows",
    "pick_queries",
    "tsne",
    "write_report",
]
