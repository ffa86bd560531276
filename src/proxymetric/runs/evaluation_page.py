"""The page of `evaluate`: the parts of a run's report, on any labelled images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxymetric.models.load import next_to
from proxymetric.runs.comparison import UNTRAINED_MEANS, Comparison
from proxymetric.runs.report import draw_page
from proxymetric.runs.result import UNTRAINED
from proxymetric.runs.score import EmbeddedSet, describe, images_per_class
from proxymetric.system.files import check_output


def default_page(run: str | Path, data: str) -> Path:
    """The default page of an evaluation: next to the run's folder, named after run and data.

    Example:
        >>> print(default_page("runs/birds", "new photos"))
        runs/birds-on-new-photos.html
    """
    return next_to(run, "on", data, ".html")


def check_target(page: Path) -> None:
    """Check, before the work begins, that the page replaces nothing but an earlier page.

    Raises:
        ValueError: the path holds something other than a page, or cannot be written.
    """
    from proxymetric.plots.report import is_page

    check_output("report", page, "a page of proxymetric", is_page, "--report with another file, or --no-report")


def draw_evaluation(
    page: Path,
    *,
    run: str,
    embedded: EmbeddedSet,
    comparison: Comparison,
    note: str,
    remarks: Sequence[str],
    sizes: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the page of an evaluation.

    Args:
        page: the file.
        run: name of the run.
        embedded: the set with the normalised embeddings of the trained encoder, on the CPU.
        comparison: the scores.
        note: which classes the model was trained on; may be empty.
        remarks: sentences that say what the scores mean.
        sizes: of a nested model: the scores of smaller vectors, see `score.score_sizes`.

    Returns:
        The file.
    """
    table: list[dict[str, Any]] = [
        {"name": name, **scores, "intervals": comparison.intervals.get(name, {})}
        for name, scores in comparison.rows.items()
    ]
    if comparison.differences:
        table.append({"name": "difference"} | {name: str(each) for name, each in comparison.differences.items()})
    explanation = f" {UNTRAINED_MEANS}" if UNTRAINED in comparison.rows else ""
    return draw_page(
        page,
        embedded=embedded,
        title=f"{embedded.images.name}: {Path(run).name}",
        facts={
            "run": run,
            "evaluated on": describe(embedded),
            "classes": note,
            "images per class": images_per_class(embedded),
        },
        table=table,
        results_note=f"Retrieval on these classes, in per cent.{explanation}",
        remarks=[remark for remark in remarks if remark != UNTRAINED_MEANS],
        sizes=sizes,
        curve=[],
        notes=[],
        map_heading="Map of the classes",
    )
