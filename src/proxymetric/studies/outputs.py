"""Checks of the files that a study replaces: only files that an earlier command for the same study wrote."""

from __future__ import annotations

import tarfile
from pathlib import Path

from proxymetric.studies.collected import RUNS_FILE, read_runs
from proxymetric.studies.drawing import PLOTS, SOFTWARE
from proxymetric.studies.ranges import SEARCH
from proxymetric.studies.search import DRAWS_FILE
from proxymetric.studies.spec import Study
from proxymetric.system.files import check_output
from proxymetric.system.tensor_files import read_header

PNG_HEAD_BYTES = 400
"""bytes at the beginning of a PNG in which the field `Software` is searched"""


def check_outputs(study: Study, archive: Path | None, tables: Path | None) -> None:
    """Check, before any work, that the archive and the tables of a study may be written.

    Args:
        study: the study.
        archive: the file of `--archive`, if any.
        tables: the folder of `--tables`, if any.

    Raises:
        ValueError: a file that no such command wrote is in the way.
    """
    if archive is not None:
        kind = f"an archive of the study {study.name!r}"
        check_output("--archive", archive, kind, lambda file: _is_archive(file, study.name))
    if tables is None:
        return
    if tables.exists() and not tables.is_dir():
        raise ValueError(f"--tables: got {tables}, which is a file; expected a folder")
    text = tables / "tables.md"
    kind = f"a table of the study {study.name!r}"
    has_tables = text.is_file() and _first_line(text) == f"# {study.title}"
    for file in (text, text.with_suffix(".tex")):
        check_output("--tables", file, kind, lambda _: has_tables)
    for file in (file for kind in (*PLOTS, SEARCH) for file in tables.glob(f"{kind}-*.png")):
        check_output("--tables", file, "a plot of a study", lambda plot: has_tables or _is_plot(plot))
    if tables.is_dir() and not text.is_file() and any(each.is_dir() for each in tables.iterdir()):
        raise ValueError(
            f"--tables: got {tables}, which holds other folders and no tables; expected a new or empty folder"
        )


def check_collected(results: Path, vectors: Path | None, vector_names: list[str]) -> None:
    """Check that collected files replace only files of earlier collections.

    Args:
        results: the folder of `--results`.
        vectors: the folder of `--embeddings`, if any.
        vector_names: the files that are written there.

    Raises:
        ValueError: a file that no such command wrote is in the way.
    """
    check_output("--results", results / RUNS_FILE, "the collected results of a study", _is_collected)
    check_output("--results", results / DRAWS_FILE, "the draws of a search", lambda file: '"draw"' in _first_line(file))
    for name in vector_names if vectors is not None else ():
        assert vectors is not None
        check_output("--embeddings", vectors / name, "embeddings of a study", lambda file: "run" in read_header(file))


def _first_line(file: Path) -> str:
    with open(file, encoding="utf-8", errors="replace") as text:
        return text.readline().rstrip("\n")


def _is_archive(file: Path, study: str) -> bool:
    try:
        with tarfile.open(file, "r:gz") as archive:
            first = archive.next()
    except (tarfile.TarError, EOFError, OSError):
        return False
    return first is not None and first.name == f"{study}/study.json"


def _is_plot(file: Path) -> bool:
    with open(file, "rb") as content:
        return SOFTWARE.encode() in content.read(PNG_HEAD_BYTES)


def _is_collected(file: Path) -> bool:
    """Whether all lines of a file are collected results."""
    return all({"rows", "recipe", "data", "study"} <= run.keys() for run in read_runs(file.parent).values())
