"""Draw a run's report again: after a change of the page, or where it was lost."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from proxymetric.core.watcher import Silent, Watcher
from proxymetric.files import read_json
from proxymetric.runs.evaluation_set import seen_set, unseen_vectors
from proxymetric.runs.report import draw_report


def remake_report(run: str | Path, watcher: Watcher | None = None) -> Path:
    """Embed the run's unseen classes with its model once more and write `report.html` anew.

    run: a finished run's folder; its data must still be where it was.
    """
    folder = Path(run)
    file = folder / "result.json"
    if not file.is_file():
        raise ValueError(
            f"run: {folder} is not finished (no result.json); `proxymetric train --resume` goes on with it"
        )
    result = read_json(file)
    part = result["evaluated_on"]
    if part is None or (part == "validation" and result.get("refit")):
        raise ValueError(f"run: {folder} has seen every class of its data, so there is nothing to report on")
    vectors, images = unseen_vectors(folder, watcher or Silent(), part)
    return draw_report(
        folder / "report.html",
        title=f"{result['data']['name']}: {result['recipe']['method']}",
        result=result,
        images=images,
        vectors=vectors,
        kept=np.arange(len(images)),
        seed=result["recipe"]["seed"],
        seen=seen_set(folder) if "uncertainty" in result else None,
    )
