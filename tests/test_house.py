"""The house rules: who may import whom, what is documented, and that the README tells the truth."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import proxymetric as pm
from proxymetric.cli import app
from proxymetric.papers import CATALOGUE
from terminal import TINY, proxymetric

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "proxymetric"
MODULES = sorted(PACKAGE.rglob("*.py"))

PIECES = {"losses", "ops", "references", "weightings", "schemes"}
TOP = {"training", "protocols", "studies", "cli", "progress", "serve", "__main__"}
"""what nothing below may import"""
MAY_IMPORT: dict[str, set[str]] = {
    "look": set(),
    "rules": set(),
    "shards": set(),
    "tally": {"shards"},
    "seam": {"look", "rules", "shards", "tally"},
    "ops": {"rules", "seam", "shards"},
    "checks": set(),
    "precision": set(),
    "losses": {"rules", "seam", "shards", "ops", "checks"},
    "references": {"look", "seam", "shards", "tally", "ops", "checks", "precision"},
    "weightings": {"rules", "seam", "shards", "tally", "ops", "checks", "references"},
    "schemes": {"look", "seam", "ops", "checks", "references", "weightings", "metrics"},
    "criterion": {"look", "seam", "shards", "references"},
    "papers": {"seam", "criterion", "checks", *PIECES},
    "testing": {"seam", "criterion", "papers"},
    "files": set(),
    "device": set(),
    "planning": {"checks"},
    "checkpoint": {"files"},
    "data": {"seam", "files"},
    "encoders": {"_torchvision", "data", "files", "look"},
    "metrics": {"precision"},
    "plots": {"metrics", "files"},
    "search": {"seam", "files"},
    "protocol": set(),
    "recipe": {"data", "encoders", "metrics", "papers", "protocol"},
}
"""the layers, from the bottom up; a unit that is not named here may import anything but what `TOP` forbids"""


def unit(file: Path) -> str:
    """The part of the package that a file belongs to: a folder or a single module."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(file: Path) -> set[str]:
    """Every module that a file imports anywhere, also inside functions, with its full name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(file: Path) -> set[str]:
    """The other parts of the package that a file imports."""
    parts = {name.split(".")[1] for name in imports(file) if name.startswith("proxymetric.")}
    return {part for part in parts if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()} - {unit(file)}


def names(modules: list[Path]) -> list[str]:
    return [module.relative_to(PACKAGE).as_posix() for module in modules]


@pytest.mark.parametrize("file", MODULES, ids=names(MODULES))
def test_imports_point_one_way(file):
    if unit(file) in MAY_IMPORT:
        above = ours(file) - MAY_IMPORT[unit(file)]
        assert not above, f"{unit(file)} may not import {', '.join(sorted(above))}"
    if unit(file) not in TOP | {"__init__"}:
        assert not ours(file) & TOP
    if unit(file) not in ("cli", "training"):
        assert "progress" not in ours(file), "only the command line and `pm.train` draw bars"
    if unit(file) not in ("__main__", "cli"):
        assert "cli" not in ours(file)
    if unit(file) not in ("cli", "progress", "__main__"):
        assert not {name.split(".")[0] for name in imports(file)} & {"typer", "rich", "click"}


def test_the_rule_about_imports_sees_what_it_should(tmp_path):
    """Also imports inside functions, of a whole package, and of a name from it."""
    file = tmp_path / "probe.py"
    inside = "    from proxymetric.training import train\n    from proxymetric import cli\n"
    file.write_text(f"import rich.table\ndef f():\n{inside}")
    assert imports(file) == {"rich.table", "proxymetric.training.train", "proxymetric.cli"}


@pytest.mark.parametrize("file", MODULES, ids=names(MODULES))
def test_files_are_short_and_say_what_they_are(file):
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 600
    assert ast.get_docstring(ast.parse(text)), "a module says in a sentence what it is"
    assert file.name != "utils.py"


def public() -> Iterator[tuple[str, object]]:
    others = (importlib.import_module(f"proxymetric.{name}") for name in ("papers", "planning"))
    for module in (pm, pm.losses, pm.references, *others):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) or inspect.ismodule(value):
                yield f"{module.__name__.removeprefix('proxymetric').strip('.') or 'pm'}.{name}", value


@pytest.mark.parametrize(("name", "value"), list(public()), ids=lambda value: value if isinstance(value, str) else "")
def test_every_public_name_is_explained(name, value):
    text = inspect.getdoc(value) or ""
    first = text.split("\n\n")[0].strip()
    assert len(first) > 15, name
    assert first.endswith((".", ":")), f"{name} begins with a sentence, not {first!r}"
    if inspect.isclass(value):
        assert "__doc__" in vars(value), "its own words, not those of a base class"


@pytest.mark.parametrize("name", pm.losses.__all__)
def test_every_loss_teaches(name):
    """An equation, each number and name it takes, where it comes from, and an example (which `pytest src` runs)."""
    loss = getattr(pm.losses, name)
    text = inspect.getdoc(loss)
    equations = [equation for equation in re.findall(r"``(.+?)``", text, re.DOTALL) if re.search(r"[-+/]", equation)]
    assert equations, "an equation"
    for argument, parameter in inspect.signature(loss).parameters.items():
        if isinstance(parameter.default, int | float | str):
            assert re.search(rf"\b{argument}\b[^:\n]*:", text), f"{argument} is explained"
    assert re.search(r"\b(19|20)\d\d\b|\bEqs?\. \d", text), "the paper's year or the number of the equation"
    assert doctest.DocTestParser().get_examples(text), "an example"


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_method_cites_and_advises(name):
    row = CATALOGUE[name]
    assert re.fullmatch(r"[^,]+ (19|20)\d\d, .{10,}", row.about.paper), "authors year, title"
    assert len(row.about.choose) > 20
    assert len((row.__doc__ or "").strip()) > 20
    home = inspect.getmodule(row)
    assert home is not None
    assert re.search(r"(19|20)\d\d", home.__doc__ or ""), "the file's first line names the paper"
    parameters = inspect.signature(row).parameters
    assert list(parameters)[:2] == ["classes", "dim"]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in list(parameters.values())[2:])


def test_the_version_is_written_once_more():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == pm.__version__


# The README

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str, text: str = README) -> list[str]:
    """The code blocks of a language, without those that follow a line `<!-- skip: reason -->`."""
    fence = re.compile(rf"^(<!-- skip: [^\n]+ -->\n)?^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [code for skip, code in fence.findall(text) if not skip]


def test_blocks_are_found_and_skipped():
    text = "a\n```python\nx = 1\n```\n<!-- skip: needs photos -->\n```python\ny\n```\n```bash\nls\n```\n"
    assert blocks("python", text) == ["x = 1\n"]
    assert blocks("bash", text) == ["ls\n"]


def test_the_readmes_python_runs(photos, tmp_path, monkeypatch):
    """In one namespace, where `make demo` has been (a small one)."""
    assert blocks("python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("proxymetric.training.run.draw_report", lambda *args, **kwargs: None)
    size = ("--size", 32, "--set", "view.resize=32")
    answer = proxymetric("train", "--data", photos, *TINY, *size, "--out", "runs/demo")
    assert answer.code == 0, answer
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, code in enumerate(blocks("python"), 1):
        exec(compile(code, f"README.md, python block {number}", "exec"), namespace)


def commands(text: str) -> list[list[str]]:
    """The words of every `proxymetric VERB ...` of a shell text, continued lines joined."""
    lines = text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[line.index("proxymetric") + 1 :] for line in words if "proxymetric" in line]


SAID = [words for code in blocks("bash") for words in commands(code)]
SAID += [words for span in re.findall(r"`(proxymetric [^`]+)`", README) for words in commands(span)]
"""every command of the README, in blocks and in sentences"""


def test_the_readme_shows_commands():
    assert len(SAID) >= 4


@pytest.mark.parametrize("words", SAID, ids=" ".join)
def test_the_readmes_commands_exist(words):
    verbs = typer.main.get_command(app).commands
    verb, *rest = words
    assert verb in verbs
    known = {flag for option in verbs[verb].params for flag in (*option.opts, *option.secondary_opts)}
    for flag in (word.split("=")[0] for word in rest if word.startswith("-")):
        assert flag in known, f"proxymetric {verb} has no {flag}"


def test_flags_in_the_readmes_sentences_exist():
    verbs = typer.main.get_command(app).commands.values()
    known = {flag for verb in verbs for option in verb.params for flag in (*option.opts, *option.secondary_opts)}
    mentioned = set(re.findall(r"`(--[a-z][a-z-]*)", README))
    assert mentioned
    assert mentioned <= known


def test_the_recipes_and_files_of_the_readme_exist():
    for name in set(re.findall(r"recipes/[\w/.+-]+\.toml|src/[\w/]+\.py", README)):
        assert (ROOT / name).is_file(), name
