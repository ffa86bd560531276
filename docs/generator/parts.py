"""Fills the generated parts of hand-written pages: the text between `<!-- generated: NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from generator.auto_choice import auto_choice_table
from generator.catalogue import catalogue_table
from generator.divided_proxies import divided_proxies_table
from generator.growth import growth_table
from generator.history import compare_table, first_table, mlrc_table
from generator.inspection import inspection_table
from generator.methods import stored_runs
from generator.moving import costs, scripts
from generator.none_of_these import choice_table, none_of_these_table
from generator.performance import (
    losses_table,
    metrics_table,
    peer_cpu_table,
    peer_table,
    rates_table,
    start_up_table,
    step_table,
)
from generator.photographs import short_remark
from generator.scores import BENCHMARKS, RESULTS, ROOT, table
from generator.search import engines_table, frames_table, load_table, ratios_table
from generator.simple_things import (
    closed_forms_table,
    few_classes_table,
    frozen_defaults_table,
    screening_table,
    simple_things_table,
    simple_things_verdict,
)
from generator.small_vectors import matryoshka_table, small_vectors_table
from generator.training import criterion_table, embedding_table, files_table, loop_table
from generator.tunings import (
    alike_table,
    kernels_table,
    parameters_table,
    released_table,
    tuned_table,
    tuning_table,
)


class Part(NamedTuple):
    """A generated part of a page."""

    make: Callable[[], str]
    sources: tuple[Path, ...] = ()
    """files or folders of results that the part needs"""

    def text(self) -> str:
        """The text of the part, or a note if its results are missing."""
        missing = [path for path in self.sources if not path.exists()]
        if missing:
            return f"No results are stored in `{missing[0].relative_to(ROOT).as_posix()}`."
        return self.make()


def methods_table() -> str:
    """The catalogue: method, paper, and when to choose it, and which photographs the advice rests on."""
    from proxymetric.papers import CATALOGUE

    rows = [[f"`{name}`", row.about.paper.split(",")[0], row.about.choose] for name, row in CATALOGUE.items()]
    return f"{short_remark(stored_runs())}\n\n{table(['method', 'paper', 'choose it'], rows)}"


def benchmark(*names: str) -> tuple[Path, ...]:
    """Files of recorded benchmarks."""
    return tuple(BENCHMARKS / f"{name}.json" for name in names)


PARTS = {
    "methods": Part(methods_table),
    "parameters": Part(parameters_table),
    "first": Part(first_table, (RESULTS,)),
    "compare": Part(compare_table, (RESULTS / "cub-160",)),
    "mlrc": Part(mlrc_table, (RESULTS / "mlrc",)),
    "tuned": Part(tuned_table, (RESULTS / "vit-s-128",)),
    "alike": Part(alike_table, (RESULTS / "vit-s-128",)),
    "released": Part(released_table, (RESULTS / "vit-s-128",)),
    "tuning": Part(tuning_table, benchmark("tuning-cuda")),
    "tuning-kernels": Part(kernels_table, benchmark("tuning-kernels-cuda")),
    "loop": Part(loop_table, benchmark("train-step-cuda", "train-step-cpu")),
    "criterion": Part(criterion_table, benchmark("train-step-cuda")),
    "files": Part(files_table, benchmark("files-cpu")),
    "embedding": Part(embedding_table, benchmark("files-cpu")),
    "step": Part(step_table, benchmark("step-cuda", "step-cpu")),
    "metrics": Part(metrics_table, benchmark("metrics-cpu", "metrics-cuda")),
    "losses": Part(losses_table, benchmark("losses-cpu")),
    "rates": Part(rates_table, benchmark("losses-cuda")),
    "peer": Part(peer_table, benchmark("peer-cuda")),
    "peer-cpu": Part(peer_cpu_table, benchmark("losses-cpu", "losses-arm")),
    "growth-cpu": Part(partial(growth_table, "cpu"), benchmark("growth-cpu")),
    "growth-cuda": Part(partial(growth_table, "cuda"), benchmark("growth-cuda")),
    "inspection": Part(inspection_table, benchmark("inspection-cpu")),
    "moving-pml-scripts": Part(partial(scripts, "pml")),
    "moving-pml-costs": Part(partial(costs, "pml"), benchmark("moving-in-cpu")),
    "moving-oml-scripts": Part(partial(scripts, "oml")),
    "moving-oml-costs": Part(partial(costs, "oml"), benchmark("moving-in-cpu")),
    "start-up": Part(start_up_table, benchmark("start-up")),
    "small-vectors": Part(small_vectors_table, benchmark("small-vectors-cub-test-half")),
    "matryoshka": Part(matryoshka_table, (RESULTS / "cub-matryoshka",)),
    "search-small": Part(partial(engines_table, "small"), benchmark("search-cpu")),
    "search-large": Part(partial(engines_table, "large"), benchmark("search-cpu")),
    "search-ratios": Part(ratios_table, benchmark("search-cpu")),
    "catalogue": Part(catalogue_table, benchmark("catalogue-100000")),
    "service-load": Part(load_table, benchmark("service-cpu")),
    "map-frames": Part(frames_table, benchmark("map-frames-cpu")),
    "divided-proxies": Part(divided_proxies_table, benchmark("divided-proxies")),
    "simple-things": Part(simple_things_table, benchmark("simple-things")),
    "simple-things-verdict": Part(simple_things_verdict, benchmark("simple-things")),
    "frozen-defaults": Part(frozen_defaults_table, benchmark("frozen-defaults")),
    "frozen-defaults-folds": Part(closed_forms_table, benchmark("frozen-defaults-folds")),
    "frozen-defaults-few-classes": Part(few_classes_table, benchmark("frozen-defaults-folds")),
    "frozen-defaults-screening": Part(screening_table, benchmark("frozen-defaults-screening")),
    "none-of-these": Part(none_of_these_table, benchmark("none-of-these")),
    "auto-choice": Part(auto_choice_table, benchmark("auto-choice-cub", "auto-choice-glyphs")),
    "none-of-these-choice": Part(choice_table, benchmark("none-of-these")),
}
MARKS = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """The README and the pages of docs/ that have generated parts."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [file for file in files if MARKS.search(file.read_text(encoding="utf-8"))]


def filled(text: str) -> str:
    """The text of a page with its generated parts updated."""
    return MARKS.sub(lambda match: f"{match[1]}{PARTS[match[2]].text()}\n{match[3]}", text)
