"""A number of a method is written once: at the piece that takes it."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import proxymetric as pm
from proxymetric.core.pieces import Compare
from proxymetric.papers import CATALOGUE, assembled, options
from proxymetric.papers.assembled import Builder

ROOT = Path(__file__).resolve().parents[2]
EDITS = {
    "losses/proxy_anchor.py": [
        ("    margin: float = 0.1\n", "    margin: float = 0.17\n"),
        ("margin: in [-1, 1]; 0.1 in the paper.", "margin: in [-1, 1]; 0.17 in a new paper."),
    ],
    "weightings/informative_samples.py": [
        ("memory: int = 55_000", "memory: int = 77"),
        ("its code has 55,000", "a new code has 77"),
    ],
}
"""changes of one default and its explanation each, in one file each"""
CHECK = """
import inspect, json, sys
import proxymetric as pm
from proxymetric.papers import CATALOGUE, options
from proxymetric.cli import main
names = ("proxy-anchor", "vcpa", "vptsp-m", "vptsp-g", "proxy-isa")
texts = {name: inspect.getdoc(CATALOGUE[name]) for name in names}
defaults = {name: {key: repr(each.default) for key, each in options(name).items()} for name in names}
built = {name: repr(pm.method(name, classes=3, dim=4).objective) for name in ("proxy-anchor", "vcpa", "vptsp-m")}
print(json.dumps([texts, defaults, built]))
sys.argv = ["proxymetric", "methods", "proxy-anchor"]
main()
"""
ASSEMBLED = {name: method for name, method in CATALOGUE.items() if hasattr(method, "__wrapped__")}


def decorator(name: str) -> tuple[list[object], dict[str, object]]:
    """The pieces that `@assembled(...)` of a method lists, and the numbers that it states."""
    function = inspect.unwrap(CATALOGUE[name])
    module = importlib.import_module(function.__module__)
    tree = ast.parse(inspect.getsource(module))
    definition = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function.__name__)
    call = definition.decorator_list[1]
    assert isinstance(call, ast.Call)
    pieces = [getattr(module, each.id) for each in call.args if isinstance(each, ast.Name)]
    return pieces, {
        each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg not in (None, "without")
    }


def test_a_default_changed_in_a_piece_shows_everywhere(tmp_path: Path) -> None:
    """In signature, help, command line and the objective of each method with this piece; one file is edited."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name, changes in EDITS.items():
        file = tmp_path / "src" / "proxymetric" / name
        text = file.read_text(encoding="utf-8")
        for before, after in changes:
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        file.write_text(text, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src"), "COLUMNS": "200"}
    words = [sys.executable, "-c", CHECK]
    answer = subprocess.run(words, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr[-3000:]
    first, _, printed = answer.stdout.partition("\n")
    texts, defaults, built = json.loads(first)
    assert all(defaults[name]["margin"] == "0.17" for name in ("proxy-anchor", "vcpa", "vptsp-m", "vptsp-g"))
    assert defaults["proxy-isa"]["memory"] == "77"
    assert "0.17 in a new paper" in texts["proxy-anchor"]
    assert "a new code has 77" in texts["proxy-isa"]
    assert all("margin=0.17" in text for text in built.values()), built
    assert "--set loss.margin=0.17" in printed
    assert "0.17 in a new paper" in printed
    margins = [line for text in texts.values() for line in text.splitlines() if line.startswith("    margin: ")]
    assert len(margins) == 4
    assert not any("0.1 " in line for line in margins), "a second place that states the old number"


def test_the_pages_of_the_site_have_the_derived_arguments() -> None:
    griffe = pytest.importorskip("griffe")
    sys.path.insert(0, str(ROOT / "docs"))
    from generator.docstrings import Docstrings

    module = griffe.load(
        "proxymetric.papers.proxy_isa", search_paths=[ROOT / "src"], extensions=griffe.Extensions(Docstrings())
    )
    method = module["proxy_isa"]
    shown = {each.name: each.default for each in method.parameters if each.default is not None}
    assert shown == {key: repr(each.default) for key, each in options("proxy-isa").items()}
    explained = {
        each.name for part in method.docstring.parse("google") if part.kind == "parameters" for each in part.value
    }
    assert explained == {"classes", "dim", *shown}


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_argument_is_explained_once(name: str) -> None:
    text = inspect.getdoc(CATALOGUE[name]) or ""
    explained = [line[4:].partition(":")[0] for line in text.splitlines() if assembled.ENTRY.match(line)]
    assert explained == list(inspect.signature(CATALOGUE[name]).parameters)


@pytest.mark.parametrize("name", ASSEMBLED)
def test_no_method_repeats_a_number_of_its_pieces(name: str) -> None:
    pieces, stated = decorator(name)
    numbers = {key: number for piece in reversed(pieces) for key, number in assembled._numbers(piece).items()}
    assert not [key for key, value in stated.items() if numbers[key].default == value], "already the default"
    assert not set(numbers) & set(assembled._numbers(inspect.unwrap(CATALOGUE[name]))), "an argument of a piece"


@pytest.mark.parametrize("name", ASSEMBLED)
def test_every_piece_whose_numbers_are_offered_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, call, unless = set(), Builder.__call__, Builder.unless
    monkeypatch.setattr(Builder, "__call__", lambda *args, **more: asked.add(args[1]) or call(*args, **more))
    monkeypatch.setattr(Builder, "unless", lambda *args, **idle: asked.add(args[1]) or unless(*args, **idle))
    pm.method(name, classes=3, dim=4)
    assert asked >= set(decorator(name)[0])


def test_all_methods_of_the_catalogue_but_one_are_assembled() -> None:
    assert set(CATALOGUE) - set(ASSEMBLED) == {"xbm"}, "xbm states its own numbers only"


@dataclass(frozen=True)
class Part:
    """A part.

    Args:
        size: 3 by default.
        kind: a text.
        inner: no number.
    """

    size: int = 3
    kind: str = "a"
    inner: object = ()


def test_a_method_offers_the_numbers_of_its_pieces_and_its_own() -> None:
    @assembled.assembled(Part, without=("kind",), size=4)
    def method(build: Builder, *, own: float = 0.5) -> Compare:
        """Say what it is.

        Args:
            own: in its own words.

        Example:
            none
        """
        return build(Part, inner=own)  # type: ignore[return-value]

    assert method(1, 2, own=0.25) == Part(4, "a", 0.25)
    assert method(1, 2, size=5).size == 5
    assert str(inspect.signature(method)) == (
        "(classes: 'int', dim: 'int', *, own: 'float' = 0.5, size: 'int' = 4) -> 'Objective'"
    )
    assert inspect.getdoc(method).splitlines()[2:8] == [
        "Args:",
        "    classes: number of training classes, C.",
        "    dim: width of the embeddings, D.",
        "    own: in its own words.",
        "    size: 3 by default.",
        "",
    ]
    with pytest.raises(TypeError, match="kind"):
        method(1, 2, kind="b")


def test_a_number_that_no_piece_takes_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="better: got 'sise', expected a number of its pieces; did you mean 'size'"):

        @assembled.assembled(Part, sise=3)
        def better(build: Builder) -> Compare: ...


def test_a_piece_that_does_nothing_is_left_out() -> None:
    build = Builder({"classes": 1, "dim": 2, "size": 0, "kind": None})
    assert build.unless(Part, size=0) is None
    assert build.unless(Part, size=0, kind=None) is None
    assert build.unless(Part, kind="a") == Part(0, None)
