"""The protocol of "A Metric Learning Reality Check" (Musgrave, Belongie & Lim, ECCV 2020)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxymetric.core.pieces import unit
from proxymetric.core.watcher import Silent, Watcher
from proxymetric.files import write_json
from proxymetric.recipe import settings as as_tables
from proxymetric.runs.assemble import scored
from proxymetric.runs.evaluation_set import unseen_vectors
from proxymetric.runs.train import Run, train

FOLDS = 4
DIM = 128


def mlrc(
    data: str | Path | None = None,
    *,
    out: str | Path,
    folds: int = FOLDS,
    dim: int = DIM,
    settings: Iterable[str] | Mapping[str, Any] = (),
    resume: bool = False,
    watcher: Watcher | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Cross-validate on the training classes, test once: one model per fold, averaged and concatenated.

    The training half's classes are cut into `folds` contiguous blocks. Model k trains on all blocks but the k-th, and
    its epoch is the one with the best MAP@R on block k. On the test half two numbers are given for each metric:
    "average", the mean over the models of `dim` dimensions each, and "concatenated", of their unit vectors side by side
    (`folds * dim` dimensions).

    data, options: as for `proxymetric.train`. out: the folder, with one run per fold in it (`fold1`, ...) and the
    result as `result.json`. resume: keep finished folds and go on with the one that was interrupted.

    >>> from proxymetric.runs.mlrc import mlrc
    >>> mlrc("glyphs", out="runs/mlrc", backbone="small", epochs=20)["concatenated"]["MAP@R"]    # doctest: +SKIP
    """
    folder, watcher = Path(out), Silent() if watcher is None else watcher
    said = as_tables(settings)
    if "validation" in said.get("data", {}) or "monitor" in said.get("train", {}) or "protocol" in said:
        raise ValueError("settings: data.validation, train.monitor and protocol are MLRC's own; leave them out")
    runs: list[Run] = []
    for fold in range(1, folds + 1):
        watcher.say(f"fold {fold} of {folds}")
        told = {"data.validation": f"{fold}/{folds}", "train.monitor": "MAP@R", "encoder.dim": dim}
        told["protocol"] = "held-out"
        merged = {
            f"{table}.{key}": v for table, keys in said.items() if isinstance(keys, dict) for key, v in keys.items()
        }
        merged |= {key: value for key, value in said.items() if not isinstance(value, dict)} | told
        place = folder / f"fold{fold}"
        runs.append(
            train(data, out=place, settings=merged, watcher=watcher, **options, resume=resume and place.is_dir())
        )
    metrics = runs[0].result["recipe"]["train"]["metrics"]
    vectors, images = zip(*(unseen_vectors(run.folder, watcher) for run in runs), strict=True)
    together = (
        torch.cat([unit(v) for v in vectors], dim=1),
        torch.from_numpy(images[0].labels),
        np.arange(len(images[0])),
    )
    single = [run.scores for run in runs]
    result = {
        "protocol": "MLRC",
        "folds": folds,
        "dim": dim,
        "average": {name: sum(scores[name] for scores in single) / folds for name in metrics},
        "concatenated": scored(images[0], together, metrics),
        "models": [
            {"fold": run.folder.name, "chosen_epoch": run.result["chosen_epoch"], "test": run.scores} for run in runs
        ],
        **{key: runs[0].result[key] for key in ("recipe", "versions", "machine", "data", "finished")},
        "seconds": sum(run.result["seconds"] for run in runs),
    }
    write_json(folder / "result.json", result)
    return result
