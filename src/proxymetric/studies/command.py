"""The actions of `proxymetric study`: run, list, archive, collect, tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from proxymetric.arguments.own_code import check_trusted, trusting
from proxymetric.studies.folder import RunStatus, StudyFolder, flat_recipe, identities, is_over, missing_files
from proxymetric.studies.outputs import check_outputs
from proxymetric.studies.ranges import Draw, in_words
from proxymetric.studies.reading import load_study
from proxymetric.studies.reporting import Reporter, Silent
from proxymetric.studies.results import collect, stored_draws, stored_results, write_archive
from proxymetric.studies.running import Session
from proxymetric.studies.search import DRAWS_FILE, as_lines, check_draws, of_study, read_draws
from proxymetric.studies.spec import Study, Task, narrowed
from proxymetric.system.clock import clock
from proxymetric.system.files import replacing

GPU_JOBS = 4
"""runs at the same time on a GPU, by default"""


class Run(NamedTuple):
    """A run of a study after the call: its status, and how long it took or will take."""

    name: str
    status: str
    """"done", "to do", "to resume", "failed" or "changed" (the study is written differently now)"""
    minutes: float | None
    """None: unknown"""


@dataclass
class StudyResult:
    """What a call of `study` did, and what is left.

    Attributes:
        folder: the folder of the study.
        runs: the runs that were asked for; empty for `collect` and `tables`.
        failed: name of each run that failed -> its error.
        interrupted: whether Ctrl-C or SIGTERM stopped the study.
        collected: the runs whose collected results are new or replaced.
        tables: the file of tables that was written; None if none was.
    """

    folder: Path
    runs: list[Run] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False
    collected: list[str] = field(default_factory=list)
    tables: Path | None = None

    @property
    def code(self) -> int:
        """The exit code of a command: 0, 1 if a run failed, 130 if the study was interrupted."""
        return 130 if self.interrupted else int(bool(self.failed))

    def as_dict(self) -> dict[str, Any]:
        """The result in plain types, for JSON."""
        runs = [run._asdict() for run in self.runs]
        files = {"folder": str(self.folder), "tables": None if self.tables is None else str(self.tables)}
        return {
            **files,
            "runs": runs,
            "failed": self.failed,
            "interrupted": self.interrupted,
            "collected": self.collected,
        }


@dataclass(frozen=True)
class Options:
    """The arguments of `study`."""

    study: Path
    out: Path | None = None
    data_root: Path | None = None
    jobs: int | None = None
    minutes: float | None = None
    only: str = ""
    seeds: str = ""
    data: str = ""
    dry_run: bool = False
    overwrite: bool = False
    archive: Path | None = None
    collect: tuple[Path, ...] = ()
    results: Path | None = None
    embeddings: Path | None = None
    tables: Path | None = None
    trust_code: bool = False


def study(
    file: str | Path,
    *,
    out: str | Path | None = None,
    data_root: str | Path | None = None,
    jobs: int | None = None,
    minutes: float | None = None,
    only: str = "",
    seeds: str = "",
    data: str = "",
    dry_run: bool = False,
    overwrite: bool = False,
    archive: str | Path | None = None,
    collect: Sequence[str | Path] = (),
    results: str | Path | None = None,
    embeddings: str | Path | None = None,
    tables: str | Path | None = None,
    trust_code: bool = False,
    reporter: Reporter | None = None,
) -> StudyResult:
    """Train all runs of a study that are not finished; the same call continues a study that was stopped or killed.

    Several runs share a GPU. If a run fails, the others continue. The tables of all results so far are written to the
    folder of the study.

    Args:
        file: the TOML file that describes the study.
        out: folder of the study; None: `runs/study-<name>`.
        data_root: folder with the data and weights of the study.
        jobs: runs at the same time; None: 1, or `GPU_JOBS` on a GPU.
        minutes: stop after this time: start only runs that will finish by then, and save those that do not.
        only: run only these rows of the study, separated by commas.
        seeds: run only these seeds, such as "0,1".
        data: run only on these data sets of the study.
        dry_run: run nothing; `runs` of the result has the status of each run, and its time.
        overwrite: repeat runs whose recipe or data changed; replace collected results.
        archive: after each run write results, logs and best embeddings to this archive (.tar.gz).
        collect: run nothing; copy the results of these archives or study folders to `results`.
        results: folder of collected results. A run of a study goes on from the draws that lie there.
        embeddings: with `collect`: copy the embeddings to this folder.
        tables: run nothing; write tables and plots of `results` or `out` to this folder.
        trust_code: import code (module:function) that the study or a recipe of it names.
        reporter: shows how the study proceeds; None shows nothing.

    Returns:
        What was done, and what is left.

    Raises:
        ValueError: an argument or the study is wrong; nothing has been written.

    Example:
        >>> import proxymetric as pm
        >>> [run.status for run in pm.study("studies/glyphs.toml", dry_run=True).runs]    # doctest: +SKIP
        ['to do', 'to do', 'to do', 'to do']
    """
    places = {"study": file, "out": out, "data_root": data_root, "archive": archive, "results": results,
              "embeddings": embeddings, "tables": tables}  # fmt: skip
    options = Options(
        **{name: None if place is None else Path(place) for name, place in places.items()},  # type: ignore[arg-type]
        jobs=jobs,
        minutes=minutes,
        only=only,
        seeds=seeds,
        data=data,
        dry_run=dry_run,
        overwrite=overwrite,
        collect=tuple(map(Path, collect)),
        trust_code=trust_code,
    )
    _check(options)
    with trusting(everything=options.trust_code):
        return _execute(options, Silent() if reporter is None else reporter)


def _execute(options: Options, reporter: Reporter) -> StudyResult:
    study = load_study(options.study)
    tasks = narrowed(study, _words(options.only), _numbers(options.seeds), _words(options.data))
    check_outputs(study, options.archive, options.tables)
    out = options.out or Path("runs") / f"study-{study.name}"
    result = StudyResult(out)
    if options.collect:
        assert options.results is not None
        new_names = collect(study, options.collect, options.results, options.overwrite, options.embeddings)
        draws = f", {len(stored_draws(study, options.results))} draws are there" if study.search else ""
        reporter.answer(f"{len(new_names)} results are new or replaced in {options.results}{draws}")
        result.collected = list(new_names)
    if options.tables is not None:
        result.tables = _tables(study, options.results or out, options.tables, reporter)
    if options.collect or options.tables is not None:
        return result
    if options.data_root is not None and not options.data_root.is_dir():
        raise ValueError(f"--data-root: got {str(options.data_root)!r}, expected a folder")
    _check_recipes(study, tasks, options.data_root)
    book = StudyFolder(study, out, options.data_root, _given(study, options, out))
    if options.dry_run:
        statuses = book.statuses()
        jobs = _jobs(options, [task for task in tasks if not is_over(task, statuses[task.name])])
        result.runs = _list(book, book.current(tasks), statuses, jobs, reporter)
        for sentence in missing_files(_unfinished_draws_and_runs(book, tasks), options.data_root):
            reporter.answer(f"not there yet: {sentence}")
        return result
    _run(options, book, tasks, reporter, result)
    return result


def _given(study: Study, options: Options, out: Path) -> list[Draw]:
    """The draws that were collected elsewhere, from which a study goes on; it keeps a copy of them in its folder.

    Raises:
        ValueError: there is no search, or the draws are not those of the study.
    """
    if options.results is not None and study.search is None:
        raise ValueError("--results: got a folder without --collect or --tables, expected one of these flags")
    if options.results is not None and not options.results.is_dir():
        raise ValueError(f"--results: got {str(options.results)!r}, expected a folder of collected results")
    files = [folder / DRAWS_FILE for folder in (out, options.results) if folder is not None]
    for file in files[options.overwrite :]:
        check_draws(study, read_draws(file), file)
    return of_study(study, (draw for file in files for draw in read_draws(file)))


def _unfinished_draws_and_runs(book: StudyFolder, tasks: list[Task]) -> list[Task]:
    """The runs whose data must be here: all but the draws that are done."""
    return [task for task in tasks if task.draw is None or not is_over(task, book.status(task))]


def _check(options: Options) -> None:
    if options.jobs is not None and options.jobs < 1:
        raise ValueError(f"--jobs: got {options.jobs}, expected at least 1")
    if options.minutes is not None and not 0 < options.minutes < float("inf"):
        raise ValueError(f"--minutes: got {options.minutes}, expected a number above 0")
    if options.collect and options.results is None:
        raise ValueError("--results: got none, expected the folder that --collect fills")
    for flag, value in (("--only", options.only), ("--seeds", options.seeds), ("--data", options.data)):
        if value and (options.collect or options.tables):
            action = "--collect" if options.collect else "--tables"
            raise ValueError(
                f"{flag}: got {value!r} together with {action}, which takes all results; expected no {flag}"
            )
    if options.archive is not None and not options.archive.name.endswith((".tar.gz", ".tgz")):
        raise ValueError(f"--archive: got {options.archive.name!r}, expected a name that ends in .tar.gz")


def _check_recipes(study: Study, tasks: list[Task], root: Path | None) -> None:
    """Refuse a run with a wrong setting or backbone, or one that does not measure what the tables show."""
    from proxymetric.runs.recipe import check_backbone

    checked: set[str] = set()
    for task in tasks:
        recipe = flat_recipe(task, root)
        if task.draw is not None and recipe["data.validation"] == 0:
            raise ValueError(
                f"rows.{task.cell.row}.search: got data.validation = 0, expected held-out classes, which choose the "
                "best draw"
            )
        # The sizes of nested vectors must fit the dimensions.
        loss = {key: recipe[key] for key in recipe if key in ("method", "encoder.dim") or key.startswith("loss.")}
        if (written := json.dumps(loss, sort_keys=True)) not in checked:
            checked.add(written)
            _check_loss(task, loss)
        if ":" in (transform := recipe["view.transform"] or ""):
            check_trusted("view.transform", transform)  # it is imported by the workers
        for metric in study.metrics:
            if metric not in recipe["train.metrics"]:
                raise ValueError(
                    f"metrics: got {metric!r}, which the runs of {task.cell.row} do not measure; expected one of "
                    f'{", ".join(recipe["train.metrics"])}, or a setting "train.metrics" that has it'
                )
        if (backbone := recipe["encoder.backbone"]) not in checked:
            checked.add(backbone)
            try:
                check_backbone(backbone)
            except ValueError as error:
                place = task.places.get("encoder.backbone", f"rows.{task.cell.row}")
                raise ValueError(f"{place}: {error}") from None


def _check_loss(task: Task, loss: dict[str, Any]) -> None:
    """Refuse values of the table `[loss]` that the method does not take, also inside `loss.base`."""
    from proxymetric.runs import recipe as recipes
    from proxymetric.runs.assemble import check_loss
    from proxymetric.runs.auto_method import AUTO, DEFAULT_METHOD

    if loss["method"] == AUTO:  # the recipe has the defaults of this method
        loss = loss | {"method": DEFAULT_METHOD}
    try:
        check_loss(recipes.check(recipes.merged(recipes.settings(loss))))
    except ValueError as error:
        place = task.places.get(f"loss.{str(error).partition(':')[0]}", f"rows.{task.cell.row}")
        raise ValueError(f"{place}: {error}") from None


def _run(options: Options, book: StudyFolder, tasks: list[Task], reporter: Reporter, result: StudyResult) -> None:
    data_identities = identities(_unfinished_draws_and_runs(book, tasks), options.data_root)
    with book.locked() as lock:
        _run_locked(options, book, tasks, data_identities, lock, reporter, result)


def _run_locked(
    options: Options,
    book: StudyFolder,
    tasks: list[Task],
    data_identities: dict[str, str],
    lock: int,
    reporter: Reporter,
    result: StudyResult,
) -> None:
    book.read()
    statuses = book.statuses(data_identities)
    study, tasks = book.study, book.current(tasks)
    changed = [task for task in tasks if statuses[task.name].status == "changed"]
    if changed and not options.overwrite:
        raise ValueError(_other_runs(book, changed, statuses))
    todo = [
        task
        for task in tasks
        if not is_over(task, statuses[task.name]) or (options.overwrite and statuses[task.name].status == "failed")
    ]
    jobs = _jobs(options, todo)
    book.record_finished(statuses)
    book.save()
    if book.given:
        with replacing(book.folder / DRAWS_FILE) as temporary:
            temporary.write_text(as_lines(book.given.values()), encoding="utf-8")
    reporter.say(f"{study.name}: {len(todo)} runs to do, {len(tasks) - len(todo)} done; {jobs} at the same time")
    session = Session(
        book, todo, statuses, data_identities, jobs, options.data_root, options.minutes, reporter,
        _on_gpu(todo), options.archive, options.overwrite,
    )  # fmt: skip
    outcome = session.run(lock)
    if options.archive is not None:
        count = write_archive(book, session.statuses, options.archive)
        reporter.answer(f"archive: {options.archive}, {count} results")
    if any(each.result for each in session.statuses.values()):
        result.tables = _tables(study, book.folder, book.folder / "tables", reporter, needed=False)
    for name, error in outcome.failed.items():
        log = book.folder / "logs" / f"{name}.log"
        where = f" (whole log: {log})" if log.is_file() else ""
        reporter.answer(f"failed: {name}: {error.splitlines()[0]}{where}")
    if outcome.unfinished:
        examples = ", ".join(task.name for task in outcome.unfinished[:3])
        count = len(outcome.unfinished)
        reporter.answer(f"{count} runs are not finished, such as {examples}; the same command continues the study")
    estimates = book.estimates([*study.draws(), *study.tasks()], session.statuses)
    result.runs = [_run_of(book, task, session.statuses[task.name], estimates[task.name]) for task in tasks]
    result.failed, result.interrupted = outcome.failed, outcome.interrupted


def _run_of(book: StudyFolder, task: Task, status: RunStatus, estimate: float | None) -> Run:
    """What the result says about a run."""
    label = {"new": "to do", "begun": "to resume"}.get(status.status, status.status)
    if status.status == "done":
        estimate = (status.result or book.given[task.name]).seconds
    elif is_over(task, status):
        estimate = None
    return Run(task.name, label, None if estimate is None else estimate / 60)


def _other_runs(book: StudyFolder, changed: list[Task], statuses: dict[str, RunStatus]) -> str:
    """What to say about runs of the folder that are not those of the study as it is written now."""
    draws = [task for task in changed if task.draw is not None]
    first = (draws or changed)[0].name
    if draws:
        return (
            f"search: got {len(draws)} draws in {book.folder} with other numbers or data, such as {first} "
            f"({statuses[first].reason}); expected the draws of this study, with the ranges that they were made with: "
            "--overwrite draws again, another --out keeps both"
        )
    return (
        f"out: got {len(changed)} runs in {book.folder} with another recipe or other data, such as {first} "
        f"({statuses[first].reason}); expected runs of this study: --overwrite repeats them, another --out keeps both"
    )


def _jobs(options: Options, todo: list[Task]) -> int:
    """The number of runs at the same time."""
    return options.jobs or (GPU_JOBS if _on_gpu(todo) else 1)


def _on_gpu(tasks: list[Task]) -> bool:
    import torch

    return torch.cuda.is_available() and any(task.settings.get("train.device") != "cpu" for task in tasks)


def _list(
    book: StudyFolder, tasks: list[Task], statuses: dict[str, RunStatus], jobs: int, reporter: Reporter
) -> list[Run]:
    """List the runs with their status, and estimate the time of those that are not done."""
    estimates = book.estimates([*book.study.draws(), *book.study.tasks()], statuses)
    width = max(len(task.name) for task in tasks)
    todo, total, unknown = 0, 0.0, 0
    runs = [_run_of(book, task, statuses[task.name], estimates[task.name]) for task in tasks]
    for task, run in zip(tasks, runs, strict=True):
        status, estimate = statuses[task.name], estimates[task.name]
        time = "unknown" if run.minutes is None else f"{run.minutes:.1f} min"
        reasons = [in_words(task.values), *status.reason.splitlines()[:1]]
        if task.waits:
            reasons = [f"for the best draw of {book.study.rows[task.cell.row].printed}"]
        reason = f"  {'; '.join(filter(None, reasons))}" if any(reasons) else ""
        if not is_over(task, status):
            todo += 1
            total, unknown = total + (estimate or 0.0), unknown + (estimate is None)
        elif status.status != "done":
            time = ""
        reporter.answer(f"{task.name:{width}}  {run.status:9}  {time:>9}{reason}")
    if not todo:
        reporter.answer("all runs are done")
        return runs
    known = f"about {clock(total / min(jobs, todo))}" if todo > unknown else ""
    times = " and ".join(filter(None, (known, f"{unknown} of unknown length" if unknown else "")))
    reporter.answer(f"{len(tasks)} runs, {todo} to do: {times} with {jobs} at the same time")
    return runs


def _tables(study: Study, stored: Path, folder: Path, reporter: Reporter, needed: bool = True) -> Path | None:
    from proxymetric.studies.tables import write_tables

    try:
        draws = of_study(study, stored_draws(study, stored))
        files = write_tables(study, stored_results(study, stored, needed=not draws), folder, draws)
    except ModuleNotFoundError as error:
        if needed:
            raise ValueError(
                f"--tables: got an environment without {error.name}, expected pip install {error.name}"
            ) from None
        reporter.say(f"no tables: {error.name} is not installed; --tables can write them later from the results")
        return None
    reporter.answer(f"tables: {files[0]}")
    return files[0]


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"--seeds: got {text!r}, expected whole numbers such as 0,1") from None
