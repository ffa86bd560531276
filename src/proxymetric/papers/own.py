"""Methods of the user's own code, named as "module:function" in the place of a method of the catalogue."""

from __future__ import annotations

import inspect
from typing import cast

from proxymetric.arguments.own_code import find_function
from proxymetric.papers.about import Method, about

EXAMPLE = "my_losses:better"
UNKNOWN = about(
    paper="your own",
    choose="for your own experiments",
    no_plan="is your own and does not state what its loss sums over",
)
"""the row of a method that has none"""


def own_method(name: str) -> Method:
    """The function that builds a method of the user's own.

    Args:
        name: "module:function". The module is in the working directory or installed. The function takes the number of
            classes, the width of the embeddings and arguments with defaults, which are the keys of the table `[loss]`,
            and returns an objective. With `@about(...)` it states what the method needs (`papers.about`).

    Raises:
        ValueError: there is no such module or function, or the function does not take `classes` and `dim`.

    Example:
        >>> own_method("proxymetric.papers.proxy_anchor:proxy_anchor").about.paper
        'Kim et al. 2020, Proxy Anchor Loss for Deep Metric Learning'
    """
    function = find_function("method", name, EXAMPLE)
    parameters = list(inspect.signature(function).parameters)
    if parameters[:2] != ["classes", "dim"]:
        raise ValueError(
            f"method: got {name!r}, a function of ({', '.join(parameters)}); expected one of (classes, dim, ...) that "
            "returns an objective, such as Compare(loss, source)"
        )
    return cast(Method, function) if hasattr(function, "about") else UNKNOWN(function)
