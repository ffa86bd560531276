"""The table of what `--method auto` chooses from few and from many known classes."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

from generator.scores import BENCHMARKS, paragraph, read, table

SETS = {"cub": "CUB", "glyphs": "drawn characters"}


def auto_choice_table() -> str:
    """The recorded runs of benchmarks/auto_choice.py."""
    rows, records = [], [read(BENCHMARKS / f"auto-choice-{name}.json") for name in SETS]
    for record in records:
        for classes, entry in record["known classes"].items():
            mean, draws = entry["mean"], entry["draws"]
            names = Counter(mean["chosen"])
            scores = [fmean(draw["scores"][name] for draw in draws) for name in ("untrained", "proxy-anchor")]
            of_chosen = fmean(draw["scores"][draw["chosen"]] for draw in draws)
            rows.append(
                [SETS[record["set"]], classes, ", ".join(f"{name} ({count})" for name, count in names.most_common()),
                 f"{of_chosen:.1f}", *(f"{value:.1f}" for value in scores), f"{mean['regret']:.1f}",
                 f"{100 * mean['share']:.0f} %"]
            )  # fmt: skip
    first = records[0]
    text = paragraph(
        f"`{first['backbone']}`, frozen; {first['images of each class']} images of each class. The known classes are "
        f"drawn from 100 training classes; MAP@R in per cent, on {first['unseen classes']} test classes. Chosen: the "
        "number of draws in brackets. Regret: the highest score of a candidate less that of the chosen one, on "
        "average. Trials: their time as a share of the rest of a run."
    )
    columns = ["data", "known classes", "chosen", "chosen, MAP@R", "untrained", "proxy-anchor", "regret", "trials"]
    return f"{text}\n\n{table(columns, rows)}"
