"""Verbs for a trained run: embed, export."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from proxymetric.cli.images import ImagesFolder
from proxymetric.cli.results import AsJson, vectors_as_json
from proxymetric.cli.root import CutDim, Device, RunFolder, RunOrFile, SlimWeights, VectorKind, Which, app, example


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
    from proxymetric.models.load import load_model
    from proxymetric.search import VectorFile
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    target = out if out is not None else Path(f"{images.resolve().name}.safetensors")
    stored = VectorFile.build(
        target,
        images,
        partial(load_model, run, which, device, weights, terminal.say),
        dim=dim,
        vectors=vectors or "float32",
        overwrite=overwrite,
        say=terminal.say,
        report=None if as_json else terminal.print,
        progress=partial(terminal.work, "embedding"),
    )
    if as_json:
        terminal.dump(vectors_as_json(target, stored))


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
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    terminal.say(f"exporting {run}")
    from proxymetric.models.export import export as write_files

    if licence is not None and hub is None:
        raise ValueError(f"--licence: got {licence!r} without --hub; expected it only for a folder to share")
    targets = {"torch": torch, "onnx": onnx, "slim": slim, "hub": hub}
    files = {kind: file for kind, file in targets.items() if file is not None}
    written = write_files(run, files, which=which, takes=takes, overwrite=overwrite, licence=licence, say=terminal.say)
    for file, description in written.items():
        typer.echo(f"{file}: {description}")
