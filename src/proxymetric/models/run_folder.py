"""Read the files of a run and check them; an error names the file that is damaged or missing."""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxymetric.arguments.checks import MAX_DIM, SIZES
from proxymetric.arguments.signatures import did_you_mean, fit, one_of
from proxymetric.core.normalisation import NORMALISATIONS
from proxymetric.system.files import read_json
from proxymetric.system.tensor_files import read_header

if TYPE_CHECKING:
    from proxymetric.encoders import Encoder

MAX_RUNS_NAMED = 5
DESCRIPTION: dict[str, type] = {
    "recipe": dict, "said": dict, "encoder": dict, "normalise": str, "view": dict, "classes": list, "data": dict,
}  # fmt: skip
"""key of `run.json` -> the type of its value"""
INNER: dict[tuple[str, str], type] = {
    ("recipe", "method"): str, ("recipe", "seed"): int, ("recipe", "data"): dict, ("recipe", "view"): dict,
    ("recipe", "encoder"): dict, ("recipe", "loss"): dict, ("recipe", "train"): dict, ("encoder", "backbone"): str,
    ("data", "name"): str, ("data", "identity"): str,
}  # fmt: skip
"""(table, key) in `run.json` -> the type of its value"""
LARGEST = {("encoder", "size"): SIZES[1], ("encoder", "dim"): MAX_DIM, ("view", "size"): SIZES[1]}
"""(table, key) in `run.json` -> its largest value, for which memory is reserved"""
IN_WORDS = {dict: "a table", list: "a list", str: "text", int: "a whole number"}
SIMPLER, REFIT = "simpler", "refit"
"""folders inside a run: the simpler model that it keeps, and the model that was trained on all classes"""
FILES = {"best": "best.safetensors", "last": "last.safetensors", "chosen": "best.safetensors"}


def is_description(content: Any) -> bool:
    """Whether any version of this package wrote the content of a `run.json`.

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
        raise ValueError(f"run: got {run}, which holds no run (it has no run.json); expected the folder of a run{hint}")
    description = read_json(file)
    check_description(description, file)
    return description


def check_description(description: Any, file: Path) -> None:
    """Check the content of a `run.json`.

    Args:
        description: the content.
        file: where it comes from, for errors.

    Raises:
        ValueError: the content is damaged, or a newer version wrote it.

    Example:
        >>> check_description([], Path("run.json"))
        Traceback (most recent call last):
        ValueError: run.json: got a list, expected a file that `train` wrote
    """
    expected = "expected a file that `train` wrote"
    if not isinstance(description, dict):
        raise ValueError(f"{file}: got {IN_WORDS.get(type(description), type(description).__name__)}, {expected}")
    check_version(description, file)
    missing = sorted(DESCRIPTION.keys() - description.keys())
    if missing:
        raise ValueError(f"{file}: got no {', '.join(missing)}, {expected}")
    for key, kind in DESCRIPTION.items():
        _check_type(file, key, description[key], kind)
    for (table, key), kind in INNER.items():
        if key not in description[table]:
            raise ValueError(f"{file}: got no {table}.{key}, {expected}")
        _check_type(file, f"{table}.{key}", description[table][key], kind)
    if not all(isinstance(name, str) for name in description["classes"]):
        raise ValueError(f"{file}: got classes that are not names, {expected}")
    if description["normalise"] not in NORMALISATIONS:
        raise ValueError(
            f"{file}: got normalise {description['normalise']!r}, expected one of {', '.join(NORMALISATIONS)}; if "
            f"the file is not damaged, use {_right_version(description)}"
        )


def _check_type(file: Path, key: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{file}: got {value!r:.60} for {key}, expected {IN_WORDS[kind]}; the file is damaged")


def check_version(description: dict[str, Any], file: Path) -> None:
    """Refuse a run that a newer version of this package wrote.

    Args:
        description: the content of `run.json`.
        file: where it comes from, for errors.

    Raises:
        ValueError: the version that wrote the file is newer.

    Example:
        >>> check_version({"versions": {"proxymetric": "99.0"}}, Path("run.json"))
        Traceback (most recent call last):
        ValueError: run.json: got a run of proxymetric 99.0, which is newer than this version (...); expected that
        version or a newer one: pip install --upgrade proxymetric
    """
    run_version, own_version = _version_of(description), _own_version()
    if _numbers(run_version) > _numbers(own_version):
        raise ValueError(
            f"{file}: got a run of proxymetric {run_version}, which is newer than this version ({own_version}); "
            "expected that version or a newer one: pip install --upgrade proxymetric"
        )


def unknown_key(description: dict[str, Any], file: Path, key: str) -> str:
    """The error for a key of a `run.json` that this version does not know."""
    return f"{file}: got the key {key}, which this version does not know; expected {_right_version(description)}"


def _right_version(description: dict[str, Any]) -> str:
    version = _version_of(description) or "(unknown version)"
    return f"proxymetric {version}, which wrote the file; this is {_own_version()}"


def _version_of(description: dict[str, Any]) -> str:
    versions = description.get("versions")
    return str(versions.get("proxymetric", "")) if isinstance(versions, dict) else ""


def _own_version() -> str:
    from proxymetric.system.version import __version__

    return __version__


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version.

    >>> _numbers("0.10.1.dev2") > _numbers("0.9"), _numbers("not installed as a package")
    (True, ())
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def checked_arguments(
    description: dict[str, Any], file: Path, table: str, target: Callable[..., Any]
) -> dict[str, Any]:
    """Check a table of `run.json` that holds the arguments of a function or class.

    Args:
        description: the content of `run.json`.
        file: where it comes from, for errors.
        table: key of the table.
        target: what is called with the arguments.

    Raises:
        ValueError: an argument is unknown or has the wrong type.
    """
    parameters = inspect.signature(target).parameters
    hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
    for key, value in description[table].items():
        if key not in parameters:
            raise ValueError(unknown_key(description, file, f"{table}.{key}"))
        fit(f"{file}: {table}.{key}", value, hints.get(key, Any))
        most = LARGEST.get((table, key))
        if most is not None and value is not None and not 1 <= value <= most:
            raise ValueError(
                f"{file}: got {value} for {table}.{key}, expected a number in 1..{most}; the file is damaged"
            )
    return dict(description[table])


def build_encoder(description: dict[str, Any], file: Path) -> Encoder:
    """Build the encoder that a `run.json` describes, without its weights.

    Raises:
        ValueError: the description is damaged.
    """
    from proxymetric.encoders import build

    arguments = checked_arguments(description, file, "encoder", build)
    try:
        return build(**arguments)
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{file}: got an encoder that cannot be built ({reason}), expected one that `train` built"
        ) from None


def read_state(file: Path) -> dict[str, Any]:
    """Read the state in the header of a checkpoint, without its tensors; empty if the file is damaged or missing."""
    try:
        state = json.loads(read_header(file).get("state", "{}")) if file.is_file() else {}
    except ValueError:
        return {}
    return state if isinstance(state, dict) else {}


def model_folder(run: str | Path, which: str = "best") -> Path:
    """The folder with the checkpoint and the `run.json` of a model of a run.

    "best" is the simpler model that the run keeps (`runs.simplest`), the one refitted on all classes, or that of the
    chosen epoch; the first two have folders of their own inside the run. After a refit it is "last", too.

    Args:
        run: folder of the run.
        which: "best", "last" or "chosen".
    """
    run = Path(run)
    one_of("which", which, FILES)
    for part in {"best": (SIMPLER, REFIT), "last": (REFIT,), "chosen": ()}[which]:
        if (run / part / "result.json").is_file():
            return model_folder(run / part)
    return run


def is_refitted(run: str | Path, which: str = "best") -> bool:
    """Whether `which` names a model that was refitted on all classes."""
    return model_folder(run, which).name == REFIT


def keeps_simpler(run: str | Path) -> bool:
    """Whether the best model of a run is a simpler one than the trained one."""
    return (Path(run) / SIMPLER / "result.json").is_file()


def model_file(run: str | Path, which: str = "best") -> Path:
    """The checkpoint that holds a model of a run.

    Args:
        run: folder of the run; for a model with a folder of its own, that folder (`model_folder`).
        which: "best", "last" or "chosen".

    Raises:
        ValueError: the checkpoint is missing. No other checkpoint replaces it.
    """
    run = Path(run)
    one_of("which", which, FILES)
    file, last = run / FILES[which], run / FILES["last"]
    if file.is_file():
        return file
    if which == "last" or not last.is_file():
        raise ValueError(f"run: got {run}, which has no checkpoint (no {file.name}); expected a run that was trained")
    best = read_state(last).get("best")
    if best is None and "position" in read_state(last):
        return last  # no epoch was chosen: the last one counts
    epoch = f" of epoch {round(best[1], 2)}" if isinstance(best, list) and len(best) == 2 else ""
    raise ValueError(
        f"run: {file} is missing, though the run chose the model{epoch}; expected that file, or --which last for the "
        "model of the last epoch"
    )
