"""The house rules: who may import whom, and what is documented."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
import textwrap
import tomllib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import proxymetric as pm
from proxymetric import cli
from proxymetric.papers import CATALOGUE

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "proxymetric"
MODULES = sorted(PACKAGE.rglob("*.py"))

LAYERS: dict[str, set[str]] = {
    "arguments": set(),
    "system": set(),
    "closed_forms": {"arguments"},
    "core": {"arguments"},
    "metrics": {"arguments", "system"},
    "criterion": {"core"},
    "encoders": {"arguments", "core", "system"},
    "ops": {"arguments", "core"},
    "data": {"arguments", "core", "system"},
    "weightings": {"arguments", "core"},
    "plots": {"metrics", "system"},
    "training": {"arguments", "core", "criterion", "encoders", "metrics", "system"},
    "sources": {"arguments", "core", "ops", "system"},
    "losses": {"arguments", "core", "ops"},
    "features": {"data", "encoders", "system"},
    "search": {"arguments", "core", "data", "metrics", "plots", "system"},
    "schemes": {"arguments", "core", "metrics", "sources"},
    "papers": {"arguments", "closed_forms", "core", "criterion", "losses", "ops", "schemes", "sources", "weightings"},
    "models": {"arguments", "core", "data", "encoders", "features", "papers", "system"},
    "serve": {"arguments", "data", "models", "search", "system"},
    "runs": {
        "arguments",
        "closed_forms",
        "core",
        "criterion",
        "data",
        "encoders",
        "features",
        "losses",
        "metrics",
        "models",
        "papers",
        "plots",
        "search",
        "system",
        "training",
    },
    "inspection": {"core", "data", "features", "metrics", "models", "plots", "system"},
    "studies": {"arguments", "data", "metrics", "models", "plots", "runs", "system", "training"},
    "__init__": {
        "criterion",
        "data",
        "encoders",
        "inspection",
        "losses",
        "metrics",
        "models",
        "papers",
        "runs",
        "schemes",
        "search",
        "sources",
        "studies",
        "system",
        "training",
        "weightings",
    },
    "cli": {
        "__init__",
        "arguments",
        "data",
        "features",
        "inspection",
        "models",
        "papers",
        "runs",
        "search",
        "serve",
        "system",
        "training",
    },
    "__main__": {"cli", "studies"},
}
"""the layers, from the bottom up: each part of the package, and the parts that it may import"""
WARN_LINES, MOST_LINES = 400, 600
MOST_ROOMS, MOST_ARROWS = 27, 145
NO_NOUNS = {"found", "said", "own", "told", "apart", "seen"}
"""words that do not say what a variable is"""


def unit(file: Path) -> str:
    """The part of the package that a file belongs to: a folder or a single module."""
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
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
    """The other parts of the package that a file imports; `import proxymetric` imports its face."""
    parts = {name.split(".")[1] for name in imports(file) if name.startswith("proxymetric.")}
    if "proxymetric" in imports(file):
        parts.add("__init__")
    return {part for part in parts if (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()} - {unit(file)}


def test_imports_point_one_way():
    """Imports go from higher layers to lower ones, and every part of the package belongs to a layer."""
    assert {unit(file) for file in MODULES} == LAYERS.keys()
    places = list(LAYERS)
    for part, below in LAYERS.items():
        higher = [name for name in below if places.index(name) >= places.index(part)]
        assert not higher, f"{part} is below {higher}"
    wrong = {
        file.relative_to(PACKAGE).as_posix(): sorted(above)
        for file in MODULES
        if (above := ours(file) - LAYERS[unit(file)])
    }
    assert not wrong, "a part imports what it may not"
    unused = {
        part: unneeded
        for part, below in LAYERS.items()
        if (unneeded := below.difference(*(ours(file) for file in MODULES if unit(file) == part)))
    }
    assert not unused, "a part may import what it does not"
    terminal = {"typer", "rich", "click"}
    wrong = [
        file.relative_to(PACKAGE).as_posix()
        for file in MODULES
        if not terminal_part(file) and {name.split(".")[0] for name in imports(file)} & terminal
    ]
    assert not wrong, "only the command line and the files of the terminal need its packages"


def terminal_part(file: Path) -> bool:
    """Whether a file may import the packages that draw in a terminal."""
    return unit(file) in ("cli", "__main__") or file in (PACKAGE / "system/terminal.py", PACKAGE / "system/tables.py")


def test_the_house_stays_small():
    """The parts of the package and `benchmarks/` are at most 27 rooms with at most 145 arrows between them."""
    inside = {part: set().union(*(ours(file) for file in MODULES if unit(file) == part)) for part in LAYERS}
    measured = {name.split(".")[1] for file in (ROOT / "benchmarks").rglob("*.py") for name in imports(file)
                if name.startswith("proxymetric.")}  # fmt: skip
    arrows = {**inside, "benchmarks": measured & inside.keys()}
    assert len(arrows) <= MOST_ROOMS
    assert sum(map(len, arrows.values())) <= MOST_ARROWS


def test_nothing_below_knows_the_command_line_or_the_runs():
    """Only the face, the studies and the command line import `runs`, and only `__main__` imports `cli`."""
    assert {part for part, below in LAYERS.items() if "runs" in below} == {"__init__", "studies", "cli"}
    assert {part for part, below in LAYERS.items() if "cli" in below} == {"__main__"}


VERBS = {
    "demo",
    "train",
    "evaluate",
    "inspect",
    "index",
    "search",
    "serve",
    "embed",
    "study",
    "methods",
    "export",
    "cache",
}
MOST_VERB_LINES, MOST_FACE_LINES = 40, 40


def test_verbs_are_few_and_thin():
    """There are these twelve verbs; each parses, makes a call of the library, and prints."""
    assert {verb.__name__.replace("_", "-") for verb in cli.VERBS} <= VERBS
    long = {verb.__name__: lines for verb in cli.VERBS if (lines := body_lines(verb)) > MOST_VERB_LINES}
    assert not long, "what a verb decides belongs below cli"


def body_lines(function: Callable[..., object]) -> int:
    """The lines of a function after its docstring."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    first, last = node.body[1 if ast.get_docstring(node) else 0], node.body[-1]
    return (last.end_lineno or 0) - first.lineno + 1


def test_the_face_stays_small():
    """At most 40 lines of code: without comments, blank lines and texts."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    text = {line for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            for line in range(node.lineno, (node.end_lineno or 0) + 1)}  # fmt: skip
    lines = (PACKAGE / "__init__.py").read_text(encoding="utf-8").splitlines()
    code = [line for number, line in enumerate(lines, 1) if line.strip() and number not in text]
    assert len(code) <= MOST_FACE_LINES


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
    others = (importlib.import_module(f"proxymetric.{name}") for name in ("papers", "runs.planning"))
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
