"""Verbs that change the classes of an index: index add-class, index remove."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.cli.images import check_images
from proxymetric.cli.root import Device, app, example
from proxymetric.cli.searching import IndexFolder, OtherRun
from proxymetric.system.text import visible

if TYPE_CHECKING:
    from proxymetric.search import Index


@app.command(
    "index add-class",
    hidden=True,
    short_help="Add images of a class to an index, without training.",
    epilog=example("proxymetric index add-class birds.index wren wren1.jpg wren2.jpg"),
)
def add_class(
    folder: IndexFolder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The class; a new one, or one of the index.")],
    image: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Images of the class.")],
    run: OtherRun = None,
    device: Device = None,
) -> None:
    """Add images of a class to an index: `search` knows them at once, and nothing is trained.

    All images are added in one step, or none if one of them cannot be read or is in the index already.
    """
    from proxymetric.search import Index
    from proxymetric.search.class_photos import add_class as add
    from proxymetric.search.class_photos import check_name
    from proxymetric.serve.searcher import model_of
    from proxymetric.system.terminal import Terminal

    opened = Index(folder)
    check_name(name)
    check_images(image, every=True)
    before = opened.classes.get(name, 0)
    ids = add(opened, model_of(opened, run, device), name, image)
    terminal = Terminal()
    known = f"which had {before}" if before else "a new class"
    terminal.print(f"{_counted(ids)} of {visible(name)}, {known}: {_first(ids)}")
    terminal.print(_size(opened))


@app.command(
    "index remove",
    hidden=True,
    short_help="Remove images or whole classes from an index.",
    epilog=example(
        "proxymetric index remove birds.index --class wren",
        "proxymetric index remove birds.index owl/owl1.jpg owl/owl2.jpg",
    ),
)
def remove(
    folder: IndexFolder,
    item: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Images, by the ids that `search` prints. Default: none.")
    ] = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--class", metavar="NAME", help="A class whose images are removed; repeatable. Default: none."),
    ] = None,
) -> None:
    """Remove images or whole classes from an index, all in one step; the files themselves are not deleted.

    `search` and a running `serve` know them no more. Images that still lie in the indexed folder are added again by the
    next `proxymetric index`; a message says how many.
    """
    from proxymetric.search import Index
    from proxymetric.search.removal import remove as remove_from
    from proxymetric.search.removal import still_there
    from proxymetric.system.terminal import Terminal

    opened = Index(folder)
    ids = remove_from(opened, name or [], item or [])
    terminal = Terminal()
    terminal.print(f"removed {_counted(ids)}: {_first(ids)}")
    if count := still_there(opened, ids):
        terminal.print(
            f"{count:,} of them still lie{'s' if count == 1 else ''} in {opened.manifest.photos}: delete the files, or "
            "`proxymetric index` adds them again"
        )
    terminal.print(_size(opened))


def _counted(ids: list[str]) -> str:
    return f"{len(ids):,} image{'' if len(ids) == 1 else 's'}"


def _first(ids: list[str]) -> str:
    return f"{', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''}"


def _size(index: Index) -> str:
    return f"{len(index):,} images of {len(index.classes):,} classes in {index.folder}"
