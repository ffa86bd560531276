"""The folder of a study: the files of each run, its status, and estimates of its time."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxymetric.arguments.signatures import did_you_mean
from proxymetric.studies.pool import ENDED
from proxymetric.studies.ranges import Draw
from proxymetric.studies.search import SEARCHED, draw_of, failed_draw, resolved, short
from proxymetric.studies.spec import Cell, Study, Task
from proxymetric.system.files import read_json, write_json

if TYPE_CHECKING:
    from proxymetric.runs.result import Result

NOT_COMPARED = {
    "data.path", "data.workers", "data.cache", "train.device", "train.save_every", "train.track", "train.parallel",
}  # fmt: skip
"""keys of a recipe that do not change the result of a run"""
STATE = "study.json"
"""the file that holds the status of all runs"""
EMBEDDED = "glyphs", "digits", "hf"
"""data sets that come with the package and need no files, and the prefix of those of Hugging Face"""
LOCK_SECONDS = 90.0
"""time to wait until the workers of a killed study have saved"""


@dataclass
class RunStatus:
    """The status of one run.

    Attributes:
        status: "done", "begun" (it has a checkpoint), "failed", "changed" (the recipe or the data differs from that of
            the stored run), "waits" (its search is not done) or "new".
        reason: why the status is "failed" or "changed".
        result: the result of a run that is done.
    """

    status: str
    reason: str = ""
    result: Result | None = None


def is_over(task: Task, run: RunStatus) -> bool:
    """Whether a run need not be done again: it is done, or a draw that fails with its numbers and was not killed."""
    fails = task.draw is not None and run.status == "failed" and not run.reason.startswith(ENDED)
    return run.status == "done" or fails


def local_path(path: str, root: Path | None) -> str:
    """The path of data or weights on this machine: below the data root, unless it is absolute or an embedded set.

    >>> local_path("glyphs:60", Path("/data")), local_path("CUB_200_2011", Path("/data"))
    ('glyphs:60', '/data/CUB_200_2011')
    """
    if root is None or path.split(":")[0] in EMBEDDED or Path(path).is_absolute():
        return path
    return str(root / path)


def local_settings(task: Task, root: Path | None) -> dict[str, Any]:
    """The settings of a run with local paths."""
    keys = [key for key in ("data.path", "encoder.weights") if isinstance(task.settings.get(key), str)]
    return task.settings | {key: local_path(task.settings[key], root) for key in keys}


def flat_recipe(task: Task, root: Path | None) -> dict[str, Any]:
    """The checked recipe of a run with its defaults, as dotted keys and JSON values; only keys that decide its result.

    Args:
        task: the run.
        root: the folder of data and weights; the header of the weights completes the recipe.

    Raises:
        ValueError: a recipe or a setting is wrong.
    """
    from proxymetric.runs import recipe as recipes
    from proxymetric.runs.folder import flat_values

    raw = {} if task.recipe is None else recipes.load(task.recipe)
    try:
        tables = _checked(recipes.merged(raw, recipes.settings(local_settings(task, root))))
    except ValueError as error:
        place = task.places.get(str(error).partition(":")[0], f"rows.{task.cell.row}")
        raise ValueError(f"{place}: {error}") from None
    flat = flat_values(tables)
    if "encoder.weights" in task.settings:
        flat["encoder.weights"] = task.settings["encoder.weights"]
    return {key: value for key, value in flat.items() if key not in NOT_COMPARED}


def difference_to(task: Task, result: Mapping[str, Any]) -> str | None:
    """How the recipe of a stored result differs from what the study says; None: it does not.

    Only what the study and its recipe file say is compared: the file of the weights, whose header completes a recipe,
    need not be here.

    Args:
        task: the run, as in the study.
        result: the content of a result file.
    """
    from proxymetric.runs.folder import flat_values

    raw = _without_weights(task)
    stated, stored = flat_values(raw), flat_values(result.get("recipe", {}))
    for key, value in flat_values(_checked(raw)).items():
        if key not in stated or key not in stored or key in NOT_COMPARED:
            continue
        if key == "method" and _chooses(raw):
            if result.get("auto") is None:
                return f"method is {stored[key]!r}, which was named, not chosen by {value!r}"
            continue  # the result has the method that the run has chosen
        if not _equal(value, stored[key]):
            return f"{key} is {stored[key]!r}, not {value!r}"
    return None


def printed_value(task: Task, key: str) -> Any:
    """The value of a key in the recipe of a run, with its defaults, whether or not the weights are here."""
    from proxymetric.runs import recipe as recipes
    from proxymetric.runs.auto_method import without_auto
    from proxymetric.runs.folder import flat_values

    raw = _without_weights(task)
    value = flat_values(_checked(raw)).get(key)
    if value is None and key in ("train.lr", "train.proxy_lr"):
        rates = recipes.check(without_auto(raw) if _chooses(raw) else raw).train.base_rates
        return rates[key == "train.proxy_lr"]
    return value


def _without_weights(task: Task) -> dict[str, Any]:
    """The unchecked tables of a run without the file of its weights."""
    from proxymetric.runs import recipe as recipes

    settings = {key: value for key, value in task.settings.items() if key != "encoder.weights"}
    return recipes.merged({} if task.recipe is None else recipes.load(task.recipe), recipes.settings(settings))


def _chooses(raw: Mapping[str, Any]) -> bool:
    """Whether unchecked tables leave the choice of the method to the run."""
    from proxymetric.runs.auto_method import AUTO

    return bool(raw.get("method") == AUTO)


def _checked(raw: dict[str, Any]) -> dict[str, Any]:
    """Checked tables with their defaults; the method "auto" stays, with the defaults of the method that it begins with.

    Raises:
        ValueError: a setting is wrong.
    """
    from proxymetric.runs import recipe as recipes
    from proxymetric.runs.auto_method import without_auto

    if not _chooses(raw):
        return recipes.check(raw).as_dict()
    return recipes.check(without_auto(raw)).as_dict() | {"method": raw["method"]}


def _equal(value: Any, stored: Any) -> bool:
    """Whether a value equals a stored one, whose floats may be rounded."""
    if isinstance(value, Mapping) and isinstance(stored, Mapping):
        return all(_equal(item, stored[key]) for key, item in value.items() if key in stored)
    if isinstance(value, list) and isinstance(stored, list):
        return len(value) == len(stored) and all(map(_equal, value, stored))
    if isinstance(value, float) and isinstance(stored, int | float):
        return math.isclose(value, stored, rel_tol=1e-3)
    return bool(value == stored)


class StudyFolder:
    """The files of a study.

    Each run has a folder `runs/NAME/`, its output in `logs/NAME.log` and its recipe in `plans/NAME.json`; the best run
    of each row has its vectors in `embeddings/NAME.safetensors`. `study.json` holds the status of all runs. Draws that
    were made elsewhere are in `draws.jsonl`.

    Args:
        study: the study.
        folder: its folder, created by the first file that is written.
        root: the folder of data and weights.
        given: draws that were collected elsewhere, which are not repeated.
    """

    def __init__(self, study: Study, folder: Path, root: Path | None = None, given: Iterable[Draw] = ()) -> None:
        self.study, self.folder, self.root = study, folder, root
        self.given = {draw.run: draw for draw in given}
        self._epochs: dict[str, float] = {}
        self.state: dict[str, Any] = {"study": study.name, "runs": {}, "sessions": []}
        if (folder / STATE).is_file():
            self.read()
        elif folder.exists() and (not folder.is_dir() or any(file.name != "lock" for file in folder.iterdir())):
            raise ValueError(f"out: got {folder}, which is not empty and holds no study; expected a new folder")

    def run(self, task: Task) -> Path:
        """The folder of a run."""
        return self.folder / "runs" / task.name

    def log(self, task: Task) -> Path:
        """The file with the output of a run."""
        return self.folder / "logs" / f"{task.name}.log"

    def plan(self, task: Task) -> Path:
        """The file with the recipe and the data with which a run was started."""
        return self.folder / "plans" / f"{task.name}.json"

    def vectors(self, task: Task) -> Path:
        """The file with the test embeddings of a run, if it is the best of its row."""
        return self.folder / "embeddings" / f"{task.name}.safetensors"

    def read(self) -> None:
        """Read `study.json`, if there is one.

        Raises:
            ValueError: the file belongs to another study.
        """
        if not (self.folder / STATE).is_file():
            return
        self.state |= read_json(self.folder / STATE)
        if self.state["study"] != self.study.name:
            raise ValueError(
                f"out: got {self.folder}, which holds the study {self.state['study']!r}; expected a folder of "
                f"{self.study.name!r}"
            )

    def save(self) -> None:
        """Write `study.json`."""
        write_json(self.folder / STATE, self.state)

    def note(self, task: Task, **facts: Any) -> None:
        """Record facts about a run in `study.json`."""
        self.state["runs"].setdefault(task.name, {}).update(facts)
        self.save()

    def seconds_spent(self, task: Task) -> float:
        """Seconds that earlier sessions spent on a run that is not done."""
        return float(self.state["runs"].get(task.name, {}).get("spent", 0.0))

    def status(self, task: Task, identity: str | None = None) -> RunStatus:
        """The status of a run.

        Args:
            task: the run.
            identity: the current hash of its data; None: the data is not compared.
        """
        plan, folder = self.plan(task), self.run(task)
        if task.waits:
            return RunStatus("waits")
        if (draw := self.given.get(task.name)) is not None:
            if None not in (identity, draw.identity) and identity != draw.identity:
                raise ValueError(
                    f"results: got the draw {draw.run} with the images {short(draw.identity)}, expected the images of "
                    f"{task.cell.data} that are here, {short(identity)}"
                )
            return RunStatus("done", draw.error)
        if not plan.is_file():
            return RunStatus("new")
        stored = read_json(plan)
        values, earlier = flat_recipe(task, self.root), stored["recipe"]
        for key in sorted(values.keys() | earlier.keys()):
            if values.get(key) != earlier.get(key):
                return RunStatus("changed", f"{key} was {earlier.get(key)!r} and is {values.get(key)!r}")
        if identity is not None and stored["identity"] not in (None, identity):
            return RunStatus("changed", f"the images of {task.cell.data} have changed since the run started")
        result = read_result(folder / "result.json")
        if result is not None:
            return RunStatus("done", result=result)
        facts = self.state["runs"].get(task.name, {})
        if facts.get("status") == "failed":
            return RunStatus("failed", facts.get("error", ""))
        return RunStatus("begun" if (folder / "last.safetensors").is_file() else "new")

    def statuses(self, identities: Mapping[str, str] | None = None) -> dict[str, RunStatus]:
        """The status of every run and draw; the runs of a search get the numbers of its best draw (`self.study`).

        Args:
            identities: name of a data set -> current hash; the data of other sets is not compared.
        """
        of = identities or {}
        statuses = {task.name: self.status(task, of.get(task.cell.data)) for task in self.study.draws()}
        self.resolve(statuses)
        return statuses | {task.name: self.status(task, of.get(task.cell.data)) for task in self.study.tasks()}

    def resolve(self, statuses: Mapping[str, RunStatus]) -> None:
        """Give the runs of every search that is done the numbers of its best draw."""
        self.study = resolved(self.study, self.drawn(statuses))

    def drawn(self, statuses: Mapping[str, RunStatus]) -> list[Draw]:
        """The draws that are done, and those whose runs failed with their numbers (not because they were killed)."""
        draws = []
        for task in self.study.draws():
            run = statuses.get(task.name, RunStatus("new"))
            if task.name in self.given:
                draws.append(self.given[task.name])
            elif run.result is not None:
                draws.append(draw_of(task, run.result))
            elif is_over(task, run):
                draws.append(failed_draw(task, run.reason))
        return draws

    def current(self, tasks: list[Task]) -> list[Task]:
        """The same runs with the numbers that are known by now."""
        known = {task.name: task for task in self.study.tasks()}
        return [known.get(task.name, task) for task in tasks]

    def drop_checkpoints(self, task: Task) -> None:
        """Delete the model of a draw that is done: only its scores are used."""
        for file in self.run(task).glob("*.safetensors"):
            file.unlink(missing_ok=True)

    def record_finished(self, statuses: dict[str, RunStatus]) -> None:
        """Record as "done" every run that has a result: a worker may finish a run after its study was killed.

        Models of draws that such a worker left are deleted.
        """
        for name, run in statuses.items():
            facts = self.state["runs"].setdefault(name, {}) if run.status == "done" else {}
            if run.result is not None and facts.get("status") != "done":
                facts.update(status="done", seconds=run.result.seconds, spent=0.0, scores=run.result.scores)
        for task in self.study.draws():
            if statuses[task.name].result is not None:
                self.drop_checkpoints(task)

    def begin(self, task: Task, identity: str | None, restart: bool = False) -> None:
        """Write the plan of a run before it starts.

        Args:
            task: the run.
            identity: the hash of its data.
            restart: delete the files of the earlier run of this name.
        """
        if restart:
            shutil.rmtree(self.run(task), ignore_errors=True)
            self.vectors(task).unlink(missing_ok=True)
            self.state["runs"].pop(task.name, None)
        write_json(self.plan(task), {"recipe": flat_recipe(task, self.root), "identity": identity})

    def estimates(self, tasks: list[Task], statuses: dict[str, RunStatus]) -> dict[str, float | None]:
        """Estimate the seconds that each run takes.

        The estimate is the median time of finished runs of the same cell, or else of the same row and data set, or else
        `minutes` of the row, or else None. A row and its search count as one row, whose runs take a time in proportion
        to their epochs. The time already spent on an unfinished run is subtracted.
        """
        by_cell: dict[Cell, list[float]] = {}
        by_row: dict[tuple[str, str], list[tuple[Task, float]]] = {}
        whole: dict[str, Task] = {}
        for task in tasks:
            result, name = statuses[task.name].result, task.cell.row.removesuffix(SEARCHED)
            if task.draw is None:
                whole.setdefault(name, task)
            if result is not None or task.name in self.given:
                stored = self.given[task.name].seconds if result is None else result.seconds
                time = self.state["runs"].get(task.name, {}).get("wall") or stored
                by_cell.setdefault(task.cell, []).append(time)
                by_row.setdefault((name, task.cell.data), []).append((task, time))
        estimates: dict[str, float | None] = {}
        for task in tasks:
            cell, minutes = task.cell, self.study.rows[task.cell.row].minutes
            name = cell.row.removesuffix(SEARCHED)
            similar = by_cell.get(cell) or [
                time * self._share(task, other) for other, time in by_row.get((name, cell.data), ())
            ]
            estimate = statistics.median(similar) if similar else None if minutes is None else 60 * minutes
            if estimate is not None and not similar and task.draw is not None:
                estimate *= self._share(task, whole[name])
            if estimate is not None and statuses[task.name].status in ("begun", "failed"):
                estimate = max(0.1 * estimate, estimate - self.seconds_spent(task))
            estimates[task.name] = estimate
        return estimates

    def _share(self, task: Task, other: Task) -> float:
        """The epochs of a run over those of another one."""
        if (task.draw is None) == (other.draw is None):
            return 1.0
        for each in (task, other):
            if each.name not in self._epochs:
                self._epochs[each.name] = flat_recipe(each, self.root)["train.epochs"]
        return self._epochs[task.name] / self._epochs[other.name]

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Lock the folder. Workers inherit the lock, so it is released when the last of them has exited.

        Raises:
            ValueError: another process runs a study in this folder.
        """
        import fcntl

        self.folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    owner = os.pread(handle, 32, 0).decode() or "0"
                    if _alive(int(owner)) or time.monotonic() > deadline:
                        raise ValueError(
                            f"out: got {self.folder}, in use by process {owner}; expected a folder that no process "
                            "uses: wait until that process ends, or choose another folder with --out"
                        ) from None
                    time.sleep(0.1)  # the workers of a killed study are still saving
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)
            yield handle
        finally:
            os.close(handle)


def _alive(process: int) -> bool:
    if process <= 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_result(file: Path) -> Result | None:
    """Read the `result.json` of a run; None if there is none, if it is damaged, or if it has no scores.

    Raises:
        ValueError: the file has a newer schema or lacks keys.
    """
    from proxymetric.runs.result import Result

    if not file.is_file():
        return None
    try:
        content = read_json(file)
    except (ValueError, OSError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("rows"), dict):
        return None
    result = Result.from_dict(content, str(file))
    return result if result.scores else None


def identities(tasks: list[Task], root: Path | None) -> dict[str, str]:
    """Open each data set that the runs use, and return the hash of its content by name.

    Raises:
        ValueError: a data set or a weights file does not exist.
    """
    from proxymetric.data import open_data

    if missing := missing_files(tasks, root):
        raise ValueError(missing[0])
    hashes: dict[str, str] = {}
    for task in tasks:
        name = task.cell.data
        if name not in hashes:
            path = local_settings(task, root)["data.path"]
            hashes[name] = open_data(path, flat_recipe(task, root)["data.layout"]).identity()
    return hashes


def missing_files(tasks: list[Task], root: Path | None) -> list[str]:
    """A sentence for each data set and each weights file of the runs that does not exist."""
    sentences = []
    for task in tasks:
        settings = local_settings(task, root)
        weights, path = settings.get("encoder.weights"), settings["data.path"]
        if weights is not None and not Path(weights).is_file():
            sentences.append(f"backbones.{task.cell.backbone}.weights: got {weights!r}, expected a file{_below(root)}")
        if path.split(":")[0] not in EMBEDDED and not Path(path).exists():
            sentences.append(
                f"data.{task.cell.data}.path: got {path!r}, expected a path of images{_below(root)}"
                f"{_nearest_path(path)}"
            )
    return list(dict.fromkeys(sentences))


def _below(root: Path | None) -> str:
    """The hint at the end of an error that names `--data-root`, if it is not given."""
    return " (--data-root is the folder of data and weights)" if root is None else ""


def _nearest_path(path: str) -> str:
    """The name in the same folder that is most similar to a missing path, as the end of an error."""
    folder = Path(path).parent
    return did_you_mean(Path(path).name, [file.name for file in folder.iterdir()]) if folder.is_dir() else ""
