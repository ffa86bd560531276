"""Tables of a study in Markdown and LaTeX, made from its stored results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxymetric.runs.result import Result
from proxymetric.runs.score import name_classes
from proxymetric.studies.inference import MAX_SEEDS, Mean, paired, seeds_needed, student
from proxymetric.studies.ranges import Draw
from proxymetric.studies.scores import CHOSEN, HELD_OUT, LAST, Results, printed_number
from proxymetric.studies.search import chosen
from proxymetric.studies.spec import LABELS, Cell, Study
from proxymetric.system.files import replacing

MIN_SEEDS_OF_A_SPREAD = 3
"""fewest pairs from which the tables estimate a spread"""
CLAIM_COLUMNS = ["paper's difference", "same sign", "in the interval", "seeds to detect the paper's difference"]
CLAIM_NOTE = (
    'Same sign: "open" where the interval contains 0. In the interval: whether it contains the paper\'s difference. '
    "Both judge the chosen epoch; one chosen on the test half favours methods that peak early: compare the last epoch."
)


@dataclass
class Table:
    """A table of text with a title and a note below it."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        """The table in Markdown.

        >>> print(Table("scores", ["method", "R@1"], [["a", "1.0 ± 0.1"]]).markdown())
        **scores**
        <BLANKLINE>
        | method | R@1 |
        |---|---|
        | a | 1.0 ± 0.1 |
        """
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        texts = [f"| {' | '.join(line)} |" for line in lines]
        texts[1] = texts[1].replace(" ", "")
        return "\n".join([f"**{self.title}**", "", *texts, *(["", self.note] if self.note else [])])

    def latex(self) -> str:
        """The table as a LaTeX float; it needs the package booktabs. Columns of numbers are aligned to the right."""
        columns = zip(*self.rows, strict=True) if self.rows else [()] * len(self.columns)
        sides = "".join("r" if all(map(_is_number, filter(None, cells))) else "l" for cells in columns)
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{_escaped(self.title)}. {_escaped(self.note)}}}",
                 rf"\begin{{tabular}}{{{sides}}}", r"\toprule", _line(self.columns), r"\midrule",
                 *map(_line, self.rows), r"\bottomrule", r"\end{tabular}", r"\end{table}"]  # fmt: skip
        return "\n".join(lines)


def _is_number(text: str) -> bool:
    """Whether a text begins with a number.

    >>> _is_number("+0.5 ± 0.1"), _is_number("R@1")
    (True, False)
    """
    return text.lstrip("+-").split(" ")[0].replace(".", "", 1).isdigit()


def _line(cells: list[str]) -> str:
    return " & ".join(map(_escaped, cells)) + r" \\"


def _escaped(text: str) -> str:
    r"""Text with the special characters of LaTeX escaped.

    >>> print(_escaped("50 % ± 1 of `a_b`"))
    50 \% $\pm$ 1 of a\_b
    """
    for sign in ("\\", "%", "_", "&", "#", "$"):
        text = text.replace(sign, r"\textbackslash{}" if sign == "\\" else f"\\{sign}")
    return text.replace("±", r"$\pm$").replace("`", "").replace("−", "$-$")


def _kinds(results: Results, cells: list[Cell]) -> dict[str, str]:
    """The scores that tables show (see `Results.scores`) -> the end of their column's title."""
    protocol = cells[0].protocol
    if protocol == "papers":
        return {CHOSEN: f", {LABELS['papers']}", LAST: f", {LABELS['last']}"}
    if all(run.evaluated_on == "validation" for cell in cells for run in results.runs[cell].values()):
        return {CHOSEN: f", {HELD_OUT}"}  # the data has no test classes
    return {CHOSEN: "", HELD_OUT: f", {HELD_OUT}"} if protocol == "held-out" else {CHOSEN: ""}


def _held_out_note(kinds: dict[str, str]) -> str:
    sentence = " Scores are of the test half, except in columns of held-out classes, which choose epoch and settings."
    return sentence if HELD_OUT in kinds else ""


def _counts_note(runs: list[Result]) -> str:
    """How many images of how many classes were scored; empty if no run says it.

    >>> counts = [{"classes": 9, "images": n} for n in (90, 88)]
    >>> _counts_note([Result(evaluated_on="test", data={"test": each}) for each in counts])
    ' Scored: 9 test classes (88 to 90 images).'
    """
    scored: dict[tuple[str, int], list[int]] = {}
    for run in runs:
        if counts := run.data.get(run.evaluated_on or ""):
            kind = "held-out" if run.evaluated_on == "validation" else "test"
            scored.setdefault((kind, counts["classes"]), []).append(counts["images"])
    names = [
        name_classes(kind, {"classes": classes, "images": " to ".join(map(str, sorted({min(images), max(images)})))})
        for (kind, classes), images in scored.items()
    ]
    return f" Scored: {', '.join(names)}." if names else ""


def score_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """Means over the seeds: of the chosen epoch on the test half, and of what `_kinds` has beside it."""
    study, kinds = results.study, _kinds(results, cells)
    columns = ["method", "seeds", *(f"{metric}{label}" for label in kinds.values() for metric in study.metrics)]
    papers = {cell: study.rows[cell.row].paper.get(cell.data, {}) for cell in cells}
    published = [metric for metric in study.metrics if any(metric in figures for figures in papers.values())]
    columns += [f"paper's {metric}" for metric in published]
    note = f"Mean over the seeds ± half the 95 % Student interval.{_held_out_note(kinds)}"
    if published:
        note += " The papers' figures are of their own backbones, which differ between papers: compare differences."
    runs = [run for cell in cells for run in results.runs[cell].values()]
    note += _counts_note(runs)
    if untrained := sum(not run.chosen_epoch for run in runs):
        note += (
            f" {untrained} of {len(runs)} runs chose epoch 0: no epoch scored higher than the model before training."
        )
    table = Table(f"{heading}, %", columns, note=note)
    for cell in cells:
        row = study.rows[cell.row]
        line = [row.title, str(len(results.runs[cell]))]
        for kind in kinds:
            line += [_mean(results.scores(cell, metric, kind)) for metric in study.metrics]
        table.rows.append(line + [_as_printed(papers[cell][m]) if m in papers[cell] else "" for m in published])
    return table


def difference_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """The difference of each row to its baseline, paired by seed, and the difference that the paper claims."""
    study, kinds = results.study, _kinds(results, cells)
    columns = ["method", "against", "metric", "pairs", *(f"difference{label}" for label in kinds.values())]
    note = f"Mean of the differences at equal seeds ± half the 95 % Student interval.{_held_out_note(kinds)}"
    claimed = any(results.claim(cell, metric) is not None for cell in cells for metric in study.metrics)
    if claimed:
        columns += CLAIM_COLUMNS
        note += (
            f" {CLAIM_NOTE} Seeds to detect it: pairs with which a two-sided paired t-test at 5 % detects the paper's "
            "difference with 80 % power, given the spread measured here."
        )
    table = Table(f"{heading}, differences, points", columns, note=note)
    for cell in cells:
        base = results.baseline(cell)
        for metric in study.metrics if base is not None else ():
            assert base is not None
            measured, claim = results.difference(cell, metric), results.claim(cell, metric)
            if measured is None:
                continue
            titles = [study.rows[cell.row].title, study.rows[base.row].title]
            line = [*titles, metric, str(measured.n)]
            line += [mean_text(results.difference(cell, metric, kind), "+") for kind in kinds]
            if claimed:
                line += claim_texts(measured, claim)
            table.rows.append(line)
    return table


def figure_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """The figures that the methods report about themselves at the chosen epoch."""
    table = Table(
        f"{heading}, inside the methods at the chosen epoch", ["method", "figure", "seeds", "mean"],
        note="Mean over the seeds ± half the 95 % Student interval.",
    )  # fmt: skip
    for cell in cells:
        for name, values in results.figures(cell).items():
            mean = student(list(values.values()))
            half = "" if mean.half is None else f" ± {mean.half:.2g}"
            title = results.study.rows[cell.row].title
            table.rows.append([title, name, str(mean.n), f"{mean.value:.4g}{half}"])
    return table


def why_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """Why the differences are as they are, in the words of the study."""
    table = Table(f"{heading}, our reading", ["method", "why"])
    for cell in cells:
        if text := results.why(cell):
            table.rows.append([results.study.rows[cell.row].title, text])
    return table


def size_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """The scores of vectors that are cut and stored in fewer bits, and the difference to training at that dimension."""
    metrics = results.study.metrics
    columns = ["method", "dimensions", "numbers", "bytes", "seeds", *metrics]
    columns += [f"{metric} against training at that dimension" for metric in metrics]
    note = (
        "Mean over the seeds ± half the 95 % Student interval; differences are paired by seed, between vectors that "
        "are cut and those of the run that has only this dimension. Bits are scored without re-ranking."
    )
    table = Table(f"{heading}, smaller vectors, %", columns, note=note)
    by_metric = {metric: {cell: results.sizes(cell, metric) for cell in cells} for metric in metrics}
    of_first = by_metric[metrics[0]]
    alone = {next(iter(sizes))[0]: cell for cell, sizes in of_first.items() if len({dim for dim, *_ in sizes}) == 1}
    for cell, sizes in of_first.items():
        for key, values in sizes.items():
            line = [results.study.rows[cell.row].title, *map(str, key), str(len(values))]
            line += [_mean(by_metric[metric][cell].get(key, {})) for metric in metrics]
            other = alone.get(key[0])
            for metric in metrics:
                ours, theirs = (by_metric[metric][each].get(key, {}) if each else {} for each in (cell, other))
                line.append(mean_text(paired(ours, theirs), "+") if other is not None and other != cell else "")
            table.rows.append(line)
    return table


def regret_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """A line for each run of `--method auto`, and their means; no lines if there is none.

    The regret of a run is the highest score at its seed of a candidate that it tried, less the score of the run. These
    scores are those of the rows of the same table that differ from the run in method and start alone. A run without
    such a row is left out.
    """
    from proxymetric.runs.auto_method import DEFAULT_METHOD, METRIC
    from proxymetric.studies.regret import method_choices

    note = (
        f"{METRIC} in per cent. The regret is the highest score at the same seed of a candidate that was tried, less "
        "that of the run that chose; trials: their time as a share of the time of that run. An earlier rule compared "
        "six losses on one set of held-out classes."
    )
    columns = ["method", "seed", "chosen", METRIC, "highest", "regret", f"against {DEFAULT_METHOD}", "trials"]
    table = Table(f"{heading}, the choice of a method", columns, note=note)
    for cell in cells:
        choices = method_choices(results, cells, cell)
        title = results.study.rows[cell.row].title
        for each in choices:
            gain = "" if each.gain is None else f"{rounded(each.gain, 2):+.2f}"
            table.rows.append(
                [title, str(each.seed), each.label, f"{each.score:.1f}", f"{each.best}, {each.best_score:.1f}",
                 f"{rounded(each.regret, 2):+.2f}", gain, f"{100 * each.trial_share:.0f} %"]
            )  # fmt: skip
        if choices:
            regrets = [each.regret for each in choices]
            gains = [each.gain for each in choices if each.gain is not None]
            means = [mean_text(student(values), "+") if values else "" for values in (regrets, gains)]
            share = f"{100 * student([each.trial_share for each in choices]).value:.0f} %"
            table.rows.append([title, "mean", "", "", "", *means, share])
    return table


def effort_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """Each searched row beside the row as printed, and the differences of both to their baselines."""
    search = results.study.search
    draws = 0 if search is None else search.draws
    columns = ["method", "metric", "as printed", f"searched, {draws} draws", "searched against as printed"]
    columns += ["against the baseline, as printed", "against the baseline, searched"]
    note = (
        f"Each row, and its baseline too, had {draws} draws of its numbers, chosen on held-out classes in short runs. "
        "Differences are paired by seed; both rows of the last column were searched."
    )
    table = Table(f"{heading}, as printed and searched", columns, note=note)
    for cell in cells:
        printed = results.printed(cell)
        for metric in results.study.metrics if printed is not None else ():
            assert printed is not None
            scores = [results.scores(each, metric) for each in (printed, cell)]
            differences = [paired(*reversed(scores)), *(results.difference(each, metric) for each in (printed, cell))]
            table.rows.append(
                [results.study.rows[printed.row].title, metric, *map(_mean, scores),
                 *(mean_text(each, "+") for each in differences)]
            )  # fmt: skip
    return table


def search_tables(results: Results, data: str, backbone: str) -> list[Table]:
    """The numbers that the search of each row has found, and the scores of its draws on the held-out classes."""
    study = results.study
    best = chosen(study, (draw for draws in results.draws.values() for draw in draws))
    groups = {key: draws for key, draws in results.draws.items() if key[1:] == (data, backbone)}
    metric = next((draw.metric for draws in groups.values() for draw in draws if draw.metric), "")
    numbers = Table(
        f"{search_heading(study, data, backbone)}, the numbers",
        ["method", "number", "range", "as printed", "best draw"],
        note="The best draw has the highest score on the held-out classes; no image of the test half was used.",
    )
    scores = Table(
        f"{search_heading(study, data, backbone)}, {metric} of the draws on held-out classes, %",
        ["method", "draws", "without a score", "best", "median", "lowest"],
        note="A draw without a score has numbers with which the run fails. These scores choose; they are not results.",
    )
    for (row, *_), draws in groups.items():
        values = [100 * abs(draw.score) for draw in draws if draw.score is not None]
        title, group = study.rows[row].title, draws[0].group
        figures = [f"{of(values):.1f}" if values else "" for of in (max, statistics.median, min)]
        scores.rows.append([title, str(len(draws)), str(len(draws) - len(values)), *figures])
        for key, each in (study.rows[row].ranges or {}).items():
            value = best[group].values[key] if group in best else None
            numbers.rows.append([title, key, str(each), _number(printed_number(study, group, key)), _number(value)])
    return [numbers, scores]


def search_heading(study: Study, data: str, backbone: str) -> str:
    """The heading of the search on a data set with a backbone."""
    assert study.search is not None
    titles = ", ".join(filter(None, (study.data[data].title, study.backbones[backbone].title)))
    return f"{titles}: search, {study.search.draws} draws of {study.search.epochs} epochs for each row"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


MAKERS: tuple[Callable[[Results, str, list[Cell]], Table], ...] = (
    score_table,
    effort_table,
    difference_table,
    size_table,
    regret_table,
    figure_table,
    why_table,
)


def write_tables(study: Study, results: dict[str, Result], folder: Path, draws: Iterable[Draw] = ()) -> list[Path]:
    """Write `tables.md`, `tables.tex` and the plots of a study.

    Args:
        study: the study.
        results: name of the run -> result.
        folder: the folder for the files.
        draws: the draws of its search.

    Returns:
        The files that were written.
    """
    from proxymetric.studies.drawing import draw, draw_search

    newest = Results(study, results, draws)
    tables: dict[str, list[Table]] = {}
    pictures: dict[str, list[Path]] = {}
    for by_cell in (newest, *newest.older):
        for heading, cells in by_cell.groups():
            tables[heading] = [make(by_cell, heading, cells) for make in MAKERS]
            pictures[heading] = draw(by_cell, heading, cells, folder)
    for data, backbone in dict.fromkeys(group[1:] for group in newest.draws):
        heading = search_heading(study, data, backbone)
        tables[heading] = search_tables(newest, data, backbone)
        pictures[heading] = draw_search(newest, data, backbone, folder)
    photographs = [sentence for by_cell in (newest, *newest.older) for sentence in by_cell.photographs()]
    markdown = [f"# {study.title}", *photographs]
    for heading, group in tables.items():
        markdown.append(f"## {heading}")
        markdown += [table.markdown() for table in group if table.rows]
        markdown += [f"![{file.stem}]({file.name})" for file in pictures[heading]]
    latex = [f"% {sentence}" for sentence in photographs]
    latex += [table.latex() for group in tables.values() for table in group if table.rows]
    files = [folder / "tables.md", folder / "tables.tex"]
    for file, texts in zip(files, (markdown, latex)):
        with replacing(file) as temporary:
            temporary.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return files + [file for plots in pictures.values() for file in plots]


def _mean(values: dict[int, float]) -> str:
    return mean_text(student(list(values.values()))) if values else ""


def mean_text(mean: Mean | None, sign: str = "") -> str:
    """A mean with its interval as text.

    >>> mean_text(Mean(61.23, 0.44, 5)), mean_text(Mean(0.5, None, 1), "+")
    ('61.2 ± 0.4', '+0.50')
    """
    if mean is None:
        return ""
    digits = 2 if sign else 1
    half = "" if mean.half is None else f" ± {mean.half:.{digits}f}"
    return f"{rounded(mean.value, digits):{sign}.{digits}f}{half}"


def _as_printed(value: float, sign: str = "") -> str:
    """A figure of a paper with one or two decimals, as the paper prints it.

    >>> _as_printed(69.7), _as_printed(64.65), _as_printed(0.5, "+")
    ('69.7', '64.65', '+0.5')
    """
    return f"{rounded(value, 2):{sign}.{1 if round(value, 1) == round(value, 2) else 2}f}"


def rounded(value: float, digits: int) -> float:
    """A rounded value; zero has no minus sign.

    >>> rounded(-0.001, 2)
    0.0
    """
    return round(value, digits) + 0.0


def claim_texts(measured: Mean, claim: float | None) -> list[str]:
    """The cells of `CLAIM_COLUMNS`: a measured difference beside the one that the paper claims.

    Example:
        >>> claim_texts(Mean(0.3, 0.2, 3, 0.1), 0.4), claim_texts(Mean(0.3, 0.5, 3, 0.2), 4.2)
        (['+0.4', 'yes', 'yes', '3'], ['+4.2', 'open', 'no', '2'])
        >>> claim_texts(Mean(0.3, 0.2, 3, 0.1), math.inf)  # a curve without figures
        ['higher', 'yes', '', '']
    """
    if claim is None:
        return [""] * len(CLAIM_COLUMNS)
    has_sign = measured.value * claim > 0
    open_sign = measured.half is None or abs(measured.value) <= measured.half
    sign = "" if claim == 0 else "open" if open_sign else "yes" if has_sign else "no"
    if math.isinf(claim):
        return ["higher" if claim > 0 else "lower", sign, "", ""]
    inside = "" if measured.half is None else "yes" if abs(claim - measured.value) <= measured.half else "no"
    return [_as_printed(claim, "+"), sign, inside, seeds_text(measured, claim)]


def seeds_text(measured: Mean, claim: float | None) -> str:
    """The number of seeds that would resolve the paper's difference, given the measured spread; "" if not known.

    Two seeds do not tell the spread: it may be ten times as large as measured.
    """
    if claim is None or measured.sd is None or measured.n < MIN_SEEDS_OF_A_SPREAD:
        return ""
    needed = seeds_needed(claim, measured.sd)
    return f"{needed:,}" if needed is not None else f"more than {MAX_SEEDS:,}" if claim else ""
