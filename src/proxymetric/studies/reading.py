"""Read and check the TOML file of a study; the error for an unknown key names the nearest known key."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from proxymetric.arguments.signatures import did_you_mean, one_of
from proxymetric.runs.protocol import PROTOCOLS
from proxymetric.studies.ranges import Range, read_ranges, read_search
from proxymetric.studies.search import with_searched_rows
from proxymetric.studies.spec import Backbone, Data, Row, Study
from proxymetric.system.files import read_toml

METRICS = ("R@1", "MAP@R")
STUDY_KEYS = (
    "name", "title", "seeds", "protocols", "metrics", "embeddings", "settings", "data", "backbones", "search", "rows",
)  # fmt: skip
DATA_KEYS = ("path", "title", "settings")
BACKBONE_KEYS = ("backbone", "weights", "title", "settings")
ROW_KEYS = (
    "name", "title", "recipe", "settings", "baseline", "paper", "claim", "seeds", "protocols", "data", "backbones",
    "minutes", "why", "search",
)  # fmt: skip
DIRECTIONS = {"higher": math.inf, "lower": -math.inf}
"""claims without a figure"""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def load_study(path: str | Path) -> Study:
    """Read and check a study's TOML file.

    Args:
        path: the file.

    Returns:
        The study.

    Raises:
        ValueError: the file is missing or is not TOML, or a key or value is wrong.

    Example:
        >>> load_study("nowhere/study.toml")
        Traceback (most recent call last):
        ...
        ValueError: study: got 'nowhere/study.toml', which does not exist; expected a TOML file
    """
    path = Path(path)
    if not path.is_file():
        folder = path.parent
        hint = did_you_mean(path.name, [file.name for file in folder.glob("*.toml")]) if folder.is_dir() else ""
        state = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"study: got {str(path)!r}, which {state}; expected a TOML file{hint}")
    content = read_toml(path, "study")
    return parse({"name": path.stem, **content}, path.parent)


def parse(content: Mapping[str, Any], folder: Path = Path()) -> Study:
    """Check the content of a study's file.

    Args:
        content: the tables of the TOML file.
        folder: the folder in which recipes are searched first.

    Raises:
        ValueError: a key is unknown, or a value is out of range.

    Example:
        >>> parse({"name": "x", "sedes": [0]})
        Traceback (most recent call last):
        ...
        ValueError: sedes: got an unknown key, expected one of name, title, seeds, ...; did you mean 'seeds'?
    """
    _check_keys("", content, STUDY_KEYS)
    name = _name("name", content.get("name"))
    metrics = _metrics(content.get("metrics", METRICS))
    seeds = _seeds("seeds", content.get("seeds", [0]))
    protocols = _choice("protocols", content.get("protocols", ["held-out"]), PROTOCOLS)
    data = {key: _data(key, table) for key, table in _tables("data", content).items()}
    if not data:
        raise ValueError("data: got no data set, expected a table such as [data.cub] with its path")
    backbones = {key: _backbone(key, table) for key, table in _tables("backbones", content).items()}
    backbones = backbones or {"": Backbone("", None, None, "", {})}
    search, shared = read_search(content, data)
    rows: dict[str, Row] = {}
    row_tables = content.get("rows", [])
    if not isinstance(row_tables, list) or not row_tables:
        raise ValueError("rows: got no row, expected at least one [[rows]]")
    for number, table in enumerate(row_tables):
        row = _row(number, table, seeds, protocols, tuple(data), tuple(backbones), shared)
        if row.name in rows:
            raise ValueError(f"rows: got two rows named {row.name!r}, expected different names")
        rows[row.name] = row
    for row in rows.values():
        if row.baseline is not None and (row.baseline not in rows or row.baseline == row.name):
            others = [other for other in rows if other != row.name]
            hint = did_you_mean(row.baseline, others)
            raise ValueError(f"rows.{row.name}.baseline: got {row.baseline!r}, expected another row{hint}")
    study = Study(
        name=name,
        title=_text("title", content.get("title", name)),
        metrics=metrics,
        embeddings=_choice("embeddings", content.get("embeddings", list(PROTOCOLS)), PROTOCOLS, empty=True),
        settings=_settings("settings", content.get("settings", {})),
        data=data,
        backbones=backbones,
        rows=with_searched_rows(rows, search),
        folder=folder,
        search=search,
    )
    names = [task.name for task in (*study.draws(), *study.tasks())]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"rows: got two runs with the folder {min(repeated)!r}, expected different names")
    return study


def _check_keys(where: str, table: Any, keys: Iterable[str]) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}: got {table!r}, expected a table")
    for key in table:
        if key not in keys:
            place = f"{where}.{key}" if where else key
            raise ValueError(f"{place}: got an unknown key, expected one of {', '.join(keys)}{did_you_mean(key, keys)}")


def _tables(name: str, content: Mapping[str, Any]) -> dict[str, Any]:
    tables = content.get(name, {})
    if not isinstance(tables, Mapping):
        raise ValueError(f"{name}: got {tables!r}, expected tables such as [{name}.NAME]")
    return {_name(name, key): table for key, table in tables.items()}


def _name(where: str, value: Any) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError(f"{where}: got {value!r}, expected a name of letters, digits and . _ + -")
    return value


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: got {value!r}, expected text")
    return value


def _seeds(where: str, value: Any) -> tuple[int, ...]:
    are_seeds = isinstance(value, list) and all(type(seed) is int and seed >= 0 for seed in value)
    if not are_seeds or not value or len(set(value)) != len(value):
        raise ValueError(f"{where}: got {value!r}, expected different whole numbers of at least 0")
    return tuple(value)


def _choice(where: str, value: Any, known: Iterable[str], empty: bool = False) -> tuple[str, ...]:
    known = tuple(known)
    if not isinstance(value, list) or (not value and not empty):
        raise ValueError(f"{where}: got {value!r}, expected a list of {', '.join(known)}")
    for name in value:
        one_of(where, name, known)
    return tuple(dict.fromkeys(value))


def _metrics(value: Any) -> tuple[str, ...]:
    from proxymetric.metrics import names

    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"metrics: got {value!r}, expected a list such as ['R@1', 'MAP@R']")
    return tuple(names(tuple(value)))


def _settings(where: str, value: Any) -> dict[str, Any]:
    """Settings with dotted keys: `{loss = {margin = 0.2}}` becomes `{"loss.margin" = 0.2}`."""
    if not isinstance(value, Mapping):
        raise ValueError(f'{where}: got {value!r}, expected a table such as {{"loss.margin" = 0.2}}')
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping) and "." not in key:
            flat |= {f"{key}.{inner}": each for inner, each in item.items()}
        else:
            flat[key] = item
    for key in ("seed", "protocol", "data.path"):
        if key in flat:
            raise ValueError(
                f"{where}.{key}: got {flat[key]!r}, expected it in `seeds`, `protocols` or `data` of the study"
            )
    return flat


def _data(name: str, table: Any) -> Data:
    where = f"data.{name}"
    _check_keys(where, table, DATA_KEYS)
    path = _text(f"{where}.path", table.get("path"))
    return Data(
        name, path, _text(f"{where}.title", table.get("title", name)),
        _settings(f"{where}.settings", table.get("settings", {})),
    )  # fmt: skip


def _backbone(name: str, table: Any) -> Backbone:
    where = f"backbones.{name}"
    _check_keys(where, table, BACKBONE_KEYS)
    weights = table.get("weights")
    return Backbone(
        name, _text(f"{where}.backbone", table.get("backbone", name)),
        None if weights is None else _text(f"{where}.weights", weights),
        _text(f"{where}.title", table.get("title", name)), _settings(f"{where}.settings", table.get("settings", {})),
    )  # fmt: skip


def _row(
    number: int, table: Any, seeds: tuple[int, ...], protocols: tuple[str, ...], data: tuple[str, ...],
    backbones: tuple[str, ...], shared: Mapping[str, Range],
) -> Row:  # fmt: skip
    _check_keys(f"rows[{number}]", table, ROW_KEYS)
    name = _name(f"rows[{number}].name", table.get("name"))
    where = f"rows.{name}"
    minutes = table.get("minutes")
    if minutes is not None and (isinstance(minutes, bool) or not isinstance(minutes, int | float) or minutes <= 0):
        raise ValueError(f"{where}.minutes: got {minutes!r}, expected a number above 0")
    for key in ("recipe", "baseline"):
        if key in table:
            _text(f"{where}.{key}", table[key])
    selections = {
        key: _choice(f"{where}.{key}", table[key], known) if key in table else default
        for key, known, default in (
            ("protocols", PROTOCOLS, protocols), ("data", data, data), ("backbones", backbones, backbones)
        )
    }  # fmt: skip
    return Row(
        name=name, title=_text(f"{where}.title", table.get("title", name)), recipe=table.get("recipe"),
        settings=_settings(f"{where}.settings", table.get("settings", {})), baseline=table.get("baseline"),
        paper=_figures(f"{where}.paper", table.get("paper", {}), data),
        claim=_figures(f"{where}.claim", table.get("claim", {}), data, DIRECTIONS),
        seeds=_seeds(f"{where}.seeds", table["seeds"]) if "seeds" in table else seeds,
        protocols=selections["protocols"], data=selections["data"], backbones=selections["backbones"],
        minutes=None if minutes is None else float(minutes), why=_why(f"{where}.why", table.get("why", "")),
        ranges=read_ranges(f"{where}.search", table["search"], shared) if "search" in table else None,
    )  # fmt: skip


def _why(where: str, value: Any) -> str:
    """A text in which `{name}` or `{name:.2f}` are figures; which names there are is known when there are results."""
    text = _text(where, value)
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise ValueError(f"{where}: got {text!r} ({error}), expected figures such as {{chosen epoch:.0f}}") from None
    for name in names:
        if not name or "." in name or "[" in name:
            raise ValueError(f"{where}: got {{{name}}}, expected the name of a figure, such as {{chosen epoch:.0f}}")
    return text


def _figures(
    where: str, value: Any, data: tuple[str, ...], words: Mapping[str, float] = MappingProxyType({})
) -> dict[str, dict[str, float]]:
    """Checked scores in per cent by data set and metric, such as `{cub = {"R@1" = 69.7}}`; `words` stand for others."""
    from proxymetric.metrics import names

    _check_keys(where, value, data)
    for key, table in value.items():
        if not isinstance(table, Mapping):
            raise ValueError(f'{where}.{key}: got {table!r}, expected a table such as {{"R@1" = 69.7}}')
        names(tuple(table))
        for metric, figure in table.items():
            if isinstance(figure, str) and figure in words:
                continue
            if isinstance(figure, bool) or not isinstance(figure, int | float) or not -100 <= figure <= 100:
                others = "".join(f' or "{word}"' for word in words)
                raise ValueError(f"{where}.{key}.{metric}: got {figure!r}, expected a number in per cent{others}")
    return {
        key: {metric: words[figure] if isinstance(figure, str) else float(figure) for metric, figure in table.items()}
        for key, table in value.items()
    }
