"""Tables for people: drawn in a terminal, plain lines elsewhere. Names are shown as they are, never as markup."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from proxymetric.system.text import visible

TABLE_METRICS = ("R@1", "MAP@R", "nDCG@8")


class TextTable(Table):
    """A table whose title, headings and cells are plain text: `[red]` in a file name is not read as a colour.

    Args:
        title: title of the table; empty for no title.
        columns: headings.
        left: columns that are aligned at the left; the others are aligned at the right.
        **options: arguments of `rich.table.Table`.
    """

    def __init__(self, title: str, columns: list[str], left: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(title=Text(visible(title)) if title else None, title_justify="left", **options)
        for name in columns:
            justify: Any = "left" if name in left else "right"
            self.add_column(Text(visible(name)), justify=justify, overflow="fold")

    def add(self, *cells: object) -> None:
        """Add a row."""
        self.add_row(*(Text(visible(cell)) for cell in cells))


def show(console: Console, table: Table) -> None:
    """Print a table: drawn and wrapped in a terminal; as lines of aligned columns, never wrapped, elsewhere."""
    if console.is_terminal:
        console.print(table)
        return
    for line in plain_lines(table):
        console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=True)


def plain_lines(table: Table) -> list[str]:
    """The lines of a table without a frame: title, headings, rows; two spaces or more between columns.

    Example:
        >>> table = TextTable("scores", ["", "R@1"], left=("",))
        >>> table.add("untrained encoder", "76.8")
        >>> plain_lines(table)
        ['scores', '                    R@1', 'untrained encoder  76.8']
    """
    columns = [[_plain(column.header), *map(_plain, column.cells)] for column in table.columns]
    lines = [_plain(table.title)] if table.title else []
    widths = [max(map(len, cells)) for cells in columns]
    for row in zip(*columns):
        cells = [
            cell.rjust(width) if column.justify == "right" else cell.ljust(width)
            for cell, width, column in zip(row, widths, table.columns)
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _plain(cell: Any) -> str:
    return cell.plain if isinstance(cell, Text) else str(cell)


def score_table(title: str, rows: dict[str, dict[str, float]], shown: tuple[str, ...] = TABLE_METRICS) -> TextTable:
    """Make a table of scores in per cent; `shown` are its columns."""
    columns = [name for name in shown if any(name in row for row in rows.values())]
    table = TextTable(title, ["", *columns], left=("",))
    for name, row in rows.items():
        table.add(name, *(f"{100 * row[c]:.1f}" if c in row else "" for c in columns))
    return table
