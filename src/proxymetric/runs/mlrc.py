"""The protocol of "A Metric Learning Reality Check" (Musgrave, Belongie & Lim, ECCV 2020)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from proxymetric.arguments.own_code import trusting
from proxymetric.arguments.recipe_keys import flat_keys
from proxymetric.arguments.signatures import fit
from proxymetric.core.normalisation import unit
from proxymetric.data import open_data, split
from proxymetric.runs import recipe as recipes
from proxymetric.runs.evaluation_set import unseen_vectors
from proxymetric.runs.protocol import FOLD_DIM, FOLDS
from proxymetric.runs.score import EmbeddedSet, score
from proxymetric.runs.train import Run, read_recipe, train
from proxymetric.system.files import check_output, read_json, write_json
from proxymetric.system.lock import locked
from proxymetric.system.watcher import Silent, Watcher
from proxymetric.training.process_group import ProcessGroup

FIXED_KEYS = ("data.validation", "train.monitor", "protocol")
"""keys of the recipe that the protocol sets"""


def mlrc(
    data: str | Path | None = None,
    *,
    out: str | Path,
    folds: int = FOLDS,
    dim: int = FOLD_DIM,
    settings: Iterable[str] | Mapping[str, Any] = (),
    resume: bool = False,
    watcher: Watcher | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Cross-validate on the training classes, and score the test classes once.

    The training classes are cut into `folds` contiguous blocks. Model k trains on all blocks but the k-th, and MAP@R on
    block k chooses its epoch. Each metric is given twice for the test classes: "average" is the mean over the models
    with `dim` dimensions each, "concatenated" scores their unit vectors side by side (`folds * dim` dimensions).

    Under torchrun all processes train each fold together, and the first one scores the test classes.

    Args:
        data: as for `proxymetric.train`.
        out: folder with one run per fold (`fold1`, ...) and `result.json`.
        folds: number of blocks and of models, at least 2.
        dim: dimensions of each model; encoder.dim in `settings` wins.
        settings: as for `proxymetric.train`, without data.validation, train.monitor and protocol.
        resume: keep finished folds and continue the one that was interrupted.
        watcher: receives messages and progress; None means no output.
        **options: other arguments of `proxymetric.train`.

    Returns:
        The content of `result.json`.

    Raises:
        ValueError: `folds` is below 2, the settings contain a key that the protocol sets, or the data has no test
            classes. All three are checked before the first fold.

    Example:
        >>> from proxymetric.runs.mlrc import mlrc
        >>> mlrc("glyphs", out="runs/mlrc", backbone="small", epochs=20)["concatenated"]["MAP@R"]    # doctest: +SKIP
    """
    folder, watcher = Path(out), Silent() if watcher is None else watcher
    if fit("folds", folds, int) < 2:
        raise ValueError(f"folds: got {folds}, expected a whole number of at least 2")
    overrides = flat_keys(recipes.settings(settings))
    for key in FIXED_KEYS:
        if key in overrides:
            raise ValueError(f"settings: got {key}, which MLRC sets itself; expected none of {', '.join(FIXED_KEYS)}")
    dim = overrides.get("encoder.dim", dim)  # a setting wins over the argument
    # The models of all folds are concatenated, so each fold keeps its trained one.
    fixed = {"train.monitor": "MAP@R", "train.keep": "trained", "encoder.dim": dim, "protocol": "held-out"}
    check_output("out", folder / "result.json", "a result of MLRC", _is_result)
    with trusting(overrides, options, everything=options.get("trust_code", False)):
        _check_test_classes(data, overrides | fixed, options)
    # One group for all folds: each `train` finds it and does not leave it.
    with ProcessGroup.joined() as world, contextlib.ExitStack() as locks:
        world.from_first(lambda: locks.enter_context(locked(folder)))
        listener = watcher if world.first else Silent()
        return _mlrc(world, data, folder, folds, dim, overrides | fixed, resume, listener, options)


def _is_result(file: Path) -> bool:
    try:
        content = read_json(file)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("protocol") == "MLRC"


def _mlrc(
    world: ProcessGroup,
    data: str | Path | None,
    folder: Path,
    folds: int,
    dim: int,
    settings: dict[str, Any],
    resume: bool,
    watcher: Watcher,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Train the folds and test once, in a folder that the first process has locked."""
    runs: list[Run] = []
    for fold in range(1, folds + 1):
        watcher.say(f"fold {fold} of {folds}")
        merged = settings | {"data.validation": f"{fold}/{folds}"}
        out = folder / f"fold{fold}"
        # The first process may create the folder before the others look.
        has_begun = world.from_first(out.is_dir)
        runs.append(train(data, out=out, settings=merged, watcher=watcher, **options, resume=resume and has_begun))
    sets: list[EmbeddedSet] = []
    for run in runs:
        world.from_first(functools.partial(_add_unseen, sets, run.folder, watcher))
    return world.from_first(lambda: _finish(folder, folds, dim, runs, sets))


def _add_unseen(sets: list[EmbeddedSet], run: Path, watcher: Watcher) -> None:
    sets.append(unseen_vectors(run, watcher))


def _finish(folder: Path, folds: int, dim: int, runs: list[Run], sets: list[EmbeddedSet]) -> dict[str, Any]:
    """Score the vectors of all models together, and write `result.json`."""
    results = [run.result for run in runs]
    metrics = results[0].recipe["train"]["metrics"]
    concatenated = sets[0]._replace(vectors=torch.cat([unit(each.vectors) for each in sets], dim=1))
    result = {
        "protocol": "MLRC",
        "folds": folds,
        "dim": dim,
        "average": {name: sum(run.scores[name] for run in runs) / folds for name in metrics if name in runs[0].scores},
        "concatenated": score(concatenated, metrics),
        "models": [
            {"fold": run.folder.name, "chosen_epoch": run.result.chosen_epoch, "test": run.scores} for run in runs
        ],
        "recipe": results[0].recipe,
        "versions": results[0].versions,
        "machine": results[0].machine,
        "data": results[0].data,
        "finished": max(each.finished for each in results),
        "seconds": sum(each.seconds for each in results),
    }
    write_json(folder / "result.json", result)
    return result


def _check_test_classes(data: str | Path | None, settings: dict[str, Any], options: dict[str, Any]) -> None:
    """Refuse data without test classes, and a choice of the method, before any fold is trained."""
    raw = read_recipe(data=data, settings=settings, **options)
    if raw.get("method") == "auto":
        raise ValueError("method: got 'auto', expected the name of a method: each fold would choose its own")
    recipe = recipes.check(raw)
    if not recipe.data.path:
        return  # the first fold raises the error
    images = open_data(recipe.data.path, recipe.data.layout)
    if split(images, 0.0, recipe.data.test, recipe.seed).test is None:
        raise ValueError(
            f"data: got {images.name}, which has no test classes; expected data with test classes, or a share of its "
            "classes as test classes: --set data.test=0.5"
        )
