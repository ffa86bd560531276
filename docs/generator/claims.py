"""What the papers claim beside what was measured, and what the runs cost, over all studies with results."""

from __future__ import annotations

from datetime import datetime, timedelta

from generator.scores import table

PROTOCOLS = ("papers", "held-out")


def claims_table(all_results: list) -> str:
    """A line for each row of a study with a claim: the paper's difference, and ours in both protocols.

    Args:
        all_results: the `Results` of each study.
    """
    from proxymetric.studies.tables import mean_text, seeds_text, sign_text

    rows = []
    for results in all_results:
        cells = {(cell.row, cell.data, cell.backbone, cell.protocol): cell for cell in results.runs}
        for row, data, backbone in dict.fromkeys(key[:3] for key in cells):
            for metric in results.study.metrics:
                mine = {
                    protocol: cells[row, data, backbone, protocol]
                    for protocol in PROTOCOLS
                    if (row, data, backbone, protocol) in cells
                }
                first = next(iter(mine.values()), None)
                claim = None if first is None else results.claim(first, metric)
                if claim is None:
                    continue
                found = {protocol: results.difference(cell, metric) for protocol, cell in mine.items()}
                line = [
                    f"[{results.study.rows[row].title}]({results.study.name}.md)",
                    results.study.data[data].title or data,
                    metric,
                    f"{claim:+.1f}",
                ]
                for protocol in PROTOCOLS:
                    difference = found.get(protocol)
                    text = "" if difference is None else f"{mean_text(difference, '+')} ({difference.n})"
                    line += [text, "" if difference is None else sign_text(difference, claim)]
                spreads = [each for each in found.values() if each is not None and each.sd is not None]
                rows.append([*line, seeds_text(spreads[0], claim) if spreads else ""])
    columns = ["method", "data", "metric", "paper's difference", "`papers` (pairs)", "same sign"]
    return table([*columns, "`held-out` (pairs)", "same sign", "seeds to detect the paper's difference"], rows)


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
