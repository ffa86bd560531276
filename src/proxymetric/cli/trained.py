"""Verbs for a trained run: evaluate, embed, query, export, report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.cli.root import Device, RunFolder, RunOrFile, SlimWeights, Which, app, example

if TYPE_CHECKING:
    from torch import Tensor

    from proxymetric.cli.terminal import Terminal
    from proxymetric.data import ImageSet
    from proxymetric.models.model import Model
    from proxymetric.search import Index

MAX_BAD_IMAGES_NAMED = 10


@app.command(
    short_help="Score a trained model on labelled images.",
    epilog=example(
        "proxymetric evaluate runs/birds",
        "proxymetric evaluate runs/birds --data NEW_PHOTOS --metrics R@1,MAP@R,NMI",
    ),
)
def evaluate(
    run: RunOrFile,
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="Labelled images, as for train. Default: the data of the run."),
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            help="Separated by commas: R@K, P@K, P@R, MAP@R, MAP@K (divided by K, as in the papers), AP@K (the same "
            "sum divided by min(K, R), R relevant images), nDCG@K, NMI, covering_radius, inter_class_distance."
        ),
    ] = "R@1,R@2,R@4,R@8,P@R,MAP@R,nDCG@8",
    layout: Annotated[
        str,
        typer.Option(
            help="Layout of --data: auto, folder, nested, csv, or a benchmark (cub, cars, sop, in-shop, inaturalist, "
            "omniglot, mnist)."
        ),
    ] = "auto",
    split: Annotated[
        str,
        typer.Option(
            help="Classes to score: all, or the test, validation or train classes of the run's split. auto: the "
            "classes that the run was not trained on; the test images of other data that comes divided (test/)."
        ),
    ] = "auto",
    distance: Annotated[str, typer.Option(help="cosine or euclidean.")] = "cosine",
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
) -> None:
    """Score a trained model on labelled images.

    Each image is a query against all other images. A benchmark with queries and a gallery (In-Shop) is scored queries
    against gallery, as in training.
    """
    import numpy as np

    from proxymetric import metrics as scoring
    from proxymetric.cli.terminal import Terminal, score_table
    from proxymetric.runs.evaluation_set import evaluation_set
    from proxymetric.runs.score import EmbeddedSet, describe, queries_left_out, score

    names = scoring.names(tuple(name.strip() for name in metrics.split(",")))
    images, note = evaluation_set(run, data, layout, split, which)
    model = _load(run, which, device, weights)
    terminal = Terminal()
    for opening_note in images.notes:
        terminal.say(opening_note)
    vectors, kept = _embed(model, images, terminal)
    embedded = EmbeddedSet(images, vectors, np.asarray(kept, dtype=np.int64))
    rows = {str(run): score(embedded, names, distance)}
    title = f"{describe(embedded)}{f' ({note})' if note else ''}, %"
    terminal.console.print(score_table(title, rows, names))
    left_out = queries_left_out(embedded)
    if left_out:
        terminal.say(f"images that were not used as queries, because no other image has their class: {left_out}")


@app.command(
    short_help="Embed all images of a folder into one file.",
    epilog=example("proxymetric embed runs/birds PHOTOS --out photos.safetensors"),
)
def embed(
    run: RunOrFile,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of images; subfolders are searched too.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. Default: DIR.safetensors.")] = None,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
) -> None:
    """Embed all images of a folder into one file (safetensors).

    The file holds `vectors` (N, dim) and, in its header under `names`, the N file names as JSON. `query` searches it.
    """
    from proxymetric.cli.terminal import Terminal

    terminal = Terminal()
    index = _index(_load(run, which, device, weights), folder, terminal)
    target = out if out is not None else Path(f"{folder.resolve().name}.safetensors")
    index.save(target)
    terminal.say(f"{len(index)} vectors of {index.vectors.shape[1]} dimensions in {target}")


@app.command(
    short_help="Find the images of a folder most similar to a given one.",
    epilog=example(
        "proxymetric query runs/birds PHOTOS unknown.jpg -k 5",
        "proxymetric query runs/birds photos.safetensors one.jpg two.jpg",
    ),
)
def query(
    run: RunOrFile,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of images to search, or a file that `embed` wrote.")
    ],
    image: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image to find similar images for.")],
    k: Annotated[int, typer.Option("-k", help="Results for each image.")] = 8,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
) -> None:
    """Find the images of a folder that are most similar to a given image."""
    from proxymetric.cli.terminal import Terminal, hits_table
    from proxymetric.search import Index

    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    terminal = Terminal()
    model = _load(run, which, device, weights)
    queries = model.embed(image)
    if folder.is_file():
        index = Index.load(folder)
        if index.model != model.fingerprint():
            raise ValueError(
                f"DIR: got {folder}, which another model than {run} ({which}) embedded; expected a file that "
                "`proxymetric embed` wrote with this model"
            )
    else:
        index = _index(model, folder, terminal)
    for file, hits in zip(image, index.search(queries, k, own=[str(p) for p in image]), strict=True):
        terminal.console.print(hits_table(f"most similar to {file}", hits))


@app.command(
    short_help="Write the model of a run to one file, for use elsewhere.",
    epilog=example(
        "proxymetric export runs/birds --torch birds.pt2",
        "proxymetric export runs/birds --slim birds.safetensors",
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
    takes: Annotated[
        str, typer.Option("--input", help="Pixels that --torch and --onnx take: uint8, or float in [0, 1].")
    ] = "uint8",
    which: Which = "best",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
) -> None:
    """Write the encoder of a run, with its prompts and without proxies, as a program or as its trained parameters."""
    from proxymetric.models.export import export as write_files

    targets = {"torch": torch, "onnx": onnx, "slim": slim}
    files = {kind: file for kind, file in targets.items() if file is not None}
    for file, description in write_files(run, files, which=which, takes=takes, overwrite=overwrite).items():
        typer.echo(f"{file}: {description}")


@app.command(short_help="Draw the report of a finished run again.", epilog=example("proxymetric report runs/birds"))
def report(run: RunFolder) -> None:
    """Draw the page report.html of a finished run again.

    The images must be where they were in training.
    """
    from proxymetric.cli.terminal import Terminal
    from proxymetric.runs.report import remake_report

    terminal = Terminal()
    terminal.say(f"report: {remake_report(run, terminal)}")


def _load(run: Path, which: str, device: str | None, weights: Path | None) -> Model:
    from proxymetric.models.load import load

    if weights is not None and run.is_dir():
        raise ValueError(
            f"--weights: got {weights} with the run {run}, which has its own weights; expected it only with a file of "
            "`export --slim`"
        )
    return load(run, which, device, weights)


def _index(model: Model, folder: Path, terminal: Terminal) -> Index:
    """Embed all images of a folder."""
    from proxymetric.data.folders import ENDINGS, image_files
    from proxymetric.search import Index

    if not folder.is_dir():
        raise ValueError(f"DIR: got {folder}, expected a folder of images; there is no such folder")
    unlisted: dict[str, str] = {}
    files = image_files(folder, unlisted)
    for name, reason in unlisted.items():
        terminal.say(f"left out, cannot be listed: {name} ({reason})")
    if not files:
        raise ValueError(f"DIR: got {folder}, which has no images; expected files that end in {', '.join(ENDINGS)}")
    vectors, kept = _embed(model, files, terminal)
    return Index(vectors, [str(files[i]) for i in kept], model.fingerprint())


def _embed(model: Model, images: ImageSet | list[Path], terminal: Terminal) -> tuple[Tensor, list[int]]:
    """Embed all images that can be read, and name the others; the vectors and the indices of their images."""
    bad: list[str] = []
    vectors, kept = model.embed(
        images,
        errors="skip",
        progress=lambda done, total: terminal.work("embedding", done, total),
        on_bad=lambda title, reason: bad.append(f"{title} ({reason})"),
    )
    for image in bad[:MAX_BAD_IMAGES_NAMED]:
        terminal.say(f"left out, cannot be read: {image}")
    if len(bad) > MAX_BAD_IMAGES_NAMED:
        terminal.say(f"... and {len(bad) - MAX_BAD_IMAGES_NAMED} more")
    if not kept:
        raise ValueError(f"images: not one of the {len(images)} images can be read")
    return vectors, kept
