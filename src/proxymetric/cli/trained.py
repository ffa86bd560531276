"""Verbs for a trained run: evaluate, embed, query, export, report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.cli.root import Device, RunFolder, RunOrFile, Weights, Which, app, example

if TYPE_CHECKING:
    from torch import Tensor

    from proxymetric.cli.terminal import Terminal
    from proxymetric.data import ImageSet
    from proxymetric.models.model import Model
    from proxymetric.search import Index


@app.command(epilog=example("proxymetric evaluate runs/birds --data NEW_PHOTOS --metrics R@1,MAP@R,nDCG@8"))
def evaluate(
    run: RunOrFile,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="As for train; by default what the run was trained on.")
    ] = None,
    metrics: Annotated[str, typer.Option(help="Comma-separated: R@K, P@K, P@R, MAP@R, MAP@K, nDCG@K.")] = (
        "R@1,R@2,R@4,R@8,P@R,MAP@R,nDCG@8"
    ),
    layout: Annotated[str, typer.Option(help="auto, folder, csv, cub or cars.")] = "auto",
    split: Annotated[
        str,
        typer.Option(
            help="Which classes: all, or the run's own test, validation or train classes; "
            "auto: those it has not been trained on."
        ),
    ] = "auto",
    distance: Annotated[str, typer.Option(help="cosine or euclidean.")] = "cosine",
    which: Which = "best",
    weights: Weights = None,
    device: Device = None,
) -> None:
    """Measure a trained model on labelled images."""
    from proxymetric import metrics as scoring
    from proxymetric.cli.terminal import Terminal, score_table
    from proxymetric.models.model import embedded
    from proxymetric.runs.evaluation_set import evaluation_set

    names = scoring.names(tuple(name.strip() for name in metrics.split(",")))
    images, words = evaluation_set(run, data, layout, split, which)
    model = _loaded(run, which, device, weights)
    terminal = Terminal()
    vectors, kept = _embedded(model, images, images.title, terminal)
    labels = embedded(images.labels, kept)
    rows = {str(run): scoring.evaluate(vectors, labels, names, distance=distance)}
    title = f"{len(kept)} images of {len(set(labels.tolist()))} classes{f' ({words})' if words else ''}, %"
    terminal.console.print(score_table(title, rows, names))
    alone = scoring.left_out(labels)
    if alone:
        terminal.say(f"images alone in their class, which were not used as queries: {alone}")


@app.command(epilog=example("proxymetric embed runs/birds PHOTOS --out photos.safetensors"))
def embed(
    run: RunOrFile,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of images, searched at any depth.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; DIR.safetensors by default.")] = None,
    which: Which = "best",
    weights: Weights = None,
    device: Device = None,
) -> None:
    """Embed all images of a folder into one file (safetensors).

    It holds `vectors` (N, dim) and in its header the N files, as JSON under `names`; `query` searches it.
    """
    from proxymetric.cli.terminal import Terminal

    terminal = Terminal()
    index = _indexed(_loaded(run, which, device, weights), folder, terminal)
    target = out if out is not None else Path(f"{folder.resolve().name}.safetensors")
    index.save(target)
    terminal.say(f"{len(index)} vectors of {index.vectors.shape[1]} dimensions in {target}")


@app.command(
    epilog=example(
        "proxymetric query runs/birds PHOTOS unknown.jpg -k 5",
        "proxymetric query runs/birds photos.safetensors one.jpg two.jpg",
    )
)
def query(
    run: RunOrFile,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of images to search, or a file that embed wrote.")
    ],
    image: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="What to look for.")],
    k: Annotated[int, typer.Option("-k", help="Results for each image.")] = 8,
    which: Which = "best",
    weights: Weights = None,
    device: Device = None,
) -> None:
    """Find the images of a folder that are most like a given one."""
    from proxymetric.cli.terminal import Terminal, hits_table
    from proxymetric.search import Index

    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    terminal = Terminal()
    model = _loaded(run, which, device, weights)
    wanted = model.embed(image)
    if folder.is_file():
        index = Index.load(folder)
        if index.model != model.fingerprint():
            raise ValueError(f"{folder} was made by another model than {run} ({which}); embed the images again")
    else:
        index = _indexed(model, folder, terminal)
    for picture, found in zip(image, index.search(wanted, k, own=[str(p) for p in image]), strict=True):
        terminal.console.print(hits_table(f"most like {picture}", found))


@app.command(
    short_help="Write a run's model to one file for use elsewhere.",
    epilog=example(
        "proxymetric export runs/birds --torch birds.pt2",
        "proxymetric export runs/birds --slim birds.safetensors",
    ),
)
def export(
    run: RunFolder,
    torch: Annotated[Path | None, typer.Option("--torch", help="A .pt2 to write, for torch.export.load.")] = None,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="A .onnx to write; needs the extra `export`.")] = None,
    slim: Annotated[
        Path | None, typer.Option("--slim", help="A .safetensors of what was trained, for pm.load.")
    ] = None,
    takes: Annotated[
        str, typer.Option("--input", help="Images of --torch, --onnx: uint8, or float in [0, 1].")
    ] = "uint8",
    which: Which = "best",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
) -> None:
    """Write the encoder, prompts included and proxies not, as a program or as what was trained of it."""
    from proxymetric.models.export import export as write_files

    asked = {"torch": torch, "onnx": onnx, "slim": slim}
    files = {kind: file for kind, file in asked.items() if file is not None}
    for file, words in write_files(run, files, which=which, takes=takes, overwrite=overwrite).items():
        typer.echo(f"{file}: {words}")


@app.command(epilog=example("proxymetric report runs/birds"))
def report(run: RunFolder) -> None:
    """Draw a finished run's report again."""
    from proxymetric.cli.terminal import Terminal
    from proxymetric.runs.remake import remake_report

    terminal = Terminal()
    terminal.say(f"report: {remake_report(run, terminal)}")


def _loaded(run: Path, which: str, device: str | None, weights: Path | None) -> Model:
    from proxymetric.models.load import load

    if weights is not None and run.is_dir():
        raise ValueError(f"--weights: {run} is a run and has its own; it is for a file that `export --slim` wrote")
    return load(run, which, device, weights)


def _indexed(model: Model, folder: Path, terminal: Terminal) -> Index:
    from proxymetric.data.folders import ENDINGS, image_files
    from proxymetric.search import Index

    if not folder.is_dir():
        raise ValueError(f"DIR: there is no folder {folder}")
    files = image_files(folder)
    if not files:
        raise ValueError(f"DIR: there are no images in {folder} ({', '.join(ENDINGS)})")
    vectors, kept = _embedded(model, files, lambda i: str(files[i]), terminal)
    return Index(vectors, [str(files[i]) for i in kept], model.fingerprint())


def _embedded(
    model: Model, images: ImageSet | list[Path], title: Callable[[int], str], terminal: Terminal
) -> tuple[Tensor, list[int]]:
    """Vectors of all images that can be read, with their indices; the others are named."""
    vectors, kept = model.embed(images, errors="skip", progress=lambda i, n: terminal.work("embedding", i, n))
    left = sorted(set(range(len(images))) - set(kept))
    for i in left[:10]:
        terminal.say(f"left out, cannot be read: {title(i)}")
    if len(left) > 10:
        terminal.say(f"... and {len(left) - 10} more")
    if not kept:
        raise ValueError(f"not one of the {len(images)} images can be read")
    return vectors, kept
