"""Which methods of the catalogue can be combined, derived from their rows and from what they refuse."""

from __future__ import annotations

import proxymetric as pm
from proxymetric.papers import CATALOGUE, options


def refusal(name: str, **arguments: object) -> str:
    """The error with which a method refuses its arguments; empty if it can be built."""
    try:
        pm.method(name, classes=4, dim=3, **arguments)
    except ValueError as error:
        return str(error)
    return ""


BUILT_AROUND = [name for name in CATALOGUE if "Base" in str(getattr(options(name).get("base"), "annotation", ""))]
"""the methods that are built around another one"""
WEIGHTED = [name for name in CATALOGUE if not refusal("proxy-isa", base=name)]
"""the methods that proxy-isa can weight"""
RE_PICKED = [name for name in CATALOGUE if not refusal("ccp", base=name)]
"""the methods that ccp can pick proxies for"""
PLANNED = [name for name, method in CATALOGUE.items() if method.about.sums_over is not None]
"""the methods with a loss on the reductions against learned proxies"""
IN_BATCH = [
    name for name in RE_PICKED if pm.method(name, classes=4, dim=3, steps_per_epoch=1).objective.classes is None
]
"""the pair losses"""
REDUCTIONS = {(CATALOGUE[name].about.sums_over, CATALOGUE[name].about.grouped): name for name in reversed(WEIGHTED)}
"""one method for each kind of reduction, the first of the catalogue"""
