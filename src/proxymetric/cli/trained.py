"""Verbs for a trained run: embed, export."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.cli.images import ImagesFolder
from proxymetric.cli.results import AsJson, blocks_as_json, vectors_as_json
from proxymetric.cli.root import CutDim, Device, RunFolder, RunOrFile, SlimWeights, VectorKind, Which, app, example

if TYPE_CHECKING:
    from proxymetric.models.model import Model


Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="With --parquet: only the blocks I, I + N, I + 2N, ...; I counts from 0 to N - 1. Default: all blocks.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="With --parquet: a Ray cluster embeds the blocks (extra `ray`): auto (the one that RAY_ADDRESS names or "
        "that runs here), local (one is started here), or an address such as 10.0.0.1:6379. Default: this process.",
    ),
]


@app.command(
    short_help="Embed all images of a folder, into one file or into blocks.",
    epilog=example(
        "proxymetric embed runs/birds IMAGES --out images.safetensors",
        "proxymetric embed runs/birds IMAGES --parquet blocks --shard 0/4",
        "proxymetric embed runs/birds IMAGES --parquet blocks --ray auto",
    ),
)
def embed(
    run: RunOrFile,
    images: ImagesFolder,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. Default: IMAGES.safetensors.")] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a Parquet file for each block of images into this folder instead (extra `parquet`); `index "
            "--from-parquet DIR` makes an index of them. Default: none.",
        ),
    ] = None,
    shard: Shard = None,
    block: Annotated[
        int | None, typer.Option(help="With --parquet: images of a block; the same for all shards. Default: 4096.")
    ] = None,
    ray: RayAddress = None,
    dim: CutDim = None,
    vectors: VectorKind = None,
    as_json: AsJson = False,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace vectors of another model.")] = False,
) -> None:
    """Embed all images of a folder into one file (safetensors), or block by block for many machines.

    The file holds `vectors` (N, dim) and, in its header under `names`, the N file names as JSON. `search --in` searches
    it. With --vectors it holds `codes` (int8) instead, and for binary also `bits`.
    Earlier vectors of the same model are replaced; any other file is kept.

    With --parquet the sorted list of images is divided into blocks, and each block becomes a file. Blocks that are
    there are kept: the same command continues one that was killed, and several processes with a --shard each, on any
    number of machines, share one folder. Images, RUN and DIR must lie at the same place for all of them.
    """
    from proxymetric.models.load import load_model
    from proxymetric.search import VectorFile
    from proxymetric.search.embedding_blocks import BLOCK_IMAGES, embed_blocks
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    _check_form(parquet, {"--shard": shard, "--block": block, "--ray": ray},
                {"--out": out, "--vectors": vectors, "--overwrite": overwrite or None})  # fmt: skip
    load = partial(load_model, run, which, device, weights, terminal.say)
    report, progress = None if as_json else terminal.print, partial(terminal.work, "embedding")
    if parquet is not None:
        done = embed_blocks(
            parquet,
            images,
            load if ray is None else _elsewhere(run, which, device, weights),
            shard=shard,
            block=BLOCK_IMAGES if block is None else block,
            dim=dim,
            ray=ray,
            gpus=0 if device == "cpu" else None,
            say=terminal.say,
            report=report,
            progress=progress,
        )
        if as_json:
            terminal.dump(blocks_as_json(done))
        return
    target = out if out is not None else Path(f"{images.resolve().name}.safetensors")
    kind = vectors or "float32"
    stored = VectorFile.build(
        target, images, load, dim=dim, vectors=kind, overwrite=overwrite, say=terminal.say, report=report,
        progress=progress,
    )  # fmt: skip
    if as_json:
        terminal.dump(vectors_as_json(target, stored))


def _check_form(parquet: Path | None, of_blocks: dict[str, Any], of_file: dict[str, Any]) -> None:
    """Refuse options of the other form of `embed`."""
    form, other = ("without", "with") if parquet is None else ("with", "without")
    for option, value in (of_blocks if parquet is None else of_file).items():
        if value is not None:
            raise ValueError(f"{option}: got it {form} --parquet, expected it only {other} --parquet DIR")


def _elsewhere(run: str, which: str, device: str | None, weights: Path | None) -> Callable[[], Model]:
    """What loads a model on another machine: its places do not depend on the working directory."""
    from proxymetric.models.load import load_model
    from proxymetric.models.place import place_of

    return partial(load_model, place_of(run).absolute, which, device, weights and weights.absolute())


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
