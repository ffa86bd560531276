"""Verbs that keep an index as it should be: index metadata, index switch, index verify, index compact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from proxymetric.cli.root import app, example
from proxymetric.cli.searching import IndexFolder
from proxymetric.system.text import visible

MOST_NAMED = 5
"""unknown ids that a message names"""


@app.command(
    "index metadata",
    hidden=True,
    short_help="Change the metadata and classes of an index by a CSV file, without embedding anything.",
    epilog=example("proxymetric index metadata shop.index prices.csv"),
)
def metadata(
    folder: IndexFolder,
    table: Annotated[
        Path,
        typer.Argument(
            metavar="CSV", help="File with a column `file` or `id`, the ids that `search` prints, and other columns."
        ),
    ],
) -> None:
    """Change the metadata of an index, all of it in one step; `search` and a running `serve` know it at once.

    The columns of the file take the place of those of the same name, and an empty cell removes a value. Images keep the
    columns that the file does not have. The column `class` gives classes. Ids that the index does not have are named.
    """
    from proxymetric.search import Index
    from proxymetric.search.metadata_file import change_metadata
    from proxymetric.system.terminal import Terminal

    opened, terminal = Index(folder), Terminal()
    result = change_metadata(opened, table)
    terminal.print(f"{result.changed:,} changed, {result.unchanged:,} unchanged in {opened.folder}")
    if unknown := result.unknown:
        named = ", ".join(map(visible, unknown[:MOST_NAMED])) + (", ..." if len(unknown) > MOST_NAMED else "")
        terminal.say(f"{len(unknown):,} of the lines of {table} are about no image of the index: {named}")


@app.command(
    "index switch",
    hidden=True,
    short_help="Put an index that another model made in the place of one that is in use.",
    epilog=example(
        "proxymetric index runs/new IMAGES --out new.index", "proxymetric index switch shop.index new.index"
    ),
)
def switch(
    folder: IndexFolder,
    other: Annotated[Path, typer.Argument(metavar="OTHER", help="The index that takes its name.")],
    drop_missing: Annotated[
        bool, typer.Option("--drop-missing", help="Images of INDEX that OTHER lacks drop out.")
    ] = False,
) -> None:
    """Exchange the names of two indexes in one step; the same command again goes back.

    Classes and metadata of INDEX are written to OTHER first, so that they stay. A running `serve` loads the model of
    the new index and follows; until then it answers from the earlier one. Both folders lie on one disk.
    """
    from proxymetric.search.switching import switch as switch_names
    from proxymetric.system.terminal import Terminal

    index = switch_names(folder, other, drop_missing=drop_missing)
    made_by = visible(index.manifest.run.get("run", index.model[:12]))
    Terminal().print(f"{index.folder}: {len(index):,} images, vectors of {made_by}; {other} has the earlier ones")


@app.command(
    "index verify",
    hidden=True,
    short_help="Compare all files of an index with their checksums.",
    epilog=example("proxymetric index verify shop.index"),
)
def verify(folder: IndexFolder) -> None:
    """Read all files of an index and compare them with their checksums; a damaged file is named, with exit code 1."""
    from proxymetric.search import Index
    from proxymetric.system.terminal import Terminal

    opened = Index(folder)
    opened.verify()
    Terminal().print(f"{opened.folder}: {len(opened):,} images, all files are as they were written")


@app.command(
    "index compact",
    hidden=True,
    short_help="Write the files of an index anew, without what was removed.",
    epilog=example("proxymetric index compact shop.index"),
)
def compact(folder: IndexFolder) -> None:
    """Write all files of an index anew, so that no byte of a removed image is left in them.

    It takes as long as copying them, and room for both. `search` and a running `serve` answer meanwhile.
    """
    from proxymetric.search import Index
    from proxymetric.search.storage.state import total_bytes
    from proxymetric.system.terminal import Terminal

    opened = Index(folder)
    before = total_bytes(opened.manifest)
    opened.compact()
    after = total_bytes(opened.manifest)
    Terminal().print(f"{opened.folder}: {len(opened):,} images, {before:,} bytes before, {after:,} now")
