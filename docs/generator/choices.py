"""What `--method auto` chose in all studies with results: its regret, its gain over Proxy-Anchor, its time."""

from __future__ import annotations

import statistics
from collections import Counter

from generator.scores import table


def choices_section(all_results: list) -> str:
    """The section of the page of studies about `--method auto`; empty without such runs."""
    from proxymetric.runs.auto_method import DEFAULT_METHOD, METRIC
    from proxymetric.studies.regret import method_choices

    rows, all_choices = [], []
    for results in all_results:
        for heading, cells in results.groups():
            if choices := [choice for cell in cells for choice in method_choices(results, cells, cell)]:
                name = results.study.name
                rows.append([f"[{name}]({name}.md)", heading.split(":")[0], *_line(choices)])
                all_choices += choices
    if not rows:
        return ""
    if len(rows) > 1:
        rows.append(["all", "", *_line(all_choices)])
    earlier = ""
    if any(choice.is_earlier for choice in all_choices):
        earlier = (
            " Choices of an earlier rule are marked: it compared six losses on one set of held-out classes, and tried "
            "neither the untrained backbone nor a closed form."
        )
    columns = ["study", "data and backbone", "chosen (runs)", "regret", f"against {DEFAULT_METHOD}", "lowest", "trials"]
    return (
        "## What --method auto chooses\n\n`--method auto` tries candidates on features of the known classes. "
        f"Regret: the highest {METRIC} at the same seed of a candidate that it tried, less that of the one that it "
        f"chose. Then the difference of its choice to {DEFAULT_METHOD}, on average and at the seed where it is "
        "lowest, in points. Trials: their time as a share of the time of the run."
        f"{earlier}\n\n"
        f"{table(columns, rows)}\n\n"
    )


def _line(choices: list) -> list[str]:
    """What was chosen how often, and the means of the choices."""
    from proxymetric.studies.tables import rounded

    names = Counter(choice.label for choice in choices)
    gains = [choice.gain for choice in choices if choice.gain is not None]
    return [
        ", ".join(f"{name} ({count})" for name, count in names.most_common()),
        f"{rounded(statistics.fmean(choice.regret for choice in choices), 2):.2f}",
        f"{rounded(statistics.fmean(gains), 2):+.2f}" if gains else "",
        f"{rounded(min(gains), 2):+.2f}" if gains else "",
        f"{100 * statistics.fmean(choice.trial_share for choice in choices):.0f} %",
    ]
