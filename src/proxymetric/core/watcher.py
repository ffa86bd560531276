"""Who is told how training goes."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Tick(NamedTuple):
    """One step as a person wants to see it."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    images_per_second: float
    seconds_left: float


class Watcher(Protocol):
    """What a run calls; `Silent` ignores it all, the command line draws bars."""

    def say(self, text: str) -> None:
        """A sentence worth keeping on the screen."""

    def work(self, what: str, done: int, total: int) -> None:
        """Progress of something other than training: reading, embedding."""

    def tick(self, tick: Tick) -> None:
        """After each training step."""

    def evaluated(
        self, epoch: float, scores: dict[str, float], best: bool, scored_on: str = "held-out classes"
    ) -> None:
        """After each evaluation; epoch: a fraction in the middle of one; scored_on: which classes, in words."""

    def close(self) -> None:
        """The run is over."""


class Silent:
    """Says nothing."""

    def say(self, text: str) -> None: ...

    def work(self, what: str, done: int, total: int) -> None: ...

    def tick(self, tick: Tick) -> None: ...

    def evaluated(
        self, epoch: float, scores: dict[str, float], best: bool, scored_on: str = "held-out classes"
    ) -> None: ...

    def close(self) -> None: ...
