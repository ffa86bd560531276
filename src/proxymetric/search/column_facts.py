"""What the columns of an index hold: their kinds and values, for a page that offers filters."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from proxymetric.search.conditions import CLASS_COLUMN, Dictionary, text_of
from proxymetric.search.storage.state import State

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


def facts_of_columns(state: State) -> list[ColumnFacts]:
    """Say what each metadata column of a state holds; columns without any value are left out."""
    facts = (_facts(state, name) for name in state.manifest.columns if name != CLASS_COLUMN)
    return [each for each in facts if each is not None]


def _facts(state: State, name: str) -> ColumnFacts | None:
    dictionaries = [_stored(state, name)] if name in state.table.places else []
    changed: list[Any] = [value for values in state.changes.values.values() if (value := values.get(name)) is not None]
    dictionaries.append(Dictionary(changed))
    filled = [each for each in dictionaries if len(each.values)]
    if not filled:
        return None
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


def _stored(state: State, name: str) -> Dictionary:
    """The values of a column that items still have as of the last merge."""
    table = state.table
    is_current = state.is_living[: table.rows].copy()
    is_current[[number for number in state.changes.rows if number < table.rows]] = False
    codes = np.unique(table.codes[table.places[name]][is_current])
    codes = codes[codes >= 0]
    dictionary = table.dictionary(name)
    if len(codes) == len(dictionary.values):
        return dictionary
    return Dictionary([dictionary.values[code] for code in codes.tolist()])


def _day(time: np.datetime64) -> str:
    """A date in ISO form."""
    return str(time.astype("datetime64[D]"))
