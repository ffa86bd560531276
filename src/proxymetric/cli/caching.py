"""The verb that shows and clears what is kept between runs: cache."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from proxymetric.cli.results import AsJson
from proxymetric.cli.root import app, example


@app.command(
    short_help="Show or clear the features that are kept between runs.",
    epilog=example("proxymetric cache", "proxymetric cache --clear"),
)
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove the features; they are computed again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the features of frozen backbones that are kept between runs: where, of how many images, and how large.

    `train --frozen` and all heads in closed form use them. PROXYMETRIC_CACHE is another place for them. Decoded images
    are kept only in memory.
    """
    from proxymetric.features.stored import clear_features, default_folder, stored_features
    from proxymetric.system.tables import TextTable
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    folder, freed = default_folder(), clear_features() if clear else 0
    features = stored_features()
    total = sum(each.bytes for each in features)
    if as_json:
        rows = [each._asdict() | {"folder": str(each.folder)} for each in features]
        terminal.dump({"folder": str(folder), "bytes": total, "freed": freed, "features": rows})
        return
    if features:
        table = TextTable("", ["features", "images", "MB", "last added to"], left=("features",))
        for each in features:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.changed))
            table.add(each.folder.name, f"{each.images:,}", f"{each.bytes / 1e6:,.1f}", day)
        terminal.show(table)
    removed = f"removed {freed / 1e6:,.1f} MB; " if clear else ""
    terminal.print(f"{removed}{total / 1e6:,.1f} MB of features in {folder}")
