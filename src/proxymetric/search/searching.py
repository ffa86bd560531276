"""What a search asks, and what of the nearest items is a result: the same for local files and for a database."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from proxymetric.arguments.signatures import one_of
from proxymetric.search.conditions import CLASS_COLUMN, Condition, as_conditions, check_columns, text_of
from proxymetric.search.storage.change_log import Row

GROUPS_AT_FIRST = 4
"""with one result for each value of a column, so many times the wanted results are looked at first"""


Ranked = list[tuple[Row, float]]
"""items with their similarities, most similar first"""


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


class Nearest(Protocol):
    """Finds the nearest items that match some conditions."""

    def __call__(self, members: Sequence[int], depth: int) -> list[Ranked]:
        """Return at most `depth` items for each of these queries; fewer for a query that has no more."""
        ...


def answered(
    count: int,
    matching: Callable[[list[Condition]], Nearest],
    question: SearchQuestion,
    without: Sequence[str | Collection[str] | None] | None,
) -> list[Ranked]:
    """Answer a question for each query.

    Args:
        count: number of queries.
        matching: returns what finds the items that match all of some conditions.
        question: the question.
        without: for each query an id, or several, that are left out of its results; None: none is.
    """
    wanted = question.offset + question.k
    own_ids: list[Collection[str]] = [
        () if ids is None else (ids,) if isinstance(ids, str) else ids for ids in without or [None] * count
    ]
    most_left_out = max(map(len, own_ids), default=0)
    answers: list[Ranked] = [[] for _ in range(count)]
    for values, members in queries_alike(count, question.differs).items():
        nearest = matching([*question.conditions, *(Condition(column, "!=", (value,)) for column, value in values)])
        depth = (wanted + most_left_out) * (1 if question.one_per is None else GROUPS_AT_FIRST)
        while True:
            lists = nearest(members, depth)
            results = [_results(each, own_ids[member], question) for member, each in zip(members, lists, strict=True)]
            is_all = all(len(each) < depth for each in lists)
            if question.one_per is None or is_all or all(len(each) >= wanted for each in results):
                break
            depth *= GROUPS_AT_FIRST
        for member, each in zip(members, results, strict=True):
            answers[member] = each[question.offset : wanted]
    return answers


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


def _results(ranked: Ranked, without: Collection[str], question: SearchQuestion) -> Ranked:
    """The results of one query, without what was asked to be left out."""
    results: Ranked = []
    values: set[str] = set()
    for row, score in ranked:
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
