"""The folder of a run: who may write there, and what a resumed run must not change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from proxymetric.checkpoint import Checkpoint
from proxymetric.files import read_json
from proxymetric.recipe import Recipe, check
from proxymetric.training.optim import steps_in

OURS = ("run.json", "last.safetensors", "best.safetensors", "log.jsonl", "result.json", "report.html")
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
"""what a resumed run may be told anew; anything else would make it another run. Images may lie elsewhere now: that they
are the same ones is seen from their identity"""


def default_folder(raw: dict[str, Any]) -> Path:
    """`runs/<data>-<method>`."""
    table = raw.get("data", {})
    data = Path(str(table.get("path", "") if isinstance(table, dict) else "") or "run").resolve()
    name = data.stem if data.suffix.lower() == ".csv" else data.name
    return Path("runs") / f"{name.lower()}-{raw.get('method', 'proxy-anchor')}"


def stored(folder: Path) -> dict[str, Any] | None:
    """What `run.json` says, None where no run has begun."""
    file = folder / "run.json"
    return read_json(file) if file.is_file() else None


def has_more_than(folder: Path, epochs: float) -> bool:
    """Whether the run in `folder` has more steps behind it than so many epochs make."""
    file = folder / "last.safetensors"
    if not file.is_file():
        return False
    state = Checkpoint.read(file).state
    return state["step"] > steps_in(epochs, state["steps_per_epoch"])


def checkpoint(last: Path) -> Checkpoint:
    """The checkpoint to go on from, or a sentence that says what is left to do."""
    ways_out = f"{last.with_name('best.safetensors').name} beside it is untouched; --overwrite starts the run anew"
    try:
        found = Checkpoint.read(last)
    except ValueError as error:
        raise ValueError(f"resume: {error}. {ways_out}") from None
    if "position" not in found.state:
        raise ValueError(f"resume: {last} holds a model, not a whole checkpoint to go on from. {ways_out}")
    return found


def claim(folder: Path, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """Refuse a folder that is somebody else's, before anything is written; the run to go on with, if there is one."""
    if resume and overwrite:
        raise ValueError("resume, overwrite: got both; --resume goes on with a run, --overwrite starts it anew")
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"out: {place} is a file, expected a folder for the run")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"out: nothing can be written in {place}; expected a folder of your own")
    holds_run = (folder / "run.json").is_file()
    if holds_run and not (resume or overwrite):
        raise ValueError(
            f"out: {folder} already holds a run; add --resume to go on with it, --overwrite to start anew, "
            "or --out with another folder"
        )
    if not holds_run and folder.is_dir() and set(folder.iterdir()) - set(_leftovers(folder)):
        raise ValueError(f"out: {folder} is not empty and holds no run; expected a new folder")
    return stored(folder) if resume else None


def clear(folder: Path) -> None:
    """Remove a run, and only what belongs to it; `run.json` last, so that the folder is a run's until it is empty."""
    if (folder / "refit" / "run.json").is_file():
        shutil.rmtree(folder / "refit")
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)
    for name in reversed(OURS):
        (folder / name).unlink(missing_ok=True)
    sweep(folder)


def sweep(folder: Path) -> None:
    """Remove what runs that were killed while writing left half written."""
    for file in _leftovers(folder):
        file.unlink(missing_ok=True)


def _leftovers(folder: Path) -> list[Path]:
    # The second pattern is how safetensors names what it has not finished.
    return [file for pattern in (*(f".{name}.*.part" for name in OURS), ".tmp??????") for file in folder.glob(pattern)]


def same_data(identity: str, before: dict[str, Any], folder: Path) -> None:
    """A resumed run must see the images that it was begun with: which ones make up a batch depends on all of them."""
    if identity != before["data"]["identity"]:
        raise ValueError(
            f"resume: the images of {before['data']['name']} are not those that {folder} was begun with; "
            "put them back, or start another run with --out"
        )


def same_recipe(recipe: Recipe, before: dict[str, Any], folder: Path) -> None:
    """A resumed run must be the run that was begun."""
    train = recipe.train
    if train.decay == "cosine" and train.decay_every is None and train.epochs != before["recipe"]["train"]["epochs"]:
        raise ValueError(
            "resume: with a cosine over all epochs their number sets every rate; leave train.epochs as it was"
        )
    # A key that there was not yet when the run was begun had what is now its default.
    defaults = check({"method": recipe.method}).as_dict()
    now, then = _flat(_plain(recipe.as_dict())), _flat(_plain(defaults)) | _flat(before["recipe"])
    for key in sorted(now.keys() | then.keys(), key=lambda key: ("." in key, key)):
        if key not in MAY_CHANGE and now.get(key) != then.get(key):
            raise ValueError(
                f"resume: {folder} was begun with {key}={then.get(key)!r}, now it is {now.get(key)!r}; "
                "leave it as it was, or start another run with --out"
            )


def _plain(value: Any) -> Any:
    """As it comes back from JSON: tuples are lists."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _flat(recipe: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{name}.{key}" if isinstance(table, dict) else name: value
        for name, table in recipe.items()
        for key, value in (table.items() if isinstance(table, dict) else [("", table)])
    }
