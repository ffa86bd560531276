"""Runs that were trained twice, with the same settings and another version of the code: how far their scores differ."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

from generator.scores import table

METRICS = ("R@1", "MAP@R")


def repeats_section(all_results: list) -> str:
    """The section of the page of studies about runs that were repeated; empty if there are none."""
    repeated = [runs for runs in _runs_by_settings(all_results).values() if len({study.name for study, *_ in runs}) > 1]
    rows = [row for runs in repeated for row in _rows(runs)]
    if not rows:
        return ""
    columns = ["study", "row", "data", "protocol", "seed", "commit", *METRICS, *(f"{m}, last epoch" for m in METRICS)]
    columns.append("largest difference")
    return (
        "## The same run with newer code\n\nRuns with the same settings, images and seed, and different versions of "
        "the code, the oldest first. A GPU adds numbers in no fixed order, so that two runs differ after some steps "
        "even with the same code. The last column is the largest difference from the oldest run at any epoch, in "
        "points of MAP@R on the classes that chose the epoch. As long as a repeated run differs by less than runs of "
        "other seeds do, the older results remain valid.\n\n"
        f"{table(columns, rows)}\n\n"
    )


def _runs_by_settings(all_results: list) -> dict[str, list[tuple[Any, Any, Any]]]:
    """Study, cell and result of each run, by settings, images and seed."""
    from proxymetric.runs import recipe as recipes

    runs = defaultdict(list)
    for results in all_results:
        for cell, runs_by_seed in results.runs.items():
            for result in runs_by_seed.values():
                try:
                    settings = recipes.check(result.recipe).as_dict()  # keys that came later have their defaults
                except ValueError:
                    continue  # the settings of an earlier version
                key = json.dumps([settings, result.data.get("identity")], sort_keys=True)
                runs[key].append((results.study, cell, result))
    return {key: sorted(entries, key=lambda entry: entry[2].finished) for key, entries in runs.items()}


def _rows(runs: list[tuple[Any, Any, Any]]) -> list[list[str]]:
    from proxymetric.studies.scores import CHOSEN, LAST

    rows, oldest = [], runs[0][2]
    for study, cell, result in runs:
        scores = [result.rows.get(row, {}) for row in (CHOSEN, LAST)]
        rows.append(
            [
                f"[{study.name}]({study.name}.md)",
                study.rows[cell.row].title,
                study.data[cell.data].title,
                f"`{cell.protocol}`",
                str(result.recipe["seed"]),
                f"`{(result.commit or '')[:7]}`",
                *(f"{100 * each[metric]:.1f}" if metric in each else "" for each in scores for metric in METRICS),
                "" if result is oldest else _largest_difference(oldest.curve, result.curve),
            ]
        )
    return rows


def _largest_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """The largest difference between two curves at the same epoch, in points of MAP@R.

    Example:
        >>> _largest_difference([{"MAP@R": 0.1}, {"MAP@R": 0.5}], [{"MAP@R": 0.1}, {"MAP@R": 0.512}])
        '1.2'
    """
    differences = [abs(first.get("MAP@R", 0.0) - second.get("MAP@R", 0.0)) for first, second in zip(one, other)]
    return f"{100 * max(differences, default=0.0):.1f}"
