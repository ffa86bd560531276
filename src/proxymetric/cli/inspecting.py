"""The verb that looks for what is wrong with labelled images: inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.arguments.written import source
from proxymetric.cli.results import AsJson
from proxymetric.cli.root import Device, RunOrFile, SlimWeights, Which, app, example
from proxymetric.system.unreadable import unreadable_lines

if TYPE_CHECKING:
    from proxymetric.data import ImageSet
    from proxymetric.inspection import Inspection


def _defaults() -> dict[str, Any]:
    return {"min_probability": source("inspection/wrong_labels.py").value("LISTED_FROM")}


@app.command(
    defaults=_defaults,
    short_help="Find wrong labels, duplicates and odd images in labelled images.",
    epilog=example(
        "proxymetric inspect runs/birds IMAGES",
        "proxymetric inspect runs/birds labels.csv --out birds-inspected --json",
    ),
)
def inspect(
    run: RunOrFile,
    images: Annotated[
        str,
        typer.Argument(
            metavar="IMAGES",
            help="The labelled images, as for `train --data`: a folder with one folder per class, a CSV of file and "
            "class, a pack (.npz), the folder of a benchmark, hf:PLACE, glyphs or digits.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder to write. Default: RUN-inspects-IMAGES, next to the run."),
    ] = None,
    layout: Annotated[str, typer.Option(help="Layout of IMAGES; see `evaluate`.")] = "auto",
    min_probability: Annotated[
        float | None, typer.Option(help="List labels that are wrong with at least this probability.")
    ] = None,
    untrained: Annotated[
        bool,
        typer.Option("--untrained", help="Use the encoder before training: it cannot have learned wrong labels."),
    ] = False,
    as_json: AsJson = False,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
) -> None:
    """Find likely wrong labels, duplicates, lonely images and unreadable files, and write CSV files and a page.

    The lists are as long as the data asks for. Nothing in IMAGES is changed. After a fix, or if it was killed, the same
    command embeds only files that it has not seen.
    """
    from proxymetric.data import open_data
    from proxymetric.inspection import inspect as inspect_images
    from proxymetric.inspection.report import PAGE, check_out
    from proxymetric.models.features import load_untrained
    from proxymetric.models.load import load_model, unfinished
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    if min_probability is not None and not 0 < min_probability < 1:
        raise ValueError(f"min-probability: got {min_probability}, expected a probability between 0 and 1")
    if untrained and weights is not None:
        raise ValueError("untrained, weights: got both, expected one")
    data = open_data(images, layout)
    folder = check_out(default_folder(run, data.name) if out is None else out)
    model = load_untrained(run, device) if untrained else load_model(run, which, device, weights)
    for note in (*data.notes, *unfinished(run), *([] if untrained else _trained_on(run, data))):
        terminal.say(note)
    listed: dict[str, Any] = {} if min_probability is None else {"listed_from": min_probability}
    inspection = inspect_images(model, data, out=folder, **listed, watcher=terminal)
    if as_json:
        terminal.dump(inspection.summary())
        terminal.say(f"page: {folder / PAGE}")
        return
    for line in (*report_lines(inspection), f"page: {folder / PAGE}"):
        terminal.print(line)


def default_folder(run: str, data: str) -> Path:
    """The default folder of an inspection: next to the run's folder, named after run and data.

    Example:
        >>> print(default_folder("runs/birds", "new photos"))
        runs/birds-inspects-new-photos
    """
    from proxymetric.models.load import next_to

    return next_to(run, "inspects", data)


def report_lines(inspection: Inspection) -> list[str]:
    """What was found, in sentences."""
    contents, pairs = inspection.contents, inspection.duplicates
    copies = sum(len(group.rows) for group in pairs)
    lines = [
        f"{len(contents.images)} images of {len(contents.images.classes)} classes",
        f"likely wrong labels: {len(inspection.wrong_labels.listed)} (about {100 * inspection.wrong_labels.share:.1f} "
        "% of all labels are estimated to be wrong)",
        f"duplicates: {len(pairs)} groups of {copies} images; with two labels: "
        f"{sum(group.two_labels for group in pairs)}",
        f"lonely images: {len(inspection.lonely.listed)}",
        f"files that cannot be read: {len(contents.unreadable)}",
    ]
    unreadable = [f"{row['file']} ({row['reason']})" for row in inspection.tables()["unreadable"]]
    return [*lines, *unreadable_lines(unreadable, "cannot be read")]


def _trained_on(run: str, images: ImageSet) -> list[str]:
    """A sentence if the run was trained with these labels."""
    from proxymetric.models.load import is_run, read_run

    if not is_run(run) or read_run(run)["data"]["identity"] != images.identity():
        return []
    return [
        f"{run} was trained with these labels, and may have learned wrong ones by heart; --untrained inspects the "
        "images by the encoder before training"
    ]
