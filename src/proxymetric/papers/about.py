"""The row of the catalogue: facts about a method in addition to the function that builds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, cast

from proxymetric.arguments.signatures import one_of
from proxymetric.core.pieces import Objective

Reduction = Literal["batch", "classes"]

NO_PROXIES = "has no proxies: it compares the samples of a batch or of a memory"
"""why there is no plan for a pair method"""


class About(NamedTuple):
    """One row of the catalogue. Planning, the contract tests, error messages and tables are derived from it."""

    paper: str
    """authors, year and title"""
    choose: str
    """when to choose the method, and over which other method"""
    needs: tuple[str, ...] = ()
    """what the method needs beyond embeddings and labels: keys of `criterion.NEEDS`"""
    samples_per_class: int | None = None
    """how many images of a class a batch should hold; None: random batches are fine"""
    sums_over: Reduction | None = None
    """what the loss sums over in `ops`: the "batch" for each class, or the "classes" for each query; None: no plan"""
    grouped: bool = False
    """whether the K proxies of a class are combined into one similarity"""
    surrogate_gradient: bool = False
    """whether the loss has factors that count as constants in its gradient (`core.surrogate.held`)"""
    no_plan: str = "does not state in its catalogue row what its loss sums over (sums_over)"
    """why there is no plan, as the end of a sentence that begins with the method's name"""


class Method(Protocol):
    """A function that assembles pieces with the paper's numbers."""

    about: About
    __name__: str
    __doc__: str | None

    def __call__(self, classes: int, dim: int, **options: object) -> Objective: ...


def about(
    paper: str,
    choose: str,
    needs: tuple[str, ...] = (),
    samples_per_class: int | None = None,
    *,
    sums_over: Reduction | None = None,
    grouped: bool = False,
    surrogate_gradient: bool = False,
    no_plan: str | None = None,
) -> Callable[[Callable[..., Objective]], Method]:
    """Attach a catalogue row to the function that builds a method.

    Args:
        paper: authors, year and title.
        choose: when to choose the method, and over which other method.
        needs: what the method needs beyond embeddings and labels, keys of `criterion.NEEDS`.
        samples_per_class: how many images of a class a batch should hold; None: random batches are fine.
        sums_over: "batch" for a loss on `ops.mean_over_batch`, "classes" for one on `ops.over_classes`. None for a
            method whose memory and time cannot be planned.
        grouped: whether the K proxies of a class are combined into one similarity.
        surrogate_gradient: whether the loss has factors without gradient, marked with `core.surrogate.held`.
        no_plan: why there is no plan for a method without `sums_over`.

    Returns:
        A decorator that gives the function the attribute `about`, an `About`.

    Raises:
        ValueError: `sums_over` is unknown, or both `sums_over` and `no_plan` are given.

    Example:
        >>> @about(paper="You 2026, A Better Loss", choose="over proxy-anchor", sums_over="batch")
        ... def better(classes, dim): ...
        >>> better.about.sums_over
        'batch'
    """
    one_of("sums_over", sums_over, ("batch", "classes", None))
    if sums_over is not None and no_plan is not None:
        raise ValueError(f"no_plan: got {no_plan!r} with sums_over={sums_over!r}, expected one of the two")
    row = About(paper, choose, needs, samples_per_class, sums_over, grouped, surrogate_gradient)
    if no_plan is not None:
        row = row._replace(no_plan=no_plan)

    def attach(build: Callable[..., Objective]) -> Method:
        method = cast(Method, build)
        method.about = row
        return method

    return attach
