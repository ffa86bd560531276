"""Verbs for a trained run: embed, export, report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.cli.images import ImagesFolder
from proxymetric.cli.results import AsJson, messages, vectors_as_json
from proxymetric.cli.root import CutDim, Device, RunFolder, RunOrFile, SlimWeights, VectorKind, Which, app, example
from proxymetric.system.text import visible
from proxymetric.system.unreadable import unreadable_lines

if TYPE_CHECKING:
    from torch import Tensor

    from proxymetric.data import ImageSet
    from proxymetric.models.model import Model
    from proxymetric.system.terminal import Terminal

UNFINISHED = "{} is not finished: this is its best model so far; `proxymetric train --resume` continues it"


@app.command(
    short_help="Embed all images of a folder into one file.",
    epilog=example("proxymetric embed runs/birds IMAGES --out images.safetensors"),
)
def embed(
    run: RunOrFile,
    images: ImagesFolder,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. Default: IMAGES.safetensors.")] = None,
    dim: CutDim = None,
    vectors: VectorKind = None,
    as_json: AsJson = False,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace vectors of another model.")] = False,
) -> None:
    """Embed all images of a folder into one file (safetensors).

    The file holds `vectors` (N, dim) and, in its header under `names`, the N file names as JSON. `search --in` searches
    it. With --vectors it holds `codes` (int8) instead, and for binary also `bits`.
    Earlier vectors of the same model are replaced; any other file is kept.
    """
    from proxymetric.search import VectorFile

    terminal = messages(on_stderr=as_json)
    target = out if out is not None else Path(f"{images.resolve().name}.safetensors")
    stored = VectorFile.build(
        target,
        images,
        partial(load_model, run, which, device, weights, terminal.say),
        dim=dim,
        vectors=vectors or "float32",
        overwrite=overwrite,
        say=terminal.say,
        progress=partial(terminal.work, "embedding"),
    )
    if as_json:
        typer.echo(vectors_as_json(target, stored))


@app.command(
    short_help="Write the model of a run for use elsewhere, or to share it.",
    epilog=example(
        "proxymetric export runs/birds --torch birds.pt2",
        "proxymetric export runs/birds --slim birds.safetensors",
        "proxymetric export runs/birds --hub birds --licence apache-2.0",
    ),
)
def export(
    run: RunFolder,
    torch: Annotated[Path | None, typer.Option("--torch", help="Write a .pt2 program for torch.export.load.")] = None,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="Write a .onnx model; needs the extra `export`.")] = None,
    slim: Annotated[
        Path | None,
        typer.Option("--slim", help="Write a .safetensors file with the trained parameters only, for pm.load."),
    ] = None,
    hub: Annotated[
        Path | None,
        typer.Option("--hub", metavar="FOLDER", help="Write a folder for the Hugging Face hub: weights, config, card."),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option("--licence", help="With --hub: the licence on the card, such as apache-2.0. Default: unknown."),
    ] = None,
    takes: Annotated[
        str, typer.Option("--input", help="Pixels that --torch and --onnx take: uint8, or float in [0, 1].")
    ] = "uint8",
    which: Which = "best",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that `export` wrote.")] = False,
) -> None:
    """Write the encoder of a run, with its prompts and without proxies: a program, its trained parameters, or a folder.

    The folder of --hub holds the names of the training classes and, on the card, the scores and the name of the data.
    """
    from proxymetric.models.export import export as write_files

    if licence is not None and hub is None:
        raise ValueError(f"--licence: got {licence!r} without --hub; expected it only for a folder to share")
    targets = {"torch": torch, "onnx": onnx, "slim": slim, "hub": hub}
    files = {kind: file for kind, file in targets.items() if file is not None}
    written = write_files(run, files, which=which, takes=takes, overwrite=overwrite, licence=licence)
    for file, description in written.items():
        typer.echo(f"{file}: {description}")


@app.command(short_help="Draw the report of a finished run again.", epilog=example("proxymetric report runs/birds"))
def report(run: RunFolder) -> None:
    """Draw the page report.html of a finished run again.

    The images must be where they were in training.
    """
    from proxymetric.runs.report import remake_report
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    terminal.say(f"report: {remake_report(run, terminal)}")


def load_model(
    run: str, which: str, device: str | None, weights: Path | None, say: Callable[[str], None] | None = None
) -> Model:
    """Load the model that a verb uses; `say` is told about a run that is not finished."""
    from proxymetric.models.load import load
    from proxymetric.models.place import RunFolder, place_of

    place = place_of(run)
    if weights is not None and isinstance(place, RunFolder) and place.exists():
        raise ValueError(
            f"--weights: got {weights} with the run {run}, which has its own weights; expected it only with a file of "
            "`export --slim`"
        )
    model = load(place, which, device, weights)
    if say is not None and isinstance(place, RunFolder) and not place.is_finished():
        say(UNFINISHED.format(run))
    return model


def unfinished(run: str) -> list[str]:
    """A sentence about a run that is not finished; an empty list for a finished run, a slim file or a shared model."""
    from proxymetric.models.place import RunFolder, place_of

    place = place_of(run)
    return [UNFINISHED.format(run)] if isinstance(place, RunFolder) and not place.is_finished() else []


def embed_images(
    model: Model, images: ImageSet | list[Path], terminal: Terminal, what: str = "embedding", again: bool = False
) -> tuple[Tensor, list[int]]:
    """Embed all images that can be read, and name the others; return the vectors and the indices of their images.

    `again`: the images were embedded before, by another model, and the others named.
    """
    bad: list[str] = []
    vectors, indices = model.embed(
        images,
        errors="skip",
        progress=lambda done, total: terminal.work(what, done, total),
        on_bad=lambda title, reason: bad.append(f"{visible(title)} ({reason})"),
    )
    for line in unreadable_lines([] if again else bad):
        terminal.say(line)
    if not indices:
        raise ValueError(
            f"images: got {len(images)} images, none of which can be read; expected images that can be decoded"
        )
    return vectors, indices
