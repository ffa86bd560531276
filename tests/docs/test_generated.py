"""The generated parts are up to date, and the site has pages for all methods, studies and packages."""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")

import proxymetric as pm
from proxymetric.papers import CATALOGUE, CLOSED_FORMS
from proxymetric.studies import load_study
from proxymetric.studies.collected import read_runs, write_runs
from proxymetric.studies.results import stored_results
from proxymetric.studies.scores import Results

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from generator import (  # noqa: E402
    choices,
    claims,
    equations,
    growth,
    methods,
    parts,
    performance,
    photographs,
    reference,
    repeats,
    scores,
    site,
    study_pages,
)


@pytest.mark.parametrize("page", parts.pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_generated_parts_are_up_to_date(page):
    text = page.read_text(encoding="utf-8")
    assert parts.filled(text) == text, "run: python docs/generate.py"


def test_every_part_is_on_a_page_once():
    names = [match[2] for page in parts.pages() for match in parts.MARKS.finditer(page.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(parts.PARTS)


def test_a_part_without_results_says_so():
    part = parts.Part(lambda: "a table", (ROOT / "results" / "nowhere",))
    assert part.text() == "No results are stored in `results/nowhere`."
    assert parts.Part(lambda: "a table", (ROOT / "results",)).text() == "a table"


@pytest.mark.parametrize("name", pm.losses.__all__)
def test_the_equation_of_a_loss_is_drawn(name):
    doc = getattr(pm.losses, name).__doc__
    drawn = equations.drawn("\n".join(line.strip() for line in doc.splitlines()))
    assert "<pre>" not in drawn
    assert "<svg" in drawn or name == "ArcFace", "ArcFace refers to the equation of CosFace"


def test_an_equation_that_cannot_be_drawn_stays_code():
    assert equations.picture("1/B sum_i (x") == "<pre><code>1/B sum_i (x</code></pre>"
    assert equations.picture("a + b").count("<svg") == 1
    assert equations.picture("a\n+ b").count("<svg") == 2


def test_every_method_has_a_page_with_its_pieces():
    pages = methods.method_pages()
    assert set(pages) == {f"methods/{methods.slug(name)}.md" for name in CATALOGUE | CLOSED_FORMS} | {
        "methods/index.md"
    }
    isa = pages["methods/proxy-isa.md"]
    for kind, piece in (("Loss", "ProxyAnchor"), ("Weighting", "InformativeSamples"), ("Source", "LearnedProxies")):
        assert re.search(rf"## {kind}\n\n::: [\w.]+\.{piece}\n", isa)
    assert CATALOGUE["proxy-isa"].about.paper in isa
    assert ".AlternatingProjections\n" in pages["methods/ccp.md"]
    assert "No results of this method" in pages["methods/moco.md"]
    assert "::: proxymetric.closed_forms.whitening.Whitening\n" in pages["methods/whitening.md"]
    assert "pm.method(" not in pages["methods/whitening.md"], "it is no criterion for a loop"


def test_stored_runs_are_found_by_method(tmp_path):
    run = read_runs(ROOT / "results" / "cub-160")["vcpa-seed0"]
    write_runs(tmp_path / "new-study", {f"vcpa-cub-seed{seed}": run for seed in (0, 1)})
    runs = methods.stored_runs(tmp_path)
    assert {method: {group: len(each) for group, each in groups.items()} for method, groups in runs.items()} == {
        "vcpa": {"new-study/vcpa-cub": 2}
    }
    value = 100 * run["rows"]["trained encoder"]["R@1"]
    text = methods.results_text(runs["vcpa"])
    assert f"| `new-study/vcpa-cub` | {value:.1f} |" in text, "the scores come first"
    assert "| 42.0 | 2 |" in text


def test_a_study_has_a_page_with_and_without_results(tmp_path):
    pages, pictures = study_pages.study_pages(tmp_path)
    assert {f"studies/{file.stem}.md" for file in (ROOT / "studies").glob("*.toml")} < set(pages)
    assert not pictures
    assert "No results are stored in `results/cub-proxy-methods/` yet." in pages["studies/cub-proxy-methods.md"]
    run = read_runs(ROOT / "results" / "cub-160")["proxy-anchor-seed0"]
    names = [f"{row}-cub-resnet50-held-out-seed{seed}" for row in ("proxy-anchor", "vcpa") for seed in (0, 1)]
    write_runs(tmp_path / "cub-proxy-methods", dict.fromkeys(names, run))
    pages, pictures = study_pages.study_pages(tmp_path)
    text = pages["studies/cub-proxy-methods.md"]
    assert "No results are stored" not in text
    value = 100 * scores.score(run, "R@1")
    assert f"| VCPA | 2 | {value:.1f} ± 0.0 |" in text
    index, archive = pages["studies/index.md"], pages["studies/archive.md"]
    assert "4 of 70" in archive
    line = "| CUB-200-2011 | R@1 | `held-out` | +0.00 ± 0.00 (2) |  | +1.37 | open | no |"
    assert f"| [VCPA](cub-proxy-methods.md) {line}" in index, "the same scores at equal seeds"
    assert "| NVIDIA H200 | 4 |" in archive
    assert pictures.pop("studies/claims-degraded.png").startswith(b"\x89PNG")
    assert "](claims-degraded.png)" in index
    assert set(pictures) == {
        f"studies/cub-proxy-methods/{kind}-cub-resnet50-held-out.png" for kind in ("curves", "differences")
    }
    for picture in pictures:
        assert f"]({picture.removeprefix('studies/')})" in text


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_was_repeated_stands_beside_the_older_one(tmp_path):
    """The older result lacks keys that came later; another seed and other settings are other runs."""
    name, of = "proxy-anchor-cub-resnet50-papers-seed0", ("cub-proxy-methods", "proxy-anchor-repeated")
    runs = {study: read_runs(ROOT / "results" / study)[name] for study in of}
    for study, run in runs.items():
        write_runs(tmp_path / study, {name: run})
    pages, _ = study_pages.study_pages(tmp_path)
    section = pages["studies/archive.md"].split("## The same run with newer code")[1]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| [")]
    assert [row[0] for row in rows] == [f"| [{s}]({s}.md)" for s in ("cub-proxy-methods", "proxy-anchor-repeated")]
    curves = [[epoch["MAP@R"] for epoch in run["curve"]] for run in runs.values()]
    largest = max(abs(one - other) for one, other in zip(*curves, strict=True))
    assert rows[0][-1].strip(" |") == ""
    assert rows[1][-1].strip(" |") == f"{100 * largest:.1f}"
    repeated = runs["proxy-anchor-repeated"]
    for key, value in (("seed", 1), ("protocol", "held-out")):
        changed = repeated | {"recipe": repeated["recipe"] | {key: value}}
        write_runs(tmp_path / "proxy-anchor-repeated", {name: changed})
        studies = [load_study(ROOT / "studies" / f"{study}.toml") for study in of]
        stored = [Results(study, stored_results(study, tmp_path / study.name)) for study in studies]
        assert repeats.repeats_section(stored) == "", key


PHOTOGRAPHS = {"identity": "0" * 64, "images": 11788, "shorter_side": 357, "bytes_per_image": 97624}


def runs_of(row: str, **data: object) -> dict[str, dict]:
    """Results of VCPA and Proxy-Anchor in the names of a study, with other photographs if `data` says so."""
    run = read_runs(ROOT / "results" / "cub-160")["proxy-anchor-seed0"]
    run = run | {"data": run["data"] | data}
    return {f"{each}-cub-resnet50-{row}-seed{seed}": run for each in ("proxy-anchor", "vcpa") for seed in (0, 1)}


def test_studies_from_degraded_copies_stand_in_the_archive(tmp_path):
    write_runs(tmp_path / "cub-proxy-methods", runs_of("papers"))
    write_runs(tmp_path / "cub-batch-norm", {"none-fixed-cub-resnet50-held-out-seed0": runs_of("papers", **PHOTOGRAPHS)[
        "vcpa-cub-resnet50-papers-seed0"
    ]})  # fmt: skip
    pages, _ = study_pages.study_pages(tmp_path)
    index, archive = pages["studies/index.md"], pages["studies/archive.md"]
    assert "](cub-proxy-methods.md) | 7 | 4 of 70 |" in archive
    assert "](cub-proxy-methods.md) | 7 |" not in index
    assert "](cub-batch-norm.md) | 3 | 1 of 15 |" in index
    assert "](cub-batch-norm.md)" not in archive
    assert "](cub-papers.md) | 8 | 0 of 28 |" in index, "a study without results is not old"
    assert "- CUB-200-2011: 11,788 images, those of 0.1.0, compressed, identity 362b12c7e448." in archive
    assert "\n\n**[Archive](archive.md):** from degraded copies" in pages["studies/cub-proxy-methods.md"]
    assert "](archive.md)" not in pages["studies/cub-batch-norm.md"]
    places = list(pages)
    first = places.index(study_pages.ARCHIVE)
    assert places.index("studies/cub-batch-norm.md") < first < places.index("studies/cub-proxy-methods.md")
    # The navigation has a section of its own for what stands behind the archive.
    *current, section = site._with_archive(places)
    assert current == places[:first]
    assert list(section.values()) == [places[first:]]
    assert site._with_archive(["methods/vcpa.md"]) == ["methods/vcpa.md"]


@pytest.mark.usefixtures("no_pictures")
def test_a_study_with_one_data_set_from_the_originals_is_not_old(tmp_path):
    old, new = (next(iter(runs_of("papers", **data).values())) for data in ({}, PHOTOGRAPHS))
    write_runs(tmp_path / "auto", {"vcpa-cub-resnet50-held-out-seed0": new, "vcpa-cars-resnet50-held-out-seed0": old})
    pages, _ = study_pages.study_pages(tmp_path)
    assert "](auto.md) | 7 | 2 of 63 |" in pages["studies/index.md"]
    advice = "from degraded copies of the photographs; compare rows with each other, not with new results"
    assert f"**Cars196, as in the [archive](archive.md):** {advice}." in pages["studies/auto.md"]


@pytest.mark.usefixtures("no_pictures")
def test_a_claim_leaves_the_table_only_when_its_successor_is_there(tmp_path):
    """Claims that were measured with degraded copies stay, in a table of their own, until they are measured again."""
    write_runs(tmp_path / "cub-proxy-methods", runs_of("papers") | runs_of("held-out"))
    old = "| [VCPA](cub-proxy-methods.md) | CUB-200-2011 | R@1 | `{}` |"
    both = [old.format(protocol) for protocol in ("papers", "held-out")]
    heading = "### From degraded copies of the photographs"
    pages, pictures = study_pages.study_pages(tmp_path)
    index, archive = pages["studies/index.md"], pages["studies/archive.md"]
    assert all(line in index.split(heading)[1] for line in both)
    assert not any(line in archive for line in both)
    assert "studies/claims.png" not in pictures
    write_runs(tmp_path / "cub-papers", runs_of("papers", **PHOTOGRAPHS))
    pages, pictures = study_pages.study_pages(tmp_path)
    index, archive = pages["studies/index.md"], pages["studies/archive.md"]
    assert "| [VCPA](cub-papers.md) | CUB-200-2011 | R@1 | `papers` |" in index
    assert heading not in index
    assert not any(line in index for line in both)
    assert all(line in archive.split("## Claims that were measured again")[1] for line in both)
    assert {"studies/claims.png", "studies/claims-degraded.png"} & set(pictures) == {"studies/claims.png"}


@pytest.mark.usefixtures("no_pictures")
def test_a_study_that_was_run_again_keeps_its_older_claims_apart(tmp_path):
    """One file has results from both: those of the originals are current, the others are not lost."""
    new = runs_of("papers", **PHOTOGRAPHS)
    new = {name: run | {"finished": "2100-01-01T00:00:00Z"} for name, run in new.items()}
    write_runs(tmp_path / "cub-proxy-methods", runs_of("held-out") | new)
    pages, _ = study_pages.study_pages(tmp_path)
    index, archive = pages["studies/index.md"], pages["studies/archive.md"]
    assert "](cub-proxy-methods.md) | 7 | 8 of 70 |" in index
    line = "| [VCPA](cub-proxy-methods.md) | CUB-200-2011 | R@1 | `{}` |"
    assert line.format("papers") in index
    assert line.format("held-out") not in index
    assert line.format("held-out") in archive


def test_results_of_a_method_are_divided_by_their_photographs():
    old = list(runs_of("papers").values())[:2]
    new = list(runs_of("papers", **PHOTOGRAPHS).values())[:1]
    text = methods.results_text({"a/vcpa": old + new, "b/vcpa": old})
    current, older = text.split("From degraded copies of the photographs")
    assert re.findall(r"^\| `(\S+)` .* (\d) \| held-out", current, re.MULTILINE) == [("a/vcpa", "1")]
    assert re.findall(r"^\| `(\S+)` .* (\d) \| held-out", older, re.MULTILINE) == [("a/vcpa", "2"), ("b/vcpa", "2")]
    assert "history" not in text
    assert "history" in methods.results_text({"cub-160/vcpa": old})


def test_the_catalogue_says_what_was_measured_with_the_originals():
    old, new = ([next(iter(runs_of("papers", **data).values()))] for data in ({}, PHOTOGRAPHS))
    of_all = 'Results "here" are from degraded copies of the photographs of CUB and Cars'
    assert photographs.remark({"vcpa": {"a": old}}) == f"{of_all}."
    assert photographs.short_remark({"vcpa": {"a": old}}).startswith("All results")
    assert photographs.short_remark({"vcpa": {"a": old + new}}).startswith("Most results")
    of_drawings = [new[0] | {"data": PHOTOGRAPHS | {"name": "glyphs"}}]
    found = {"vcpa": {"a": old, "b": new}, "mpa": {"a": new}, "triplet": {"a": old}, "circle": {"a": of_drawings}}
    assert photographs.remark(found) == f"{of_all}, except those of `mpa`, `vcpa` on CUB."


def test_minutes_in_which_runs_share_a_machine_count_once():
    start = datetime(2026, 1, 1)
    minutes = [(0, 10), (2, 5), (8, 12), (20, 21)]
    spans = [tuple(start + timedelta(minutes=end) for end in span) for span in minutes]
    assert claims._covered(spans) == timedelta(minutes=13)


def test_every_package_has_a_page():
    pages = reference.reference_pages()
    for name in ("losses", "core", "criterion", "runs", "proxymetric", "command-line"):
        assert f"reference/{name}.md" in pages
    for loss in pm.losses.__all__:
        assert f"::: proxymetric.losses.{loss}\n" in pages["reference/losses.md"]
    assert "## proxymetric index add-class" in pages["reference/command-line.md"]


def test_a_cell_of_the_peer_shows_time_and_memory():
    def cell(time: float, memory: float | None) -> dict:
        return {"of the peer's": {"time": {"median": time}, "memory": memory}, "peer": {"ms": {"median": 3.25}}}

    cells = {
        "proxy-anchor": {"B 128, C 100": cell(0.84, 0.5), "B 512, C 1000000": {"skipped": "does not fit: too large"}},
        "multi-similarity, all pairs": {"B 128": cell(1.0, None)},
    }
    with_proxies, pairs = performance._peer_tables(cells, "of the peer's", "peer")
    assert with_proxies.splitlines()[0] == "| loss | B 128, C 100 | B 512, C 1,000,000 |"
    assert with_proxies.splitlines()[2] == "| `proxy-anchor` | 0.84 (3.2 ms), 0.50 | does not fit |"
    assert pairs.splitlines()[2] == "| `multi-similarity`, all pairs | 1.00 (3.2 ms) |"
    assert performance._peer_tables(cells, "of the compiled formula's", "compiled") == []


def test_growth_is_drawn_with_its_exponents(tmp_path, monkeypatch):
    points = [
        {"size": size, "ms": {"median": size / 100}, "extra_mb": None if size < 2000 else 0.01 * size}
        for size in (1000, 2000, 4000, 8000)
    ]
    curve = {
        "what": "`triplet`",
        "over": "batch",
        "operations": 2,
        "points": points,
        "exponent": {"time": 1.0, "memory": None},
    }
    facts = {"gpu": None, "processor": "a processor", "threads": 2}
    study = {"curves": {"triplet": curve}, "machine": facts, "batch": 128, "classes": 11318, "dim": 512}
    (tmp_path / "growth-cpu.json").write_text(json.dumps(study))
    monkeypatch.setattr(growth, "BENCHMARKS", tmp_path)
    assert "| `triplet` | batch | 1,000 to 8,000 | 2 | 1.00 | - | 80.0 ms, 80 MB |" in growth.growth_table("cpu")
    assert "a processor, 2 threads. Fixed sizes: batch 128, 11,318 classes" in growth.growth_table("cpu")
    pictures = growth.growth_pictures()
    assert list(pictures) == ["images/growth-cpu.svg"]
    assert "triplet, exponent 1.00" in pictures["images/growth-cpu.svg"].decode()
    assert pictures == growth.growth_pictures(), "the picture does not depend on the time"


def test_the_choices_of_auto_are_those_of_its_stored_results():
    runs = list(read_runs(ROOT / "results" / "glyphs-frozen").values())
    scores = {(run["recipe"]["seed"], run["recipe"]["method"]): run["rows"]["trained encoder"]["MAP@R"] for run in runs}
    chosen = {run["recipe"]["seed"]: run["auto"]["method"] for run in runs if "auto" in run}
    tried = {trial["method"] for run in runs for trial in run.get("auto", {}).get("trials", ())}
    assert len(chosen) == 3
    assert len(tried) == 6
    regrets, gains = [], []
    for seed, method in chosen.items():
        regrets.append(100 * (max(scores[seed, name] for name in tried) - scores[seed, method]))
        gains.append(100 * (scores[seed, method] - scores[seed, "proxy-anchor"]))
    study = load_study(ROOT / "studies" / "glyphs-frozen.toml")
    section = choices.choices_section([Results(study, stored_results(study, ROOT / "results" / "glyphs-frozen"))])
    line = next(
        line for line in section.splitlines() if line.startswith("| [glyphs-frozen](glyphs-frozen.md) | Glyphs, ")
    )
    assert line.split(" | ")[3:6] == [f"{sum(regrets) / 3:.2f}", f"{sum(gains) / 3:+.2f}", f"{min(gains):+.2f}"]
