"""Recipes: what is accepted, what is refused with which message, and which setting overrides which."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest

import terminal
from proxymetric.arguments.signatures import fit
from proxymetric.runs import recipe
from proxymetric.runs.recipe import DataOptions, check, find, load, merged, names, settings
from proxymetric.system.files import read_json
from proxymetric.training.options import TrainOptions

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted((ROOT / "recipes").rglob("*.toml"))


def test_there_are_recipes():
    assert len(RECIPES) >= 2


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_of_the_repository_passes(path):
    checked = check(load(path))
    said = tomllib.loads(path.read_text(encoding="utf-8"))
    assert checked.method == said.get("method", "proxy-anchor")
    for key, value in said.get("train", {}).items():
        is_none = value == "none" and key in ("patience", "clip_value", "decay_every")
        expected = None if is_none else tuple(value) if isinstance(value, list) else value
        assert getattr(checked.train, key) == expected


COMPARED = {
    "proxy-anchor": ("vcpa", "mpa", "mpa-dw", "mpa-ap", "proxy-isa", "soft-triple"),
    "proxy-anchor-plain": ("proxy-isa-plain",),
    "margin-contrastive": ("ccp",),
    "multi-similarity": ("ccp-multi-similarity",),
    "contrastive": ("ccp-contrastive",),
    "triplet": ("ccp-triplet",),
    "vit-s-160/vpt-bitfit-text": ("vit-s-160/vptsp-m-text", "vit-s-160/vptsp-g-text", "vit-s-160/vpt-bitfit-released"),
    "vit-s-160/vpt-bitfit-released": ("vit-s-160/vptsp-m-released", "vit-s-160/vptsp-g-released"),
}
"""recipe of a baseline -> recipes that are compared with it"""


@pytest.mark.parametrize("data", ["cub", "cars"])
@pytest.mark.parametrize("baseline", COMPARED)
def test_recipes_that_are_compared_differ_in_nothing_but_the_method(data, baseline):
    def tables(name):
        checked = check(load(ROOT / "recipes" / data / f"{name}.toml")).as_dict()
        checked["train"].pop("proxy_lr")  # the Gaussians of vcpa and pair losses have none
        if (data, baseline, name) == ("cars", "vit-s-160/vpt-bitfit-text", "vit-s-160/vpt-bitfit-released"):
            checked["train"]["lr"] = 5e-4  # the readings have different ones on Cars: studies/cars-vptsp-rates.toml
        return {part: checked[part] for part in ("data", "view", "encoder", "train")}

    for name in COMPARED[baseline]:
        assert tables(name) == tables(baseline), name


def test_both_sets_have_the_same_recipes_of_the_papers_size():
    names = {data: {path.name for path in (ROOT / "recipes" / data).glob("*.toml")} for data in ("cub", "cars")}
    assert names["cub"] - names["cars"] == {"proxy-anchor-160.toml", "proxy-anchor-frozen.toml"}
    assert names["cars"] <= names["cub"]


def test_defaults_are_those_of_the_signatures():
    empty = check({})
    assert empty.data == DataOptions()
    assert check({"encoder": {"backbone": "small"}}).train == TrainOptions()
    assert empty.loss["margin"] == 0.1
    assert empty.encoder["backbone"] == "resnet50"
    assert empty.view["size"] == 224
    assert check({"encoder": {"backbone": "small"}}).view["size"] == 32


@pytest.mark.parametrize(
    ("encoder", "train", "freeze_bn", "warmup", "decay_every"),
    [
        ({}, {}, "all", 5, 5),
        ({}, {"epochs": 16}, "all", 4, 2),
        ({}, {"epochs": 3}, "all", 0, 1),
        ({}, {"decay": "cosine"}, "all", 5, None),
        ({"freeze_bn": "none"}, {"warmup": 1, "decay_every": 10}, "none", 1, 10),
        ({}, {"frozen": True}, False, 1, 10),
        ({"pretrained": False}, {}, False, 1, 10),
        ({"backbone": "vit_tiny_patch16_224", "tuning": "vpt"}, {}, False, 1, 10),
    ],
)
def test_defaults_of_a_pretrained_network_that_is_trained(
    encoder: dict, train: dict, freeze_bn: object, warmup: int, decay_every: int
) -> None:
    recipe = check({"encoder": encoder, "train": train})
    assert (recipe.encoder["freeze_bn"], recipe.train.warmup, recipe.train.decay_every) == (
        freeze_bn, warmup, decay_every
    )  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (
            {"los": {}},
            "recipe: got the key 'los', expected one of method, protocol, ",
        ),
        ({"loss": {"margn": 1}}, "loss.margn: got an unknown key, expected a key of [loss]; did you mean 'margin'?"),
        (
            {"train": {"learning_rate": 1}},
            "train.learning_rate: got an unknown key, expected a key of [train]; did you mean 'train.lr'?",
        ),
        (
            {"encoder": {"bakbone": "small"}},
            "encoder.bakbone: got an unknown key, expected a key of [encoder]; did you mean 'backbone'?",
        ),
        ({"data": {"held_out": 0.4}}, "[data]; did you mean 'data.validation'?"),
        ({"train": {"Image-Size": 64}}, "[train]; did you mean 'view.size'?"),
        ({"batch_size": 4}, "did you mean 'train.batch'?"),
        ({"train": {"xyz": 1}}, "expected a key of [train] (epochs, batch, "),
        ({"encoder": {"size": 3}}, "encoder.size: got an unknown key"),
        ({"loss": {"classes": 3}}, "loss.classes: got an unknown key"),
        (
            {"margin": 0.2},
            "encoder, loss, train; did you mean 'loss.margin'?",
        ),
        ({"patience": 2}, "train; did you mean 'train.patience'?"),
        ({"method": "proxy-ancor"}, "lda; did you mean 'proxy-anchor'?"),
        ({"method": {"x": 1}}, "method: got {'x': 1}, expected a name"),
        ({"loss": 1}, "loss: got 1, expected a table, or a key of it: loss.KEY=VALUE"),
        ({"seed": "7"}, "seed: got '7', expected a whole number"),
        ({"seed": True}, "seed: got True, expected a whole number"),
        ({"seed": -1}, "seed: got -1, expected a whole number of at least 0"),
        ({"loss": {"margin": "0.1"}}, "loss.margin: got '0.1', expected a number"),
        ({"loss": {"margin": True}}, "loss.margin: got True, expected a number"),
        ({"train": {"epochs": 2.5}}, "train.epochs: got 2.5, expected a whole number"),
        ({"train": {"epochs": True}}, "train.epochs: got True, expected a whole number"),
        ({"train": {"frozen": 1}}, "train.frozen: got 1, expected true or false"),
        ({"train": {"lr": "fast"}}, "train.lr: got 'fast', expected a number or none"),
        ({"train": {"betas": 0.9}}, "train.betas: got 0.9, expected a list of 2 numbers"),
        ({"train": {"betas": [0.9]}}, "train.betas: got [0.9], expected a list of 2 numbers"),
        ({"train": {"betas": [0.9, "b"]}}, "train.betas: got 'b', expected a number"),
        ({"train": {"metrics": ["R@1", 3]}}, "train.metrics: got 3, expected text"),
        ({"train": {"metrics": ["R@1", "mapr"]}}, "metrics: got 'mapr', expected R@K"),
        ({"train": {"monitor": "mapr"}}, "train.monitor: got 'mapr', expected one of train.metrics (R@1, "),
        ({"train": {"optimizer": "lion"}}, "train.optimizer: got 'lion', expected one of adamw, adam, sgd"),
        ({"train": {"epochs": 0}}, "train.epochs: got 0, expected at least 1"),
        ({"train": {"patience": 0}}, "train.patience: got 0, expected at least 1"),
        ({"train": {"evaluate_steps": 0}}, "train.evaluate_steps: got 0, expected at least 1"),
        ({"train": {"evaluate_steps": 2.5}}, "train.evaluate_steps: got 2.5, expected a whole number or none"),
        ({"train": {"lr": -1}}, "train.lr: got -1.0, expected at least 0"),
        ({"train": {"lr": float("nan")}}, "train.lr: got nan, expected at least 0"),
        ({"train": {"lr": float("inf")}}, "train.lr: got inf, expected at least 0"),
        ({"train": {"warmup": -1}}, "train.warmup: got -1, expected at least 0"),
        ({"train": {"clip_norm": 0}}, "train.clip_norm: got 0.0, expected more than 0"),
        ({"train": {"betas": [0.9, 1]}}, "train.betas: got (0.9, 1.0), expected at least 0 and less than 1"),
        (
            {"data": {"cache": "memry"}},
            "data.cache: got 'memry', expected one of auto, none, memory, device; did you mean 'memory'?",
        ),
        ({"data": {"workers": -2}}, "data.workers: got -2"),
    ],
)
def test_mistakes_are_refused_with_the_key_and_what_is_wanted(raw, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        check(raw)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("-2", -2), ("0.2", 0.2), ("1e-4", 1e-4), ("true", True), ("false", False), ("none", "none"),
        ("[0.16, 1.0]", [0.16, 1.0]), ('["R@1", "MAP@R"]', ["R@1", "MAP@R"]), ('"3"', "3"),
        ("resnet50", "resnet50"), ("avg+max", "avg+max"), ("a b", "a b"), ("", ""), ("x=y", "x=y"),
        ("runs/w.safetensors", "runs/w.safetensors"),
    ],
)  # fmt: skip
def test_values_of_set_are_read_as_what_they_look_like(text, value):
    found = settings([f"train.key={text}"])["train"]["key"]
    assert found == value
    assert type(found) is type(value)


def test_set_takes_spaces_tables_and_the_last_word():
    assert settings([" loss.margin = 0.2 ", "seed=3"]) == {"loss": {"margin": 0.2}, "seed": 3}
    assert settings(["loss.margin=0.2", "loss.margin=0.3", "loss.scale=16"]) == {"loss": {"margin": 0.3, "scale": 16}}
    assert settings({"loss.margin": 0.2, "loss": {"scale": 16}}) == {"loss": {"margin": 0.2, "scale": 16}}


@pytest.mark.parametrize("text", ["loss.margin", "", "loss"])
def test_set_without_a_value_is_refused(text):
    with pytest.raises(ValueError, match=r"expected table.key=value, such as loss.margin=0.2"):
        settings([text])


@pytest.mark.parametrize("texts", [["loss=1", "loss.margin=0.2"], ["loss.margin=0.2", "loss=1"]])
def test_a_value_never_hides_a_table(texts):
    with pytest.raises(ValueError, match=r"^loss: got .* expected a table or a value, not both"):
        settings(texts)


def test_none_is_the_name_where_nothing_is_no_choice():
    checked = check(settings(["train.decay=none", "train.patience=none", "encoder.head=none", "encoder.weights=None"]))
    assert (checked.train.decay, checked.train.patience) == ("none", None)
    assert (checked.encoder["head"], checked.encoder["weights"]) == ("none", None)


def test_whole_numbers_pass_for_floats_and_lists_for_tuples():
    checked = check({"loss": {"margin": 1}, "train": {"lr": 1, "betas": [0, 0.5]}, "view": {"scale": [1, 1]}})
    assert type(checked.loss["margin"]) is float
    assert type(checked.train.lr) is float
    assert checked.train.betas == (0.0, 0.5)
    assert checked.view["scale"] == (1.0, 1.0)


def test_later_layers_win_key_by_key():
    layers = ({"seed": 1, "loss": {"margin": 0.1, "scale": 32}}, {"loss": {"margin": 0.2}}, {"seed": 2})
    assert merged(*layers) == {"seed": 2, "loss": {"margin": 0.2, "scale": 32}}
    assert layers[0]["loss"] == {"margin": 0.1, "scale": 32}


@pytest.mark.parametrize(
    ("layers", "prompts"),
    [
        ([["encoder.tuning=vpt", "encoder.tuning.prompts=20", "encoder.tuning.step=1"]], (20, 1)),
        ([["encoder.tuning=vpt"], ["encoder.tuning.prompts=20", "encoder.tuning.step=1"]], (20, 1)),
        ([["encoder.tuning={name='vpt', prompts=5, step=2}"], ["encoder.tuning.prompts=20"]], (20, 2)),
        ([["encoder.tuning={name='vpt', prompts=5, step=2}"], ["encoder.tuning={name='vpt', step=1}"]], (10, 1)),
        ([["encoder.tuning={name='vpt', prompts=5, step=2}"], ["encoder.tuning=vpt"]], (10, 0)),
    ],
)
def test_an_argument_of_a_tuning_is_set_by_itself(layers, prompts):
    told = recipe.check(recipe.merged(*map(recipe.settings, layers))).encoder["tuning"]
    assert (told["name"], told["prompts"], told["step"]) == ("vpt", *prompts)


def test_an_argument_of_a_base_is_set_by_itself():
    ccp = {"method": "ccp", "loss": {"base": {"method": "mpa", "per_class": 4}}}
    more = merged(ccp, settings(["loss.base.margin=0.2"]))
    assert check(more).loss["base"] == {"method": "mpa", "per_class": 4, "margin": 0.2}
    word = merged({"method": "ccp", "loss": {"base": "mpa"}}, settings(["loss.base.per_class=2"]))
    assert check(word).loss["base"] == {"method": "mpa", "per_class": 2}
    default = check(merged({"method": "ccp"}, settings(["loss.base.margin=0.2"]))).loss["base"]
    assert default == {"method": check({"method": "ccp"}).loss["base"], "margin": 0.2}
    frozen = {"method": "ccp", "train": {"frozen": True}}
    assert check(merged(frozen, settings(["loss.base.margin=0.2"]))).loss["base"] == default
    whole = merged(ccp, settings(["loss.base={method='proxy-nca'}"]))
    assert check(whole).loss["base"] == {"method": "proxy-nca"}


def test_a_recipe_survives_json():
    first = check(load(RECIPES[0]))
    again = check(json.loads(json.dumps(first.as_dict())))
    assert again == first
    assert again.as_dict() == first.as_dict()


def test_a_recipe_file_that_is_missing_or_broken_is_named(tmp_path):
    (tmp_path / "demo.toml").write_text("method = proxy-anchor\n")
    with pytest.raises(ValueError, match=r"demo.toml, expected valid TOML: .*line 1"):
        load(tmp_path / "demo.toml")
    with pytest.raises(ValueError, match=r"got .*demmo.toml., expected a TOML file .*; did you mean .*/demo.toml.\?"):
        load(tmp_path / "demmo.toml")


@pytest.mark.usefixtures("only_training")
def test_flags_win_over_the_file_and_set_wins_over_flags(photos, tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'method = "mpa"\nseed = 4\n[loss]\nmargin = 0.3\nscale = 16\n[encoder]\ndim = 4\n[train]\nepochs = 9\n'
    )
    answer = terminal.train(
        photos, tmp_path / "run", "--recipe", file, "--epochs", 2, "--seed", 5, "--set", "seed=6",
        "--set", "loss.margin=0.4", "--set", "encoder.dim=6",
    )  # fmt: skip
    assert answer.code == 0, answer
    used = read_json(tmp_path / "run" / "result.json")["recipe"]
    assert used["method"] == "mpa"  # the file's alone
    assert used["loss"]["scale"] == 16
    assert used["train"]["epochs"] == 2  # the flag over the file
    assert used["loss"]["margin"] == 0.4  # --set over the file
    assert (used["encoder"]["dim"], used["seed"]) == (6, 6)  # --set over the flag
    assert check(used) == check(merged(recipe.load(file), used))


def test_shipped_recipes_are_found_by_name_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert set(names()) == {str(file.relative_to(ROOT / "recipes").with_suffix("")) for file in RECIPES}
    assert (
        load("cub/proxy-anchor")
        == load("recipes/cub/proxy-anchor.toml")
        == load(ROOT / "recipes/cub/proxy-anchor.toml")
    )
    with pytest.raises(ValueError, match=r"got 'cub/proxy-ancor', expected .*; did you mean 'cub/proxy-anchor'\?"):
        find("cub/proxy-ancor")


def test_a_file_wins_over_a_shipped_recipe_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "cub").mkdir(parents=True)
    (tmp_path / "recipes" / "cub" / "proxy-anchor.toml").write_text("seed = 9\n")
    assert load("recipes/cub/proxy-anchor.toml") == {"seed": 9}


@pytest.mark.parametrize(
    ("value", "annotation", "fitted"),
    [
        (3, float, 3.0), ("none", int | None, None), ("None", float | None, None), ("none", str, "none"),
        ([1, 2.5], tuple[float, float], (1.0, 2.5)), (["a"], tuple[str, ...], ("a",)), ("a", Literal["a", "b"], "a"),
        ("none", Literal["a"] | None, None), ("f.toml", Path | None, "f.toml"),
        ({"a": 1}, str | dict[str, Any], {"a": 1}),
    ],
)  # fmt: skip
def test_values_that_fit(value, annotation, fitted):
    result = fit("x", value, annotation)
    assert result == fitted
    assert type(result) is type(fitted)


@pytest.mark.parametrize(
    ("value", "annotation", "words"),
    [
        (True, float, "a number"), (True, int | None, "a whole number or none"), (2.5, int, "a whole number"),
        ("c", Literal["a", "b"], "one of a, b"), (1, bool, "true or false"),
        ([1], tuple[float, float], "a list of 2 numbers"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit(value, annotation, words):
    with pytest.raises(ValueError, match=re.escape(f"x: got {value!r}, expected {words}") + "$"):
        fit("x", value, annotation)
