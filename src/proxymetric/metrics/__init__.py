"""Retrieval metrics of embeddings: R@K, P@K, P@R, MAP@R, MAP@K, AP@K and nDCG@K; clustering and geometry of classes."""

from proxymetric.metrics.breakdown import Breakdown, breakdown
from proxymetric.metrics.clustering import kmeans, mutual_information, nmi
from proxymetric.metrics.geometry import covering_radius, inter_class_distance
from proxymetric.metrics.intervals import Estimate, estimate, interval
from proxymetric.metrics.names import names
from proxymetric.metrics.ranking import Ranking, left_out, rank
from proxymetric.metrics.scoring import evaluate, per_query, scores
from proxymetric.metrics.verification import OperatingPoint, Roc, Verification, verification

__all__ = [
    "Breakdown",
    "Estimate",
    "OperatingPoint",
    "Ranking",
    "Roc",
    "Verification",
    "breakdown",
    "covering_radius",
    "estimate",
    "evaluate",
    "inter_class_distance",
    "interval",
    "kmeans",
    "left_out",
    "mutual_information",
    "names",
    "nmi",
    "per_query",
    "rank",
    "scores",
    "verification",
]
