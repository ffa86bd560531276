"""The search of a study: its ranges and draws, what is refused, and a whole search with a kill in the middle."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from proxymetric.runs.result import Result
from proxymetric.studies import Study, load_study, narrowed, parse
from proxymetric.studies.collected import read_runs
from proxymetric.studies.drawing import draw_search
from proxymetric.studies.folder import RunStatus, StudyFolder, flat_recipe, is_over
from proxymetric.studies.ranges import Draw, Range, Search, drawn, points
from proxymetric.studies.scores import Results, describe
from proxymetric.studies.search import chosen, read_draws, resolved
from proxymetric.studies.tables import write_tables
from proxymetric.system.files import read_json
from studies.test_run import Running, study
from terminal import proxymetric, refused

TAU = {"loss.tau": {"log": [1e-5, 1e-1]}}
MARGIN = {"loss.margin": {"linear": [0, 0.5]}}


def content(table: object = None, **of_vcpa: object) -> dict:
    """The tables of a study of two searched rows, or one whose second row has other keys."""
    rows = [
        {"name": "anchor", "settings": {"method": "proxy-anchor"}, "search": MARGIN},
        {"name": "vcpa", "settings": {"method": "vcpa"}, "baseline": "anchor", "search": TAU, **of_vcpa},
    ]
    return {
        "name": "s", "seeds": [0, 1], "data": {"g": {"path": "glyphs:60"}, "d": {"path": "digits"}}, "rows": rows,
        "search": table or {"draws": 4, "epochs": 2},
    }  # fmt: skip


def done(of: Study, scores: dict[str, float]) -> list[Draw]:
    """The draws of a study with known scores, all of the same epoch."""
    return [
        Draw(task.name, task.cell.row, task.cell.data, task.cell.backbone, task.draw, task.values,
             scores.get(task.name, 0.1), "MAP@R", epoch=1)
        for task in of.draws()
    ]  # fmt: skip


def ranged(**kind: object) -> dict:
    return content({"draws": 4, "epochs": 2}) | {
        "rows": [{"name": "a", "search": {"loss.tau": kind}}],
    }


REFUSED = {
    "one point": (ranged(linear=[1, 1]), "rows.a.search.loss.tau: got linear = [1, 1], a range of one point"),
    "falling": (ranged(linear=[2, 1]), "got linear = [2, 1], expected the lower number first: [1, 2]"),
    "log through 0": (ranged(log=[0, 1]), "got log = [0, 1], expected two numbers above 0; `linear` may start at 0"),
    "log below 0": (ranged(log=[-1, 1]), "got log = [-1, 1], expected two numbers above 0"),
    "endless": (ranged(linear=[0, float("inf")]), "expected two numbers, the lower one first"),
    "three numbers": (ranged(linear=[0, 1, 2]), "got linear = [0, 1, 2], expected two numbers, the lower one first"),
    "text": (ranged(linear=["a", "b"]), "expected two numbers, the lower one first"),
    "parts": (ranged(integer=[1, 2.5]), "got integer = [1, 2.5], expected two whole numbers, the lower one first"),
    "one entry": (ranged(choice=["avg"]), "got choice = ['avg'], expected two different entries or more"),
    "an entry twice": (ranged(choice=[1, 1]), "got choice = [1, 1], expected two different entries or more"),
    "entries of a kind": (ranged(choice=[[1], [2]]), "expected names, numbers, true or false"),
    "no list": (ranged(log=0.1), "got log = 0.1, expected a list"),
    "a misspelt kind": (ranged(lin=[0, 1]), "got 'lin', expected one of linear, log, integer, choice", "'linear'?"),
    "two kinds": (ranged(log=[1, 2], linear=[1, 2]), "expected a table with one of linear, log, integer, choice"),
    "no kind": (content({"draws": 4, "epochs": 2, "ranges": {"loss.tau": 3}}),
                "search.ranges.loss.tau: got 3, expected a table with one of"),
    "a key": (content({"draw": 4, "epochs": 2}), "search.draw: got an unknown key", "did you mean 'draws'?"),
    "no number of draws": (content({"epochs": 2}), "search.draws: got None, expected a whole number of at least"),
    "one draw": (content({"draws": 1, "epochs": 2}), "search.draws: got 1, expected a whole number of at least 2"),
    "no epochs": (content({"draws": 4}), "search.epochs: got None"),
    "a seed": (content({"draws": 4, "epochs": 2, "seed": -1}), "search.seed: got -1"),
    "data": (content({"draws": 4, "epochs": 2, "data": "gg"}), "search.data: got 'gg'", "did you mean 'g'?"),
    "a row's own draws": (content(search=TAU | {"draws": 8}),
                          "rows.vcpa.search.draws: got 8, expected it in [search]: it is the same for all rows"),
    "epochs as a number": (content(search={"train.epochs": {"integer": [1, 2]}}),
                           "rows.vcpa.search.train.epochs: got a range, expected it in `epochs` of [search]"),
    "the seed as a number": (content(search={"seed": {"integer": [1, 2]}}), "expected it in `seeds` of the study"),
    "what is not shared": (content(search={"train.lr": False}),
                           "rows.vcpa.search.train.lr: got false, which leaves a range of [search.ranges] out"),
    "nothing": (content(search={}), "rows.vcpa.search: got no range"),
    "a table": (content(search=3), "rows.vcpa.search: got 3, expected ranges such as"),
}  # fmt: skip


def test_rows_of_unequal_effort_are_refused():
    """A row that is searched alone, without [search], or with nothing to search."""
    alone = content()
    del alone["rows"][0]["search"]
    without = content()
    del without["search"]
    nothing = alone | {"rows": [{"name": "a"}]}
    taken = content()
    taken["rows"].append({"name": "vcpa-searched"})
    for tables, said in (
        (alone, "rows.vcpa.search: got a search of this row alone, expected one of its baseline 'anchor', too"),
        (without, "rows.anchor.search: got ranges, expected a table [search] with draws and epochs in the study, too"),
        (nothing, "search: got no row to search"),
        (taken, "rows.vcpa.search: got a row named 'vcpa-searched', expected another name"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            parse(tables)


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_search_is_refused_with_a_sentence(case):
    tables, *said = REFUSED[case]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - what it says is looked at
        parse(tables)
    for part in said:
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "kind", "said"),
    [
        ("loss.tua", "{ log = [1e-5, 1] }", ("rows.vcpa.search: loss.tua: got an unknown key", "did you mean 'tau'?")),
        ("los.tau", "{ log = [1e-5, 1] }", ("rows.vcpa: recipe: got the key 'los'",)),
        ("loss.newton_steps", "{ linear = [1, 9] }", ("rows.vcpa.search: loss.newton_steps: got", "a whole number")),
        ("encoder.pooling", '{ choice = ["avg", "gme"] }', ("rows.vcpa.search: encoder.pooling: got 'gme'", "'gem'?")),
    ],
)
def test_a_number_that_the_method_does_not_have_is_named(key, kind, said, tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(
        '[search]\ndraws = 8\nepochs = 1\n[data.g]\npath = "glyphs:60"\n[[rows]]\nname = "vcpa"\n'
        f'settings = {{ method = "vcpa" }}\nsearch = {{ "{key}" = {kind} }}'
    )
    refused(proxymetric("study", file, "--dry-run", "--out", tmp_path / "out"), *said)


def test_the_example_of_the_page_is_a_study(tmp_path):
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "how-to" / "studies.md").read_text()
    (example,) = [block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "[search]" in block]
    (tmp_path / "mine.toml").write_text(example)
    answer = proxymetric("study", tmp_path / "mine.toml", "--dry-run", "--out", tmp_path / "out")
    assert answer.code == 0, answer
    assert answer.out.count("-search-draw") == 2 * 16
    assert answer.out.count("for the best draw of") == 2 * 3


def test_a_missing_folder_of_collected_draws_is_refused(tmp_path):
    (tmp_path / "mine.toml").write_text(TEXT)
    words = ["study", tmp_path / "mine.toml", "--dry-run", "--results", tmp_path / "nowhere"]
    refused(proxymetric(*words), "--results: got", "nowhere', expected a folder of collected results")


def test_held_out_classes_are_needed(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text(
        '[search]\ndraws = 2\nepochs = 1\n[data.g]\npath = "glyphs:60"\nsettings = { "data.validation" = 0 }\n'
        '[[rows]]\nname = "a"\nsearch = { "loss.margin" = { linear = [0, 1] } }'
    )
    answer = proxymetric("study", file, "--dry-run")
    refused(answer, "rows.a.search: got data.validation = 0, expected held-out classes")


def test_draws_are_the_same_on_any_machine():
    """Golden values: a change of them would end every search that is under way."""
    ranges = {"a": Range("log", (1e-5, 1e-1)), "b": Range("integer", (1, 6)), "c": Range("choice", ("x", "y", "z"))}
    assert drawn("study", "row", ranges, Search(4, 1, 0, None)) == GOLDEN
    assert drawn("study", "row", ranges, Search(8, 1, 0, None))[:4] == GOLDEN, "more draws begin with the same ones"
    for other in (("other", "row", 0), ("study", "other", 0), ("study", "row", 1)):
        assert drawn(*other[:2], ranges, Search(4, 1, other[2], None)) != GOLDEN


GOLDEN = [
    {"a": 0.0003491, "b": 4, "c": "y"},
    {"a": 0.007295, "b": 1, "c": "z"},
    {"a": 0.09228, "b": 6, "c": "x"},
    {"a": 4.255e-05, "b": 3, "c": "y"},
]


@pytest.mark.parametrize("dimensions", [1, 2, 7])
def test_points_are_spread_evenly(dimensions):
    found = points(dimensions, 16, "a name")
    for column in found.T:
        assert sorted((16 * column).astype(int)) == list(range(16))
    assert found.min() > 0
    assert found.max() < 1
    assert len({tuple(line) for line in found}) == 16


def test_values_stay_in_their_range():
    assert {Range("integer", (3, 5)).value(place / 100) for place in range(100)} == {3, 4, 5}
    assert {Range("choice", ("a", "b")).value(place / 100) for place in range(100)} == {"a", "b"}
    low = 0.123449  # rounded to four digits, it is below itself
    assert Range("linear", (low, 0.2)).value(0.0) == low
    assert Range("log", (0.01, 1.0)).value(0.5) == 0.1


def test_a_row_has_its_own_ranges_after_the_shared_ones():
    shared = {"draws": 4, "epochs": 2, "ranges": {"train.lr": {"log": [1e-4, 1]}, "train.proxy_lr": {"log": [1e-4, 1]}}}
    own = {"train.proxy_lr": False, "train": {"lr": {"log": [1e-3, 1e-2]}}, "loss.tau": {"log": [1, 2]}}
    rows = parse(content(shared, search=own)).rows
    assert {key: str(each) for key, each in rows["vcpa"].ranges.items()} == {
        "train.lr": "0.001 to 0.01 (log)", "loss.tau": "1 to 2 (log)",
    }  # fmt: skip
    assert list(rows["anchor"].ranges) == ["train.lr", "train.proxy_lr", "loss.margin"]


def test_all_rows_have_the_same_number_of_short_runs_on_held_out_classes():
    made = parse(content() | {"protocols": ["papers"], "settings": {"train.epochs": 9, "train.refit": True}})
    draws = made.draws()
    assert [task.name for task in draws if task.cell.data == "g"] == [
        f"{row}-g-search-draw0{number}" for row in ("anchor", "vcpa") for number in range(4)
    ]
    for task in draws:
        recipe = flat_recipe(task, None)
        assert (recipe["protocol"], recipe["train.epochs"], recipe["seed"]) == ("held-out", 2, 0)
        assert not recipe["train.refit"]
        assert {key: recipe[key] for key in task.values} == task.values
    assert list(made.rows) == ["anchor", "anchor-searched", "vcpa", "vcpa-searched"]
    assert made.rows["vcpa-searched"].baseline == "anchor-searched"


def test_runs_wait_for_the_best_draw_of_their_own_search():
    made = parse(content({"draws": 4, "epochs": 2, "data": "g"}))
    assert {task.cell.data for task in made.draws()} == {"g"}
    waiting = {task.name for task in made.tasks() if task.waits}
    assert len(waiting) == 8
    assert all("-searched-" in name for name in waiting)
    best = resolved(made, done(made, {"vcpa-g-search-draw02": 0.5, "vcpa-g-search-draw03": 0.5}))
    assert best.chosen["vcpa", "g", ""].draw == 2, "the first of equal ones"
    assert not any(task.waits for task in best.tasks())
    values = {task.name: task.values for task in best.draws()}
    for task in best.tasks():
        if task.cell.row == "vcpa-searched":  # on both data sets
            assert task.settings["loss.tau"] == values["vcpa-g-search-draw02"]["loss.tau"]
        if task.cell.row == "vcpa":
            assert "loss.tau" not in task.settings


def test_a_search_without_all_draws_has_no_best_one():
    made = parse(content())
    draws = done(made, {})
    assert ("vcpa", "g", "") not in chosen(made, [draw for draw in draws if draw.run != "vcpa-g-search-draw01"])
    failed = [replace(draw, score=None) for draw in draws]
    assert chosen(made, failed) == {}
    mixed = [draw if draw.draw else replace(draw, score=None) for draw in draws]
    assert chosen(made, mixed)["vcpa", "g", ""].draw == 1


def test_a_killed_draw_is_done_again_and_one_that_fails_is_not():
    made = parse(content())
    draw, run = made.draws()[0], made.tasks()[0]
    assert is_over(draw, RunStatus("failed", "train: got no step with a finite loss"))
    assert not is_over(draw, RunStatus("failed", "the worker was ended by SIGKILL"))
    assert not is_over(run, RunStatus("failed", "train: got no step with a finite loss"))


def test_narrowing_keeps_the_draws_that_are_needed():
    made = parse(content({"draws": 4, "epochs": 2, "data": "g"}))
    names = [task.name for task in narrowed(made, ["vcpa-searched"], [1], ["d"])]
    assert names == [*(f"vcpa-g-search-draw0{number}" for number in range(4)), "vcpa-searched-d-held-out-seed1"]
    assert [task.name for task in narrowed(made, ["vcpa"], [1], ["d"])] == ["vcpa-d-held-out-seed1"]


def test_the_estimate_of_a_draw_is_in_proportion_to_its_epochs(tmp_path):
    made = parse(content(minutes=3) | {"settings": {"train.epochs": 6}})
    book = StudyFolder(made, tmp_path / "none")
    found = book.estimates([*made.draws(), *made.tasks()], book.statuses())
    assert found["vcpa-g-held-out-seed0"] == found["vcpa-searched-g-held-out-seed0"] == 180
    assert found["vcpa-g-search-draw00"] == 60


# A whole search, with real workers


TEXT = """
title = "A search"
seeds = [0]
metrics = ["R@1", "MAP@R"]
embeddings = []
[settings]
"train.epochs" = 2
"train.warmup" = 0
"train.save_every" = 1
"view.size" = 16
"view.resize" = 16
"encoder.dim" = 8
"encoder.pretrained" = false
[data.g]
path = "glyphs:60"
[backbones.small]
[search]
draws = 4
epochs = 1
[search.ranges]
"train.lr" = { log = [1e-4, 1e-2] }
[[rows]]
name = "anchor"
settings = { method = "proxy-anchor" }
search = { "loss.margin" = { linear = [0, 0.5] } }
[[rows]]
name = "vcpa"
settings = { method = "vcpa" }
baseline = "anchor"
[rows.search]
"loss.tau" = { log = [1e-5, 1e-1] }
"train.per_class" = { choice = [8, 1000] }
"""
WINNER = "vcpa-searched-g-small-held-out-seed0"


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str, dict[str, dict]]:
    """A study whose search was killed by SIGKILL in its third draw, then continued. Only read its folder."""
    folder = tmp_path_factory.mktemp("search")
    file, out = folder / "mine.toml", folder / "out"
    file.write_text(TEXT)
    third = "anchor-g-small-search-draw02"
    killed = Running(file, "--out", out, "--jobs", 1)
    killed.until((out / "runs" / third / "last.safetensors").is_file)
    killed.process.send_signal(signal.SIGKILL)
    code, first = killed.finish()
    assert code == -signal.SIGKILL, first
    plans = {each.stem: read_json(each)["recipe"] for each in (out / "plans").glob("*.json")}
    code, second = study(file, "--out", out, "--jobs", 2, "--archive", folder / "mine.tar.gz")
    assert code == 0, second
    return out, first, second, plans


@pytest.mark.release
def test_a_killed_search_goes_on_with_the_same_draws(searched):
    out, first, second, plans = searched
    assert set(plans) == {f"anchor-g-small-search-draw0{number}" for number in range(3)}
    for name, recipe in plans.items():
        assert read_json(out / "plans" / f"{name}.json")["recipe"] == recipe
    for done_before in re.findall(r"^finished  (\S+draw0\d)", first, re.MULTILINE):
        assert f"started   {done_before}" not in second, "a finished draw is kept"
    tasks = {task.name: task for task in load_study(out.parent / "mine.toml").draws()}
    for name in tasks:
        assert {key: read_json(out / "plans" / f"{name}.json")["recipe"][key] for key in tasks[name].values} == (
            tasks[name].values
        )
    again = proxymetric("study", out.parent / "mine.toml", "--out", out, "--dry-run")
    assert again.out.splitlines()[-1] == "all runs are done"


@pytest.mark.release
def test_draws_see_no_image_of_the_test_half(searched):
    out, *_ = searched
    for file in (out / "runs").glob("*-draw*/result.json"):
        result = read_json(file)
        assert "test" not in result["data"]
        assert result["evaluated_on"] == "validation"
        assert result["recipe"]["train"]["epochs"] == 1
        assert not list(file.parent.glob("*.safetensors")), "only the scores of a draw are kept"
    assert "test" in read_json(out / "runs" / WINNER / "result.json")["data"]


@pytest.mark.release
def test_the_best_draw_trains_and_a_draw_that_fails_has_no_score(searched, tmp_path):
    out, _, second, _ = searched
    results = tmp_path / "results"
    words = ["study", out.parent / "mine.toml", "--results", results]
    answer = proxymetric(*words, "--collect", out.parent / "mine.tar.gz", "--tables", tmp_path / "tables")
    assert answer.code == 0, answer
    assert "4 results are new or replaced" in answer.out
    assert "8 draws are there" in answer.out
    draws = read_draws(results / "draws.jsonl")
    vcpa = [draw for draw in draws if draw.row == "vcpa"]
    scored = [draw for draw in vcpa if draw.values["train.per_class"] == 8]
    failed = [draw for draw in vcpa if draw.values["train.per_class"] == 1000]
    assert scored
    assert failed
    for draw in failed:
        assert draw.score is None
        assert "per_class" in draw.error
        assert f"failed    {draw.run}, which counts as a draw without a score" in second
    best = max(scored, key=lambda draw: draw.score)
    for draw in scored:
        result = read_json(out / "runs" / draw.run / "result.json")
        assert draw.score == result["validation"]["MAP@R"]
        assert draw.identity == result["data"]["identity"]
    stored = read_runs(results)[WINNER]
    assert stored["study"]["searched"] == best.values
    assert stored["recipe"]["loss"]["tau"] == best.values["loss.tau"]
    assert stored["recipe"]["train"]["epochs"] == 2
    text = (tmp_path / "tables" / "tables.md").read_text()
    assert f"| vcpa | loss.tau | 1e-05 to 0.1 (log) | 0.01 | {best.values['loss.tau']:.4g} |" in text
    assert "| vcpa | train.lr | 0.0001 to 0.01 (log) | 0.0001 |" in text
    assert "| method | metric | as printed | searched, 4 draws | searched against as printed |" in text
    assert f"| vcpa | 4 | {len(failed)} | {100 * best.score:.1f} |" in text
    assert "Photographs of g: 1,200 images, median shorter side 32 pixels, identity" in text
    with Image.open(tmp_path / "tables" / "search-vcpa-g-small.png") as picture:
        assert picture.text["Software"] == "proxymetric study"
    # The folder gives the same files.
    assert "0 results are new" in proxymetric(*words, "--collect", out).out
    assert read_draws(results / "draws.jsonl") == draws


@pytest.mark.release
def test_a_study_goes_on_elsewhere_from_collected_draws(searched, tmp_path):
    out, *_ = searched
    file, results = out.parent / "mine.toml", tmp_path / "results"
    assert proxymetric("study", file, "--collect", out, "--results", results).code == 0
    words = [file, "--out", tmp_path / "out", "--only", "vcpa-searched"]
    code, text = study(*words, "--results", results, "--archive", tmp_path / "a.tar.gz")
    assert code == 0, text
    assert "s: 1 runs to do, 4 done" in text.replace("mine: ", "s: ")
    assert "draw0" not in re.sub(r"for the best draw.*", "", text)
    there, here = (read_json(each / "runs" / WINNER / "result.json") for each in (out, tmp_path / "out"))
    assert here["rows"] == there["rows"]
    listed = proxymetric("study", *words, "--dry-run")
    assert listed.out.splitlines()[-1] == "all runs are done", "the draws lie in the folder now"
    other = tmp_path / "other"
    assert proxymetric("study", file, "--collect", tmp_path / "a.tar.gz", "--results", other).code == 0
    of_all = read_draws(results / "draws.jsonl")
    assert read_draws(other / "draws.jsonl") == of_all


@pytest.mark.release
def test_changed_ranges_with_stored_draws_are_refused(searched, tmp_path):
    out, *_ = searched
    file, results = out.parent / "mine.toml", tmp_path / "results"
    assert proxymetric("study", file, "--collect", out, "--results", results).code == 0
    changed = tmp_path / "mine.toml"
    changed.write_text(TEXT.replace("linear = [0, 0.5]", "linear = [0, 0.4]"))
    answer = proxymetric("study", changed, "--out", out)
    refused(answer, "search: got 4 draws in", "loss.margin was", "with the ranges that they were made with")
    assert "changed" in proxymetric("study", changed, "--out", out, "--dry-run").out
    for words in (["--collect", out, "--results", results], ["--results", results, "--out", tmp_path / "new"]):
        answer = proxymetric("study", changed, *words)
        refused(answer, "the draw anchor-g-small-search-draw00, in which loss.margin is", "expected draws of the study")
    # The last of fewer draws are not of this study any more; of more draws, the further ones are to do.
    changed.write_text(TEXT.replace("draws = 4", "draws = 2"))
    answer = proxymetric("study", changed, "--collect", out.parent / "mine.tar.gz", "--results", tmp_path / "fewer")
    refused(answer, "with the draw anchor-g-small-search-draw02, expected those of the study, with 2 draws of a row")
    changed.write_text(TEXT.replace("draws = 4", "draws = 8"))
    listed = proxymetric("study", changed, "--out", out, "--dry-run").out
    assert listed.count(" to do ") == 8
    assert listed.count("waits") == 2


def test_the_model_of_a_draw_that_ended_after_its_study_was_killed_is_deleted(tmp_path):
    made = parse(content())
    book = StudyFolder(made, tmp_path)
    first, second, *others = made.draws()
    for task in (first, second):
        book.run(task).mkdir(parents=True)
        (book.run(task) / "last.safetensors").touch()
    done = RunStatus("done", result=Result(rows={"trained encoder": {"R@1": 0.5}}))
    book.record_finished({first.name: done} | {task.name: RunStatus("begun") for task in (second, *others)})
    assert not list(book.run(first).iterdir())
    assert (book.run(second) / "last.safetensors").is_file(), "it goes on from there"


# Photographs


def results_of(made: Study, identity_of: dict[str, str], **facts: object) -> dict[str, Result]:
    """Results with the given identities, in the order of the tasks."""
    found = {}
    for number, task in enumerate(made.tasks()):
        data = {"identity": identity_of[task.name], "train": {"images": 80}, "test": {"images": 20}, **facts}
        found[task.name] = Result(
            rows={"trained encoder": {"R@1": 0.5 + 0.01 * number}}, data=data,
            finished=f"2026-01-0{1 + (identity_of[task.name] == 'new' * 20)}",
        )  # fmt: skip
    return found


def two_rows() -> Study:
    rows = [{"name": "a"}, {"name": "b", "baseline": "a"}]
    return parse({"name": "s", "metrics": ["R@1"], "data": {"g": {"path": "x", "title": "Gs"}}, "rows": rows})


def test_results_of_different_photographs_are_never_in_one_table(tmp_path):
    made = two_rows()
    new, old = "new" * 20, "old" * 20
    found = results_of(made, {"a-g-held-out-seed0": old, "b-g-held-out-seed0": new}, shorter_side=357, images=100)
    text = write_tables(made, found, tmp_path)[0].read_text()
    assert "differences, points" not in text, "no difference between scores of different photographs"
    current, older = text.split("## ")[1:]
    assert current.startswith("Gs: epoch chosen on held-out training classes\n")
    assert older.startswith("Gs: epoch chosen on held-out training classes, older photographs (oldoldoldold)\n")
    assert "| b | 1 | 51.0 |" in current
    assert "| a |" not in current
    assert "| a | 1 | 50.0 |" in older
    assert "Photographs of Gs: 100 images, median shorter side 357 pixels, identity newnewnewnew." in text
    assert "Photographs of Gs, older photographs (oldoldoldold): 100 images, median" in text
    assert "% Photographs of Gs: 100 images" in (tmp_path / "tables.tex").read_text()
    by_cell = Results(made, found)
    assert [cell.row for cell in by_cell.runs] == ["b"]
    assert [cell.row for cell in by_cell.older[0].runs] == ["a"]


def test_old_results_say_what_they_know_of_their_photographs():
    facts = {"identity": "1e14fb3c6a164db5", "train": {"images": 80, "classes": 8}, "validation": {"images": 5}}
    assert describe(facts) == "85 images, identity 1e14fb3c6a16"
    assert describe(facts | {"images": 11788, "shorter_side": 357.0, "bytes_per_image": 8400}) == (
        "11,788 images, median shorter side 357 pixels, 8.4 kB an image, identity 1e14fb3c6a16"
    )
    assert describe(facts | {"images": None, "shorter_side": None, "bytes_per_image": None}) == describe(facts)


def test_draws_of_older_photographs_are_not_in_the_picture(tmp_path):
    made = parse(content())
    found = {
        task.name: Result(rows={"trained encoder": {"R@1": 0.5}}, data={"identity": "new"}) for task in made.tasks()
    }
    draws = [replace(draw, identity="new" if draw.row == "vcpa" else "old") for draw in done(made, {})]
    by_cell = Results(made, found, draws)
    assert {group[0] for group in by_cell.draws} == {"vcpa"}
    assert [file.name for file in draw_search(by_cell, "g", "", tmp_path)] == ["search-vcpa-g.png"]


def test_collected_draws_of_other_photographs_are_refused(tmp_path):
    made = parse(content())
    draw, task = replace(done(made, {})[0], identity="old" * 20), made.draws()[0]
    book = StudyFolder(made, tmp_path / "none", given=[draw])
    assert book.status(task, "old" * 20).status == "done"
    with pytest.raises(
        ValueError, match="with the images oldoldoldold, expected the images of g that are here, newnew"
    ):
        book.status(task, "new" * 20)


def test_collected_draws_are_lines_that_can_be_read(tmp_path):
    file = tmp_path / "draws.jsonl"
    file.write_text(json.dumps({"run": "x"}) + "\n")
    with pytest.raises(ValueError, match=r"draws\.jsonl: got a damaged line 1, expected the draw of a search"):
        read_draws(file)
