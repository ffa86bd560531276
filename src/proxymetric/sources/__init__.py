"""Sources: they make the references that queries are compared with, and own the memory that these come from.

To add a source, write its file in this folder and add its line below.
"""

from __future__ import annotations

from proxymetric.core.pieces import Source
from proxymetric.core.row_table import RowTable as RowTable
from proxymetric.sources.accumulators import ACCUMULATORS, accumulator
from proxymetric.sources.in_batch import InBatch as InBatch
from proxymetric.sources.learned_proxies import INITIALISATIONS
from proxymetric.sources.learned_proxies import LearnedProxies as LearnedProxies
from proxymetric.sources.memory import Memory as Memory
from proxymetric.sources.queue import Queue as Queue
from proxymetric.sources.row_proxies import RowProxies as RowProxies
from proxymetric.sources.semantic_proxies import SemanticProxies as SemanticProxies
from proxymetric.sources.variational_proxies import VariationalProxies as VariationalProxies

__all__ = ["ACCUMULATORS", "INITIALISATIONS", "accumulator", "proxies"]
__all__ += [name for name, value in globals().items() if isinstance(value, type) and value is not Source]


def proxies(classes: int, dim: int, per_class: int = 1, init: str = "kaiming", touched: str | float = "all") -> Source:
    """The proxies of a method, for all classes or for a few classes per step.

    Args:
        classes: C.
        dim: D.
        per_class: K proxies per class.
        init: initialisation of the proxies, a name of `sources.INITIALISATIONS`.
        touched: the proxies that a step reads and moves. "all": `LearnedProxies`, trained by the run's optimiser.
            "batch": `RowProxies` of the classes in the batch, so that the cost of a step does not grow with C. A
            number in (0, 1): `RowProxies` of the batch's classes and of this share of the classes, drawn at each step.
            With the last two, the loss differs from that of "all": negative pairs with the other classes are missing.

    Returns:
        The source.

    Raises:
        ValueError: an argument is out of its range.

    Example:
        >>> type(proxies(classes=10, dim=4, touched="batch")).__name__
        'RowProxies'
    """
    if touched == "all":
        return LearnedProxies(classes, dim, per_class, init)
    if touched == "batch":
        return RowProxies(classes, dim, per_class, init)
    if isinstance(touched, int | float) and not isinstance(touched, bool) and 0 < touched < 1:
        return RowProxies(classes, dim, per_class, init, float(touched))
    raise ValueError(f"touched: got {touched!r}, expected 'all', 'batch' or a share of the classes in (0, 1)")
