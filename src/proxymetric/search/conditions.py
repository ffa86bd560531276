"""Conditions on the class and the metadata of items: what `where` means, for every engine.

A condition is a column, an operator and a value. A column that holds a list of words matches a value that is one of
them. A number matches a number, or text that reads as one; a date in ISO form (2026-11-19) matches text that reads as
one. An item without a value matches no condition but "!=".
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from proxymetric.arguments.signatures import one_of

CLASS_COLUMN = "class"
"""the column of `where` that stands for the label"""
OPERATORS = ("=", "!=", "<", "<=", ">", ">=")
ORDERS: dict[str, Callable[[Any, Any], Any]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
}
KINDS = ("text", "number", "date", "words")
"""what the values of a column may be"""
Value = str | int | float | bool
"""a single value of metadata"""
SPELLING = re.compile(r"(?P<column>[^<>=!]+)(?P<operator>!=|<=|>=|=|<|>)(?P<value>.*)", re.DOTALL)
DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


class Condition(NamedTuple):
    """One condition; all conditions of a search hold at once.

    Attributes:
        column: a column of the metadata; `class` is the label.
        operator: one of `OPERATORS`.
        values: "=": one of them is the value; "!=": none of them is; the orders have a single one.
    """

    column: str
    operator: str
    values: tuple[Value, ...]

    def __str__(self) -> str:
        return f"{self.column}{self.operator}{','.join(map(text_of, self.values))}"


def parse_condition(text: str, argument: str = "where") -> Condition:
    """Read a condition: `brand=a,b`, `brand!=a`, `price<50`, `added>=2026-01-31`.

    A comma between values means "one of"; a value that has a comma itself is given from Python or over HTTP.

    Args:
        text: the condition.
        argument: its name, for the error.

    Raises:
        ValueError: it is no condition, or an order is asked of what is neither a number nor a date.

    Example:
        >>> parse_condition("brand=a,b"), parse_condition("price<50").values
        (Condition(column='brand', operator='=', values=('a', 'b')), ('50',))
    """
    match = SPELLING.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{argument}: got {text!r}, expected COLUMN=VALUE, or one of the operators {', '.join(OPERATORS)}, such as "
            "'price<50'"
        )
    column, operator, value = match["column"].strip(), match["operator"], match["value"]
    values = (value,) if operator in ORDERS else tuple(value.split(","))
    return _checked(Condition(column, operator, values), argument)


def as_conditions(
    where: Mapping[str, Any] | Iterable[str | Condition] | None, argument: str = "where"
) -> list[Condition]:
    """Return the conditions of a search.

    Args:
        where: texts as in `parse_condition`; or column -> a value, a list of values of which one shall match, or a
            dictionary operator -> value, such as `{"price": {">=": 10, "<": 50}, "brand": ["a", "b"]}`.
        argument: its name, for the error.

    Raises:
        ValueError: an operator is unknown, or a value cannot be compared.

    Example:
        >>> [str(each) for each in as_conditions({"price": {">=": 10, "<": 50}, "brand": ["a", "b"], "sold": True})]
        ['price>=10', 'price<50', 'brand=a,b', 'sold=true']
    """
    if where is None:
        return []
    if isinstance(where, str):
        return [parse_condition(where, argument)]
    if not isinstance(where, Mapping):
        return [each if isinstance(each, Condition) else parse_condition(each, argument) for each in where]
    conditions = []
    for column, wanted in where.items():
        pairs = wanted.items() if isinstance(wanted, Mapping) else [("=", wanted)]
        for operator, value in pairs:
            one_of(f"{argument} {column}", operator, OPERATORS)
            values = tuple(value) if isinstance(value, list | tuple | set | frozenset) else (value,)
            conditions.append(_checked(Condition(column, operator, values), argument))
    return conditions


def _checked(condition: Condition, argument: str) -> Condition:
    """Refuse values that cannot be compared."""
    column, operator, values = condition
    if wrong := [value for value in values if not isinstance(value, str | int | float)]:
        raise ValueError(f"{argument}: got {column}{operator}{wrong[0]!r:.100}, expected text, a number or a bool")
    if operator not in ORDERS:
        return condition
    if len(values) != 1 or (number_of(values[0]) is None and date_of(values[0]) is None):
        given = ",".join(map(str, values))
        raise ValueError(
            f"{argument}: got {column}{operator}{given}, expected a number or a date such as 2026-11-19 after "
            f"{operator!r}"
        )
    return condition


def check_columns(conditions: Iterable[Condition], columns: Sequence[str], argument: str = "where") -> None:
    """Refuse a column that no item has.

    Raises:
        ValueError: the column is unknown; the message names the nearest one.
    """
    for condition in conditions:
        one_of(argument, condition.column, [CLASS_COLUMN, *columns])


def text_of(value: Any) -> str:
    """A value as text: true and false as words, a whole number without a point.

    Example:
        >>> text_of(True), text_of(3.0), text_of(2.5), text_of("a")
        ('true', '3', '2.5', 'a')
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)
    return str(value)


def number_of(value: Any) -> float | None:
    """A value as a number; None if it is none. True is 1."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def date_of(value: Any) -> datetime | None:
    """A value as a time, read from ISO text; None if it is none. Times with a zone are compared in UTC."""
    if not isinstance(value, str) or not DATE.match(value):
        return None
    try:
        time = (
            datetime.fromisoformat(value)
            if len(value) > 10
            else datetime.combine(date.fromisoformat(value), datetime.min.time())
        )
    except ValueError:
        return None
    return time if time.tzinfo is None else (time - time.utcoffset()).replace(tzinfo=None)  # type: ignore[operator]


class Dictionary:
    """The different values of a column, and which of them match a condition.

    A condition is answered once for each different value, however many items have it.

    Args:
        values: text, numbers, bools, or lists of words.

    Example:
        >>> prices = Dictionary([3, "12.5", "new", ["red", "dear"]])
        >>> prices.matching(Condition("price", "<", ("10",))).tolist()
        [True, False, False, False]
        >>> prices.matching(Condition("price", "=", ("red", 12.5))).tolist()
        [False, True, False, True]
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values
        self._numbers: np.ndarray | None = None
        self._times: np.ndarray | None = None
        self._places: dict[str, list[int]] | None = None

    def matching(self, condition: Condition) -> np.ndarray:
        """Say for each value whether it matches, (U,) bool."""
        matches = np.zeros(len(self.values), dtype=bool)
        if condition.operator in ORDERS:
            order, (limit,) = ORDERS[condition.operator], condition.values
            with np.errstate(invalid="ignore"):
                if (number := number_of(limit)) is not None:
                    return order(self.numbers, number) & ~np.isnan(self.numbers)
                return order(self.times, np.datetime64(date_of(limit))) & ~np.isnat(self.times)
        for value in condition.values:
            matches[self._equal(value)] = True
        return ~matches if condition.operator == "!=" else matches

    @property
    def numbers(self) -> np.ndarray:
        """Each value as a number, NaN for what is none."""
        if self._numbers is None:
            read = (None if isinstance(value, bool) else number_of(value) for value in self.values)
            self._numbers = np.array([np.nan if number is None else number for number in read], dtype=np.float64)
        return self._numbers

    @property
    def times(self) -> np.ndarray:
        """Each value as a time, NaT for what is none."""
        if self._times is None:
            self._times = np.array([date_of(value) for value in self.values], dtype="datetime64[us]")
        return self._times

    @functools.cached_property
    def kind(self) -> str:
        """What the values are, one of `KINDS`; what can be ordered is a number or a date.

        Text such as "007" is no number: it may be a code.

        Example:
            >>> [Dictionary(values).kind for values in ([3, "12.5"], ["2026-11-19"], [["red", "new"]], [3, "new"])]
            ['number', 'date', 'words', 'text']
        """
        if any(isinstance(value, list) for value in self.values):
            return "words"
        if not np.isnan(self.numbers).any():
            is_number = (text_of(number) == key_of(value) for number, value in zip(self.numbers.tolist(), self.values))
            return "number" if all(is_number) else "text"
        return "text" if np.isnat(self.times).any() else "date"

    def _equal(self, value: Value) -> list[int]:
        """The places of the values that equal one."""
        if self._places is None:
            self._places = {}
            for place, each in enumerate(self.values):
                for word in each if isinstance(each, list) else [each]:
                    self._places.setdefault(key_of(word), []).append(place)
        return self._places.get(key_of(value), [])


def key_of(value: Any) -> str:
    """What equal values share: a number equals its text."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return text_of(value)
    text = text_of(value)
    number = number_of(text)
    return text_of(number) if number is not None and text == text_of(number) else _spelled(text, number)


def _spelled(text: str, number: float | None) -> str:
    """Text as it is; but "12.50" equals 12.5. Text such as "007" is no number: it may be a code."""
    if number is None or re.match(r"\s|[-+]?0\d|\+", text) or text != text.strip() or "_" in text:
        return text
    return text_of(number)


def matches(value: Any, condition: Condition) -> bool:
    """Whether a single value matches; None is an item without one.

    Example:
        >>> matches(None, Condition("brand", "!=", ("a",))), matches("3", Condition("price", ">", (2,)))
        (True, True)
    """
    if value is None:
        return condition.operator == "!="
    return bool(Dictionary([value]).matching(condition)[0])


def value_key(value: Any) -> Any:
    """What stands for a value in a dictionary: 1, 1.0 and true are different, and a list cannot be a key.

    Example:
        >>> [value_of(value_key(value)) for value in ("a", 1, 1.0, True, ["a", "b"])]
        ['a', 1, 1.0, True, ['a', 'b']]
    """
    return value if isinstance(value, str) else (type(value), tuple(value) if isinstance(value, list) else value)


def value_of(key: Any) -> Any:
    """The value that a key stands for."""
    return key if isinstance(key, str) else key[0](key[1])


class Comparable(NamedTuple):
    """What the conditions of an item's columns compare, for databases that know neither our types nor our spelling.

    A condition with "=" holds if one of `keys` is the `key_of` a wanted value; an order compares `numbers`, or `times`
    with a date.

    Attributes:
        keys: column -> `key_of` its value, or of each of its words.
        numbers: column -> its value as a number, where it is one.
        times: column -> its value as microseconds since 1970, where it is a date.
    """

    keys: dict[str, list[str]]
    numbers: dict[str, float]
    times: dict[str, int]


def comparable(label: str | None, metadata: Mapping[str, Any]) -> Comparable:
    """Return what conditions compare of an item.

    Example:
        >>> comparable("cat", {"price": "12.50", "tags": ["red", "new"], "sold": None})
        Comparable(keys={'price': ['12.5'], 'tags': ['red', 'new'], 'class': ['cat']}, numbers={'price': 12.5},
        times={})
    """
    values = {column: value for column, value in {**metadata, CLASS_COLUMN: label}.items() if value is not None}
    keys = {column: [key_of(word) for word in (value if isinstance(value, list) else [value])]
            for column, value in values.items()}  # fmt: skip
    numbers = {column: number for column, value in values.items()
               if not isinstance(value, bool) and (number := number_of(value)) is not None}  # fmt: skip
    times = {column: microseconds(time) for column, value in values.items() if (time := date_of(value)) is not None}
    return Comparable(keys, numbers, times)


def microseconds(time: datetime) -> int:
    """Microseconds since 1970."""
    return (time - datetime(1970, 1, 1)) // timedelta(microseconds=1)


def is_text(value: str) -> bool:
    """Whether SQLite can compare a text: no surrogates, and no NUL, where a comparison ends."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in value
