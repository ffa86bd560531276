"""The verb that shows and clears what is kept between runs: cache."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from proxymetric.cli.results import AsJson
from proxymetric.cli.root import app, example


@app.command(
    short_help="Show or clear the features of images that are kept.",
    epilog=example("proxymetric cache", "proxymetric cache --clear"),
)
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove the features; they are computed again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the features of pre-trained backbones that are kept: where, of how many images, and how large.

    A pre-trained backbone runs once over an image: `train --frozen`, heads in closed form, `evaluate`, `index`,
    `inspect`, `embed` and `search` then take its features from here. Features that were not used for the longest time
    make room for new ones. PROXYMETRIC_CACHE is another place for them, and PROXYMETRIC_CACHE_GB another limit than 5;
    with 0, nothing is kept. Decoded images are kept only in memory.
    """
    from proxymetric.features import stored
    from proxymetric.system.tables import TextTable
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    folder, limit, freed = stored.default_folder(), stored.size_limit(), stored.clear_features() if clear else 0
    features, total = stored.stored_features(), stored.total_bytes()
    if as_json:
        rows = [each._asdict() | {"folder": str(each.folder)} for each in features]
        terminal.dump({"folder": str(folder), "bytes": total, "limit": limit, "freed": freed, "features": rows})
        return
    if features:
        table = TextTable("", ["features", "images", "MB", "last used"], left=("features",))
        for each in features:
            day = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.used))
            table.add(each.folder.name, f"{each.images:,}", f"{each.bytes / 1e6:,.1f}", day)
        terminal.show(table)
    removed = f"removed {freed / 1e6:,.1f} MB; " if clear else ""
    terminal.print(f"{removed}{total / 1e6:,.1f} MB of at most {limit / stored.GB:g} GB in {folder}")
