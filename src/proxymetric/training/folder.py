"""The folder of a run: who may write there, and what a resumed run must not change."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from proxymetric.files import read_json
from proxymetric.recipe import Recipe

OURS = ("run.json", "last.safetensors", "best.safetensors", "log.jsonl", "result.json", "report.html")
MAY_CHANGE = {
    "train.epochs",
    "train.patience",
    "train.refit",
    "train.device",
    "train.save_every",
    "data.workers",
    "data.cache",
}
"""what a resumed run may be told anew; anything else would make it another run"""


def default_folder(raw: dict[str, Any]) -> Path:
    """`runs/<data>-<method>`."""
    data = Path(str(raw.get("data", {}).get("path", "") or "run"))
    return Path("runs") / f"{(data.stem or data.resolve().name).lower()}-{raw.get('method', 'proxy-anchor')}"


def stored(folder: Path) -> dict[str, Any] | None:
    """What `run.json` says, None where no run has begun."""
    file = folder / "run.json"
    return read_json(file) if file.is_file() else None


def claim(folder: Path, resume: bool, overwrite: bool) -> None:
    """Refuse a folder that is somebody else's, before anything is written."""
    if folder.is_file():
        raise ValueError(f"out: {folder} is a file, wanted a folder for the run")
    has_run = stored(folder) is not None
    if has_run and not (resume or overwrite):
        raise ValueError(
            f"out: {folder} already holds a run; add --resume to go on with it, --overwrite to start anew, "
            "or --out with another folder"
        )
    if not has_run and folder.is_dir() and any(folder.iterdir()) and not resume:
        raise ValueError(f"out: {folder} is not empty and holds no run; wanted a new folder")


def clear(folder: Path) -> None:
    """Remove a run, and only what belongs to it."""
    for name in OURS:
        (folder / name).unlink(missing_ok=True)
    if (folder / "refit" / "run.json").is_file():
        shutil.rmtree(folder / "refit")


def same_recipe(recipe: Recipe, before: dict[str, Any], folder: Path) -> None:
    """A resumed run must be the run that was begun."""
    now, then = _flat(_plain(recipe.as_dict())), _flat(before["recipe"])
    for key in sorted(now.keys() | then.keys()):
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
