"""The folder of a run: who may write there, and what a resumed run may change."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from proxymetric.arguments.own_code import UntrustedCode
from proxymetric.arguments.recipe_keys import flat_keys
from proxymetric.data.hugging_face import is_hugging_face, place_of
from proxymetric.data.images import ImageSet
from proxymetric.models.run_folder import REFIT, SIMPLER, is_description, read_run, read_state, unknown_key
from proxymetric.runs.recipe import Recipe, check
from proxymetric.runs.report import check_page
from proxymetric.search.run_knowledge import HELD_OUT
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.files import read_json
from proxymetric.system.lock import LOCK, locked
from proxymetric.system.watcher import Watcher
from proxymetric.training.optim import steps_in
from proxymetric.training.tracking.run_id import FILE as TRACKER_FILE
from proxymetric.training.tracking.tensorboard import EVENTS_SUFFIX

RUN_FILES = (
    "run.json", "last.safetensors", "best.safetensors", "log.jsonl", HELD_OUT, "result.json", "report.html",
    TRACKER_FILE,
)  # fmt: skip
"""the files that a run writes"""
FOLDERS = (SIMPLER, REFIT, "tensorboard")
"""the folders that a run writes"""
CLEARING = ".run.json.cleared"
"""the name of `run.json` while the files of its run are removed"""
RUN_JSON_OPENING = b'{\n "recipe": {'
"""the first bytes of every `run.json`"""
STATE: dict[str, tuple[type, ...]] = {
    "epoch": (int,), "step": (int,), "position": (int,), "steps_per_epoch": (int,), "skipped": (int,),
    "best": (list, type(None)), "stale": (int,), "losses": (list,), "curve": (list,), "seconds": (int, float),
    "scaler": (dict,), "log": (int,), "facts": (dict,),
}  # fmt: skip
"""the keys of a checkpoint's state that a resumed run needs, and their types"""
MIN_WORD_LETTERS = 3
"""letters of a word in the name of a folder that may be a slip of the pen"""
MAY_CHANGE = {
    "train.epochs",
    "train.patience",
    "train.keep",
    "train.refit",
    "train.device",
    "train.compile",
    "train.parallel",
    "train.save_every",
    "train.track",
    "train.whiten",
    "data.path",
    "data.workers",
    "data.cache",
}
"""keys of the recipe that may change when a run is resumed; with any other change the run would be a different one. The
path of the images may change, because their content is compared; `data.cache` may not change from or to device"""


def default_folder(raw: dict[str, Any]) -> Path:
    """The default folder of a run: `runs/<data>-<method>`."""
    table = raw.get("data", {})
    source = str(table.get("path", "") if isinstance(table, dict) else "") or "run"
    data = Path(place_of(source) if is_hugging_face(source) else source).resolve()
    name = data.stem if data.suffix.lower() in (".csv", ".npz") else data.name
    method = str(raw.get("method", "proxy-anchor")).replace(":", "-")  # "module:function"
    return Path("runs") / f"{name.lower()}-{method}"


def read_description(folder: Path) -> dict[str, Any] | None:
    """Read and check `run.json`; None if the folder holds no run.

    Raises:
        ValueError: the file is damaged, or a newer version wrote it.
    """
    return read_run(folder) if (folder / "run.json").is_file() else None


def same_run(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The `run.json` of a run with exactly this recipe; None if there is none, or it is damaged."""
    try:
        description = read_description(folder)
        check_parts(folder)
    except ValueError:
        return None
    is_same = description is not None and flat_values(description["recipe"]) == flat_values(recipe.as_dict())
    return description if is_same else None


def has_more_than(folder: Path, epochs: float) -> bool:
    """Whether the run in `folder` was already trained for more than `epochs` epochs."""
    file = folder / "last.safetensors"
    if not file.is_file():
        return False
    state = read_checkpoint(file).state
    return state["step"] > steps_in(epochs, state["steps_per_epoch"])


def read_checkpoint(last: Path) -> Checkpoint:
    """Read the checkpoint that a resumed run continues from.

    Raises:
        ValueError: the file cannot be read, is damaged, or holds a model without the state of the training.
    """
    advice = "best.safetensors in the same folder is not changed; --overwrite starts the run again"
    try:
        checkpoint = Checkpoint.read(last)
    except ValueError as error:
        raise ValueError(f"resume: {error}. {advice}") from None
    state = checkpoint.state
    if "position" not in state and "epoch" in state:
        raise ValueError(
            f"resume: got {last}, which holds a model, but no state of the training; expected a checkpoint that "
            f"`train` wrote. {advice}"
        )
    bad_keys = [key for key, kinds in STATE.items() if key not in state or not isinstance(state[key], kinds)]
    if not bad_keys and not all(isinstance(record, dict) and "epoch" in record for record in state["curve"]):
        bad_keys = ["curve"]
    bad_keys += [] if "random.cpu" in checkpoint.tensors else ["random.cpu"]
    if bad_keys:
        raise ValueError(
            f"resume: {last}: got a header without a valid {bad_keys[0]}, expected a checkpoint that `train` wrote; "
            f"the file is damaged. {advice}"
        )
    return checkpoint


def check_parts(folder: Path) -> None:
    """Check, before anything is changed, that a run has all files that it needs to continue.

    Args:
        folder: the folder of a run, or of its refit.

    Raises:
        ValueError: a file is missing or damaged.
    """
    last, best = folder / "last.safetensors", folder / "best.safetensors"
    if not last.is_file():
        # A run saves its first checkpoint before its first step.
        traces = [file.name for file in (folder / "result.json",) if file.is_file()]
        traces += [best.name] if best.is_file() and read_state(best).get("step", 1) > 0 else []
        traces += ["log.jsonl"] if _logs_steps(folder / "log.jsonl") else []
        if traces:
            raise ValueError(
                f"resume: {last} is missing, but {traces[0]} shows that the run was trained; expected that file, or "
                "--overwrite to start the run again"
            )
        return
    chosen = read_checkpoint(last).state["best"]
    if chosen is None:
        return
    advice = "--overwrite starts the run again; `evaluate --which last` uses the model of the last epoch"
    if not best.is_file():
        raise ValueError(
            f"resume: {best} is missing, though the run chose the model of epoch {round(chosen[1], 2)}; expected that "
            f"file. {advice}"
        )
    try:
        Checkpoint.read(best)
    except ValueError as error:
        raise ValueError(f"resume: {error}. {advice}") from None


def _logs_steps(log: Path) -> bool:
    """Whether a log has a record of a step after the first evaluation."""
    if not log.is_file():
        return False
    for line in log.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] > 0:
            return True
    return False


def holds_run(folder: Path) -> bool:
    """Whether a folder holds a run of this package, also a damaged one; a `run.json` of another program is no run."""
    file = folder / "run.json"
    if not file.is_file() or file.is_symlink():
        return False
    try:
        content = read_json(file)
    except ValueError:
        content = None
    if content:
        return is_description(content)
    has_checkpoint = any("epoch" in read_state(folder / name) for name in ("last.safetensors", "best.safetensors"))
    return has_checkpoint or _opening(file) == RUN_JSON_OPENING


def _opening(file: Path) -> bytes:
    try:
        with open(file, "rb") as content:
            return content.read(len(RUN_JSON_OPENING))
    except OSError:
        return b""


def claim(folder: Path, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """Check that a run may write to `folder`, before anything is written.

    Args:
        folder: the folder of the run.
        resume: continue the run in it.
        overwrite: replace the run in it.

    Returns:
        The `run.json` of the run to continue; None for a new run.

    Raises:
        ValueError: the folder cannot be written; it holds something other than a run; it holds a run, and neither flag
            is given; or the `run.json` of the run to continue is damaged.
    """
    if resume and overwrite:
        raise ValueError(
            "resume, overwrite: got both, expected one; --resume continues a run, --overwrite starts it again"
        )
    if folder.is_symlink() and not folder.exists():
        raise ValueError(f"out: got {folder}, a link to {os.readlink(folder)}, which is missing; expected a folder")
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"out: got {place}, which is a file; expected a folder for the run")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"out: got {place}, which cannot be written; expected a folder that you may write to")
    if not folder.is_dir():
        return None
    # Listed first: another process may be starting a run here, and its lock must be the reason of the refusal.
    content = set(folder.iterdir())
    has_file, has_run = (folder / "run.json").exists(), holds_run(folder)
    if has_file and not has_run:
        raise ValueError(
            f"out: got {folder}, whose run.json was not written by proxymetric; expected another folder with --out"
        )
    if has_run and not (resume or overwrite):
        raise ValueError(
            f"out: got {folder}, which already holds a run; expected --resume to continue it, --overwrite to replace "
            "it, or another folder with --out"
        )
    if (
        not has_run
        and not was_cleared(folder)
        and any(path.name != LOCK and not _is_partial(path.name) for path in content)
    ):
        raise ValueError(f"out: got {folder}, which is not empty and holds no run; expected a new folder")
    _check_regular(folder)
    description = read_description(folder) if resume else None
    if description is not None:
        check_known_keys(description, folder)
    return description


def hold(
    locks: contextlib.ExitStack, folder: Path, resume: bool, overwrite: bool, watcher: Watcher
) -> dict[str, Any] | None:
    """Lock the folder of a run, then check its files: no other process can change them from now on.

    Args:
        locks: keeps the lock until it is closed.
        folder: the folder of the run.
        resume: continue the run in it.
        overwrite: replace the run in it.
        watcher: receives a message if the disk has no locks.

    Returns:
        The `run.json` of the run to continue; None for a new run.

    Raises:
        ValueError: another process writes to the folder, or `claim`, `check_page` or `check_parts` refuses it.
    """
    if not locks.enter_context(locked(folder)):
        watcher.say(f"no locks on the disk of {folder}: a second process that trains there would not be noticed")
    description = claim(folder, resume, overwrite)
    check_page(folder)
    if description is not None:
        check_parts(folder)
    return description


def _check_regular(folder: Path) -> None:
    """Refuse links and special files where the files of a run belong: their targets do not belong to the run."""
    parts = ("", f"{REFIT}/", f"{SIMPLER}/", f"{SIMPLER}/{REFIT}/")
    for name in (*FOLDERS, f"{SIMPLER}/{REFIT}", *(part + file for part in parts for file in RUN_FILES)):
        path = folder / name
        kind = "folder" if path.name in FOLDERS else "file"
        if path.is_symlink():
            raise ValueError(f"out: got {path}, which is a link; expected a {kind} of the run")
        if path.exists() and not (path.is_dir() if path.name in FOLDERS else path.is_file()):
            raise ValueError(f"out: got {path}, which is not a {kind}; expected a {kind} of the run")


def clear(folder: Path) -> None:
    """Remove the files of a run and nothing else.

    First `run.json` is renamed, so that the rest of an interrupted removal never looks like a run; the next start
    repeats the removal. `finish_clearing` completes it, after the new `run.json` is written.
    """
    tracked = _tracked(folder)
    if (folder / "run.json").is_file():
        os.replace(folder / "run.json", folder / CLEARING)
    for part in (folder / SIMPLER, folder / REFIT):
        remove_part(part)
    if not (folder / "tensorboard").is_symlink():
        for events in (folder / "tensorboard").glob("events.out.tfevents.*"):
            if tracked or events.name.endswith(EVENTS_SUFFIX):
                events.unlink(missing_ok=True)
        _remove_if_empty(folder / "tensorboard")
    for name in reversed(RUN_FILES):
        (folder / name).unlink(missing_ok=True)
    remove_partial_files(folder)


def remove_part(part: Path) -> None:
    """Remove the refitted or the simpler model of a run, the mark that it is finished first."""
    if not part.is_symlink() and ((part / CLEARING).is_file() or holds_run(part)):
        (part / "result.json").unlink(missing_ok=True)
        clear(part)
        finish_clearing(part)
        _remove_if_empty(part)


def was_cleared(folder: Path) -> bool:
    """Whether the removal of an earlier run was interrupted."""
    return (folder / CLEARING).is_file()


def finish_clearing(folder: Path) -> None:
    """Remove the mark of a removal that is complete."""
    (folder / CLEARING).unlink(missing_ok=True)


def _tracked(folder: Path) -> bool:
    """Whether the run in a folder writes its curves for TensorBoard."""
    for name in ("run.json", CLEARING):
        try:
            return read_json(folder / name)["recipe"]["train"].get("track") == "tensorboard"
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return False


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def remove_partial_files(folder: Path) -> None:
    """Remove files that a killed run had not finished writing."""
    for path in _partial_files(folder):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _partial_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob(".*") if _is_partial(path.name)]


def _is_partial(file_name: str) -> bool:
    """Whether this is the name of a file of a run while it is being written."""
    return any(fnmatch.fnmatchcase(file_name, f".{name}.*.part*") for name in RUN_FILES)


def check_known_keys(description: dict[str, Any], folder: Path) -> None:
    """Check that this version knows every key of the recipe in a `run.json`.

    Raises:
        ValueError: a key is unknown; the message names both versions.
    """
    method = description["recipe"]["method"]
    try:
        known_keys = flat_keys(check({"method": method}).as_dict())
    except UntrustedCode as error:
        raise UntrustedCode(f"{folder / 'run.json'}: {error}") from None
    except ValueError:
        raise ValueError(unknown_key(description, folder / "run.json", f"method={method!r}")) from None
    for key, value in flat_keys(description["recipe"]).items():
        if key not in known_keys and value is not None:
            raise ValueError(unknown_key(description, folder / "run.json", key))


def check_same_data(images: ImageSet, path: str, description: dict[str, Any], folder: Path) -> None:
    """Check that a resumed run has the images that it began with: the content of every batch depends on all of them.

    Args:
        images: the images of the resumed run.
        path: where they are.
        description: the `run.json` of the run.
        folder: its folder.

    Raises:
        ValueError: the images differ.
    """
    earlier = description["data"]
    if images.identity() == earlier["identity"]:
        return
    earlier_path = str(description["recipe"]["data"]["path"])
    counts = f"{len(images)} images of {len(images.classes)} classes"
    # Earlier versions did not store the numbers.
    earlier_counts = f"{earlier['images']} images of {earlier['classes']} classes" if "images" in earlier else ""
    if Path(path).resolve() == Path(earlier_path).resolve():
        had = f", and had {earlier_counts}" if earlier_counts else ""
        raise ValueError(
            f"resume: got {path}, whose images are not those that {folder} began with: files were added, removed or "
            f"changed (it has {counts}{had}); expected the same images (identity {earlier['identity'][:12]}, not "
            f"{images.identity()[:12]}), or a new run with --out"
        )
    raise ValueError(
        f"resume: got {path} ({counts}), whose images are not those that {folder} began with; expected the images of "
        f"{earlier_path}{f' ({earlier_counts})' if earlier_counts else ''}, or a new run with --out"
    )


def check_spelling(folder: Path) -> None:
    """Refuse to begin a run in place of one to continue, where an unfinished run next to it has nearly the same name.

    Args:
        folder: the folder of the run to continue.

    Raises:
        ValueError: the folder holds no run, and one with a similar name holds an unfinished run.
    """
    if (folder / "run.json").exists() or not folder.parent.is_dir():
        return
    neighbours = sorted(each for each in folder.parent.iterdir() if _is_slip(folder.name, each.name))
    for neighbour in neighbours:
        if holds_run(neighbour) and not (neighbour / "result.json").exists():
            raise ValueError(
                f"resume: got {folder}, which holds no run, expected the folder of a run to continue, or no --resume "
                f"to begin a run there; did you mean {str(neighbour)!r}?"
            )


def _is_slip(name: str, other: str) -> bool:
    """Whether two names differ by one wrong, missing or added letter, or by two letters in the wrong order.

    Names of several runs that differ on purpose, in a number or in a word of one or two letters, are no slips.

    Example:
        >>> _is_slip("nix", "nic"), _is_slip("seed-1", "seed-2"), _is_slip("run-a", "run-b")
        (True, False, False)
        >>> _is_slip("phtoos", "photos"), _is_slip("photo", "photos"), _is_slip("birds", "photos")
        (True, True, False)
    """
    if name == other:
        return False
    start = _shared_letters(name, other)
    end = _shared_letters(name[start:][::-1], other[start:][::-1])
    wrong, right = name[start : len(name) - end], other[start : len(other) - end]
    word = re.findall(r"[^\W\d_]*$", other[:start])[0] + re.findall(r"^[^\W\d_]*", other[start:])[0]
    one_letter = len(wrong) <= 1 and len(right) <= 1 and not (wrong + right).isdigit()
    return len(word) >= MIN_WORD_LETTERS and (one_letter or (len(wrong) == 2 and wrong[::-1] == right))


def _shared_letters(name: str, other: str) -> int:
    """How many letters are the same at the beginning of both names."""
    return next((i for i, (a, b) in enumerate(zip(name, other)) if a != b), min(len(name), len(other)))


def check_same_recipe(recipe: Recipe, description: dict[str, Any], folder: Path) -> None:
    """Check that a resumed run has the recipe that it began with, except for the keys in `MAY_CHANGE`.

    Raises:
        ValueError: another key differs.
    """
    train, epochs = recipe.train, description["recipe"]["train"].get("epochs")
    if train.decay == "cosine" and train.decay_every is None and train.epochs != epochs:
        raise ValueError(
            f"resume: got train.epochs={train.epochs}, expected {epochs} as before: a cosine schedule over all epochs "
            "depends on their number"
        )
    # A key that did not exist when the run began had the value that is now its default.
    defaults = check({"method": recipe.method}).as_dict()
    values, earlier = flat_values(recipe.as_dict()), flat_values(defaults) | flat_keys(description["recipe"])
    for key in sorted(values.keys() | earlier.keys(), key=lambda key: ("." in key, key)):
        # A GPU cuts and resizes the images of its cache in another way than the CPU: the numbers would differ.
        may_change = key in MAY_CHANGE and not (key == "data.cache" and "device" in (values[key], earlier.get(key)))
        if not may_change and values.get(key) != earlier.get(key):
            raise ValueError(
                f"resume: got {key}={values.get(key)!r}, expected {earlier.get(key)!r}, the value that {folder} began "
                "with, or a new run with --out"
            )


def flat_values(recipe: dict[str, Any]) -> dict[str, Any]:
    """The values of a recipe by their dotted keys, as JSON returns them: tuples become lists.

    Example:
        >>> flat_values({"seed": 1, "train": {"metrics": ("R@1",)}})
        {'seed': 1, 'train.metrics': ['R@1']}
    """
    return {key: _plain(value) for key, value in flat_keys(recipe).items()}


def _plain(value: Any) -> Any:
    """A value as JSON returns it."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value
