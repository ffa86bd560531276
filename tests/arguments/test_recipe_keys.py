"""A recipe has the same dotted keys for trackers, for a run that is resumed, and for a study."""

from __future__ import annotations

from proxymetric.arguments.recipe_keys import flat_keys
from proxymetric.runs import recipe as recipes
from proxymetric.runs.folder import flat_values
from proxymetric.studies import parse
from proxymetric.studies.folder import NOT_COMPARED, flat_recipe
from proxymetric.system.files import read_json, write_json
from proxymetric.training.tracking.recorder import settings_of


def test_a_recipe_has_the_same_keys_everywhere(tmp_path):
    settings = {"method": "proxy-isa", "loss.base": {"method": "mpa", "per_class": 2}}
    recipe = recipes.check(recipes.settings(settings | {"data.path": "glyphs:60"})).as_dict()
    write_json(tmp_path / "run.json", {"recipe": recipe})
    values = flat_values(recipe)
    assert values["loss.base"] == {"method": "mpa", "per_class": 2}, "a table inside of a table is one value"
    assert settings_of(tmp_path) == flat_keys(read_json(tmp_path / "run.json")["recipe"]) == values
    rows = [{"name": "a", "settings": settings}]
    (task,) = parse({"name": "x", "data": {"g": {"path": "glyphs:60"}}, "rows": rows}).tasks()
    of_study = {"train.keep": "trained"}  # a study compares trainings
    assert flat_recipe(task, None) == {k: value for k, value in (values | of_study).items() if k not in NOT_COMPARED}


def test_tables_inside_of_tables_have_keys_of_their_own_if_asked():
    tables = {"seed": 0, "loss": {"scale": 1, "base": {"margin": 2, "base": {"per_class": 3}}}}
    keys = ["seed", "loss.scale", "loss.base.margin", "loss.base.base.per_class"]
    assert flat_keys(tables, deep=True) == dict(zip(keys, range(4)))
