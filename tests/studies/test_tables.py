"""Tables of studies: numbers against independent formulas, labels, and plots."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from proxymetric.runs.result import Result
from proxymetric.studies import Study, parse
from proxymetric.studies.drawing import PLOTS, mean_curve, size_records
from proxymetric.studies.inference import Mean, paired, power, seeds_needed, student
from proxymetric.studies.outputs import check_outputs
from proxymetric.studies.results import stored_results
from proxymetric.studies.scores import Results
from proxymetric.studies.tables import Table, mean_text, size_table, write_tables

SCORES = {"base": [0.50, 0.52, 0.54], "new": [0.53, 0.54, 0.58]}


def study(**more: object) -> Study:
    rows = [
        {"name": "base", "title": "Base_1", "paper": {"g": {"R@1": 60.0}}},
        {"name": "new", "baseline": "base", "paper": {"g": {"R@1": 64.5}}, **more},
    ]
    return parse(
        {"name": "s", "seeds": [0, 1, 2], "protocols": ["held-out", "papers"], "metrics": ["R@1"],
         "data": {"g": {"path": "glyphs:60", "title": "Glyphs"}}, "rows": rows}
    )  # fmt: skip


def results(of: Study, without: tuple[str, ...] = ()) -> dict[str, Result]:
    """Results as training writes them, with known scores."""
    found = {}
    for task in of.tasks():
        score = SCORES[task.cell.row][task.seed]
        rows = {"trained encoder": {"R@1": score}}
        if task.cell.protocol == "papers":
            rows["last epoch"] = {"R@1": score - 0.01 * (task.seed + 1)}
        curve = [{"epoch": epoch, "R@1": score - 0.1 + 0.05 * epoch} for epoch in range(3 + task.seed)]
        if task.name not in without:
            validation = {"R@1": score + 0.2, "figures": {"rank": 10 + task.seed}}
            found[task.name] = Result(rows=rows, curve=curve, validation=validation)
    return found


@pytest.mark.usefixtures("no_pictures")
def test_a_reading_has_the_means_of_its_figures(tmp_path):
    made = study(why="The rank is\n{rank:.1f}, at epoch {chosen epoch:.0f}, {chosen epoch of the baseline:.0f} there.")
    _, _, row = cells(_tables(made, tmp_path), "Glyphs: epoch chosen on the test half, our reading")
    assert row == ["new", "The rank is 11.0, at epoch 0, 0 there."]
    assert "our reading" not in _tables(study(), tmp_path / "none")


@pytest.mark.usefixtures("no_pictures")
def test_a_reading_needs_figures_only_if_it_names_some(tmp_path):
    for text, expected in (("At epoch {chosen epoch:.0f}.", "At epoch 0."), ("The rank is {rank}.", None)):
        made = study(why=text)
        found = {name: replace(each, validation={"R@1": 0.5}) for name, each in results(made).items()}
        said = write_tables(made, found, tmp_path / str(expected))[0].read_text()
        assert ("our reading" in said) == (expected is not None)
        assert expected is None or expected in said


@pytest.mark.parametrize("text", ["{rang}", "{rank:d}"])
def test_a_reading_with_a_wrong_figure_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match=r"rows.new.why: got .* expected figures among: rank, chosen epoch"):
        _tables(study(why=text), tmp_path)


@pytest.mark.usefixtures("no_pictures")
def test_the_regret_of_a_choice_is_what_the_best_method_has_more(tmp_path):
    rows = [{"name": name} for name in ("proxy-anchor", "vcpa", "arcface", "auto")]
    rows.append({"name": "vcpa-5", "settings": {"loss.per_class": 5}})
    rows.append({"name": "cub-vcpa", "recipe": "cub/vcpa"})
    data = {"g": {"path": "glyphs:60", "title": "Glyphs"}}
    made = parse({"name": "s", "seeds": [0, 1], "metrics": ["MAP@R"], "data": data, "rows": rows})
    scores = {"proxy-anchor": (0.40, 0.50), "vcpa": (0.42, 0.49), "auto": (0.41, 0.49)}
    # Not tried, another setting, another recipe.
    scores |= {"arcface": (0.60, 0.60), "vcpa-5": (0.60, 0.60), "cub-vcpa": (0.60, 0.60)}
    trials = [{"method": name, "start": None, "score": 0.4} for name in ("proxy-anchor", "vcpa")]
    found = {}
    for task in made.tasks():
        row, score = task.cell.row, scores[task.cell.row][task.seed]
        auto = {"method": "vcpa", "seconds": 5.0, "trials": trials}
        auto |= {"start": None, "folds": 5} if task.seed == 0 else {}  # the rule of earlier versions had no folds
        choice = {"auto": auto} if row == "auto" else {}
        method = {"method": "vcpa" if row in ("auto", "vcpa-5", "cub-vcpa") else row}
        found[task.name] = Result(
            rows={"trained encoder": {"MAP@R": score}}, recipe=method, seconds=100.0, **choice
        )  # fmt: skip
    write_tables(made, found, tmp_path)
    title = "Glyphs: epoch chosen on held-out training classes, the choice of a method"
    _, _, first, second, mean = cells((tmp_path / "tables.md").read_text(), title)
    assert first == ["auto", "0", "vcpa", "41.0", "vcpa, 42.0", "+1.00", "+1.00", "5 %"]
    assert second == ["auto", "1", "vcpa (earlier rule)", "49.0", "proxy-anchor, 50.0", "+1.00", "-1.00", "5 %"]
    assert mean[1] == "mean"
    assert mean[5].startswith("+1.00")
    assert mean[-1] == "5 %"
    alone = {name: result for name, result in found.items() if name.startswith("auto")}
    write_tables(made, alone, tmp_path)
    assert "the choice of a method" not in (tmp_path / "tables.md").read_text()


@pytest.mark.parametrize("words", [1, 4, 16])
def test_the_legend_of_the_curves_fits_into_the_picture(words):
    rows = [{"name": f"r{i}", "title": " ".join([f"row-{i}"] * words)} for i in range(9)]
    data = {"g": {"path": "glyphs:60", "title": "Glyphs"}}
    made = parse({"name": "s", "seeds": [0], "metrics": ["R@1", "MAP@R"], "data": data, "rows": rows})
    curve = [{"epoch": epoch, "MAP@R": 0.1} for epoch in range(3)]  # the first plot is empty
    found = {task.name: Result(rows={"trained encoder": {"R@1": 0.2}}, curve=curve) for task in made.tasks()}
    by_cell = Results(made, found)
    ((heading, cells_of_table),) = by_cell.groups()
    figure = PLOTS["curves"](by_cell, heading, cells_of_table)
    figure.savefig(io.BytesIO(), dpi=figure.dpi)  # places everything
    (legend,) = figure.legends
    place = legend.get_window_extent()
    assert len(legend.get_texts()) == 9
    assert place.y0 >= 0
    assert 0 <= place.x0 <= place.x1 <= figure.bbox.width
    bottom = min(axes.get_tightbbox().y0 for axes in figure.axes)
    assert place.y1 <= bottom, "it hides no axis"
    assert min(axes.bbox.height for axes in figure.axes) > 0.4 * 4.2 * figure.dpi


def _tables(made: Study, folder: Path) -> str:
    write_tables(made, results(made), folder)
    return (folder / "tables.md").read_text()


def test_student_intervals():
    values = [1.0, 4.0, 2.5, 3.0]
    found = student(values)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert found.value == pytest.approx(np.mean(values))
    assert found.half == pytest.approx((high - low) / 2)
    assert student([2.0]).half is None


def test_pairs_are_made_by_seed():
    found = paired({0: 1.0, 2: 5.0, 9: 100.0}, {2: 4.0, 0: 3.0, 1: 7.0})
    assert (found.value, found.n) == (-0.5, 2)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_power_is_that_of_many_simulated_tests():
    draws = np.random.default_rng(0).normal(0.8, 1.0, size=(40_000, 9))
    rejected = stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05
    assert power(0.8, 9) == pytest.approx(rejected.mean(), abs=0.01)


@pytest.mark.parametrize(("claim", "sd"), [(1.0, 1.0), (0.5, 1.4), (-2.0, 0.5), (8.0, 0.2), (100.0, 0.1), (0.1, 2.0)])
def test_seeds_needed_are_the_fewest(claim, sd):
    needed = seeds_needed(claim, sd)
    assert power(claim / sd, needed) >= 0.8
    assert needed == 2 or power(claim / sd, needed - 1) < 0.8


@pytest.mark.parametrize("n", [2, 3, 5, 9, 40])
def test_power_is_that_of_the_noncentral_t(n):
    limit = stats.t.ppf(0.975, n - 1)
    for shift in (0.01, 0.5, 1.0, 2.0, 4.0, 6.0):  # scipy returns NaN for many larger ones
        wanted = stats.nct.sf(limit, n - 1, shift) + stats.nct.cdf(-limit, n - 1, shift)
        assert power(shift / math.sqrt(n), n) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_power_rises_with_the_effect_up_to_one(n):
    values = [power(effect, n) for effect in np.linspace(0.0, 60.0, 301)]
    assert values[0] == pytest.approx(0.05, abs=1e-5)
    assert values == sorted(values)
    assert values[-1] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize(("effect", "seeds"), [(4.7, 3), (11.02, 3), (12.0, 2)])
def test_seeds_of_large_effects(effect, seeds):
    """With scipy's noncentral t, which is NaN there, the search gave 4 and 2 for the first two."""
    assert seeds_needed(effect, 1.0) == seeds


def test_what_needs_no_or_endless_seeds():
    assert seeds_needed(1.0, 0.0) == 2
    assert seeds_needed(0.0, 1.0) is None
    assert seeds_needed(0.001, 1.0) is None


def cells(text: str, title: str) -> list[list[str]]:
    """The rows of the Markdown table under a title."""
    part = text.split(f"**{title}**")[1].split("\n\n")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()]


def test_the_tables_say_what_was_measured(tmp_path):
    made = study()
    files = write_tables(made, results(made), tmp_path)
    text = (tmp_path / "tables.md").read_text()
    half = stats.t.ppf(0.975, 2) * np.std([50, 52, 54], ddof=1) / math.sqrt(3)
    header, _, base, new = cells(text, "Glyphs: epoch chosen on the test half, %")
    assert header == ["method", "seeds", "R@1, epoch chosen on the test half", "R@1, last epoch", "paper's R@1"]
    assert base == ["Base_1", "3", f"52.0 ± {half:.1f}", f"50.0 ± {half / 2:.1f}", "60.0"]
    assert new[:2] == ["new", "3"]
    held_out = cells(text, "Glyphs: epoch chosen on held-out training classes, %")
    assert held_out[0] == ["method", "seeds", "R@1", "R@1, held-out classes", "paper's R@1"]
    assert held_out[2][2:4] == [f"52.0 ± {half:.1f}", f"72.0 ± {half:.1f}"]
    gains = np.array([3.0, 2.0, 4.0])
    sd = np.std(gains, ddof=1)
    header, _, row = cells(text, "Glyphs: epoch chosen on the test half, differences, points")
    told = dict(zip(header, row))
    assert told["against"] == "Base_1"
    assert told["pairs"] == "3"
    half = stats.t.ppf(0.975, 2) * sd / math.sqrt(3)
    assert told["difference, epoch chosen on the test half"] == f"+3.00 ± {half:.2f}"
    assert told["paper's difference"] == "+4.5"
    assert told["same sign"] == "yes"
    assert told["seeds to detect the paper's difference"] == str(seeds_needed(4.5, sd))
    header, _, row = cells(text, "Glyphs: epoch chosen on held-out training classes, differences, points")
    assert dict(zip(header, row))["difference, held-out classes"] == f"+3.00 ± {half:.2f}"
    _, _, figure, _ = cells(text, "Glyphs: epoch chosen on the test half, inside the methods at the chosen epoch")
    assert figure == ["Base_1", "rank", "3", "11 ± 2.5"]
    assert {file.suffix for file in files} == {".md", ".tex", ".png"}


@pytest.mark.usefixtures("no_pictures")
def test_scores_of_the_papers_protocol_are_never_shown_without_their_label(tmp_path):
    made = study()
    write_tables(made, results(made), tmp_path)
    for name, start in (("tables.md", "**"), ("tables.tex", "\\caption")):
        titles = [line for line in (tmp_path / name).read_text().splitlines() if line.startswith(start)]
        assert sum("epoch chosen on the test half" in title for title in titles) == 3
        assert sum("epoch chosen on held-out training classes" in title for title in titles) == 3


@pytest.mark.usefixtures("no_pictures")
def test_a_claim_of_the_other_sign_and_an_interval_around_zero(tmp_path):
    made = study(claim={"g": {"R@1": -1.0}})
    found = results(made)
    text = write_tables(made, found, tmp_path)[0].read_text()
    title = "Glyphs: epoch chosen on held-out training classes, differences, points"
    said = dict(zip(cells(text, title)[0], cells(text, title)[2]))
    assert (said["same sign"], said["in the interval"]) == ("no", "no")
    found["new-g-held-out-seed0"].rows["trained encoder"]["R@1"] = 0.30
    text = write_tables(made, found, tmp_path)[0].read_text()
    said = dict(zip(cells(text, title)[0], cells(text, title)[2]))
    assert (said["same sign"], said["in the interval"]) == ("open", "yes")


@pytest.mark.usefixtures("no_pictures")
def test_without_test_classes_the_scores_are_those_of_the_held_out_ones(tmp_path):
    made = study()
    found = {name: replace(each, evaluated_on="validation") for name, each in results(made).items()}
    text = write_tables(made, found, tmp_path)[0].read_text()
    title = "Glyphs: epoch chosen on held-out training classes"
    assert cells(text, f"{title}, %")[0] == ["method", "seeds", "R@1, held-out classes", "paper's R@1"]
    assert cells(text, f"{title}, differences, points")[0][4] == "difference, held-out classes"
    part = text.split(f"**{title}, %**")[1].split("**")[0]
    assert "test half" not in part


def test_results_of_another_study_are_refused(tmp_path):
    (tmp_path / "study.json").write_text('{"study": "another"}')
    with pytest.raises(ValueError, match="which has results of the study 'another'; expected 's'"):
        stored_results(study(), tmp_path)


@pytest.mark.usefixtures("no_pictures")
def test_half_a_study_makes_tables_of_what_there_is(tmp_path):
    made = study()
    gone = [task.name for task in made.tasks() if task.cell.row == "base" and task.seed > 0]
    text = write_tables(made, results(made, tuple(gone)), tmp_path)[0].read_text()
    row = cells(text, "Glyphs: epoch chosen on held-out training classes, differences, points")[2]
    assert row[3:5] == ["1", "+3.00"]
    gone = [task.name for task in made.tasks() if task.cell.row == "base"]
    text = write_tables(made, results(made, tuple(gone)), tmp_path)[0].read_text()
    assert "differences, points" not in text


def test_latex_is_escaped():
    text = Table("50 % of a_b", ["method & more"], [["x ± 1"]]).latex()
    assert r"50 \% of a\_b" in text
    assert r"method \& more \\" in text
    assert r"x $\pm$ 1 \\" in text


def test_curves_are_means_over_epochs_that_all_seeds_have():
    made = study()
    runs = [run.curve for run in Results(made, results(made)).runs[made.cells()[0]].values()]
    epochs, means, halves = mean_curve(runs, "R@1")
    assert epochs == [0, 1, 2]
    assert means == pytest.approx([42.0, 47.0, 52.0])
    assert all(half > 0 for half in halves)


@pytest.mark.parametrize(("word", "same"), [("higher", "yes"), ("lower", "no")])
def test_a_claim_without_a_figure_is_a_direction(tmp_path, word, same):
    made = study(claim={"g": {"R@1": word}})
    written = write_tables(made, results(made), tmp_path)
    title = "Glyphs: epoch chosen on held-out training classes, differences, points"
    said = dict(zip(*[cells(written[0].read_text(), title)[line] for line in (0, 2)]))
    assert (said["paper's difference"], said["same sign"], said["in the interval"]) == (word, same, "")
    assert said["seeds to detect the paper's difference"] == ""
    assert any(path.name.startswith("differences") for path in written)


@pytest.mark.usefixtures("no_pictures")
def test_without_a_claim_of_a_paper_there_are_no_columns_for_it(tmp_path):
    rows = [{"name": "base"}, {"name": "new", "baseline": "base"}]
    made = replace(study(), rows=parse({"name": "s", "data": {"g": {"path": "glyphs:60"}}, "rows": rows}).rows)
    text = write_tables(made, results(made), tmp_path)[0].read_text()
    assert "| method | against | metric | pairs | difference |" in text
    assert "paper's" not in text


def test_latex_aligns_numbers_to_the_right_and_text_to_the_left():
    table = Table("t", ["method", "against", "pairs", "difference", "claim"], [["a", "b", "3", "-0.10 ± 0.20", ""]])
    assert r"\begin{tabular}{llrrr}" in table.latex()


def test_zero_has_no_minus_sign():
    assert mean_text(Mean(-0.001, 0.2, 3), "+") == "+0.00 ± 0.20"


def test_pictures_show_something(tmp_path):
    made = study()
    files = [file for file in write_tables(made, results(made), tmp_path) if file.suffix == ".png"]
    assert sorted(file.name for file in files) == [
        "curves-g-held-out.png", "curves-g-papers.png", "differences-g-held-out.png", "differences-g-papers.png",
    ]  # fmt: skip
    for file in files:
        assert len(Image.open(file).convert("RGB").getcolors(2**24)) > 50, file.name


@pytest.mark.parametrize("kind", PLOTS)
def test_a_picture_of_somebody_else_is_not_replaced(kind, tmp_path):
    made, file = study(), tmp_path / f"{kind}-g-held-out.png"
    Image.new("RGB", (4, 4)).save(file)
    with pytest.raises(ValueError, match=rf"--tables: got .*{file.name}.* a plot of a study"):
        check_outputs(made, None, tmp_path)
    file.unlink()
    check_outputs(made, None, tmp_path)
    write_tables(made, results(made), tmp_path)
    check_outputs(made, None, tmp_path)  # its own pictures may be replaced


def test_an_unknown_folder_of_results_is_refused():
    from proxymetric.studies.results import stored_results

    with pytest.raises(ValueError, match="results: got nowhere, expected a folder with results of the study 's'"):
        stored_results(study(), Path("nowhere"))


def test_smaller_vectors_are_compared_with_training_at_their_dimension():
    rows = [{"name": "nested", "title": "Nested"}, {"name": "small", "title": "Small"}]
    of = parse({"name": "s", "seeds": [0, 1], "metrics": ["R@1"], "data": {"g": {"path": "glyphs"}}, "rows": rows})

    def sized(dim: int, kind: str, score: float) -> dict[str, object]:
        return {"dim": dim, "vectors": kind, "bytes": 4 * dim, "scores": {"R@1": score}}

    found = {}
    for task in of.tasks():
        gain = 0.01 * (task.seed + 1)
        sizes = [sized(8, "float32", 0.5 + gain), sized(8, "int8", 0.4), sized(16, "float32", 0.6)]
        if task.cell.row == "small":
            sizes = [sized(8, "float32", 0.5)]
        found[task.name] = Result(rows={"trained encoder": {"R@1": 0.6}}, sizes=sizes)
    by_cell = Results(of, found)
    ((heading, cells),) = by_cell.groups()
    table = size_table(by_cell, heading, cells)
    half = stats.t.ppf(0.975, 1) * math.sqrt(0.5) / math.sqrt(2)
    assert [row[:5] for row in table.rows] == [
        ["Nested", "8", "float32", "32", "2"],
        ["Nested", "8", "int8", "32", "2"],
        ["Nested", "16", "float32", "64", "2"],
        ["Small", "8", "float32", "32", "2"],
    ]
    assert [row[6] for row in table.rows] == [f"+1.50 ± {half:.2f}", "", "", ""]
    assert not size_table(Results(study(), results(study())), heading, study().cells()).rows
    points = {
        (f"{each['series']}, {each['vectors']}", each["dim"]): each for each in size_records(by_cell, cells, "R@1")
    }
    assert list(points) == [
        ("Nested, float32", 8), ("Nested, int8", 8), ("Nested, float32", 16), ("trained at each dimension, float32", 8),
    ]  # fmt: skip
    assert points["Nested, float32", 8]["scores"]["R@1"] == pytest.approx(0.515)
    assert points["Nested, float32", 8]["half"] == pytest.approx(half / 100)


def test_the_picture_of_small_vectors_is_drawn_where_there_are_some(tmp_path):
    of = parse({
        "name": "s", "seeds": [0], "metrics": ["MAP@R"], "data": {"g": {"path": "glyphs"}},
        "rows": [{"name": "nested", "title": "Nested"}],
    })  # fmt: skip
    sizes = [{"dim": dim, "vectors": "int8", "bytes": dim, "scores": {"MAP@R": dim / 99}} for dim in (8, 16)]
    for number, some in enumerate((sizes, None)):
        found = {task.name: Result(rows={"trained encoder": {"MAP@R": 0.6}}, sizes=some) for task in of.tasks()}
        files = {file.name for file in write_tables(of, found, tmp_path / str(number))}
        assert ("small-vectors-g-held-out.png" in files) == (some is not None)
    picture = np.asarray(Image.open(tmp_path / "0" / "small-vectors-g-held-out.png").convert("RGB"))
    assert (picture == (49, 87, 213)).all(axis=2).sum() > 100, "a line in the first colour"
