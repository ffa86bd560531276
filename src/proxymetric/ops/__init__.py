"""The two reductions every proxy loss is written on: over the batch for each class, over the classes for each query."""

from proxymetric.ops.reductions import NONE, Line, Reduced, log1p_exp, over_batch, over_classes
from proxymetric.ops.similarity import Columns, Similarity, similarities

__all__ = [
    "NONE",
    "Columns",
    "Line",
    "Reduced",
    "Similarity",
    "log1p_exp",
    "over_batch",
    "over_classes",
    "similarities",
]
