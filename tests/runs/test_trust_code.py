"""Code that a file names is imported only with --trust-code; code that the command names is imported."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import proxymetric as pm
from proxymetric.arguments.own_code import UntrustedCode, trusting
from proxymetric.system.files import read_json
from terminal import proxymetric, refused, train

MODULE = """
from pathlib import Path
Path(__file__).with_name("imported").touch()
from proxymetric.papers.proxy_anchor import proxy_anchor as method
def transform(size): return lambda image: image.resize((size, size))
"""
REFUSED = "code that a file names; expected --trust-code"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A working directory with a module that leaves a mark when it is imported."""
    (tmp_path / "strange.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "strange", raising=False)
    yield tmp_path
    sys.modules.pop("strange", None)


def was_imported(folder: Path) -> bool:
    """Whether the module was imported since the last question."""
    sys.modules.pop("strange", None)
    mark = folder / "imported"
    is_there = mark.exists()
    mark.unlink(missing_ok=True)
    return is_there


@pytest.mark.parametrize("tables", [("recipe", "said"), ("recipe",), ("said",)])
def test_resuming_a_strangers_run(folder, photos, finished, tables):
    run = shutil.copytree(finished, folder / "run")
    description = read_json(run / "run.json")
    for table in tables:
        description[table]["method"] = "strange:method"
    (run / "run.json").write_text(json.dumps(description))
    refused(proxymetric("train", "--out", run, "--resume"), "got 'strange:method'", REFUSED)
    refused(proxymetric("train", "--data", photos, "--out", run, "--resume", "--method", "triplet"), "got")
    for words in (
        ("embed", run, photos, "--out", folder / "a.safetensors"),
        ("index", run, photos, "--out", folder / "a.index"),
        ("evaluate", run, "--data", photos, "--out", folder / "a.html"),
        ("inspect", run, photos, "--out", folder / "inspected"),
        ("export", run, "--slim", folder / "slim.safetensors"),
        ("evaluate", run, "--redraw"),
    ):
        proxymetric(*words)
    pm.load(run)
    assert not was_imported(folder)


def test_own_run_is_continued_by_the_same_command_or_with_trust_code(folder, photos, only_training):
    assert train(photos, folder / "run", "--method", "strange:method").code == 0
    assert was_imported(folder), "the command names it"
    refused(
        proxymetric("train", "--out", folder / "run", "--resume"),
        f"{folder / 'run' / 'run.json'}: method: got",
        REFUSED,
    )
    assert not was_imported(folder)
    assert train(photos, folder / "run", "--method", "strange:method", "--resume").code == 0
    assert was_imported(folder)
    assert proxymetric("train", "--out", folder / "run", "--resume", "--trust-code").code == 0
    assert was_imported(folder)
    pm.train(out=folder / "run", resume=True, trust_code=True)
    assert was_imported(folder)
    with pytest.raises(UntrustedCode):
        pm.train(out=folder / "run", resume=True)
    assert not was_imported(folder)


RECIPES = [
    'method = "strange:method"',
    'method = "xbm"\n[loss]\nbase = "strange:method"',
    'method = "xbm"\n[loss.base]\nmethod = "strange:method"',
    '[view]\ntransform = "strange:transform"',
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe(folder, photos, recipe, only_training):
    (folder / "r.toml").write_text(recipe)
    for protocol in ("held-out", "mlrc"):
        words = ["--data", photos, "--recipe", "r.toml", "--out", folder / protocol, "--set", "data.test=0.5"]
        answer = proxymetric("train", "--protocol", protocol, *words, "--backbone", "small")
        refused(answer, "got 'strange:", REFUSED)
        assert not was_imported(folder)
    words = ["--set", "train.per_class=0", "--set", "data.workers=0", "--recipe", "r.toml", "--trust-code"]
    answer = train(photos, folder / "run", *words)
    assert was_imported(folder), answer


@pytest.mark.parametrize("key", ["method", "loss.base", "view.transform", "recipe"])
@pytest.mark.parametrize("dry", [True, False])
def test_a_study(folder, key, dry):
    value = "strange:transform" if key == "view.transform" else "strange:method"
    settings = {"train.epochs": 1, "encoder.backbone": "small", key: value}
    if key == "loss.base":
        settings["method"] = "xbm"
    if key == "recipe":
        (folder / "r.toml").write_text(RECIPES[0])
        del settings[key]
    rows = '[[rows]]\nname = "a"\n' + ('recipe = "r.toml"\n' if key == "recipe" else "")
    table = ", ".join(f"{json.dumps(name)} = {json.dumps(each)}" for name, each in settings.items())
    (folder / "s.toml").write_text(f'name = "s"\nsettings = {{{table}}}\n[data.g]\npath = "glyphs:20"\n{rows}')
    refused(proxymetric("study", "s.toml", *(["--dry-run"] if dry else [])), "got 'strange:", REFUSED)
    assert not was_imported(folder)
    if dry:
        assert proxymetric("study", "s.toml", "--dry-run", "--trust-code").code == 0
        assert was_imported(folder) == (key != "view.transform")


def test_a_verb_imports_what_it_names(folder):
    assert proxymetric("methods", "strange:method").code == 0
    assert was_imported(folder)
    refused(proxymetric("methods", "strange:methd", "--plan", 10), "did you mean 'method'?")
    assert was_imported(folder)


def test_the_trust_ends_with_its_block(folder):
    with trusting(), pytest.raises(UntrustedCode):
        pm.method("strange:method", classes=3, dim=2)
    assert not was_imported(folder)
    pm.method("strange:method", classes=3, dim=2)
    assert was_imported(folder)
