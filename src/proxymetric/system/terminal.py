"""Progress bars and messages in the terminal."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from proxymetric.system.clock import Work, clock
from proxymetric.system.tables import TABLE_METRICS, show
from proxymetric.system.text import visible
from proxymetric.system.watcher import Tick

if TYPE_CHECKING:
    from rich.table import Table

LOG_SECONDS = 30
"""time between lines of progress where the output is not a terminal"""


class Terminal:
    """A watcher that draws progress bars; if the output is not a terminal, it prints a line every `LOG_SECONDS`.

    Args:
        console: where to draw; None means standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        # Of several processes that train together, only the first one prints.
        self.console = console or Console(quiet=os.environ.get("RANK", "0") != "0")
        self.live = self.console.is_terminal
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
        """Print a line. Control characters in it are escaped, and nothing in it is markup."""
        text = visible(text, keep="\n\t")
        self.console.print(text, highlight=False, markup=False, emoji=False, soft_wrap=not self.live)

    def show(self, table: Table) -> None:
        """Print a table; plain lines where the output is not a terminal."""
        show(self.console, table)

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
            # A log file gets a line every LOG_SECONDS instead of a bar.
            if time.monotonic() - self._last_line > LOG_SECONDS:
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
