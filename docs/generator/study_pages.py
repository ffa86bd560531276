"""A page for each study of studies/*.toml: its design, and tables and plots if results are stored."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from generator.choices import choices_section
from generator.claims import (
    Claims,
    claimed_differences,
    claims_picture,
    claims_table,
    costs_table,
    divided,
    why_list,
)
from generator.photographs import ADVICE, copies_list, is_archived, mark
from generator.repeats import repeats_section
from generator.scores import RESULTS, ROOT, table

CLAIMS, WAITING = "claims.png", "claims-degraded.png"
"""pictures of the claims that were measured with the photographs themselves, and with degraded copies only"""
ARCHIVE = "studies/archive.md"
"""the page of the studies from degraded copies of the photographs; their own pages follow it"""


class Entry(NamedTuple):
    """A study in the lists: its line in the table, its page, and its results (None without any)."""

    line: list[str]
    page: str
    results: Any


def study_pages(results: Path = RESULTS) -> tuple[dict[str, str], dict[str, bytes]]:
    """The pages of all studies, their index and their archive (path in the site -> text), and their pictures."""
    from proxymetric.studies import load_study
    from proxymetric.studies.results import stored_draws, stored_results
    from proxymetric.studies.scores import Results
    from proxymetric.studies.search import of_study

    pictures: dict[str, bytes] = {}
    current: dict[str, Entry] = {}
    archived: dict[str, Entry] = {}
    for file in sorted((ROOT / "studies").glob("*.toml")):
        study = load_study(file)
        folder = results / study.name
        runs = stored_results(study, folder, needed=False)
        draws = of_study(study, stored_draws(study, folder))
        by_cell = Results(study, runs) if runs else None
        text, images = f"No results are stored in `results/{study.name}/` yet.", {}
        if runs or draws:
            text, images = measured(study, runs, draws)
        pictures |= {f"studies/{study.name}/{name}": content for name, content in images.items()}
        is_old = by_cell is not None and is_archived(by_cell)
        comment = "\n".join(re.findall(r"^# ?(.*)$", file.read_text(encoding="utf-8").split("\n\n")[0], re.MULTILINE))
        sentence = mark(by_cell) if by_cell else ""
        parts = [f"# {study.title}", sentence, comment, design(study), text, "## Run it", command(file, study.name)]
        line = [f"[{study.title}]({study.name}.md)", str(len(study.rows)), f"{len(runs)} of {len(study.tasks())}"]
        page = "\n\n".join(part for part in parts if part) + "\n"
        (archived if is_old else current)[f"studies/{study.name}.md"] = Entry(line, page, by_cell)
    new, old = ([each.results for each in some.values() if each.results] for some in (current, archived))
    claims = divided(claimed_differences(new + old))
    for name, some in ((CLAIMS, claims.current), (WAITING, claims.waiting)):
        if some:
            pictures[f"studies/{name}"] = claims_picture(some)
    pages = {place: each.page for place, each in current.items()}
    pages[ARCHIVE] = _archive(list(archived.values()), old, claims)
    pages |= {place: each.page for place, each in archived.items()}
    return pages | {"studies/index.md": _index(list(current.values()), new, claims)}, pictures


def _index(entries: list[Entry], all_results: list, claims: Claims) -> str:
    """The page of the studies: the claims, what the runs cost, and the studies that are not in the archive."""
    parts = [
        "# Studies",
        "A study compares methods over data sets, backbones, protocols and seeds; "
        "[Run a study](../how-to/studies.md) explains how. Tables and plots are generated from the files in `results/` "
        "when this site is built.",
        _claims(claims),
        _readings(all_results),
        choices_section(all_results),
        _costs(all_results),
        _list(entries),
        repeats_section(all_results),
        f"Studies from degraded copies of the photographs are in the [archive](archive.md); {ADVICE}. "
        "[History](history.md) has the results of 0.1.0, whose settings differ from the papers'.",
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _archive(entries: list[Entry], all_results: list, claims: Claims) -> str:
    """The page of the studies whose results are all from degraded copies of the photographs."""
    parts = [
        "# Archive",
        f"These studies were made from degraded copies of the photographs: {ADVICE}. A study leaves this page when it "
        "is run again from the originals.",
        copies_list(all_results),
        _list(entries),
    ]
    if claims.replaced:
        parts += [
            "## Claims that were measured again",
            "The [studies](index.md#what-the-papers-claim) have the same claims from the original photographs.",
            claims_table(claims.replaced),
        ]
    parts += [_readings(all_results), choices_section(all_results), _costs(all_results), repeats_section(all_results)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _list(entries: list[Entry]) -> str:
    return f"## All studies\n\n{table(['study', 'rows', 'runs stored'], [each.line for each in entries])}"


def _claims(claims: Claims) -> str:
    """The claims of the papers beside what was measured; nothing without results."""
    from proxymetric.studies.tables import CLAIM_NOTE

    if not (claims.current or claims.waiting):
        return ""
    parts = [
        "## What the papers claim",
        "Differences to the baseline in points: the paper's, and those measured here at equal seeds with 95 % Student "
        "intervals. `papers` chooses the epoch on the test half, as the papers do; `held-out` chooses it on held-out "
        "training classes.",
    ]
    if claims.current:
        parts += [f"![The papers' differences beside those measured here]({CLAIMS})", claims_table(claims.current)]
    parts.append(CLAIM_NOTE)
    if claims.waiting:
        parts += [
            "### From degraded copies of the photographs",
            f"These claims were not yet measured again from the originals ([archive](archive.md)): {ADVICE}.",
            f"![The papers' differences beside those measured with degraded copies]({WAITING})",
            claims_table(claims.waiting),
        ]
    return "\n\n".join(parts)


def _readings(all_results: list) -> str:
    """Why the differences are as they are; nothing if no study says it."""
    items = why_list(all_results)
    return f"## Our reading of why\n\n{items}" if items else ""


def _costs(all_results: list) -> str:
    """What the runs cost; nothing without results."""
    if not all_results:
        return ""
    return (
        "## What the runs cost\n\nRuns share a machine; its minutes are those in which at least one of them ran.\n\n"
        f"{costs_table(all_results)}"
    )


def design(study) -> str:
    """The data, backbones, metrics and rows of a study."""
    rows = [
        [row.title, f"`{row.recipe}`" if row.recipe else "", study.rows[row.baseline].title if row.baseline else "",
         ", ".join(row.protocols), str(len(row.seeds))]
        for row in study.rows.values()
    ]  # fmt: skip
    data = ", ".join(data.title for data in study.data.values())
    backbones = (
        ", ".join(filter(None, (backbone.title for backbone in study.backbones.values()))) or "those of the recipes"
    )
    heading = f"**Data:** {data}. **Backbones:** {backbones}. **Metrics:** {', '.join(study.metrics)}."
    return f"{heading}\n\n{table(['row', 'recipe', 'baseline', 'protocols', 'seeds'], rows)}{_ranges(study)}"


def _ranges(study) -> str:
    """How a study searches, with the ranges of each row; nothing without a search."""
    if study.search is None:
        return ""
    of = "each data set" if study.search.data is None else study.data[study.search.data].title
    rows = [
        [row.title, key, str(each)]
        for row in study.rows.values()
        if row.printed is None
        for key, each in (row.ranges or {}).items()
    ]
    return (
        f"\n\n**Search:** {study.search.draws} draws of {study.search.epochs} epochs for each row, chosen on held-out "
        f"classes of {of}.\n\n{table(['row', 'number', 'range'], rows)}"
    )


def command(file: Path, name: str) -> str:
    """The commands that run a study and store its results."""
    study = f"studies/{file.name}"
    return (
        f"```bash\nproxymetric study {study} --data-root DATA --archive {name}.tar.gz\n"
        f"proxymetric study {study} --collect {name}.tar.gz --results results/{name}\n```"
    )


def measured(study, runs: dict[str, dict], draws: list) -> tuple[str, dict[str, bytes]]:
    """The tables and pictures of the stored results of a study."""
    from proxymetric.studies.tables import write_tables

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tables(study, runs, folder, draws)
        text = (folder / "tables.md").read_text(encoding="utf-8").split("\n", 1)[1].strip()
        text = re.sub(r"\]\(([\w.+-]+\.png)\)", rf"]({study.name}/\1)", text)
        pictures = {file.name: file.read_bytes() for file in folder.glob("*.png")}
    return text, pictures
