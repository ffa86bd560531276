"""Watchers: objects that a run reports its progress to."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Tick(NamedTuple):
    """The progress of training after one step."""

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    images_per_second: float
    seconds_left: float


class Watcher(Protocol):
    """An object that a run calls to report its progress. `Silent` ignores the calls; the command line draws bars."""

    def say(self, text: str) -> None:
        """Show a message that stays on the screen."""

    def work(self, what: str, done: int, total: int) -> None:
        """Show the progress of work other than training, such as reading or embedding images.

        Args:
            what: the name of the work.
            done: finished units.
            total: all units.
        """

    def tick(self, tick: Tick) -> None:
        """Show the progress of training; called after each step."""

    def evaluated(
        self, epoch: float, scores: dict[str, float], best: bool, scored_on: str = "held-out classes"
    ) -> None:
        """Show the scores of an evaluation.

        Args:
            epoch: epochs so far; a fraction in the middle of an epoch.
            scores: metric -> score.
            best: whether the score is the best so far.
            scored_on: the classes that were scored, in words.
        """

    def close(self) -> None:
        """End the display; called when the run is over."""


class Silent:
    """A watcher that shows nothing."""

    def say(self, text: str) -> None: ...

    def work(self, what: str, done: int, total: int) -> None: ...

    def tick(self, tick: Tick) -> None: ...

    def evaluated(
        self, epoch: float, scores: dict[str, float], best: bool, scored_on: str = "held-out classes"
    ) -> None: ...

    def close(self) -> None: ...
