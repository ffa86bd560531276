"""What the catalogue knows of a method besides how to build it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from proxymetric.core.pieces import Objective


class About(NamedTuple):
    """One row of the catalogue."""

    paper: str
    choose: str
    """when to choose it, and over what"""
    needs: tuple[str, ...] = ()
    """what it needs beyond embeddings and labels: keys of `criterion.NEEDS`"""
    samples_per_class: int | None = None
    """how many images of a class a batch should hold; None: random batches are fine"""


class Method(Protocol):
    """A function that assembles pieces with the paper's numbers."""

    about: About
    __name__: str
    __doc__: str | None

    def __call__(self, classes: int, dim: int, **options: object) -> Objective: ...


def about(
    paper: str, choose: str, needs: tuple[str, ...] = (), samples_per_class: int | None = None
) -> Callable[[Callable[..., Objective]], Method]:
    """Attach a catalogue row to the function that builds the method."""

    def attach(build: Callable[..., Objective]) -> Method:
        method = cast(Method, build)
        method.about = About(paper, choose, needs, samples_per_class)
        return method

    return attach
