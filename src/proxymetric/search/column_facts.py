"""What the columns of an index hold: their kinds and values, for a page that offers filters."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from proxymetric.search.conditions import CLASS_COLUMN, text_of
from proxymetric.search.store import Store

MOST_VALUES = 100
"""different values up to which they are listed"""


class ColumnFacts(NamedTuple):
    """What a column holds.

    Attributes:
        name: of the column.
        kind: what its values are, one of `conditions.KINDS`.
        values: the different values of text or words, sorted; None if there are more than `MOST_VALUES`, or if they are
            numbers or dates.
        least: the smallest number or the first date; None for text and words.
        greatest: the largest number or the last date.
    """

    name: str
    kind: str
    values: list[str] | None = None
    least: float | str | None = None
    greatest: float | str | None = None


def facts_of_columns(store: Store) -> list[ColumnFacts]:
    """Say what each metadata column of an index holds.

    A database is not asked for the values: its columns are said to be text.
    """
    return [_facts(store, name) for name in store.manifest.columns if name != CLASS_COLUMN]


def _facts(store: Store, name: str) -> ColumnFacts:
    filled = [each for each in store.dictionaries(name) if len(each.values)]
    if not filled:
        return ColumnFacts(name, "text")
    kinds = {each.kind for each in filled}
    if len(kinds) != 1:
        kinds = {"words"} if "words" in kinds else {"text"}
    (kind,) = kinds
    if kind == "number":
        return ColumnFacts(
            name,
            kind,
            least=float(min(each.numbers.min() for each in filled)),
            greatest=float(max(each.numbers.max() for each in filled)),
        )
    if kind == "date":
        return ColumnFacts(
            name,
            kind,
            least=_day(min(each.times.min() for each in filled)),
            greatest=_day(max(each.times.max() for each in filled)),
        )
    words: set[str] = set()
    for each in filled:
        for value in each.values:
            words.update(map(text_of, value) if isinstance(value, list) else [text_of(value)])
            if len(words) > MOST_VALUES:
                return ColumnFacts(name, kind)
    return ColumnFacts(name, kind, values=sorted(words))


def _day(time: np.datetime64) -> str:
    """A date in ISO form."""
    return str(time.astype("datetime64[D]"))
