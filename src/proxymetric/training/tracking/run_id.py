"""The id of a run at a tracker, kept in the folder of the run, so that a resumed run continues its curves."""

from __future__ import annotations

from pathlib import Path

from proxymetric.system.files import read_json, write_json

FILE = "tracker.json"


def read_id(folder: Path, tracker: str) -> str | None:
    """Return the id that a tracker gave to the run in a folder; None if there is none.

    Example:
        >>> read_id(Path("no-such-run"), "wandb") is None
        True
    """
    file = folder / FILE
    return read_json(file).get(tracker) if file.is_file() else None


def write_id(folder: Path, tracker: str, run_id: str) -> None:
    """Keep the id that a tracker gave to the run in a folder."""
    file = folder / FILE
    ids = read_json(file) if file.is_file() else {}
    write_json(file, {**ids, tracker: run_id})
