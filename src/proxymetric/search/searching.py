"""Searches in one state of an index: which rows match, which are nearest, and what of them is a result."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.search.conditions import CLASS_COLUMN, Condition, as_conditions, check_columns, text_of
from proxymetric.search.derived import points_of
from proxymetric.search.engines import Engine, open_engine
from proxymetric.search.items import Hit, Item
from proxymetric.search.storage.change_log import Row
from proxymetric.search.storage.state import State, open_state

GROUPS_AT_FIRST = 4
"""with one result for each value of a column, so many times the wanted results are looked at first"""


class Opened:
    """A state of an index, the engine that searches it, and what was computed of it.

    Args:
        state: the state.
        engine: its engine.
    """

    def __init__(self, state: State, engine: Engine) -> None:
        self.state, self.engine = state, engine

    @functools.cached_property
    def vectors(self) -> np.ndarray:
        """The vectors of all items, (count, dim), in the order of their rows."""
        if "float32" in self.state.arrays and not self.state.has_dead:
            return self.state.arrays["float32"]
        return self.state.floats(self.state.living)

    @functools.cached_property
    def points(self) -> np.ndarray | None:
        """The map, (count, 2); None without one."""
        return points_of(self.state)


def opened_state(folder: Path, earlier: State | None) -> Opened:
    """Open the newest state of an index with its engine.

    Raises:
        ValueError: the folder is not an index, or a file is missing or damaged.
    """
    state = open_state(folder, earlier)
    return Opened(state, open_engine(state.manifest.engine, state))


class SearchQuestion(NamedTuple):
    """What is asked of each query; the arguments of `StoredIndex.search`, checked."""

    k: int
    conditions: list[Condition]
    differs: Mapping[str, Any]
    offset: int
    min_similarity: float | None
    one_per: str | None


def checked_question(
    columns: Sequence[str],
    k: int,
    where: Mapping[str, Any] | Iterable[str | Condition] | None,
    differs: Mapping[str, Any] | None,
    offset: int,
    min_similarity: float | None,
    one_per: str | None,
) -> SearchQuestion:
    """Check the arguments of a search.

    Args:
        columns: the metadata columns that there are.
        k: as the other arguments, see `StoredIndex.search`.
    """
    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    if offset < 0:
        raise ValueError(f"offset: got {offset}, expected at least 0")
    if min_similarity is not None and not -1 <= min_similarity <= 1:
        raise ValueError(f"min_similarity: got {min_similarity:g}, expected a similarity between -1 and 1")
    conditions = as_conditions(where)
    check_columns(conditions, columns)
    for column in differs or {}:
        one_of("differs", column, [CLASS_COLUMN, *columns])
    if one_per is not None:
        one_of("one_per", one_per, [CLASS_COLUMN, *columns])
    return SearchQuestion(k, conditions, differs or {}, offset, min_similarity, one_per)


def answered(
    opened: Opened, queries: Tensor, question: SearchQuestion, without: Sequence[str | Collection[str] | None] | None
) -> list[list[Hit]]:
    """Answer a question for each query.

    Args:
        opened: the state.
        queries: (Q, dim) of unit length.
        question: the question.
        without: for each query an id, or several, that are left out of its results; None: none is.
    """
    state, wanted = opened.state, question.offset + question.k
    own_ids: list[Collection[str]] = [
        () if ids is None else (ids,) if isinstance(ids, str) else ids for ids in without or [None] * len(queries)
    ]
    most_left_out = max(map(len, own_ids), default=0)
    hits: list[list[Hit]] = [[] for _ in queries]
    for values, members in queries_alike(len(queries), question.differs).items():
        conditions = [*question.conditions, *(Condition(column, "!=", (value,)) for column, value in values)]
        mask = state.matching(conditions) if conditions else state.is_living if state.has_dead else None
        depth = (wanted + most_left_out) * (1 if question.one_per is None else GROUPS_AT_FIRST)
        while True:
            similarities, numbers = opened.engine.search(queries[members], depth, mask)
            different = numbers.unique().tolist()
            rows = dict(zip(different, state.at(different), strict=True))
            lists = [
                _results(rows, scores, nearest, own_ids[member], question)
                for member, scores, nearest in zip(
                    members, similarities.clamp(-1, 1).tolist(), numbers.tolist(), strict=True
                )
            ]
            is_all = numbers.shape[1] < depth
            if question.one_per is None or is_all or all(len(results) >= wanted for results in lists):
                break
            depth *= GROUPS_AT_FIRST
        for member, results in zip(members, lists, strict=True):
            hits[member] = [_hit(state, row, score) for row, score in results[question.offset : wanted]]
    return hits


def queries_alike(count: int, differs: Mapping[str, Any]) -> dict[tuple[tuple[str, Any], ...], list[int]]:
    """Group queries by what must differ from their results, so that those with equal values are searched at once.

    Args:
        count: number of queries.
        differs: column -> the value of the queries, one for all or a list.

    Returns:
        Columns and values -> numbers of the queries.

    Raises:
        ValueError: a list has another length.

    Example:
        >>> queries_alike(3, {"camera": ["left", None, "left"]})
        {(('camera', 'left'),): [0, 2], (): [1]}
    """
    lists = {
        column: [values] * count if values is None or isinstance(values, str | int | float) else list(values)
        for column, values in differs.items()
    }
    for column, values in lists.items():
        if len(values) != count:
            raise ValueError(
                f"differs: got {len(values)} values of {column} for {count} queries, expected one for each"
            )
    groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
    for query in range(count):
        pairs = [(column, values[query]) for column, values in lists.items()]
        groups.setdefault(tuple((column, value) for column, value in pairs if value is not None), []).append(query)
    return groups


def _results(
    rows: Mapping[int, Row],
    scores: Sequence[float],
    numbers: Sequence[int],
    without: Collection[str],
    question: SearchQuestion,
) -> list[tuple[Row, float]]:
    """The results of one query, without what was asked to be left out."""
    results: list[tuple[Row, float]] = []
    values: set[str] = set()
    for number, score in zip(numbers, scores, strict=True):
        row = rows[number]
        if row.id in without:
            continue
        if question.min_similarity is not None and score < question.min_similarity:
            break
        if question.one_per is not None and (text := _value(row, question.one_per)) is not None:
            if text in values:
                continue
            values.add(text)
        results.append((row, score))
    return results


def _value(row: Row, column: str) -> str | None:
    """The value of an item in a column, as text."""
    value = row.label if column == CLASS_COLUMN else row.values().get(column)
    return None if value is None else text_of(value)


def as_item(state: State, row: Row) -> Item:
    """An item of a state, with its place among the items."""
    return Item(row.id, row.label, row.values(), _position(state, row.number))


def _hit(state: State, row: Row, similarity: float) -> Hit:
    return Hit(row.id, similarity, row.label, row.values(), _position(state, row.number))


def _position(state: State, number: int) -> int:
    """The place of a row among those with items."""
    return int(np.searchsorted(state.living, number)) if state.has_dead else number
