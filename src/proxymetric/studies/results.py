"""The stored results of a study: read them from its folder or from collected files, and collect them in small files."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxymetric.studies.choice import best_run
from proxymetric.studies.collected import RUNS_FILE, as_line, read_runs, write_runs
from proxymetric.studies.folder import STATE, RunStatus, StudyFolder, difference_to, read_result
from proxymetric.studies.outputs import check_collected
from proxymetric.studies.pool import tail
from proxymetric.studies.ranges import Draw
from proxymetric.studies.search import (
    DRAWS_FILE,
    as_lines,
    check_draws,
    from_lines,
    of_study,
    read_draws,
    resolved,
    selection_score,
    short,
)
from proxymetric.studies.spec import LABELS, Study, Task
from proxymetric.system.files import read_json, replacing, write_json

if TYPE_CHECKING:
    from proxymetric.runs.result import Result

FLOAT_DIGITS = 5
"""digits of the floats in collected results"""
LOG_LINES = 200
"""last lines of each log in an archive"""


EXACT = ("rows", "validation")
"""tables of a result whose scores the tables of a study compare"""


def compact(result: dict[str, Any], task: Task) -> dict[str, Any]:
    """The content of a `result.json` without local paths and ROC; floats have five digits, except in `EXACT`."""
    small = {key: value if key in EXACT else _rounded(value) for key, value in result.items()}
    if small.get("thresholds") is not None:
        small["thresholds"] = {key: value for key, value in small["thresholds"].items() if key != "roc"}
    data, encoder = small["recipe"]["data"], small["recipe"]["encoder"]
    root = str(data["path"])
    data["path"] = task.settings["data.path"]
    if encoder.get("weights") is not None:
        encoder["weights"] = task.settings.get("encoder.weights", Path(str(encoder["weights"])).name)
    bad = small.get("bad_images", {})
    small["bad_images"] = {name.removeprefix(root).lstrip("/"): str(why).replace(root, "") for name, why in bad.items()}
    small["study"] = {
        "row": task.cell.row, "data": task.cell.data, "backbone": task.cell.backbone,
        "protocol": task.cell.protocol, "seed": task.seed,
    }  # fmt: skip
    if task.values:
        small["study"]["searched"] = task.values
    return small


def _rounded(value: Any) -> Any:
    """A value with all floats in it rounded.

    >>> _rounded({"a": [0.1234567, 12345.678, 1.23456789e-7]})
    {'a': [0.12346, 12345.678, 1.2346e-07]}
    """
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float):
        return round(value, FLOAT_DIGITS) if abs(value) >= 0.01 else float(f"{value:.{FLOAT_DIGITS}g}")
    return value


def as_text(result: dict[str, Any]) -> str:
    """JSON with one line for each key of the result: small files and readable diffs."""
    lines = [f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}" for key, value in result.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def stored_results(study: Study, folder: Path, needed: bool = True) -> dict[str, Result]:
    """Read the results of a study, by the name of the run, from a folder of collected files or from its own folder.

    Raises:
        ValueError: the folder has no result of the study although one is needed, or the collected file is damaged.
    """
    check_study(study, folder)
    collected, results = read_runs(folder), {}
    for task in study.tasks():
        if task.name in collected:
            results[task.name] = _checked(collected[task.name], f"{folder / RUNS_FILE}, run {task.name}")
        elif (result := read_result(folder / "runs" / task.name / "result.json")) is not None:
            results[task.name] = result
    if not results and needed:
        raise ValueError(f"results: got {folder}, expected a folder with results of the study {study.name!r}")
    return results


def _checked(content: dict[str, Any], place: str) -> Result:
    """A collected result.

    Raises:
        ValueError: it is not the result of a run; the sentence begins with its place.
    """
    from proxymetric.runs.result import Result

    result = Result.from_dict(content, place)
    if not result.scores:
        raise ValueError(f"{place}: got a result without scores, expected that of a finished run: collect it again")
    return result


def stored_draws(study: Study, folder: Path) -> list[Draw]:
    """Read the draws of a study's search from a folder of collected files or from its own folder, which may have both.

    Raises:
        ValueError: a line of the collected draws is damaged.
    """
    given = read_draws(folder / DRAWS_FILE)
    if not (folder / STATE).is_file():
        return given
    book = StudyFolder(study, folder, given=given)
    outcomes = {task.name: read_result(book.run(task) / "result.json") for task in study.draws()}
    facts = book.state["runs"]
    failed = {
        name: RunStatus("failed", facts[name].get("error") or "")
        for name, result in outcomes.items()
        if result is None and facts.get(name, {}).get("status") == "failed"
    }
    done = {name: RunStatus("done", result=each) for name, each in outcomes.items() if each}
    return [_as_made(book, draw) for draw in book.drawn(failed | done)]


def _as_made(book: StudyFolder, draw: Draw) -> Draw:
    """A draw with the numbers of its run, which are not those of the study if its ranges have changed since."""
    plan = book.folder / "plans" / f"{draw.run}.json"
    if draw.run in book.given or not plan.is_file():
        return draw
    recipe = read_json(plan)["recipe"]
    return replace(draw, values={key: recipe.get(key) for key in draw.values})


def check_study(study: Study, folder: Path) -> None:
    """Refuse a folder whose `study.json` names another study."""
    file = folder / STATE
    other = read_json(file).get("study", study.name) if file.is_file() else study.name
    if other != study.name:
        raise ValueError(f"results: got {folder}, which has results of the study {other!r}; expected {study.name!r}")


def write_archive(book: StudyFolder, statuses: dict[str, RunStatus], file: Path) -> int:
    """Write a .tar.gz with the small results, the last lines of the logs and the embeddings.

    Returns:
        The number of results in it.
    """
    study, count = book.study, 0
    with replacing(file) as temporary, tarfile.open(temporary, "w:gz") as archive:

        def add(name: str, content: bytes) -> None:
            entry = tarfile.TarInfo(f"{study.name}/{name}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))

        state = {key: value for key, value in book.state.items() if key != "runs"}
        add(STATE, (json.dumps(state, indent=1) + "\n").encode())
        chosen = []
        for task in study.tasks():
            result = statuses[task.name].result if task.name in statuses else None
            if result is not None:
                add(f"results/{task.name}.json", as_text(compact(result.as_dict(), task)).encode())
                count += 1
            log = tail(book.log(task), LOG_LINES)
            if log:
                add(f"logs/{task.name}.log", (log + "\n").encode())
            vectors = book.vectors(task)
            if vectors.is_file() and result is not None and best_run(study, task.cell, statuses) == task:
                add(f"embeddings/{task.name}.safetensors", vectors.read_bytes())
                chosen.append(_choice(task, result))
        if study.search is not None:
            add(DRAWS_FILE, as_lines(book.drawn(statuses)).encode())
        add("embeddings.json", (json.dumps(chosen, indent=1) + "\n").encode())
    return count


def _choice(task: Task, result: Result) -> dict[str, Any]:
    """Why the embeddings of this run are in the archive."""
    score = selection_score(result)
    monitor = result.recipe["train"]["monitor"]
    reason = f"best {monitor} of its seeds, {LABELS[task.cell.protocol]}" if score is not None else "first seed"
    return {"run": task.name, "protocol": task.cell.protocol, "score": score, "why": reason}


def collect(study: Study, sources: Iterable[Path], results: Path, overwrite: bool, vectors: Path | None) -> list[str]:
    """Copy the results of archives and study folders into one folder: a line of its `runs.jsonl` for each run.

    Args:
        study: the study.
        sources: archives (.tar.gz) and folders of studies.
        results: the folder for the collected files.
        overwrite: replace stored results that differ.
        vectors: a folder for the embeddings; None: embeddings are not copied.

    Returns:
        The names of the runs that are new or replaced.

    Raises:
        ValueError: a source is neither an archive nor a study folder, is of another study or of the same study with
            other settings or ranges, a result differs from the stored one, or results of one data set were computed
            with different images.
    """
    runs: dict[str, dict[str, Any]] = {}
    embeddings: dict[str, bytes] = {}
    sessions: dict[tuple[str, int], Any] = {}
    read = {each: _from_archive(each) if each.is_file() else _from_folder(study, each) for each in sources}
    for source, (_, state, vectors_of, _) in read.items():
        if (other := state.get("study", study.name)) != study.name:
            raise ValueError(f"collect: got {source}, which is of the study {other!r}; expected one of {study.name!r}")
        embeddings |= vectors_of
        sessions |= _by_start(state.get("sessions", []))
    draws = _collected_draws(study, {source: content[3] for source, content in read.items()}, results, overwrite)
    study = resolved(study, draws)
    tasks = {task.name: task for task in study.tasks()}
    for source, (contents, *_) in read.items():
        unknown = sorted(set(contents) - set(tasks))
        if unknown:
            raise ValueError(
                f"collect: got {source} with the run {unknown[0]!r}, expected only runs of the study {study.name!r}"
            )
        for name, result in contents.items():
            if tasks[name].waits:
                raise ValueError(
                    f"collect: got {source} with the run {name} without all draws of its search; expected the archive "
                    "or the folder that has them"
                )
            if difference := difference_to(tasks[name], result):
                raise ValueError(
                    f"collect: got {source} with the run {name}, in which {difference}; expected runs of the study as "
                    "it is written now"
                )
        runs |= {name: compact(result, tasks[name]) for name, result in contents.items()}
    check_study(study, results)
    stored = read_runs(results)
    new_names = [name for name, run in runs.items() if name not in stored or _differ(name, run, stored[name])]
    for name in new_names:
        if name in stored and not overwrite:
            raise ValueError(
                f"results: got {results / RUNS_FILE} with the run {name}, which differs from the collected result; "
                "expected the same result, or --overwrite to replace it"
            )
    check_collected(results, vectors, list(embeddings))
    if not overwrite:
        _check_same_images(tasks, stored | runs, draws)
    if new_names:
        write_runs(results, stored | runs)
    if draws:
        with replacing(results / DRAWS_FILE) as temporary:
            temporary.write_text(as_lines(draws), encoding="utf-8")
    if (results / STATE).is_file():
        sessions = _by_start(read_json(results / STATE)["sessions"]) | sessions
    if sessions:
        write_json(results / STATE, {"study": study.name, "sessions": [sessions[key] for key in sorted(sessions)]})
    for name, content in embeddings.items():
        if vectors is not None:
            with replacing(vectors / name) as temporary:
                temporary.write_bytes(content)
    return new_names


def _by_start(sessions: list[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """The sessions by start and number of jobs: parts of a study that share a machine may start in the same second."""
    return {(session["started"], session.get("jobs", 0)): session for session in sessions}


def _collected_draws(study: Study, read: Mapping[Path, list[Draw]], results: Path, overwrite: bool) -> list[Draw]:
    """The draws of all sources and those stored before, in the order of the study.

    Raises:
        ValueError: they are not draws of the study as it is written now, or a draw has two outcomes.
    """
    known: dict[str, Draw] = {}
    file = results / DRAWS_FILE
    stored = read_draws(file)
    if overwrite:
        stored = of_study(study, stored)
    for source, draws in {file: stored, **read}.items():
        check_draws(study, draws, source)
        for draw in draws:
            other = known.setdefault(draw.run, draw)
            if other != draw and not overwrite and other.score is not None:
                raise ValueError(
                    f"draws: got {source} with the draw {draw.run}, which differs from the one collected before; "
                    "expected the same draw, or --overwrite to replace it"
                )
            known[draw.run] = draw
    return [known[task.name] for task in study.draws() if task.name in known]


def _differ(name: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
    return as_line(name, one) != as_line(name, other)


def _check_same_images(tasks: dict[str, Task], runs: dict[str, dict[str, Any]], draws: list[Draw]) -> None:
    """Refuse new results of a data set whose images are not those of its other results, stored or new."""
    first: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, task in tasks.items():
        if name not in runs:
            continue
        data = runs[name]["data"]
        other_name, other = first.setdefault(task.cell.data, (name, data))
        if data["identity"] != other["identity"]:
            raise ValueError(
                f"collect: got the run {name} with {_image_counts(data)}, and {other_name} with "
                f"{_image_counts(other)}, other images; expected the same images of {task.cell.data!r} in all runs, or "
                "--overwrite to keep both, in tables of their own"
            )
    for draw in draws:
        name, data = first.get(draw.data, (draw.run, {"identity": draw.identity}))
        if draw.identity is not None and draw.identity != data["identity"]:
            raise ValueError(
                f"collect: got the draw {draw.run} with the images {short(draw.identity)}, and {name} with the images "
                f"{short(data['identity'])}; expected the same images of {draw.data!r} in the search and all runs"
            )


def _image_counts(data: dict[str, Any]) -> str:
    counts = " and ".join(f"{data[part]['images']} images to {part}" for part in ("train", "test") if part in data)
    return f"{counts} (identity {short(data['identity'])})"


def _from_archive(file: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes], list[Draw]]:
    results, state, embeddings = {}, {}, {}
    draws: list[Draw] = []
    try:
        with gzip.open(file) as stream:
            while stream.read(2**20):  # compares the checksum at the end, which tarfile does not
                pass
        with tarfile.open(file, "r:gz") as archive:
            for entry in archive:
                _, _, name = entry.name.partition("/")
                folder, _, file_name = name.rpartition("/")
                content = archive.extractfile(entry)
                if content is None:
                    continue
                if name == STATE:
                    state = json.loads(content.read())
                elif name == DRAWS_FILE:
                    draws = from_lines(content.read().decode(), DRAWS_FILE)
                elif folder == "results" and file_name.endswith(".json"):
                    results[file_name.removesuffix(".json")] = json.loads(content.read())
                elif folder == "embeddings":
                    embeddings[file_name] = content.read()
    except (tarfile.TarError, zlib.error, ValueError, EOFError, OSError) as error:
        raise ValueError(f"collect: got {file}, expected a whole archive of a study: {error}") from None
    return results, state, embeddings, draws


def _from_folder(study: Study, folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, bytes], list[Draw]]:
    if not folder.is_dir():
        raise ValueError(f"collect: got {folder}, expected an archive or a folder of a study")
    state = read_json(folder / STATE) if (folder / STATE).is_file() else {}
    files = sorted((folder / "embeddings").glob("*.safetensors"))
    check_study(study, folder)
    draws = stored_draws(study, folder)
    results = {name: result.as_dict() for name, result in stored_results(study, folder, needed=not draws).items()}
    return results, state, {file.name: file.read_bytes() for file in files}, draws
