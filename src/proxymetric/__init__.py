"""proxymetric: proxy-based deep metric learning.

>>> import proxymetric as pm
>>> criterion = pm.method("proxy-anchor", classes=100, dim=512)

Names are imported when they are first used, so that `import proxymetric` and the command line start fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from proxymetric.system.version import __version__ as __version__

if TYPE_CHECKING:
    from proxymetric import encoders, inspection, losses, metrics, papers, schemes, sources, weightings
    from proxymetric.criterion import Criterion
    from proxymetric.data import open_data, samplers
    from proxymetric.inspection import inspect
    from proxymetric.metrics import evaluate
    from proxymetric.models.load import load
    from proxymetric.models.model import Model
    from proxymetric.papers import contract as testing
    from proxymetric.papers import method, methods
    from proxymetric.runs.train import train
    from proxymetric.search import Index
    from proxymetric.training.gathering import gather_batch

_HOMES = {
    "Criterion": "proxymetric.criterion",
    "Index": "proxymetric.search",
    "Model": "proxymetric.models.model",
    "evaluate": "proxymetric.metrics",
    "gather_batch": "proxymetric.training.gathering",
    "inspect": "proxymetric.inspection.report",
    "load": "proxymetric.models.load",
    "method": "proxymetric.papers",
    "methods": "proxymetric.papers",
    "open_data": "proxymetric.data",
    "train": "proxymetric.runs.train",
}
_MODULES = {
    **{name: f"proxymetric.{name}" for name in ("encoders", "inspection", "losses", "metrics", "papers")},
    **{name: f"proxymetric.{name}" for name in ("schemes", "sources", "weightings")},
    "samplers": "proxymetric.data.samplers",
    "testing": "proxymetric.papers.contract",
}

__all__ = [
    "Criterion",
    "Index",
    "Model",
    "encoders",
    "evaluate",
    "gather_batch",
    "inspect",
    "inspection",
    "load",
    "losses",
    "method",
    "methods",
    "metrics",
    "open_data",
    "papers",
    "samplers",
    "schemes",
    "sources",
    "testing",
    "train",
    "weightings",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'proxymetric' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
