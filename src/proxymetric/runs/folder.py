"""The folder of a run: who may write there, and what a resumed run may change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from proxymetric.checkpoint import Checkpoint
from proxymetric.files import read_json
from proxymetric.recipe import Recipe, check
from proxymetric.training.optim import steps_in

RUN_FILES = ("run.json", "last.safetensors", "best.safetensors", "log.jsonl", "result.json", "report.html")
MAY_CHANGE = {
    "train.epochs",
    "train.patience",
    "train.refit",
    "train.device",
    "train.parallel",
    "train.save_every",
    "train.track",
    "data.path",
    "data.workers",
    "data.cache",
}
"""keys of the recipe that may change when a run is resumed; any other change would make it another run. The path of the
images may change, because their identity is checked"""


def default_folder(raw: dict[str, Any]) -> Path:
    """The default folder of a run: `runs/<data>-<method>`."""
    table = raw.get("data", {})
    data = Path(str(table.get("path", "") if isinstance(table, dict) else "") or "run").resolve()
    name = data.stem if data.suffix.lower() == ".csv" else data.name
    return Path("runs") / f"{name.lower()}-{raw.get('method', 'proxy-anchor')}"


def read_description(folder: Path) -> dict[str, Any] | None:
    """The content of `run.json`; None if the folder holds no run."""
    file = folder / "run.json"
    return read_json(file) if file.is_file() else None


def has_more_than(folder: Path, epochs: float) -> bool:
    """Whether the run in `folder` was already trained for more than `epochs` epochs."""
    file = folder / "last.safetensors"
    if not file.is_file():
        return False
    state = Checkpoint.read(file).state
    return state["step"] > steps_in(epochs, state["steps_per_epoch"])


def read_checkpoint(last: Path) -> Checkpoint:
    """Read the checkpoint that a resumed run continues from.

    Raises:
        ValueError: the file cannot be read, or holds a model without the state of the training.
    """
    advice = "best.safetensors in the same folder is not changed; --overwrite starts the run again"
    try:
        checkpoint = Checkpoint.read(last)
    except ValueError as error:
        raise ValueError(f"resume: {error}. {advice}") from None
    if "position" not in checkpoint.state:
        raise ValueError(f"resume: {last} holds a model, but not the state of a training to continue. {advice}")
    return checkpoint


def claim(folder: Path, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """Check that a run may write to `folder`, before anything is written.

    Args:
        folder: of the run.
        resume: continue the run in it.
        overwrite: replace the run in it.

    Returns:
        The content of `run.json` of the run to continue; None for a new run.

    Raises:
        ValueError: the folder cannot be written, holds something else, or holds a run and neither flag is given.
    """
    if resume and overwrite:
        raise ValueError(
            "resume, overwrite: got both, expected one; --resume continues a run, --overwrite starts it again"
        )
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"out: got {place}, which is a file; expected a folder for the run")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"out: got {place}, which cannot be written; expected a folder that you may write to")
    holds_run = (folder / "run.json").is_file()
    if holds_run and not (resume or overwrite):
        raise ValueError(
            f"out: {folder} already holds a run; expected --resume to continue it, --overwrite to replace it, or "
            "another folder with --out"
        )
    if not holds_run and folder.is_dir() and set(folder.iterdir()) - set(_partial_files(folder)):
        raise ValueError(f"out: got {folder}, which is not empty and holds no run; expected a new folder")
    return read_description(folder) if resume else None


def clear(folder: Path) -> None:
    """Remove the files of a run and nothing else; `run.json` last, so that an interrupted removal can be repeated."""
    if (folder / "refit" / "run.json").is_file():
        shutil.rmtree(folder / "refit")
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    for name in reversed(RUN_FILES):
        (folder / name).unlink(missing_ok=True)
    remove_partial_files(folder)


def remove_partial_files(folder: Path) -> None:
    """Remove files that a killed run had not finished writing."""
    for file in _partial_files(folder):
        file.unlink(missing_ok=True)


def _partial_files(folder: Path) -> list[Path]:
    # The second pattern is the name that safetensors gives a file it has not finished.
    return [
        file for pattern in (*(f".{name}.*.part" for name in RUN_FILES), ".tmp??????") for file in folder.glob(pattern)
    ]


def check_same_data(identity: str, before: dict[str, Any], folder: Path) -> None:
    """Check that a resumed run has the images that it began with: the content of every batch depends on all of them.

    Raises:
        ValueError: the images differ.
    """
    if identity != before["data"]["identity"]:
        raise ValueError(
            f"resume: the images of {before['data']['name']} are not those that {folder} began with; expected the same "
            "images, or a new run with --out"
        )


def check_same_recipe(recipe: Recipe, before: dict[str, Any], folder: Path) -> None:
    """Check that a resumed run has the recipe that it began with, but for the keys in `MAY_CHANGE`.

    Raises:
        ValueError: another key differs.
    """
    train = recipe.train
    if train.decay == "cosine" and train.decay_every is None and train.epochs != before["recipe"]["train"]["epochs"]:
        raise ValueError(
            f"resume: got train.epochs={train.epochs}, expected {before['recipe']['train']['epochs']} as before: a "
            "cosine schedule over all epochs depends on their number"
        )
    # A key that did not exist when the run began had the value that is now its default.
    defaults = check({"method": recipe.method}).as_dict()
    now, then = _flat(_plain(recipe.as_dict())), _flat(_plain(defaults)) | _flat(before["recipe"])
    for key in sorted(now.keys() | then.keys(), key=lambda key: ("." in key, key)):
        if key not in MAY_CHANGE and now.get(key) != then.get(key):
            raise ValueError(
                f"resume: got {key}={now.get(key)!r}, expected {then.get(key)!r} as {folder} began with, or a new run "
                "with --out"
            )


def _plain(value: Any) -> Any:
    """A value as JSON returns it: tuples become lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _flat(recipe: dict[str, Any]) -> dict[str, Any]:
    """Tables as `table.key` entries."""
    return {
        f"{name}.{key}" if isinstance(table, dict) else name: value
        for name, table in recipe.items()
        for key, value in (table.items() if isinstance(table, dict) else [("", table)])
    }
