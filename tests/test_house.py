"""The house rules: who may import whom, and what is documented."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import proxymetric as pm
from proxymetric.papers import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "proxymetric"
MODULES = sorted(PACKAGE.rglob("*.py"))

FIELD = {"losses", "ops", "sources", "weightings", "schemes"}
EVERYWHERE = {"signatures", "registry", "clock", "signals", "visible", "own_code"}
"""small files that every part may import"""
LAYERS: dict[str, set[str]] = {
    "signatures": set(),
    "registry": set(),
    "_torchvision": set(),
    "checks": set(),
    "precision": set(),
    "protocol": set(),
    "files": set(),
    "device": set(),
    "lock": set(),
    "clock": set(),
    "signals": set(),
    "visible": set(),
    "own_code": set(),
    "recipe_keys": set(),
    "tracking": {"files", "recipe_keys"},
    "core": {"checks"},
    "tensor_files": set(),
    "ops": {"core", "checks"},
    "losses": {"core", "ops", "checks"},
    "sources": {"core", "ops", "checks", "precision"},
    "weightings": {"core", "ops", "checks"},
    "metrics": {"checks", "precision"},
    "schemes": {"core", "checks", "sources", "metrics"},
    "criterion": {"core", "sources"},
    "closed_forms": {"checks"},
    "papers": {"core", "criterion", "checks", "closed_forms", *FIELD},
    "testing": {"core", "ops", "criterion", "papers"},
    "planning": {"checks", "papers"},
    "checkpoint": {"files", "tensor_files"},
    "data": {"_torchvision", "core", "files"},
    "samplers": {"checks", "data", "metrics"},
    "encoders": {"_torchvision", "core", "data", "files"},
    "plots": {"metrics", "files"},
    "search": {"core", "data", "files", "lock", "metrics", "plots", "schemes", "tensor_files"},
    "models": {"checks", "core", "data", "encoders", "checkpoint", "files", "papers", "tensor_files", "device"},
    "inspection": {"core", "data", "files", "lock", "metrics", "models", "plots", "tensor_files"},
    "serve": {"data", "models", "search"},
    "training": {"core", "sources", "criterion", "encoders", "checkpoint", "metrics", "tensor_files", "tracking"},
    "recipe": {
        "checks", "data", "encoders", "files", "losses", "metrics", "papers", "protocol", "recipe_keys", "training",
    },
    "runs": {
        "closed_forms", "core", "files", "data", "metrics", "protocol", "plots", "criterion", "encoders", "papers",
        "recipe", "training", "models", "checkpoint", "device", "lock", "cli", "search", "tracking",
        "recipe_keys",
    },
    "studies": {
        "runs", "data", "files", "tensor_files", "models", "training", "protocol", "metrics", "plots", "recipe",
    },
    "cli": {
        "core", "files", "recipe", "protocol", "runs", "training", "data", "models", "search", "inspection", "metrics",
        "planning", "device", "papers", "serve", "studies",
    },
    "__main__": {"cli", "studies"},
    "__init__": {
        "criterion", "data", "encoders", "inspection", "losses", "metrics", "models", "papers", "runs", "samplers",
        "schemes", "search", "sources", "testing", "training", "weightings",
    },
}  # fmt: skip
"""the layers, from the bottom up: each part of the package, and the parts that it may import"""
WARN_LINES, MOST_LINES = 400, 600
NO_NOUNS = {"found", "said", "own", "told", "apart", "seen"}
"""words that do not say what a variable is"""


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


def test_imports_point_one_way():
    """Imports go from higher layers to lower ones, and every part of the package belongs to a layer."""
    assert {unit(file) for file in MODULES} == LAYERS.keys()
    places = list(LAYERS)
    for part, below in LAYERS.items():
        higher = [name for name in below if places.index(name) >= places.index(part)]
        assert not [name for name in higher if (part, name) != ("runs", "cli")], f"{part} is below {higher}"
    wrong = {
        file.relative_to(PACKAGE).as_posix(): sorted(above)
        for file in MODULES
        if (above := ours(file) - LAYERS[unit(file)] - EVERYWHERE)
    }
    assert not wrong, "a part imports what it may not"
    unused = {
        part: unneeded
        for part, below in LAYERS.items()
        if (unneeded := below.difference(*(ours(file) for file in MODULES if unit(file) == part)))
    }
    assert not unused, "a part may import what it does not"
    drawing = [file.name for file in MODULES if unit(file) == "runs" and "cli" in ours(file)]
    assert drawing == ["train.py"], "only `pm.train` draws progress bars as the command line does"
    terminal = {"typer", "rich", "click"}
    wrong = [
        file.relative_to(PACKAGE).as_posix()
        for file in MODULES
        if unit(file) not in ("cli", "__main__") and {name.split(".")[0] for name in imports(file)} & terminal
    ]
    assert not wrong, "only the command line needs a terminal"


def test_the_rule_about_imports_sees_what_it_should(tmp_path):
    """It sees imports inside functions, of a whole package, and of a name from a package."""
    file = tmp_path / "probe.py"
    inside = "    from proxymetric.training import train\n    from proxymetric import cli\n"
    file.write_text(f"import rich.table\ndef f():\n{inside}")
    assert imports(file) == {"rich.table", "proxymetric.training.train", "proxymetric.cli"}


def test_files_are_short_and_say_what_they_are():
    lengths = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in MODULES}
    assert not [file for file, lines in lengths.items() if lines > MOST_LINES]
    for file, lines in lengths.items():
        if lines > WARN_LINES:
            warnings.warn(f"{file.relative_to(PACKAGE)} has {lines} lines", stacklevel=1)
    silent = [file for file in MODULES if not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))]
    assert not silent, "a module says in a sentence what it is"
    assert not [file for file in MODULES if file.name == "utils.py"]


def variables(file: Path) -> Iterator[tuple[str, int]]:
    """The name and the line of every variable, parameter and attribute that a file sets or declares."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name, node.lineno
            case ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name, node.lineno
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                yield name, node.lineno


def test_names_of_variables_are_nouns():
    wrong = [
        f"{file.relative_to(ROOT).as_posix()}:{line}: {name}"
        for file in MODULES
        for name, line in variables(file)
        if name in NO_NOUNS
    ]
    assert not wrong, "a name says what the thing is: gradients, overrides, nearest_rows\n" + "\n".join(wrong)


def test_the_rule_about_names_sees_what_it_should(tmp_path):
    """It sees parameters, loops, `with`, `:=`, attributes, fields, imports, errors and patterns, but not uses."""
    file = tmp_path / "probe.py"
    file.write_text(
        "import a as found\n"
        "class A:\n    said: int\n"
        "def f(own, *, told=0, **apart):\n"
        "    own.seen = own.rest = [told for found in own_code if (said := found)]\n"
        "    with own as (told, _): pass\n"
        "    try: pass\n    except OSError as apart: pass\n"
        "    match own:\n        case {'x': seen, **found}: pass\n        case [*said]: pass\n"
        "f(found.said, own=told)\n"
    )
    places = sorted((line, name) for name, line in variables(file) if name in NO_NOUNS)
    expected = {1: ["found"], 3: ["said"], 4: ["apart", "own", "told"], 5: ["found", "said", "seen"], 6: ["told"],
                8: ["apart"], 10: ["found", "seen"], 11: ["said"]}  # fmt: skip
    assert places == [(line, name) for line, names in expected.items() for name in names]


def public() -> Iterator[tuple[str, object]]:
    others = (importlib.import_module(f"proxymetric.{name}") for name in ("papers", "planning"))
    for module in (pm, pm.losses, pm.sources, *others):
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
    """A loss has an equation, a description of each argument, a reference, and an example (which `pytest src` runs)."""
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
