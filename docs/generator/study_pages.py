"""A page for each study of studies/*.toml: its design, and tables and plots if results are stored."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from generator.choices import choices_section
from generator.claims import claimed_differences, claims_picture, claims_table, costs_table, why_list
from generator.repeats import repeats_section
from generator.scores import RESULTS, ROOT, table


def study_pages(results: Path = RESULTS) -> tuple[dict[str, str], dict[str, bytes]]:
    """The pages of all studies and their index (path in the site -> text), and their pictures (path -> PNG)."""
    from proxymetric.studies import load_study
    from proxymetric.studies.results import stored_draws, stored_results
    from proxymetric.studies.scores import Results
    from proxymetric.studies.search import of_study

    pages: dict[str, str] = {}
    pictures: dict[str, bytes] = {}
    rows, all_results = [], []
    for file in sorted((ROOT / "studies").glob("*.toml")):
        study = load_study(file)
        folder = results / study.name
        try:
            runs = stored_results(study, folder)
        except ValueError:
            runs = {}
        draws = of_study(study, stored_draws(study, folder))
        if runs:
            all_results.append(Results(study, runs))
        text, images = f"No results are stored in `results/{study.name}/` yet.", {}
        if runs or draws:
            text, images = measured(study, runs, draws)
        comment = "\n".join(re.findall(r"^# ?(.*)$", file.read_text(encoding="utf-8").split("\n\n")[0], re.MULTILINE))
        parts = [f"# {study.title}", comment, design(study), text, "## Run it", command(file, study.name)]
        pages[f"studies/{study.name}.md"] = "\n\n".join(part for part in parts if part) + "\n"
        pictures |= {f"studies/{study.name}/{name}": content for name, content in images.items()}
        rows.append([f"[{study.title}]({study.name}.md)", str(len(study.rows)), f"{len(runs)} of {len(study.tasks())}"])
    index = (
        "# Studies\n\nA study compares methods over data sets, backbones, protocols and seeds; "
        "[Run a study](../how-to/studies.md) explains how. Tables and plots are generated from the files in `results/` "
        f"when this site is built.\n\n{_summary(all_results)}## All studies\n\n"
        f"{table(['study', 'rows', 'runs stored'], rows)}\n\n{repeats_section(all_results)}"
        "[History](history.md) has the results of 0.1.0, whose settings differ from the papers'.\n"
    )
    if differences := claimed_differences(all_results):
        pictures["studies/claims.png"] = claims_picture(differences)
    return pages | {"studies/index.md": index}, pictures


def _summary(all_results: list) -> str:
    """The claims of the papers beside what was measured, and what the runs cost; nothing without results."""
    if not all_results:
        return ""
    from proxymetric.studies.tables import CLAIM_NOTE

    differences = claimed_differences(all_results)
    claims = (
        "## What the papers claim\n\nDifferences to the baseline in points: the paper's, and those measured here at "
        "equal seeds with 95 % Student intervals. `papers` chooses the epoch on the test half, as the papers do; "
        "`held-out` chooses it on held-out training classes.\n\n![The papers' differences beside those measured here]"
        f"(claims.png)\n\n{claims_table(differences)}\n\n{CLAIM_NOTE}\n\n### Our reading of why\n\n"
        f"{why_list(all_results)}\n\n"
    )
    return (
        f"{claims if differences else ''}{choices_section(all_results)}"
        "## What the runs cost\n\nRuns share a machine; its minutes are those in which at least one of them ran.\n\n"
        f"{costs_table(all_results)}\n\n"
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
