"""Bars and tables for a person at a terminal."""

from __future__ import annotations

import os
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from proxymetric.core.watcher import Tick
from proxymetric.protocol import CHOSEN_ON_TEST

SHOWN = ("R@1", "MAP@R", "nDCG@8")


class Terminal:
    """Draws the run's progress; where the output is no terminal, one line now and then instead of a bar."""

    def __init__(self, console: Console | None = None) -> None:
        # Of several processes that train together the first one speaks.
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
        self._said = time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=not self.live)

    def work(self, what: str, done: int, total: int) -> None:
        self._bar(what, done, total, "")
        if done >= total:
            self._drop()

    def tick(self, tick: Tick) -> None:
        facts = f"loss {tick.loss:.3f}, {tick.images_per_second:,.0f} images/s, {clock(tick.seconds_left)} left"
        self._bar(f"epoch {tick.epoch}/{tick.epochs}", tick.step, tick.steps, facts)

    def evaluated(
        self, epoch: float, scores: dict[str, float], best: bool, scored_on: str = "held-out classes"
    ) -> None:
        self._drop()
        text = "  ".join(f"{name} {100 * scores[name]:5.1f}" for name in scores if name in SHOWN)
        self.say(f"epoch {round(epoch, 2) or 0:3}  {scored_on}: {text}{'  best' if best else ''}")

    def close(self) -> None:
        self._drop()

    def _bar(self, what: str, done: int, total: int, facts: str) -> None:
        if not self.live:
            # A log file gets a line every half minute, not a thousand bars.
            if time.monotonic() - self._said > 30:
                self._said = time.monotonic()
                self.say(f"{what}: {done} of {total}{', ' if facts else ''}{facts}")
            return
        kind = what.split(" ")[0]
        if self._task is None or kind != self._name:
            self._drop()
            self.progress.start()
            self._task, self._name = self.progress.add_task(what, total=total, facts=facts), kind
        self.progress.update(self._task, description=what, completed=done, total=total, facts=facts)

    def _drop(self) -> None:
        if self._task is not None:
            self.progress.stop()
            self.progress.remove_task(self._task)
            self._task = None


def clock(seconds: float) -> str:
    """A span of time as people say it.

    >>> clock(42), clock(130), clock(7300)
    ('42s', '2m10s', '2h01m')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def score_table(title: str, rows: dict[str, dict[str, float]], shown: tuple[str, ...] = SHOWN) -> Table:
    """Scores side by side, in per cent."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    columns = [name for name in shown if any(name in row for row in rows.values())]
    for name in columns:
        table.add_column(name, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{100 * row[c]:.1f}" if c in row else "" for c in columns))
    return table


def hits_table(title: str, found: list[tuple[str, float]]) -> Table:
    """The results of one query; file names are never cut."""
    table = Table(title=title, title_justify="left")
    for name in ("", "similarity", "file"):
        table.add_column(name, justify="left" if name == "file" else "right", overflow="fold")
    for place, (file, score) in enumerate(found, 1):
        table.add_row(str(place), f"{score:.3f}", file)
    return table


def catalogue_table(rows: dict[str, Any]) -> Table:
    """Methods by name: whose they are and when to choose them."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "paper", "choose it"):
        table.add_column(heading, no_wrap=heading == "method")
    for name, about in rows.items():
        table.add_row(name, about.paper.split(",")[0], about.choose)
    return table


def result_lines(result: dict[str, Any]) -> str:
    """What to print under the table."""
    counts = result["data"].get(result["evaluated_on"], {})
    of = f"{counts.get('images', 0)} images of {counts.get('classes', 0)}"
    where = {
        "test": f"scores on {of} test classes",
        "validation": f"scores on the {of} held-out classes that chose it",
        None: "no classes were held out, so there are no scores; `proxymetric evaluate` measures on other images",
    }[result["evaluated_on"]]
    how = f"chosen by {result['chosen_by']}" if result["chosen_by"] != "last" else "is the last one"
    if result.get("protocol") == "papers":
        how += f" ({CHOSEN_ON_TEST}, as in the papers: the last epoch is the honest figure)"
    lines = [f"epoch {round(result['chosen_epoch'], 2)} of {round(result['epochs'], 2)} {how}; {where}"]
    if result["skipped_steps"]:
        lines.append(f"{result['skipped_steps']} of {result['steps']} steps skipped: loss or gradient not finite")
    if result["bad_images"]:
        lines.append(f"images that could not be read and were left out: {len(result['bad_images'])} (see result.json)")
    if result.get("refit"):
        lines.append(
            f"refitted on all {result['refit']['classes']} classes, epochs: {round(result['refit']['epochs'], 2)}"
        )
    return "\n".join(lines)
