"""Retrieval metrics of embeddings: R@K, P@K, P@R, MAP@R, AP, MRR and nDCG@K; clusters and geometry of classes."""

from proxymetric.metrics.agreement import adjusted_mutual_information, mutual_information
from proxymetric.metrics.breakdown import Breakdown, breakdown
from proxymetric.metrics.clustering import ami, kmeans, nmi
from proxymetric.metrics.fewer_classes import FewerClasses, fewer_classes
from proxymetric.metrics.geometry import covering_radius, inter_class_distance
from proxymetric.metrics.intervals import Estimate, estimate, interval
from proxymetric.metrics.names import names
from proxymetric.metrics.ranking import Ranking, left_out, rank
from proxymetric.metrics.scoring import evaluate, per_query, scores
from proxymetric.metrics.verification import OperatingPoint, Roc, Verification, verification

__all__ = [
    "Breakdown",
    "Estimate",
    "FewerClasses",
    "OperatingPoint",
    "Ranking",
    "Roc",
    "Verification",
    "adjusted_mutual_information",
    "ami",
    "breakdown",
    "covering_radius",
    "estimate",
    "evaluate",
    "fewer_classes",
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
