"""The folder of a run for its readers: every part is checked here, and a damaged or missing part is one sentence."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxymetric.core.pieces import NORMALISATIONS
from proxymetric.files import read_json
from proxymetric.signatures import did_you_mean, fit, one_of
from proxymetric.tensor_files import read_header

if TYPE_CHECKING:
    from proxymetric.encoders import Encoder

MAX_RUNS_NAMED = 5
DESCRIPTION: dict[str, type] = {
    "recipe": dict, "said": dict, "encoder": dict, "normalise": str, "view": dict, "classes": list, "data": dict,
}  # fmt: skip
"""the keys of `run.json` and their types"""
INNER: dict[tuple[str, str], type] = {
    ("recipe", "method"): str, ("recipe", "seed"): int, ("recipe", "data"): dict, ("recipe", "view"): dict,
    ("recipe", "encoder"): dict, ("recipe", "loss"): dict, ("recipe", "train"): dict, ("encoder", "backbone"): str,
    ("data", "name"): str, ("data", "identity"): str,
}  # fmt: skip
"""keys of its tables and their types"""
IN_WORDS = {dict: "a table", list: "a list", str: "text", int: "a whole number"}
FILES = {"best": "best.safetensors", "last": "last.safetensors", "chosen": "best.safetensors"}


def is_description(content: Any) -> bool:
    """Whether the content of a `run.json` was written by this package, of any version.

    Example:
        >>> is_description({"my": "own app"})
        False
    """
    return isinstance(content, dict) and isinstance(content.get("recipe"), dict) and "versions" in content


def read_run(run: str | Path) -> dict[str, Any]:
    """Read and check `run.json`, the description of a run.

    Args:
        run: folder of the run.

    Returns:
        The content of the file.

    Raises:
        ValueError: the folder holds no run, the file is damaged, or a newer version wrote it.
    """
    run, file = Path(run), Path(run) / "run.json"
    if not file.is_file():
        nearby = {each.parent for each in (*run.glob("*/run.json"), *run.parent.glob("*/run.json"))}
        nearest = did_you_mean(run.name, [each.name for each in nearby])
        listed = sorted(map(str, nearby), key=lambda name: (f"'{Path(name).name}'" not in nearest, name))
        hint = f"; there are runs at {', '.join(listed[:MAX_RUNS_NAMED])}" if listed else ""
        if nearest:
            hint = f"; did you mean {listed[0]!r}?"
        raise ValueError(f"run: {run} holds no run (no run.json), expected the folder of a run{hint}")
    about = read_json(file)
    check_description(about, file)
    return about


def check_description(about: Any, file: Path) -> None:
    """Check the content of a `run.json`.

    Args:
        about: the content.
        file: where it comes from, for errors.

    Raises:
        ValueError: it is damaged, or a newer version wrote it.

    Example:
        >>> check_description([], Path("run.json"))
        Traceback (most recent call last):
        ValueError: run.json: got a list, expected a file that `train` wrote
    """
    expected = "expected a file that `train` wrote"
    if not isinstance(about, dict):
        raise ValueError(f"{file}: got {IN_WORDS.get(type(about), type(about).__name__)}, {expected}")
    check_version(about, file)
    missing = sorted(DESCRIPTION.keys() - about.keys())
    if missing:
        raise ValueError(f"{file}: got no {', '.join(missing)}, {expected}")
    for key, kind in DESCRIPTION.items():
        _check_type(file, key, about[key], kind)
    for (table, key), kind in INNER.items():
        if key not in about[table]:
            raise ValueError(f"{file}: got no {table}.{key}, {expected}")
        _check_type(file, f"{table}.{key}", about[table][key], kind)
    if not all(isinstance(name, str) for name in about["classes"]):
        raise ValueError(f"{file}: got classes that are not names, {expected}")
    if about["normalise"] not in NORMALISATIONS:
        raise ValueError(f"{file}: got normalise {about['normalise']!r}, {expected}{_versions(about)}")


def _check_type(file: Path, key: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{file}: got {value!r:.60} for {key}, expected {IN_WORDS[kind]}; the file is damaged")


def check_version(about: dict[str, Any], file: Path) -> None:
    """Refuse a run that a newer version of this package wrote.

    Args:
        about: the content of `run.json`.
        file: where it comes from, for errors.

    Raises:
        ValueError: the version that wrote it is newer.

    Example:
        >>> check_version({"versions": {"proxymetric": "99.0"}}, Path("run.json"))
        Traceback (most recent call last):
        ValueError: run.json: got a run of proxymetric 99.0, which is newer than this version (...); expected that
        version or a newer one: pip install --upgrade proxymetric
    """
    then, now = _version_of(about), _own_version()
    if _numbers(then) > _numbers(now):
        raise ValueError(
            f"{file}: got a run of proxymetric {then}, which is newer than this version ({now}); expected that version "
            "or a newer one: pip install --upgrade proxymetric"
        )


def unknown_key(about: dict[str, Any], file: Path, key: str) -> str:
    """The sentence for a key of a `run.json` that this version does not know."""
    return f"{file}: got the key {key}, which this version does not know{_versions(about)}"


def _versions(about: dict[str, Any]) -> str:
    return f"; proxymetric {_version_of(about) or '(unknown version)'} wrote the file, this is {_own_version()}"


def _version_of(about: dict[str, Any]) -> str:
    versions = about.get("versions")
    return str(versions.get("proxymetric", "")) if isinstance(versions, dict) else ""


def _own_version() -> str:
    from proxymetric import __version__

    return __version__


def _numbers(version: str) -> tuple[int, ...]:
    """
    >>> _numbers("0.10.1.dev2") > _numbers("0.9"), _numbers("not installed as a package")
    (True, ())
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def checked_arguments(about: dict[str, Any], file: Path, table: str, target: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that a table of `run.json` holds for a function or class.

    Args:
        about: the content of `run.json`.
        file: where it comes from, for errors.
        table: key of the table.
        target: what is called with the arguments.

    Raises:
        ValueError: an argument is unknown or has the wrong type.
    """
    parameters = inspect.signature(target).parameters
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for key, value in about[table].items():
        if key not in parameters:
            raise ValueError(unknown_key(about, file, f"{table}.{key}"))
        fit(f"{file}: {table}.{key}", value, hints.get(key, Any))
    return dict(about[table])


def build_encoder(about: dict[str, Any], file: Path) -> Encoder:
    """Build the encoder that a `run.json` describes, without its weights.

    Raises:
        ValueError: the description is damaged.
    """
    from proxymetric.encoders import build

    return build(**checked_arguments(about, file, "encoder", build))


def read_state(file: Path) -> dict[str, Any]:
    """Read the state in the header of a checkpoint, without its tensors; empty if it is damaged or missing."""
    try:
        state = json.loads(read_header(file).get("state", "{}")) if file.is_file() else {}
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def is_refitted(run: str | Path, which: str = "best") -> bool:
    """Whether `which` names a model that was refitted on all classes."""
    return which != "chosen" and (Path(run) / "refit" / "result.json").is_file()


def model_file(run: str | Path, which: str = "best") -> Path:
    """The checkpoint that holds a model of a run.

    Args:
        run: folder of the run; for a refitted model its folder `refit`.
        which: "best", "last" or "chosen".

    Raises:
        ValueError: the checkpoint is missing. Another one is never taken in its place.
    """
    run = Path(run)
    one_of("which", which, FILES)
    file, last = run / FILES[which], run / FILES["last"]
    if file.is_file():
        return file
    if which == "last" or not last.is_file():
        raise ValueError(f"run: {run} has no checkpoint (no {file.name}), expected a run that was trained")
    best = read_state(last).get("best")
    if best is None and "position" in read_state(last):
        return last  # no classes chose an epoch: the last one counts
    epoch = f" of epoch {round(best[1], 2)}" if isinstance(best, list) and len(best) == 2 else ""
    raise ValueError(
        f"run: {file} is missing, though the run chose the model{epoch}; expected that file, or --which last for the "
        "model of the last epoch"
    )
