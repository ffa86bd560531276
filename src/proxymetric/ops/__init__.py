"""The two reductions that every proxy loss uses.

`mean_over_batch` sums over the batch for each class; `over_classes` sums over the classes for each query.
"""

from proxymetric.ops.plain import Columns, similarities
from proxymetric.ops.problem import NONE, Line, Means, Reduced, Settings, log1p_exp
from proxymetric.ops.reductions import (
    IMPLS,
    Implementation,
    chosen,
    current_settings,
    mean_over_batch,
    over_classes,
    using,
)
from proxymetric.ops.similarity import Similarity

__all__ = [
    "IMPLS",
    "NONE",
    "Columns",
    "Implementation",
    "Line",
    "Means",
    "Reduced",
    "Settings",
    "Similarity",
    "chosen",
    "current_settings",
    "log1p_exp",
    "mean_over_batch",
    "over_classes",
    "similarities",
    "using",
]
