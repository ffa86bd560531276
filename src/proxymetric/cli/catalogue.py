"""The verb that lists the methods: methods."""

from __future__ import annotations

from typing import Annotated

import typer

from proxymetric.cli.root import app, example


@app.command(
    short_help="List the methods, or describe one.",
    epilog=example("proxymetric methods", "proxymetric methods mpa-ap"),
)
def methods(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Describe this method: its arguments and their defaults.")
    ] = None,
) -> None:
    """List the methods with their papers and when to choose each, or describe one method."""
    from proxymetric.cli.tables import catalogue_table
    from proxymetric.cli.terminal import Terminal
    from proxymetric.papers import CATALOGUE, lookup
    from proxymetric.papers import options as arguments

    terminal = Terminal()
    if name is None:
        terminal.show(catalogue_table({key: row.about for key, row in CATALOGUE.items()}))
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
