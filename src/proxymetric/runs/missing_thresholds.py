"""Thresholds for a finished run that has none, such as a run of an earlier version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from proxymetric.data import ImageSet, open_data, split
from proxymetric.models.load import is_refitted, is_run, read_run
from proxymetric.models.proxies import load_uncertainty
from proxymetric.runs.score import EmbeddedSet
from proxymetric.runs.thresholds import MIN_CLASSES, has_pairs, store_thresholds
from proxymetric.search.run_knowledge import HELD_OUT
from proxymetric.system.files import NotSaved, read_json_object, write_json
from proxymetric.system.lock import locked


def add_missing_thresholds(
    run: str | Path, evaluated: EmbeddedSet, embed: Callable[[ImageSet], EmbeddedSet], which: str = "best"
) -> str | None:
    """Choose the thresholds of a run that has none on its held-out classes, and write them as `train` does.

    Args:
        run: folder of a run, or a slim file.
        evaluated: a set that the model has embedded already; if it is that of the held-out classes, it is used.
        embed: embeds images by the model `which` of the run.
        which: the model that is evaluated.

    Returns:
        A sentence: which thresholds were written, or why there are none. None if the run has thresholds, or is no run.
    """
    folder = Path(run)
    if not is_run(run) or not folder.is_dir():
        return None
    result = folder / "result.json"
    if not result.is_file():
        return "no thresholds: the run is not finished; `train --resume` writes them at its end"
    try:
        if read_json_object(result).get("thresholds") is not None and (folder / HELD_OUT).is_file():
            return None
        held_out = _held_out(folder, which)
        if isinstance(held_out, str):
            return f"no thresholds: {held_out}"
        is_evaluated = evaluated.images.identity() == held_out.identity()
        embedded = evaluated._replace(differs=None) if is_evaluated else embed(held_out)
        return _store(folder, embedded)
    except (ValueError, OSError, NotSaved) as error:
        return f"no thresholds: {error}"


def _held_out(folder: Path, which: str) -> ImageSet | str:
    """The held-out classes of a run; or the reason why no thresholds can be chosen on them."""
    if is_refitted(folder):
        return "the model was refitted, and its held-out classes were trained on then"
    if which == "last":
        return "they belong to the model of the chosen epoch; `evaluate --which best` writes them"
    description = read_run(folder)
    recipe = description["recipe"]
    images = open_data(recipe["data"]["path"], recipe["data"]["layout"])
    if images.identity() != description["data"]["identity"]:
        return f"the images in {recipe['data']['path']} are not those that the run was trained with"
    held_out = split(images, recipe["data"]["validation"], recipe["data"]["test"], recipe["seed"]).validation
    if held_out is None:
        return "the run held no classes out of its training; thresholds are never chosen on test classes"
    if not has_pairs(held_out.labels):
        return f"fewer than {MIN_CLASSES} held-out classes have two images or more"
    return held_out


def _store(folder: Path, embedded: EmbeddedSet) -> str:
    """Write the thresholds of a run into its folder; return what was written, in a sentence."""
    description = read_run(folder)
    uncertainty = load_uncertainty(folder, embedded.vectors.shape[1])
    seed = description["recipe"]["seed"]
    with locked(folder):
        thresholds = store_thresholds(folder, embedded, uncertainty, description["classes"], seed)
        if thresholds is None:
            return f"no thresholds: fewer than {MIN_CLASSES} held-out classes have two images that can be read"
        content = read_json_object(folder / "result.json")
        write_json(folder / "result.json", content | {"thresholds": thresholds})
    points = thresholds["points"]
    rates = ", ".join(f"{100 * point['asked']:g} %" for point in points)
    values = ", ".join(f"{point['threshold'][0]:.3f}" for point in points)
    return (
        f"the run had no thresholds; chosen on its {thresholds['classes']} held-out classes, at false-match rates of "
        f"{rates}: {values}; `proxymetric evaluate {folder} --redraw` draws them"
    )
