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
    from proxymetric.runs.planning import plan
    from proxymetric.runs.train import train
    from proxymetric.search import Index
    from proxymetric.studies.command import study
    from proxymetric.training.gathering import gather_batch

__all__ = [
    "Criterion", "Index", "Model", "encoders", "evaluate", "gather_batch", "inspect", "inspection", "load", "losses",
    "method", "methods", "metrics", "open_data", "papers", "plan", "samplers", "schemes", "sources", "study",
    "testing", "train", "weightings",
]  # fmt: skip
_HOMES = {
    "Criterion": "criterion", "Index": "search", "Model": "models.model", "evaluate": "metrics",
    "gather_batch": "training.gathering", "inspect": "inspection.report", "load": "models.load", "method": "papers",
    "methods": "papers", "open_data": "data", "plan": "runs.planning", "study": "studies.command",
    "train": "runs.train",
}  # fmt: skip
"""the functions and classes of the face -> the modules that they are imported from; all other names are modules"""
_MODULES = {"samplers": "data.samplers", "testing": "papers.contract"}
"""modules of the face that have another name below"""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'proxymetric' has no attribute {name!r}")
    module = importlib.import_module(f"proxymetric.{_HOMES.get(name) or _MODULES.get(name, name)}")
    return getattr(module, name) if name in _HOMES else module


def __dir__() -> list[str]:
    return sorted(__all__)
