"""The three reductions that every proxy loss uses.

`mean_over_batch` sums over the batch for each class; `over_classes` sums over the classes for each query;
`cross_entropy` classifies each query among the classes.
"""

from proxymetric.core.similarity import Similarity
from proxymetric.ops.plain import Columns, similarities
from proxymetric.ops.problem import NONE, Arc, ArcOfQuery, Exponent, Line, Means, QueryArc, Reduced, Settings, log1p_exp
from proxymetric.ops.reductions import (
    IMPLS,
    Implementation,
    chosen,
    cross_entropy,
    current_settings,
    mean_over_batch,
    over_classes,
    using,
)

__all__ = [
    "IMPLS",
    "NONE",
    "Arc",
    "ArcOfQuery",
    "Columns",
    "Exponent",
    "Implementation",
    "Line",
    "Means",
    "QueryArc",
    "Reduced",
    "Settings",
    "Similarity",
    "chosen",
    "cross_entropy",
    "current_settings",
    "log1p_exp",
    "mean_over_batch",
    "over_classes",
    "similarities",
    "using",
]
