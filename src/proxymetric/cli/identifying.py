"""Verbs for the classes of an index: add-class, remove, identify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.cli.results import AsJson
from proxymetric.cli.root import Device, app, example
from proxymetric.cli.searching import IndexFolder, OtherRun, check_images
from proxymetric.system.text import visible

if TYPE_CHECKING:
    from proxymetric.search import Answer


@app.command(
    "add-class",
    short_help="Add photos of a class to an index, without training.",
    epilog=example("proxymetric add-class birds.index wren wren1.jpg wren2.jpg"),
)
def add_class(
    folder: IndexFolder,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The class; a new one, or one of the index.")],
    photo: Annotated[list[Path], typer.Argument(metavar="PHOTO", help="Images of the class.")],
    run: OtherRun = None,
    device: Device = None,
) -> None:
    """Add photos of a class to an index: `search` and `identify` know them at once, and nothing is trained.

    All photos are added in one step, or none if one of them cannot be read or is in the index already.
    """
    from proxymetric.search import Index
    from proxymetric.search.class_photos import add_class as add
    from proxymetric.search.class_photos import check_name
    from proxymetric.serve.searcher import model_of
    from proxymetric.system.terminal import Terminal

    opened = Index(folder)
    check_name(name)
    check_images(photo, "PHOTO", every=True)
    before = opened.classes.get(name, 0)
    ids = add(opened, model_of(opened, run, device), name, photo)
    terminal = Terminal()
    known = f"which had {before}" if before else "a new class"
    terminal.print(
        f"{len(ids)} image{'' if len(ids) == 1 else 's'} of {visible(name)}, {known}: "
        f"{', '.join(ids[:3])}{', ...' if len(ids) > 3 else ''}"
    )
    terminal.print(f"{len(opened):,} images of {len(opened.classes):,} classes in {folder}")


@app.command(
    short_help="Remove images or whole classes from an index.",
    epilog=example(
        "proxymetric remove birds.index --class wren", "proxymetric remove birds.index owl/owl1.jpg owl/owl2.jpg"
    ),
)
def remove(
    folder: IndexFolder,
    item: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Images, by the ids that `search` prints.")
    ] = None,
    name: Annotated[
        list[str] | None, typer.Option("--class", metavar="NAME", help="A class whose images are removed; repeatable.")
    ] = None,
) -> None:
    """Remove images or whole classes from an index, all in one step; the photos themselves are not deleted.

    `search`, `identify` and a running `serve` know them no more. Photos that still lie in the indexed folder are added
    again by the next `proxymetric index`; a message says how many.
    """
    from proxymetric.search import Index
    from proxymetric.search.removal import remove as remove_from
    from proxymetric.search.removal import still_there
    from proxymetric.system.terminal import Terminal

    opened = Index(folder)
    ids = remove_from(opened, name or [], item or [])
    terminal = Terminal()
    terminal.print(
        f"removed {len(ids):,} image{'' if len(ids) == 1 else 's'}: {', '.join(ids[:3])}"
        f"{', ...' if len(ids) > 3 else ''}"
    )
    if count := still_there(opened, ids):
        terminal.print(
            f"{count:,} of them still lie{'s' if count == 1 else ''} in {opened.manifest.photos}: delete the files, or "
            "`proxymetric index` adds them again"
        )
    terminal.print(f"{len(opened):,} images of {len(opened.classes):,} classes in {folder}")


@app.command(
    short_help="Say which class of an index is on an image, or none of them.",
    epilog=example(
        "proxymetric identify birds.index unknown.jpg",
        "proxymetric identify birds.index unknown.jpg --far 0.001 --json",
    ),
)
def identify(
    folder: IndexFolder,
    image: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image to identify.")],
    far: Annotated[
        float,
        typer.Option(help="False-accept rate: the share of images of other classes that are taken for one of these."),
    ] = 0.01,
    as_json: AsJson = False,
    run: OtherRun = None,
    device: Device = None,
) -> None:
    """Say which class of an index is on an image, or that it is none of these.

    Each image is a line of file, class, score and runner-up (or, if it is none of these, the closest class),
    separated by tabs. The threshold is chosen so that images
    of classes that the index does not have are refused, all but the share --far; a message says by which images. An
    IMAGE that cannot be read is named, the others are answered, and the exit code is 1. An IMAGE that is in the index
    itself is left out of its own class.
    """
    from proxymetric.cli.results import Queries
    from proxymetric.search import Identifier, Index
    from proxymetric.search.class_photos import id_of
    from proxymetric.search.identify import IndexedQueries
    from proxymetric.serve.searcher import model_of
    from proxymetric.system.terminal import Terminal

    opened = Index(folder)
    check_images(image)
    model = model_of(opened, run, device)
    identifier = Identifier(opened, run)
    threshold = identifier.threshold(far)
    queries = Queries.embed(model, image)
    indexed = IndexedQueries.of(opened, [id_of(opened, file) for file in queries.files])
    answers = identifier(queries.vectors, far, indexed)
    in_index = (indexed.rows >= 0).tolist()
    if as_json:
        content = [
            {"image": str(file)} | as_dict(answer, far) | {"in_index": is_own}
            for file, answer, is_own in zip(queries.files, answers, in_index, strict=True)
        ]
        typer.echo(json.dumps(content + queries.errors("image"), indent=1))
        queries.end()
        return
    for file, answer in zip(queries.files, answers, strict=True):
        typer.echo("\t".join([visible(str(file)), *_cells(answer)]))
    terminal = Terminal()
    if len(answers):
        rare = ", which is extrapolated: there are too few images to count so rare an event"
        terminal.say(
            f"false-accept rate {100 * far:g} %: scores above {threshold.value:.3f} ({threshold.low:.3f} to "
            f"{threshold.high:.3f}){rare if threshold.is_extrapolated else ''}; of the images of these classes, "
            f"{100 * identifier.recognised(far):.0f} % are named"
        )
        terminal.say(identifier.note)
    if any(in_index):
        files = ", ".join(visible(str(file)) for file, is_own in zip(queries.files, in_index, strict=True) if is_own)
        terminal.say(f"in the index, and left out of the own class: {files}")
    queries.end()


def as_dict(answer: Answer, far: float) -> dict[str, Any]:
    """The answer for one image as JSON; `class` is null for none of these."""
    return {
        "class": answer.label,
        "score": answer.score,
        "threshold": answer.threshold,
        "far": far,
        "best": answer.best,
        "similarity": answer.similarity,
        "runner_up": answer.runner_up,
        "runner_up_similarity": answer.runner_up_similarity,
        "uncertainty": answer.uncertainty,
        "has_uncertainty": answer.has_uncertainty,
    }


def _cells(answer: Answer) -> list[str]:
    if answer.label is None:
        cells = ["none of these", f"{answer.score:.3f}", f"closest {visible(answer.best)}"]
    else:
        cells = [visible(answer.label), f"{answer.score:.3f}", f"runner-up {visible(answer.runner_up or 'none')}"]
    if answer.has_uncertainty:
        value = answer.uncertainty
        cells.append("no uncertainty: a new class" if value is None else f"uncertainty {value:.3g}")
    return cells
