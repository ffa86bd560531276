"""What the papers claim beside what was measured, and what the runs cost, over all studies with results."""

from __future__ import annotations

import io
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from generator.photographs import is_degraded
from generator.scores import table

PROTOCOLS = ("papers", "held-out", "last")
METRICS = ("R@1", "MAP@R")
PLACES = {"papers": (0, -0.14), "held-out": (2, 0.14), "last": (6, 0.28)}
"""protocol -> number of its colour, and place beside the middle of its line"""
LIMITS = (-5, 6)
"""points that the picture shows; a longer interval runs over its edge, and a value beyond it is written there"""
WIDTH_OF_VALUE = 2
"""points beside the edge that such a value takes"""


@dataclass(frozen=True)
class ClaimedDifference:
    """The difference of a row of a study to its baseline, and the one that the paper claims."""

    results: Any
    cell: Any
    metric: str
    measured: Any
    claim: float

    @property
    def title(self) -> str:
        """The method."""
        return self.results.study.rows[self.cell.row].title

    @property
    def at_the_last_epoch(self) -> Any:
        """The difference at the last epoch; None if the runs did not score it."""
        from proxymetric.studies.scores import LAST

        return self.results.difference(self.cell, self.metric, LAST)

    @property
    def data(self) -> str:
        """The title of the data set."""
        return self.results.study.data[self.cell.data].title or self.cell.data

    @property
    def is_degraded(self) -> bool:
        """Whether it was measured with degraded copies of the photographs."""
        return is_degraded(self.results.identities[self.cell.data])

    @property
    def subject(self) -> tuple[str, str, str]:
        """What the claim is about."""
        return self.title, self.data, self.metric


class Claims(NamedTuple):
    """The claims of the papers, by the photographs with which they were measured.

    Attributes:
        current: measured with the photographs themselves.
        waiting: measured with degraded copies only.
        replaced: measured with degraded copies, and later with the photographs themselves.
    """

    current: list[ClaimedDifference]
    waiting: list[ClaimedDifference]
    replaced: list[ClaimedDifference]


def divided(differences: list[ClaimedDifference]) -> Claims:
    """Divide claims by their photographs: differences of other photographs are never in one table."""
    current = [each for each in differences if not each.is_degraded]
    subjects = {each.subject for each in current}
    older = [each for each in differences if each.is_degraded]
    return Claims(
        current,
        [each for each in older if each.subject not in subjects],
        [each for each in older if each.subject in subjects],
    )


def claimed_differences(all_results: list) -> list[ClaimedDifference]:
    """The rows of all studies with a claim, those of one method beside each other."""
    found = [
        ClaimedDifference(results, cell, metric, difference, claim)
        for of_study in all_results
        for results in (of_study, *of_study.older)
        for cell in sorted(results.runs, key=lambda cell: PROTOCOLS.index(cell.protocol))
        for metric in results.study.metrics
        if (claim := results.claim(cell, metric)) is not None
        and (difference := results.difference(cell, metric)) is not None
    ]
    order = list(dict.fromkeys(each.title for each in found))
    return sorted(found, key=lambda each: (order.index(each.title), each.data, each.metric != "R@1"))


def claims_table(differences: list[ClaimedDifference]) -> str:
    """A line for each claim and protocol: the difference measured here beside the paper's."""
    from proxymetric.studies.tables import CLAIM_COLUMNS, claim_texts, mean_text

    rows = [
        [
            f"[{each.title}]({each.results.study.name}.md)",
            each.data,
            each.metric,
            f"`{each.cell.protocol}`",
            f"{mean_text(each.measured, '+')} ({each.measured.n})",
            mean_text(each.at_the_last_epoch, "+"),
            *claim_texts(each.measured, each.claim),
        ]
        for each in differences
    ]
    columns = ["method", "data", "metric", "protocol", "difference (pairs)", "last epoch", *CLAIM_COLUMNS]
    return table(columns, rows)


def claims_picture(differences: list[ClaimedDifference]) -> bytes:
    """The claims about R@1 and MAP@R and the differences measured here as a PNG, a line for each method and data."""
    from matplotlib.figure import Figure

    from proxymetric.studies.drawing import COLOURS, INK, draw_claim, style

    lines = list(dict.fromkeys((each.title, each.data) for each in differences))
    figure = Figure(figsize=(9.6, 1.6 + 0.34 * len(lines)), layout="constrained")
    for axes, metric in zip(figure.subplots(1, len(METRICS), sharey=True), METRICS, strict=True):
        axes.axvline(0, color=INK, linewidth=1)
        for each in differences:
            if each.metric != metric:
                continue
            place = lines.index((each.title, each.data))
            colour, shift = PLACES[each.cell.protocol]
            if LIMITS[0] < each.measured.value < LIMITS[1]:
                axes.errorbar(
                    each.measured.value, place + shift, xerr=each.measured.half or 0.0, fmt="o", markersize=4,
                    color=COLOURS[colour], capsize=2, linewidth=1.4, label=f"measured, {each.cell.protocol}",
                )  # fmt: skip
            else:
                _draw_outside(axes, each.measured.value, place + shift, COLOURS[colour], each.claim)
            draw_claim(axes, each.claim, place)
        axes.set_yticks(range(len(lines)), [f"{title}, {data.split('-')[0]}" for title, data in lines])
        axes.set_ylim(len(lines) - 0.5, -0.5)
        axes.set_xlim(*LIMITS)
        style(axes, f"{metric}, points")
    marks = {label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels())}
    figure.legend(list(marks.values()), list(marks), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150)
    return picture.getvalue()


def _draw_outside(axes: Any, value: float, place: float, colour: str, claim: float) -> None:
    """An arrow at the edge of the picture and the value, for a difference that lies beyond it.

    The value stands farther inside if the mark of the claim is at its usual place.
    """
    left = value < 0
    edge = LIMITS[0 if left else 1]
    points = 48 if abs(claim - edge) < WIDTH_OF_VALUE else 24
    axes.annotate(
        f"{value:+.1f}", (edge, place), (points if left else -points, 0), textcoords="offset points",
        ha="left" if left else "right", va="center", fontsize=8, color=colour,
        arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.4},
    )  # fmt: skip


def why_list(all_results: list) -> str:
    """Why the differences are as they are: an item for each row of a study that says it, with its figures."""
    items = []
    for results in all_results:
        seen = set()
        for cell in sorted(results.runs, key=lambda cell: cell.protocol != "papers"):  # one protocol is enough
            if (key := (cell.row, cell.data, cell.backbone)) not in seen and (text := results.why(cell)):
                seen.add(key)
                title = results.study.data[cell.data].title or cell.data
                items.append(f"- **{results.study.rows[cell.row].title}, {title}:** {text}")
    return "\n".join(items)


def costs_table(all_results: list) -> str:
    """A line for each study: runs, minutes of the machine, images per second and runs per hour.

    Runs share a machine; its minutes are those in which at least one of them ran.
    """
    rows = []
    for results in all_results:
        runs = [run for by_seed in results.runs.values() for run in by_seed.values()]
        spans = []
        for run in runs:
            end = datetime.fromisoformat(run.finished)
            spans.append((end - timedelta(seconds=run.seconds), end))
        minutes = _covered(spans).total_seconds() / 60
        images = sum((run.images_per_second or 0) * run.training_seconds for run in runs)  # not in early results
        machine = ", ".join(dict.fromkeys(str(run.machine.get("gpu") or "CPU") for run in runs))
        rows.append(
            [
                f"[{results.study.title}]({results.study.name}.md)",
                machine,
                str(len(runs)),
                f"{minutes:.0f}",
                f"{images / (60 * minutes):,.0f}" if images else "",
                f"{60 * len(runs) / minutes:.0f}",
            ]
        )
    return table(["study", "machine", "runs", "minutes of the machine", "images/s in training", "runs per hour"], rows)


def _covered(spans: list[tuple[datetime, datetime]]) -> timedelta:
    """The time that is covered by at least one span."""
    total, until = timedelta(), None
    for start, end in sorted(spans):
        if until is not None and start < until:
            start = until
        if end > start:
            total += end - start
            until = end
    return total
