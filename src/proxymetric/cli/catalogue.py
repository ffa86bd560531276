"""The verb that lists the methods and the shipped recipes: methods."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.arguments.own_code import trusting
from proxymetric.cli.root import app, example

if TYPE_CHECKING:
    from proxymetric.system.tables import TextTable

CITATION = re.compile(r" \([^()]* et al[^()]*\)")
SENTENCE_END = re.compile(r"[.;:] ")


@app.command(
    short_help="List the methods, or describe one.",
    epilog=example("proxymetric methods", "proxymetric methods mpa-ap", "proxymetric methods mpa-ap --recipes"),
)
def methods(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Describe this method: its arguments and their defaults.")
    ] = None,
    recipes: Annotated[
        bool, typer.Option("--recipes", help="List the shipped recipes instead, or those of the method NAME.")
    ] = False,
) -> None:
    """List the methods with their papers and when to choose each, or describe one method."""
    from proxymetric.cli.tables import catalogue_table
    from proxymetric.papers import CATALOGUE, CLOSED_FORMS, lookup
    from proxymetric.papers import options as arguments
    from proxymetric.system.terminal import Terminal

    ctx.with_resource(trusting(name))
    terminal = Terminal()
    if recipes:
        if name is not None:
            lookup(name)
        terminal.show(_recipe_table(name))
        terminal.say("\nproxymetric train --recipe RECIPE --data FOLDER trains one; --set changes its settings")
        return
    if name is None:
        terminal.show(catalogue_table({key: row.about for key, row in (CATALOGUE | CLOSED_FORMS).items()}))
        terminal.say("\nproxymetric methods NAME describes one method and its arguments")
        return
    row = lookup(name)
    first, *other_lines = (row.__doc__ or "").strip().splitlines()
    terminal.say(f"{name}: {first}")
    for line in other_lines:
        terminal.say(line.strip())
    terminal.say(f"\npaper: {row.about.paper}\nchoose it: {row.about.choose}\n\narguments with their defaults:")
    for key, parameter in arguments(name).items():
        terminal.say(f"  --set loss.{key}={parameter.default}")


def _recipe_table(method: str | None) -> TextTable:
    """The shipped recipes, or those of one method: name, method, and the first sentence of the file."""
    from proxymetric.runs import recipe
    from proxymetric.system.tables import TextTable

    columns = ["recipe", "method", "what it is"]
    table = TextTable("", columns, left=tuple(columns))
    for name in recipe.names():
        method_of_recipe = recipe.load(name)["method"]
        if method in (None, method_of_recipe):
            table.add(name, method_of_recipe, _first_sentence(recipe.find(name).read_text("utf-8")))
    return table


def _first_sentence(toml: str) -> str:
    """The first sentence of the comment at the head of a file, without its citations, in at most 100 characters.

    >>> _first_sentence("# MPA on Cars196 (Saeki et al. 2023): ten\\n# proxies. More.\\nmethod = 'mpa'")
    'MPA on Cars196'
    """
    comment = " ".join(line.strip("# ") for line in toml.splitlines() if line.startswith("#"))
    sentence = SENTENCE_END.split(CITATION.sub("", f"{comment} "))[0]
    return textwrap.shorten(sentence.rstrip(" ,"), 100, placeholder=" ...")
