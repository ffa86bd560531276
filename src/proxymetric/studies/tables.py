"""Tables of a study in Markdown and LaTeX, made from its stored results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from proxymetric.files import replacing
from proxymetric.studies.inference import MOST_SEEDS, Mean, seeds_needed, student
from proxymetric.studies.scores import CHOSEN, LAST, Results
from proxymetric.studies.spec import LABELS, Cell, Study

if TYPE_CHECKING:
    from proxymetric.runs.result import Result


@dataclass
class Table:
    """Cells of text under a title. note: a sentence below it."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    note: str = ""

    def markdown(self) -> str:
        """
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
        """A floating table; it needs the package booktabs."""
        width = len(self.columns)
        lines = [r"\begin{table}", r"\centering", rf"\caption{{{_escaped(self.title)}. {_escaped(self.note)}}}",
                 rf"\begin{{tabular}}{{l{'r' * (width - 1)}}}", r"\toprule", _line(self.columns), r"\midrule",
                 *map(_line, self.rows), r"\bottomrule", r"\end{tabular}", r"\end{table}"]  # fmt: skip
        return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return " & ".join(map(_escaped, cells)) + r" \\"


def _escaped(text: str) -> str:
    r"""
    >>> print(_escaped("50 % ± 1 of `a_b`"))
    50 \% $\pm$ 1 of a\_b
    """
    for sign in ("\\", "%", "_", "&", "#", "$"):
        text = text.replace(sign, r"\textbackslash{}" if sign == "\\" else f"\\{sign}")
    return text.replace("±", r"$\pm$").replace("`", "").replace("−", "$-$")


def score_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """Means over the seeds; with the papers' protocol the chosen and the last epoch side by side."""
    study, protocol = results.study, cells[0].protocol
    kinds = [(CHOSEN, LABELS[protocol])]
    if protocol == "papers":
        kinds.append((LAST, LABELS["last"]))
    ends = [f", {words}" if protocol == "papers" else "" for _, words in kinds]
    columns = ["method", "seeds", *(f"{metric}{end}" for end in ends for metric in study.metrics)]
    columns += [f"paper's {metric}" for metric in study.metrics]
    table = Table(f"{heading}, %", columns, note="Mean over the seeds ± half the 95 % Student interval.")
    for cell in cells:
        row = study.rows[cell.row]
        line = [row.title, str(len(results.runs[cell]))]
        for kind, _ in kinds:
            line += [_mean(results.scores(cell, metric, kind)) for metric in study.metrics]
        papers = row.paper.get(cell.data, {})
        table.rows.append(line + [f"{papers[m]:.1f}" if m in papers else "" for m in study.metrics])
    return table


def difference_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """Each row against its baseline, paired by seed, beside what the paper claims."""
    study, protocol = results.study, cells[0].protocol
    papers = protocol == "papers"
    columns = ["method", "against", "metric", "pairs", f"difference, {LABELS[protocol]}" if papers else "difference"]
    columns += ["difference, last epoch"] if papers else []
    columns += ["paper's difference", "same sign", "seeds to resolve the paper's"]
    note = (
        "Mean of the differences at equal seeds ± half the 95 % Student interval. Seeds to resolve: pairs with which a "
        "two-sided paired t-test at 5 % sees the paper's difference with 80 % power, given the spread measured here."
    )
    table = Table(f"{heading}, differences, points", columns, note=note)
    for cell in cells:
        base = results.baseline(cell)
        for metric in study.metrics if base is not None else ():
            assert base is not None
            found, claim = results.difference(cell, metric), results.claim(cell, metric)
            if found is None:
                continue
            line = [study.rows[cell.row].title, study.rows[base.row].title, metric, str(found.n), _text(found, "+")]
            if papers:
                line.append(_text(results.difference(cell, metric, LAST), "+"))
            line += [f"{claim:+.1f}" if claim is not None else "", _sign(found, claim), _seeds(found, claim)]
            table.rows.append(line)
    return table


def figure_table(results: Results, heading: str, cells: list[Cell]) -> Table:
    """What happens inside the methods at the chosen epoch."""
    table = Table(
        f"{heading}, inside the methods at the chosen epoch", ["method", "figure", "seeds", "mean"],
        note="Mean over the seeds ± half the 95 % Student interval.",
    )  # fmt: skip
    for cell in cells:
        for name, values in results.figures(cell).items():
            found = student(list(values.values()))
            half = "" if found.half is None else f" ± {found.half:.2g}"
            title = results.study.rows[cell.row].title
            table.rows.append([title, name, str(found.n), f"{found.value:.4g}{half}"])
    return table


MAKERS: tuple[Callable[[Results, str, list[Cell]], Table], ...] = (score_table, difference_table, figure_table)


def write_tables(study: Study, results: dict[str, Result], folder: Path) -> list[Path]:
    """Write `tables.md`, `tables.tex` and the pictures of a study.

    Args:
        study: what was run.
        results: the results by the name of the run.
        folder: where to.

    Returns:
        The files that were written.
    """
    from proxymetric.studies.drawing import draw

    found = Results(study, results)
    groups = found.groups()
    tables = {heading: [make(found, heading, cells) for make in MAKERS] for heading, cells in groups}
    pictures = {heading: draw(found, heading, cells, folder) for heading, cells in groups}
    markdown = [f"# {study.title}"]
    for heading, made in tables.items():
        markdown.append(f"## {heading}")
        markdown += [table.markdown() for table in made if table.rows]
        markdown += [f"![{file.stem}]({file.name})" for file in pictures[heading]]
    latex = [table.latex() for made in tables.values() for table in made if table.rows]
    files = [folder / "tables.md", folder / "tables.tex"]
    for file, texts in zip(files, (markdown, latex)):
        with replacing(file) as temporary:
            temporary.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return files + [file for made in pictures.values() for file in made]


def _mean(values: dict[int, float]) -> str:
    return _text(student(list(values.values()))) if values else ""


def _text(mean: Mean | None, sign: str = "") -> str:
    """
    >>> _text(Mean(61.23, 0.44, 5)), _text(Mean(0.5, None, 1), "+")
    ('61.2 ± 0.4', '+0.50')
    """
    if mean is None:
        return ""
    digits = 2 if sign else 1
    half = "" if mean.half is None else f" ± {mean.half:.{digits}f}"
    return f"{mean.value:{sign}.{digits}f}{half}"


def _sign(found: Mean, claim: float | None) -> str:
    """Whether the difference points where the paper says, and whether its interval leaves 0 out."""
    if claim is None or claim == 0:
        return ""
    words = "yes" if found.value * claim > 0 else "no"
    return words if found.half is not None and abs(found.value) > found.half else f"{words}, not resolved"


def _seeds(found: Mean, claim: float | None) -> str:
    if claim is None or found.sd is None:
        return ""
    needed = seeds_needed(claim, found.sd)
    return f"{needed:,}" if needed is not None else f"more than {MOST_SEEDS:,}" if claim else ""
