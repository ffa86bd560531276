"""What there is to choose from: methods."""

from __future__ import annotations

from typing import Annotated

import typer

from proxymetric.cli.root import app, example


@app.command(
    short_help="List the methods: paper, and when to choose which.",
    epilog=example("proxymetric methods mpa-ap"),
)
def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One method: its arguments and defaults.")] = None,
) -> None:
    """The catalogue: what can be trained, whose it is and when to choose it."""
    from proxymetric.cli.terminal import Terminal, catalogue_table
    from proxymetric.papers import CATALOGUE, lookup
    from proxymetric.papers import options as arguments

    terminal = Terminal()
    if name is None:
        terminal.console.print(catalogue_table({key: row.about for key, row in CATALOGUE.items()}))
        terminal.say("\nproxymetric methods NAME shows the arguments of one")
        return
    row = lookup(name)
    first, *rest = (row.__doc__ or "").strip().splitlines()
    terminal.say(f"{name}: {first}")
    for line in rest:
        terminal.say(line.strip())
    terminal.say(f"\npaper: {row.about.paper}\nchoose it: {row.about.choose}\n\narguments with their defaults:")
    for key, parameter in arguments(name).items():
        terminal.say(f"  --set loss.{key}={parameter.default}")
