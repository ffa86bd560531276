"""The result of a run, `result.json`: one file with everything that could explain the run's numbers."""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
import subprocess
import sys
import typing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from proxymetric.arguments.signatures import fit
from proxymetric.encoders import tuned_parameters
from proxymetric.runs.protocol import CHOSE_EPOCH
from proxymetric.runs.score import name_classes
from proxymetric.system.files import read_json, write_json
from proxymetric.training.learner import Learner

SCHEMA = 2
"""version of `result.json`. 1: up to 0.1.0, without schema, commit and protocol. 2: with them, and with the scores of
the last epoch in protocol `papers`"""
TRAINED, UNTRAINED, PIXELS, LAST_EPOCH = "trained encoder", "untrained encoder", "raw pixels", "last epoch"
"""the keys of `rows`"""


@dataclass
class Result:
    """The content of `result.json`.

    Every attribute is a key of the file with the same name. The keys of `OPTIONAL` are left out of the file where they
    are None.

    Attributes:
        schema: version of this layout.
        commit: commit of the package's files, with "+changes" where they differ from it; None if unknown.
        protocol: which classes choose the epoch, see `proxymetric.runs.protocol`.
        recipe: the whole recipe with its defaults, by table.
        weights: the file of the backbone's weights and what its header changed; None without such a file.
        data: `name` and `identity` of the images, and what they are like: `images`, `shorter_side` and
            `bytes_per_image` (`data.photographs`). The same and the number of `classes` for "train", "validation" and
            "test", without images that could not be read, and the number of `training_classes` among the last two if
            there are any.
        versions: of Python and of the packages that influence results.
        machine: `system`, `processor`, `cores`, `gpu` where there is one, and `processes` where there are several.
        finished: time of the end, UTC.
        rates: first learning rate of each parameter group.
        training_seconds: time of the training steps.
        waiting_seconds: the part of this time in which the steps waited for images.
        images_per_second: throughput of the training steps.
        memory: peak memory in MB: `process_mb` where the platform reports it, `device_mb` on a GPU.
        parameters: `trained` and `total` numbers of parameters, and the trained ones by part in `parts`.
        steps: optimiser steps, skipped ones included.
        skipped_steps: steps with a loss or gradient that was not finite.
        epochs: epochs that were trained.
        chosen_epoch: epoch of the best evaluation; the last epoch where no epoch was chosen.
        chosen_step: optimiser step of that evaluation; None in files of schema 1 that lack it.
        chosen_by: metric that chose the epoch, or "last".
        validation: record of the chosen evaluation: epoch, step, loss, `mean_cosine`, metrics, figures.
        curve: records of all evaluations. `mean_cosine` is that of two training images, see `runs.mean_cosine`; files
            of earlier versions lack it.
        auto: how `--method auto` chose the method, see `runs.auto_method.Choice`; None if the user named it.
        closed_form: how the head was computed before training, see `runs.closed_form.Fit`; None for a random head.
            `refit` has the same entry for the head that was fitted on all known classes.
        kept: which model is the run's best, see `runs.clear_gain.Kept`; None where no simpler one was a candidate.
        whiten: the whitening behind the trained head, see `runs.whiten.Whitened`; None without `train.whiten`.
        refit: epochs, images, classes and cost of the training on all classes; None without a refit.
        rows: metrics as fractions, by what was scored: "raw pixels", "untrained encoder", the closed forms "whitening"
            and "lda" on its features, "trained encoder" and, in protocol `papers`, "last epoch".
        sizes: of a nested run: the metrics of the trained encoder with its vectors cut to each size and stored as
            floats, bytes and bits; see `runs.score.score_sizes`. None for other runs.
        fewer_classes: by what was scored, its scores among 2, 4, 8, ... and all of these classes; see
            `runs.fewer_classes.among_fewer`. None if there are too few of them.
        evaluated_on: the classes that `rows` are scored on: "test", "validation" or None.
        queries_left_out: queries that had nothing of their class to find.
        uncertainty: see `runs.class_uncertainty`; None for methods without uncertainty.
        thresholds: of similarity, chosen on the held-out classes: see `runs.thresholds`; None without such classes.
        bad_images: images that could not be read, with the reason.
        seconds: time of the whole run, from opening the images to the scores.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "result.json"
        >>> Result(rows={"trained encoder": {"R@1": 0.5}}, recipe={"method": "triplet"}).write(file)
        >>> Result.read(file).scores
        {'R@1': 0.5}
    """

    schema: int = SCHEMA
    commit: str | None = None
    protocol: str = "held-out"
    recipe: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] | None = None
    data: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    finished: str = ""
    rates: dict[str, float] = field(default_factory=dict)
    training_seconds: float = 0.0
    waiting_seconds: float = 0.0
    images_per_second: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    skipped_steps: int = 0
    epochs: float = 0
    chosen_epoch: float = 0
    chosen_step: int | None = None
    chosen_by: str = "last"
    validation: dict[str, Any] = field(default_factory=dict)
    curve: list[dict[str, Any]] = field(default_factory=list)
    auto: dict[str, Any] | None = None
    closed_form: dict[str, Any] | None = None
    whiten: dict[str, Any] | None = None
    kept: dict[str, Any] | None = None
    refit: dict[str, Any] | None = None
    rows: dict[str, dict[str, float]] = field(default_factory=dict)
    sizes: list[Any] | None = None
    fewer_classes: dict[str, list[Any]] | None = None
    evaluated_on: str | None = None
    queries_left_out: int = 0
    uncertainty: dict[str, Any] | None = None
    thresholds: dict[str, Any] | None = None
    bad_images: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def scores(self) -> dict[str, float]:
        """The metrics of the model that the run keeps, as fractions; empty where no classes were held out."""
        return self.rows.get(self.kept_row, {})

    @property
    def kept_row(self) -> str:
        """The key of `rows` with the scores of the model that the run keeps.

        Example:
            >>> Result().kept_row, Result(kept={"name": "untrained"}).kept_row, Result(kept={"name": "lda"}).kept_row
            ('trained encoder', 'untrained encoder', 'lda')
        """
        name = "trained" if self.kept is None else str(self.kept["name"])
        return {"trained": TRAINED, "untrained": UNTRAINED}.get(name, name)

    @property
    def scored_classes(self) -> str:
        """Say whether the model knows the classes that `rows` are scored on, and whether they chose the epoch."""
        counts = self.data.get(self.evaluated_on or "", {})
        known = counts.get("training_classes", 0)
        chose_epoch = self.evaluated_on == "validation" and self.chosen_by != "last"
        computed = None if self.steps else self.closed_form
        if computed is not None and self.evaluated_on == "validation" and "held-out" in computed["chosen_on"]:
            return f"{self.named_classes}, not fitted on, but they chose the shrinkage"
        if not known:
            return f"{self.named_classes}, {CHOSE_EPOCH if chose_epoch else 'never seen in training'}"
        words = f"{counts['images']} images not trained on ({known} of their {counts['classes']} classes are training"
        return f"{words} classes){'; they chose the epoch' if chose_epoch else ''}"

    @property
    def named_classes(self) -> str:
        """The classes that `rows` are scored on, with their numbers.

        Example:
            >>> Result(evaluated_on="test", data={"test": {"images": 90, "classes": 30}}).named_classes
            '30 test classes (90 images)'
        """
        kind = "held-out" if self.evaluated_on == "validation" else "test"
        counts = self.data.get(self.evaluated_on or "")
        return name_classes(kind, counts) if counts else f"{kind} classes"

    def as_dict(self) -> dict[str, Any]:
        """The content of the file."""
        content = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return {key: value for key, value in content.items() if key not in OPTIONAL or value is not None}

    def write(self, file: Path) -> None:
        """Write `result.json`."""
        write_json(file, self.as_dict())

    @classmethod
    def read(cls, file: Path) -> Result:
        """Read a `result.json` of this schema or of an earlier one.

        Raises:
            ValueError: the file is not JSON, has a newer schema, or lacks keys.
        """
        content = read_json(file)
        if not isinstance(content, dict):
            raise ValueError(f"{file}: got {type(content).__name__}, expected the result of a run")
        return cls.from_dict(content, str(file))

    @classmethod
    def from_dict(cls, content: dict[str, Any], name: str = "result") -> Result:
        """Check the content of a `result.json`.

        Args:
            content: what the file holds; keys that this class does not know are left out.
            name: name of the file, for errors.

        Raises:
            ValueError: the content has a newer schema, lacks keys, or has values of wrong types.

        Example:
            >>> Result.from_dict({"schema": 99})
            Traceback (most recent call last):
            ValueError: result: got schema 99, expected at most 2; a newer proxymetric wrote it
        """
        schema = content.get("schema", 1)
        if not isinstance(schema, int) or schema > SCHEMA:
            raise ValueError(f"{name}: got schema {schema}, expected at most {SCHEMA}; a newer proxymetric wrote it")
        keys = [each.name for each in dataclasses.fields(cls)]
        required = set(keys) - OPTIONAL - (SINCE_SCHEMA_2 if schema < 2 else set())
        missing = [key for key in keys if key in required and key not in content]
        if missing:
            raise ValueError(f"{name}: got no {', '.join(missing)}, expected the result of a finished run")
        values = {key: content[key] for key in keys if key in content}
        hints = typing.get_type_hints(cls)
        for key, value in values.items():
            fit(f"{name}: {key}", value, hints[key])
        return cls(**values | {"schema": schema})


OPTIONAL = {
    "auto",
    "closed_form",
    "fewer_classes",
    "kept",
    "refit",
    "sizes",
    "thresholds",
    "uncertainty",
    "waiting_seconds",
    "whiten",
}
"""keys that a file may lack in any schema"""
SINCE_SCHEMA_2 = {"schema", "commit", "protocol", "weights", "rates", "images_per_second", "chosen_step"}
"""keys that a file of schema 1 may lack"""


def commit() -> str | None:
    """The commit of this package's files, with "+changes" where they differ from it; None if unknown.

    An export by `git archive` has the commit in the file `commit.txt`; in a checkout, git is asked.
    """
    package = Path(__file__).resolve().parent.parent
    exported = package / "commit.txt"
    if exported.is_file() and re.fullmatch(r"[0-9a-f]{40}", exported.read_text().strip()):
        return exported.read_text().strip()
    if not (package.parent.parent / ".git").exists():
        return None
    try:
        head, changes = (
            subprocess.run(["git", *words], cwd=package, capture_output=True, text=True, timeout=10, check=True).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "."))
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{head.strip()}+changes" if changes.strip() else head.strip()


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that influence results."""
    names = ("proxymetric", "torch", "torchvision", "timm", "numpy", "safetensors")
    return {"python": platform.python_version()} | {name: _version(name) for name in names}


@functools.cache
def _version(name: str) -> str:
    try:
        return version(name)
    except ImportError:
        return "not installed as a package"


def machine(device: torch.device, processes: int = 1) -> dict[str, Any]:
    """The machine that a run computes on, and the number of processes if there are several."""
    facts: dict[str, Any] = {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
    if processes > 1:
        facts["processes"] = processes
    return facts


def peak_memory(device: torch.device) -> dict[str, int]:
    """Peak memory in MB: `process_mb` where the platform reports it (not on Windows), `device_mb` on a GPU."""
    peak = {}
    try:
        import resource
    except ImportError:  # Windows
        pass
    else:
        bytes_per_unit = 1 if sys.platform == "darwin" else 1024
        peak["process_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * bytes_per_unit // 2**20
    if device.type == "cuda":
        peak["device_mb"] = torch.cuda.max_memory_allocated(device) // 2**20
    return peak


def count_parameters(learner: Learner, trained: int, rows: int = 0, remote: int = 0) -> dict[str, Any]:
    """Count parameters: those that are trained, all of them, and the trained ones of each part.

    Args:
        learner: encoder and criterion.
        trained: parameters that the optimiser updates, those of other processes included.
        rows: parameters in row tables, which the optimiser does not update.
        remote: proxy parameters that other processes hold; `trained` includes them.
    """
    encoder = {"head": sum(p.numel() for p in learner.encoder.head_parameters())}
    if not learner.frozen:
        encoder = tuned_parameters(learner.encoder)
    parts = encoder | learner.criterion.parts()
    parts["proxies"] = parts.get("proxies", 0) + remote
    return {
        "trained": trained + rows,
        "total": sum(p.numel() for p in learner.parameters()) + rows + remote,
        "parts": {part: count for part, count in parts.items() if count},
    }
