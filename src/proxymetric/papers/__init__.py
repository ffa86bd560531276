"""The catalogue: one paper per file, one line per method.

To add a method, write its file in this folder and add its line to `CATALOGUE`: its name, and "file:function".
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

from proxymetric.arguments.registry import load_registry
from proxymetric.arguments.signatures import did_you_mean, one_of
from proxymetric.core.class_shards import making_part
from proxymetric.criterion import Criterion
from proxymetric.losses.nested import check_sizes, nest
from proxymetric.papers.about import About, Method
from proxymetric.papers.base import base_of
from proxymetric.papers.closed_form import ClosedForm
from proxymetric.papers.own import own_method

CATALOGUE: dict[str, Method] = load_registry(
    "proxymetric.papers",
    {
        "proxy-anchor": "proxy_anchor:proxy_anchor",
        "proxy-nca": "proxy_nca:proxy_nca",
        "proxy-nca++": "proxy_nca:proxy_nca_pp",
        "norm-softmax": "margin_softmax:norm_softmax",
        "cosface": "margin_softmax:cosface",
        "arcface": "margin_softmax:arcface",
        "subcentre-arcface": "margin_softmax:subcentre_arcface",
        "adaface": "adaface:adaface",
        "soft-triple": "soft_triple:soft_triple",
        "mpa": "mpa:mpa",
        "mpa-dw": "mpa:mpa_dw",
        "mpa-ap": "mpa:mpa_ap",
        "contrastive": "contrastive:contrastive",
        "margin-contrastive": "contrastive:margin_contrastive",
        "triplet": "triplet:triplet",
        "multi-similarity": "multi_similarity:multi_similarity",
        "circle": "circle:circle",
        "supcon": "supcon:supcon",
        "proxy-isa": "proxy_isa:proxy_isa",
        "vcpa": "vcpa:vcpa",
        "vptsp-m": "vptsp:vptsp_m",
        "vptsp-g": "vptsp:vptsp_g",
        "ccp": "ccp:ccp",
        "xbm": "xbm:xbm",
        "moco": "moco:moco",
    },
)
"""name -> the function that builds the method; its row is the attribute `about`"""
CLOSED_FORMS: dict[str, Method] = load_registry(
    "proxymetric.papers",
    {
        "untrained": "untrained:untrained",
        "whitening": "whitening:whitening",
        "lda": "lda:lda",
    },
)
"""the same for methods that no step trains: `train` computes their head from all features at once"""

__all__ = [
    "CATALOGUE",
    "CLOSED_FORMS",
    "About",
    "Method",
    "closed_form",
    "lookup",
    "method",
    "methods",
    "needs",
    "options",
    "rows",
]


def methods() -> list[str]:
    """The names of all methods that steps train; `CLOSED_FORMS` has those that are computed.

    Returns:
        The names in the order of the catalogue.

    Example:
        >>> "mpa-ap" in methods()
        True
    """
    return list(CATALOGUE)


def lookup(name: str) -> Method:
    """The method of that name.

    Args:
        name: one of `methods()` or `CLOSED_FORMS`, or "module:function" for a method of your own (`papers.own`).

    Returns:
        The function that builds the method. Its catalogue row is the attribute `about`.

    Raises:
        ValueError: there is no such method; the message suggests the most similar name.

    Example:
        >>> lookup("proxy-anchor").about.paper
        'Kim et al. 2020, Proxy Anchor Loss for Deep Metric Learning'
    """
    if ":" in name:
        return own_method(name)
    known = CATALOGUE | CLOSED_FORMS
    one_of("method", name, known)
    return known[name]


def closed_form(name: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> ClosedForm | None:
    """The closed form of a method; None for a method that steps train.

    Args:
        name: the name of a method.
        arguments: the arguments of the method.

    Example:
        >>> closed_form("whitening", {"shrinkage": 0.3}).shrinkage, closed_form("proxy-anchor")
        (0.3, None)
    """
    if name not in CLOSED_FORMS:
        return None
    taken = {key: value for key, value in arguments.items() if key in options(name)}
    objective = CLOSED_FORMS[name](2, 1, **taken)
    assert isinstance(objective, ClosedForm)
    return objective


def options(name: str) -> Mapping[str, inspect.Parameter]:
    """The arguments of a method beyond classes and dim.

    Args:
        name: one of `methods()`.

    Returns:
        The parameters by name, with their defaults.

    Example:
        >>> options("proxy-anchor")["margin"].default
        0.1
    """
    parameters = inspect.signature(lookup(name)).parameters
    return {key: parameter for key, parameter in parameters.items() if key not in ("classes", "dim")}


def rows(name: str, arguments: Mapping[str, Any]) -> list[About]:
    """The catalogue rows of a method and of every method that it is built around.

    Args:
        name: one of `methods()`.
        arguments: the arguments of the method.

    Returns:
        The row of the method, then that of its base, and so on.

    Example:
        >>> [row.needs for row in rows("ccp", {"base": "proxy-isa"})]
        [('encoder', 'validation', 'pool'), ('epochs',), ()]
    """
    base = base_of(options(name), arguments)
    return [lookup(name).about, *(rows(*base) if base is not None else ())]


def needs(name: str, arguments: Mapping[str, Any]) -> frozenset[str]:
    """What a method and its base need beyond embeddings and labels.

    Args:
        name: one of `methods()`.
        arguments: the arguments of the method.

    Returns:
        Keys of `criterion.NEEDS`.

    Example:
        >>> sorted(needs("ccp", {"base": "proxy-isa"}))
        ['encoder', 'epochs', 'pool', 'validation']
    """
    return frozenset(need for row in rows(name, arguments) for need in row.needs)


def method(
    name: str,
    *,
    classes: int,
    dim: int,
    steps_per_epoch: int | None = None,
    nested: Sequence[int] | None = None,
    shard: tuple[int, int] | tuple[int, int, Any] | None = None,
    **arguments: object,
) -> Criterion:
    """Build a method of the catalogue as a criterion for your own training loop.

    `pm.methods()` lists the names. `proxymetric methods NAME` explains a method and its arguments; so does
    `help(proxymetric.papers.lookup(NAME))` in Python.

    Args:
        name: one of `methods()`, or "module:function" for a method of your own (`papers.own`).
        classes: number of training classes, C.
        dim: width of the embeddings, D.
        steps_per_epoch: optimiser steps in an epoch, for methods with a schedule that counts in epochs.
        nested: sizes that the vectors can be cut to after training, ascending, such as [64, 128, 256, 512]; the last
            one is `dim`. The loss is the mean over the sizes (`losses.Nested`).
        shard: arguments of `Criterion.shard`: the number of this process and the number of processes, which divide the
            proxies by class. The result is that of `Criterion.shard`, but the proxies of all classes are not in memory
            at once.
        **arguments: the arguments of the method itself; `proxymetric.papers.options(name)` has their defaults.

    Returns:
        The criterion, a module.

    Raises:
        ValueError: the method or an argument is unknown; the message suggests the most similar name. Or the proxies of
            this method cannot be divided.

    Example:
        >>> criterion = method("proxy-anchor", classes=100, dim=64, margin=0.2)
        >>> criterion
        Criterion('proxy-anchor', classes=100, dim=64, margin=0.2)
        >>> [group["name"] for group in criterion.param_groups(lr=1e-2)]
        ['proxies']
        >>> method("proxy-anchor", classes=100, dim=64, nested=[16, 64])
        Criterion('proxy-anchor', classes=100, dim=64, nested=[16, 64])
        >>> method("proxy-anchor", classes=100, dim=64, shard=(0, 4)).parts()
        {'proxies': 1600}
    """
    build = lookup(name)
    parameters = options(name)
    for key, value in arguments.items():
        if key not in parameters:
            raise ValueError(
                f"{key}: got an unknown argument ({value!r}), expected an argument of {name}: {', '.join(parameters)}"
                f"{did_you_mean(key, parameters)}"
            )
    epochs = {} if steps_per_epoch is None else {"steps_per_epoch": steps_per_epoch}
    if nested is not None:
        check_sizes(nested, dim)
    sizes = {} if nested is None else {"nested": list(nested)}
    with nullcontext() if shard is None else making_part(*shard):
        objective = build(classes, dim, **arguments)
    criterion = Criterion(
        objective if nested is None else nest(objective, nested, dim),
        needs=needs(name, arguments),
        steps_per_epoch=steps_per_epoch,
        name=name,
        arguments={"classes": classes, "dim": dim, **epochs, **sizes, **arguments},
    )
    return criterion if shard is None else criterion.shard(*shard)
