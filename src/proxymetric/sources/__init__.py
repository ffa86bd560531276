"""Sources of references: what queries are compared with, and what is remembered of it.

To add a source, write its file in this folder and add its line below.
"""

from __future__ import annotations

from proxymetric.core.pieces import Source
from proxymetric.sources.accumulators import ACCUMULATORS, accumulator
from proxymetric.sources.in_batch import InBatch as InBatch
from proxymetric.sources.learned_proxies import INITIALISATIONS
from proxymetric.sources.learned_proxies import LearnedProxies as LearnedProxies
from proxymetric.sources.memory import Memory as Memory
from proxymetric.sources.queue import Queue as Queue
from proxymetric.sources.row_proxies import RowProxies as RowProxies
from proxymetric.sources.row_table import RowTable as RowTable
from proxymetric.sources.semantic_proxies import SemanticProxies as SemanticProxies
from proxymetric.sources.variational_proxies import VariationalProxies as VariationalProxies

__all__ = ["ACCUMULATORS", "INITIALISATIONS", "accumulator", "proxies"]
__all__ += [name for name, value in globals().items() if isinstance(value, type) and value is not Source]


def proxies(classes: int, dim: int, per_class: int = 1, init: str = "kaiming", touched: str | float = "all") -> Source:
    """The proxies of a method: compare with those of all classes, or only with those of some.

    touched: "all" gives `LearnedProxies`, stepped by the run's optimiser; "batch" gives `RowProxies`, where a step
    reads and moves only the rows of the classes in the batch, so that its cost does not grow with their number; a
    number in (0, 1) adds so large a share of the other classes, drawn anew at each step. Both are another loss than
    "all": pushes from the classes left out are missing.
    """
    if touched == "all":
        return LearnedProxies(classes, dim, per_class, init)
    if touched == "batch":
        return RowProxies(classes, dim, per_class, init)
    if isinstance(touched, int | float) and not isinstance(touched, bool) and 0 < touched < 1:
        return RowProxies(classes, dim, per_class, init, float(touched))
    raise ValueError(f"touched: got {touched!r}, expected 'all', 'batch' or a share of the other classes in (0, 1)")
