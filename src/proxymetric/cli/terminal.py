"""Progress bars and tables in the terminal."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from proxymetric.core.watcher import Tick
from proxymetric.files import printable
from proxymetric.protocol import CHOSEN_ON_TEST

if TYPE_CHECKING:
    from proxymetric.runs.result import Result

TABLE_METRICS = ("R@1", "MAP@R", "nDCG@8")
LOG_SECONDS = 30
"""time between lines of progress where the output is not a terminal"""


class Terminal:
    """A watcher that draws progress bars; if the output is not a terminal, it prints a line now and then.

    Args:
        console: where to draw; None means standard output.
    """

    def __init__(self, console: Console | None = None) -> None:
        # Of several processes that train together, only the first one prints.
        self.console = console or Console(quiet=os.environ.get("RANK", "0") != "0")
        self.live = self.console.is_terminal
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
            transient=True,
        )
        self._task: TaskID | None = None
        self._name = ""
        self._last_line = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(printable(text), highlight=False, markup=False, soft_wrap=not self.live)

    def work(self, what: str, done: int, total: int) -> None:
        """Show the progress of something other than training."""
        self._bar(what, done, total, "")
        if done >= total:
            self._remove_bar()

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
            # A log file gets a line now and then instead of a bar.
            if time.monotonic() - self._last_line > LOG_SECONDS:
                self._last_line = time.monotonic()
                self.say(f"{what}: {done} of {total}{', ' if facts else ''}{facts}")
            return
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


def clock(seconds: float) -> str:
    """Format a duration.

    >>> clock(42), clock(130), clock(7300)
    ('42s', '2m10s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def score_table(title: str, rows: dict[str, dict[str, float]], shown: tuple[str, ...] = TABLE_METRICS) -> Table:
    """Make a table of scores in per cent; `shown` are its columns."""
    table = Table(title=printable(title), title_justify="left")
    table.add_column("")
    columns = [name for name in shown if any(name in row for row in rows.values())]
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(printable(name), *(f"{100 * row[c]:.1f}" if c in row else "" for c in columns))
    return table


def hits_table(title: str, hits: list[tuple[str, float]]) -> Table:
    """Make a table of the results of one query; long file names are wrapped, not cut."""
    table = Table(title=printable(title), title_justify="left")
    for name in ("", "similarity", "file"):
        table.add_column(name, justify="left" if name == "file" else "right", overflow="fold")
    for place, (file, score) in enumerate(hits, 1):
        table.add_row(str(place), f"{score:.3f}", printable(file))
    return table


def catalogue_table(rows: dict[str, Any]) -> Table:
    """Make a table of methods: name, paper, and when to choose it."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "paper", "choose it"):
        table.add_column(heading, no_wrap=heading == "method")
    for name, about in rows.items():
        table.add_row(name, about.paper.split(",")[0], about.choose)
    return table


def result_lines(result: Result) -> str:
    """The lines under the table of scores."""
    counts = result.data.get(result.evaluated_on or "", {})
    images = f"{counts.get('images', 0)} images of {counts.get('classes', 0)}"
    scored_on = {
        "test": f"scores on {images} test classes",
        "validation": f"scores on the {images} held-out classes that chose it",
        None: "no classes were held out, so there are no scores; `proxymetric evaluate` scores other images",
    }[result.evaluated_on]
    choice = f"chosen by {result.chosen_by}" if result.chosen_by != "last" else "is the last one"
    if result.protocol == "papers":
        choice += f" ({CHOSEN_ON_TEST}, as in the papers; the score of the last epoch is the honest one)"
    lines = [f"epoch {round(result.chosen_epoch, 2)} of {round(result.epochs, 2)} {choice}; {scored_on}"]
    if result.skipped_steps:
        lines.append(f"{result.skipped_steps} of {result.steps} steps skipped: loss or gradient not finite")
    if result.bad_images:
        lines.append(f"images that could not be read and were left out: {len(result.bad_images)} (see result.json)")
    if result.refit:
        lines.append(f"refitted on all {result.refit['classes']} classes, epochs: {round(result.refit['epochs'], 2)}")
    return "\n".join(lines)
