"""What a person sees: results on the standard output, messages and progress bars on the error stream."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from proxymetric.system.clock import Work, clock
from proxymetric.system.tables import TABLE_METRICS, show
from proxymetric.system.text import visible
from proxymetric.system.watcher import Tick

if TYPE_CHECKING:
    from rich.table import Table

LOG_SECONDS, VERBOSE_LOG_SECONDS = 30, 5
"""time between lines of progress where the error stream is not a terminal"""


class Volume(NamedTuple):
    """How much is said beside the results."""

    quiet: bool = False
    """only results and errors"""
    verbose: bool = False
    """more lines of progress"""


_volume: ContextVar[Volume | None] = ContextVar("volume", default=None)


@contextlib.contextmanager
def speaking(quiet: bool, verbose: bool) -> Iterator[None]:
    """Set how much is said inside this context.

    Raises:
        ValueError: both are given.

    Example:
        >>> with speaking(quiet=True, verbose=False):
        ...     Terminal().say("not a word")
    """
    if quiet and verbose:
        raise ValueError("quiet, verbose: got both, expected one")
    token = _volume.set(Volume(quiet, verbose))
    try:
        yield
    finally:
        _volume.reset(token)


def volume() -> Volume:
    """How much is said here."""
    return _volume.get() or Volume()


class Terminal:
    """Prints results on the standard output; as a watcher it prints messages and progress on the error stream.

    Where the error stream is not a terminal, a line every `LOG_SECONDS` stands for a progress bar.

    Args:
        console: where messages and progress are drawn; None means the error stream.
        results: where results are printed; None means the standard output.
    """

    def __init__(self, console: Console | None = None, results: Console | None = None) -> None:
        # Of several processes that train together, only the first one prints.
        others = os.environ.get("RANK", "0") != "0"
        self.console = console or Console(stderr=True, quiet=others)
        self.results = results or Console(quiet=others)
        self.volume = volume()
        self.live = self.console.is_terminal and not self.volume.quiet
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", markup=False),
            console=self.console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._name = ""
        self._last_line = time.monotonic()
        self._work = Work("", 0, 0.0)

    def say(self, text: str) -> None:
        """Print a message. Control characters in it are escaped, and nothing in it is markup."""
        if not self.volume.quiet:
            _print(self.console, visible(text, keep="\n\t"))

    def print(self, text: str) -> None:
        """Print a line of the result, as `say` prints a message."""
        _print(self.results, visible(text, keep="\n\t"))

    def show(self, table: Table) -> None:
        """Print a table of the result; plain lines where the output is not a terminal."""
        show(self.results, table)

    def dump(self, content: Any) -> None:
        """Print the result as JSON."""
        _print(self.results, json.dumps(content, indent=1), wrap=False)

    def work(self, what: str, done: int, total: int) -> None:
        """Show the progress of something other than training, with its rate and the time left."""
        if what != self._work.what or done < self._work.first:
            self._work = Work(what, done, time.monotonic())
        self._bar(what, done, total, self._work.facts(done, total, time.monotonic()))
        if done >= total:
            self._remove_bar()
            self._work = Work("", 0, 0.0)

    def tick(self, tick: Tick) -> None:
        """Show the progress of training."""
        facts = f"loss {tick.loss:.3f}, {tick.images_per_second:,.0f} images/s, {clock(tick.seconds_left)} left"
        self._bar(f"epoch {tick.epoch}/{tick.epochs}", tick.step, tick.steps, facts)

    def evaluated(
        self, epoch: float, scores: dict[str, float], best: bool, scored_on: str = "held-out classes"
    ) -> None:
        """Print the scores of an evaluation."""
        self._remove_bar()
        text = "  ".join(f"{name} {100 * scores[name]:5.1f}" for name in scores if name in TABLE_METRICS)
        self.say(f"epoch {round(epoch, 2) or 0:3}  {scored_on}: {text}{'  best' if best else ''}")

    def close(self) -> None:
        """Remove the progress bar."""
        self._remove_bar()

    def _bar(self, what: str, done: int, total: int, facts: str) -> None:
        if not self.live:
            pause = VERBOSE_LOG_SECONDS if self.volume.verbose else LOG_SECONDS
            if time.monotonic() - self._last_line > pause:
                self._last_line = time.monotonic()
                self.say(f"{what}: {done} of {total}{', ' if facts else ''}{facts}")
            return
        what = visible(what)
        kind = what.split(" ")[0]
        if self._task is None or kind != self._name:
            self._remove_bar()
            self.progress.start()
            self._task, self._name = self.progress.add_task(what, total=total, facts=facts), kind
        self.progress.update(self._task, description=what, completed=done, total=total, facts=facts)

    def _remove_bar(self) -> None:
        if self._task is not None:
            self.progress.stop()
            self.progress.remove_task(self._task)
            self._task = None


def _print(console: Console, text: str, wrap: bool = True) -> None:
    """Print text as it is; it is wrapped only in a terminal."""
    console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=not (wrap and console.is_terminal))
