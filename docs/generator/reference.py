"""Pages of the API reference and of the command line, generated from the package."""

from __future__ import annotations

import importlib
import inspect

from generator.scores import ROOT, table

PACKAGE = ROOT / "src" / "proxymetric"
HIDDEN = {"__init__", "__main__", "arguments", "cli", "system"}
"""modules without a page: internal helpers, and the command line, which has its own page"""
ON_TOP = ("plan", "study")
"""names of the face that are described on the top page, because no page of a part has them"""
EXTENDED = {"proxymetric.search.Index"}
"""classes whose page also has the methods of the class that they extend"""
FIRST = ("criterion", "papers", "losses", "sources", "weightings", "schemes", "core", "ops", "metrics")
"""the order of the first pages; the others follow by name"""


def reference_pages() -> dict[str, str]:
    """All pages: path in the site -> text."""
    pages = {"reference/proxymetric.md": top_page(), "reference/command-line.md": command_page()}
    for name in parts():
        pages[f"reference/{name}.md"] = part_page(name)
    for name, module in inner_modules().items():
        pages[f"reference/{name}.md"] = f"# pm.{name}\n\n" + _directive(module, toplevel=True)
    return pages


def inner_modules() -> dict[str, str]:
    """The modules of the face that lie inside a part of the package: name of the face -> full name."""
    import proxymetric

    return {name: f"proxymetric.{home}" for name, home in proxymetric._MODULES.items()}


def parts() -> list[str]:
    """The packages and modules of proxymetric that have a page."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    names -= HIDDEN
    return [name for name in FIRST if name in names] + sorted(names - set(FIRST))


def top_page() -> str:
    """The names of `import proxymetric as pm`."""
    import proxymetric

    def home(name: str) -> str:
        return f"proxymetric.{proxymetric._HOMES[name]}.{name}"

    rows = []
    for name in proxymetric.__all__:
        value = getattr(proxymetric, name)
        summary = (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")
        is_module = inspect.ismodule(value)
        link = f"[`pm.{name}`]({name}.md)" if is_module else f"[`pm.{name}`][{home(name)}]"
        rows.append([link, summary])
    here = "\n".join(_directive(home(name)) for name in ON_TOP)
    names = table(["name", "what it is"], rows)
    return f"# proxymetric\n\nThe names of `import proxymetric as pm`.\n\n{names}\n\n{here}\n"


def part_page(name: str) -> str:
    """One package or module: the names of `__all__`, or all public names of its modules."""
    module = importlib.import_module(f"proxymetric.{name}")
    title = f"# proxymetric.{name}\n\n"
    if not hasattr(module, "__path__"):
        return title + _directive(module.__name__, toplevel=True)
    intro = (module.__doc__ or "").strip()
    public_names = getattr(module, "__all__", None)
    if public_names:
        names = [f"{module.__name__}.{member}" for member in public_names]
        return f"{title}{intro}\n\n" + "\n".join(_directive(member) for member in names)
    files = sorted(path.stem for path in (PACKAGE / name).glob("*.py") if not path.stem.startswith("_"))
    blocks = [f"## {file}\n\n" + _directive(f"{module.__name__}.{file}", toplevel=True, level=3) for file in files]
    return f"{title}{intro}\n\n" + "\n".join(blocks)


def _directive(identifier: str, toplevel: bool = False, level: int = 2) -> str:
    options = f"    options:\n      heading_level: {level}\n"
    if identifier in EXTENDED:
        options += "      inherited_members: true\n"
    if toplevel:
        options += "      show_root_heading: false\n      show_root_toc_entry: false\n"
    return f"::: {identifier}\n{options}"


def command_page() -> str:
    """The help texts of all commands."""
    import typer
    from typer.testing import CliRunner

    from proxymetric.cli import app

    runner = CliRunner(env={"COLUMNS": "110", "NO_COLOR": "1", "TERM": "dumb"})
    verbs = typer.main.get_command(app).commands
    blocks = ["# Command line\n\nThe help texts of `proxymetric`."]
    for verb in ("", *verbs):
        words = [verb, "--help"] if verb else ["--help"]
        text = runner.invoke(app, words, prog_name="proxymetric").output.strip()
        blocks.append(f"## proxymetric {verb}".rstrip() + f"\n\n```text\n{text}\n```")
    return "\n\n".join(blocks) + "\n"
