"""The files of studies: what they mean, and the errors for mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxymetric.studies import Study, load_study, narrowed, parse
from proxymetric.studies.folder import difference_to, flat_recipe, local_settings
from terminal import proxymetric, refused

ROOT = Path(__file__).resolve().parent.parent.parent
GLYPHS = ROOT / "studies" / "glyphs.toml"


def small(**more: object) -> dict:
    """The tables of a study of two rows."""
    return {
        "name": "small", "seeds": [3, 1], "data": {"g": {"path": "glyphs:60"}, "d": {"path": "digits"}},
        "rows": [{"name": "a"}, {"name": "b", "baseline": "a", "data": ["g"]}], **more,
    }  # fmt: skip


def test_runs_go_seed_by_seed():
    names = [task.name for task in parse(small()).tasks()]
    assert names == [
        "a-g-held-out-seed3", "b-g-held-out-seed3", "a-d-held-out-seed3",
        "a-g-held-out-seed1", "b-g-held-out-seed1", "a-d-held-out-seed1",
    ]  # fmt: skip


def test_a_row_may_be_narrower():
    rows = [{"name": "a"}, {"name": "b", "seeds": [1], "protocols": ["last"], "data": ["d"]}]
    study = parse(small(rows=rows, protocols=["papers", "last"]))
    assert [task.name for task in study.tasks() if task.cell.row == "b"] == ["b-d-last-seed1"]
    assert len(study.tasks()) == 2 * 2 * 2 + 1


def test_the_more_special_setting_wins():
    study = parse(
        small(
            settings={"loss": {"margin": 0.1, "scale": 1}, "train.epochs": 1},
            data={"g": {"path": "glyphs:60", "settings": {"loss.margin": 0.2, "train.epochs": 2}}},
            backbones={"tiny": {"backbone": "small", "weights": "w.safetensors", "settings": {"train.epochs": 3}}},
            rows=[{"name": "a", "settings": {"train.epochs": 4}}],
        )
    )
    settings = study.tasks()[0].settings
    assert settings == {
        "loss.margin": 0.2, "loss.scale": 1, "train.epochs": 4, "encoder.backbone": "small",
        "encoder.weights": "w.safetensors", "data.path": "glyphs:60", "protocol": "held-out", "seed": 3,
        "train.keep": "trained",
    }  # fmt: skip
    there = local_settings(study.tasks()[0], Path("/data"))
    assert (there["data.path"], there["encoder.weights"]) == ("glyphs:60", "/data/w.safetensors")


def test_recipes_are_found_from_the_studys_folder_and_by_data(tmp_path):
    (tmp_path / "recipes" / "g").mkdir(parents=True)
    (tmp_path / "recipes" / "g" / "x.toml").write_text("[train]\nepochs = 7\n")
    (tmp_path / "studies").mkdir()
    rows = [{"name": "a", "recipe": "recipes/{data}/x.toml", "data": ["g"]}]
    task = parse(small(rows=rows), tmp_path / "studies").tasks()[0]
    assert flat_recipe(task, None)["train.epochs"] == 7
    rows[0]["data"] = ["d"]
    with pytest.raises(ValueError, match=r"rows\.a\.recipe: got 'recipes/d/x\.toml', expected a file in"):
        parse(small(rows=rows), tmp_path / "studies")


WRONG = {
    "sedes": (small(sedes=[0]), "sedes: got an unknown key", "did you mean 'seeds'?"),
    "a row's key": (small(rows=[{"name": "a", "recpie": "x"}]), "rows[0].recpie: got an unknown", "mean 'recipe'?"),
    "capitals": (small(SEEDS=[0]), "SEEDS: got an unknown key", "did you mean 'seeds'?"),
    "a data key": (small(data={"g": {"pat": "x"}}), "data.g.pat", "did you mean 'path'?"),
    "no path": (small(data={"g": {}}), "data.g.path: got None, expected text"),
    "no data": (small(data={}), "data: got no data set"),
    "no rows": (small(rows=[]), "rows: got no row"),
    "seeds": (small(seeds=[0, 0]), "seeds: got [0, 0], expected different whole numbers"),
    "a negative seed": (small(seeds=[-1]), "seeds: got [-1]"),
    "protocol": (small(protocols=["paper"]), "protocols: got 'paper'", "did you mean 'papers'?"),
    "metric": (small(metrics=["R@"]), "R@"),
    "baseline": (small(rows=[{"name": "a"}, {"name": "b", "baseline": "aa"}]), "rows.b.baseline: got 'aa'", "'a'?"),
    "itself": (small(rows=[{"name": "a", "baseline": "a"}]), "rows.a.baseline: got 'a', expected another row"),
    "two of a name": (small(rows=[{"name": "a"}, {"name": "a"}]), "two rows named 'a'"),
    "a name": (small(rows=[{"name": "a b"}]), "rows[0].name: got 'a b', expected a name"),
    "seed as a setting": (small(settings={"seed": 1}), "settings.seed: got 1"),
    "paper": (small(rows=[{"name": "a", "paper": {"cub": {"R@1": 1}}}]), "rows.a.paper.cub: got an unknown key"),
    "figure": (small(rows=[{"name": "a", "paper": {"g": {"R@1": "69"}}}]), "expected a number in per cent"),
    "claim": (
        small(rows=[{"name": "a", "claim": {"g": {"R@1": "up"}}}]),
        'got \'up\', expected a number in per cent or "higher" or "lower"',
    ),
    "minutes": (small(rows=[{"name": "a", "minutes": 0}]), "rows.a.minutes: got 0, expected a number above 0"),
    "an open brace": (small(rows=[{"name": "a", "why": "x {rank"}]), "rows.a.why: got 'x {rank'", "expected figures"),
    "more than a name": (small(rows=[{"name": "a", "why": "{rank.real}"}]), "rows.a.why: got {rank.real}"),
    "a setting's form": (small(settings=3), "settings: got 3, expected a table"),
    "the same folder": (
        small(data={"g": {"path": "x"}}, backbones={"a-b": {}}, rows=[{"name": "a-g"}, {"name": "a", "title": "t"}])
        | {"data": {"g": {"path": "x"}, "g-g": {"path": "x"}}},
        "rows: got two runs with the folder",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_study_is_refused_with_a_sentence(case):
    content, *said = WRONG[case]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - what it says is looked at
        parse(content)
    for part in said:
        assert part in str(refusal.value)


def test_narrowing():
    study = parse(small())
    assert [task.name for task in narrowed(study, ["b"], [1])] == ["b-g-held-out-seed1"]
    with pytest.raises(ValueError, match=r"--only: got 'bb', expected rows of the study \(a, b\); did you mean 'b'\?"):
        narrowed(study, ["bb"])
    with pytest.raises(ValueError, match=r"--only: got 'B', .*did you mean 'b'\?"):
        narrowed(study, ["B"])
    with pytest.raises(ValueError, match="--seeds: got 7, expected one of 1, 3"):
        narrowed(study, (), [7])
    with pytest.raises(
        ValueError, match=r"--data: got 'gg', expected data sets of the study \(g, d\); did you mean 'g'"
    ):
        narrowed(study, data=["gg"])


def test_narrowing_to_a_data_set():
    rows = [{"name": "a"}, {"name": "b", "data": ["h"]}]
    study = parse(small(seeds=[1], data={"g": {"path": "x"}, "h": {"path": "y"}}, rows=rows))
    assert [task.name for task in narrowed(study, data=["g"])] == ["a-g-held-out-seed1"]
    assert {task.name for task in narrowed(study, data=["h"])} == {"a-h-held-out-seed1", "b-h-held-out-seed1"}
    with pytest.raises(ValueError, match=r"^--only b --data g: got no run of the study"):
        narrowed(study, ["b"], data=["g"])


def test_narrowing_to_a_row_without_the_seed():
    study = parse(small(rows=[{"name": "a", "seeds": [1]}, {"name": "b", "seeds": [3]}]))
    with pytest.raises(ValueError, match=r"^--only a --seeds 3: got no run of the study"):
        narrowed(study, ["a"], [3])


def test_the_glyphs_study_is_whole():
    study = load_study(GLYPHS)
    assert isinstance(study, Study)
    assert len(study.tasks()) == 4
    assert {flat_recipe(task, None)["method"] for task in study.tasks()} == {"proxy-anchor", "proxy-nca++"}


@pytest.mark.parametrize("file", sorted((ROOT / "studies").glob("*.toml")), ids=lambda file: file.stem)
def test_every_shipped_study_can_be_listed(file, tmp_path):
    answer = proxymetric("study", file, "--dry-run", "--out", tmp_path / "out")
    assert answer.code == 0, answer
    assert f"{len(narrowed(load_study(file)))} runs" in answer.out
    assert not (tmp_path / "out").exists()


def test_a_method_that_is_chosen_is_compared_as_such():
    (task,) = parse(small(seeds=[0], rows=[{"name": "a", "settings": {"method": "auto"}, "data": ["g"]}])).tasks()
    assert flat_recipe(task, None)["method"] == "auto"
    result = {"recipe": {"method": "vcpa", "seed": 0}, "auto": {"method": "vcpa"}}
    assert difference_to(task, result) is None
    assert difference_to(task, result | {"auto": None}) == "method is 'vcpa', which was named, not chosen by 'auto'"
    assert difference_to(task, result | {"recipe": {"method": "vcpa", "seed": 1}}) == "seed is 1, not 0"


BAD_COMMANDS = {
    "no file": (["nowhere.toml"], "study: got 'nowhere.toml', which does not exist; expected a TOML file"),
    "folder": (["."], "study: got '.', which is a folder; expected a TOML file"),
    "a misspelt file": ([str(GLYPHS.with_name("glyph.toml"))], "did you mean 'glyphs.toml'?"),
    "jobs": ([str(GLYPHS), "--jobs", "0"], "--jobs: got 0, expected at least 1"),
    "minutes": ([str(GLYPHS), "--minutes", "-1"], "--minutes: got -1.0, expected a number above 0"),
    "only": ([str(GLYPHS), "--only", "proxy-anchr"], "--only: got 'proxy-anchr'", "did you mean 'proxy-anchor'?"),
    "seeds": ([str(GLYPHS), "--seeds", "a"], "--seeds: got 'a', expected whole numbers"),
    "root": ([str(GLYPHS), "--data-root", "nowhere"], "--data-root: got 'nowhere', expected a folder"),
    "archive": ([str(GLYPHS), "--archive", "x.zip"], "--archive: got 'x.zip', expected a name that ends in .tar.gz"),
    "collect": ([str(GLYPHS), "--collect", "x.tar.gz"], "--results: got none, expected the folder"),
    "results": ([str(GLYPHS), "--results", "x"], "--results: got a folder without --collect or --tables"),
    "no archive": ([str(GLYPHS), "--collect", "x.tar.gz", "--results", "r"], "collect: got x.tar.gz, expected an"),
    "no results": ([str(GLYPHS), "--tables", "t"], "expected a folder with results of the study 'glyphs'"),
}


@pytest.mark.parametrize("case", BAD_COMMANDS)
def test_bad_input_is_a_sentence_and_writes_nothing(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, *said = BAD_COMMANDS[case]
    refused(proxymetric("study", *words), *said)
    assert list(tmp_path.iterdir()) == []


def test_what_recipes_data_and_folders_lack_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "s.toml"

    def told(text: str, *said: str) -> None:
        file.write_text(text)
        refused(proxymetric("study", file), *said)
        assert [each.name for each in tmp_path.iterdir()] == ["s.toml"]

    told('[data.g]\npath = "glyphs:60"\n[[rows]]\nname = "a"\n'
         'settings = {method = "proxy-isa", "loss.base" = {method = "mpa", perclass = 2}}',
         "rows.a: perclass: got an unknown argument (2)", "did you mean 'per_class'?")  # fmt: skip
    told('[data.g]\npath = "glyphs:60"\n[[rows]]\nname = "a"\nsettings = {"loss.margn" = 1}',
         "rows.a.settings: loss.margn: got an unknown key", "did you mean 'margin'?")  # fmt: skip
    told('[data.g]\npath = "glyphs:60"\n[[rows]]\nname = "a"\nsettings = {method = "auto", "loss.margin" = 1}',
         "rows.a.settings: loss.margin: got a setting of one method together with method 'auto'")  # fmt: skip
    told('[data.g]\npath = "birds"\n[[rows]]\nname = "a"', "data.g.path: got 'birds', expected a path of images")
    told('[data.g]\npath = "glyphs:60"\n[backbones.small]\nweights = "w"\n[[rows]]\nname = "a"',
         "backbones.small.weights: got 'w', expected a file (--data-root")  # fmt: skip
    told("name = ", "expected valid TOML")
    (tmp_path / "runs" / "study-s").mkdir(parents=True)
    (tmp_path / "runs" / "study-s" / "mine.txt").write_text("x")
    file.write_text('[data.g]\npath = "glyphs:60"\n[[rows]]\nname = "a"')
    refused(proxymetric("study", file), "is not empty and holds no study; expected a new folder")


def test_the_study_of_vectors_that_can_be_cut_trains_at_each_of_its_sizes():
    study = load_study(ROOT / "studies" / "cub-matryoshka.toml")
    by_row = {task.cell.row: task for task in study.tasks()}
    nested = by_row.pop("nested").settings
    assert nested["loss.nested"][-1] == nested["encoder.dim"]
    assert sorted(task.settings["encoder.dim"] for task in by_row.values()) == nested["loss.nested"]
    assert all(task.settings["loss.nested"] == [task.settings["encoder.dim"]] for task in by_row.values())
    assert {task.seed for task in study.tasks()} == set(range(5))
