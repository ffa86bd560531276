"""The command line: a thin layer over the library. Heavy imports stay inside the verbs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="proxymetric",
    help="Learn an embedding from labelled images, to find things of classes it has never seen by similarity.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)

Data = Annotated[
    str | None,
    typer.Option("--data", "-d", help="Folder of class folders, CSV of file and class, a benchmark, glyphs or digits."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, as `train --out` wrote it.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:0.")]
Which = Annotated[str, typer.Option(help="best, last or chosen (see pm.load).")]


@app.command(
    epilog="Example: proxymetric train --data PHOTOS --backbone resnet50 --method proxy-anchor --set loss.margin=0.2"
)
def train(
    data: Data = None,
    method: Annotated[str | None, typer.Option("--method", "-m", help="See `proxymetric methods`.")] = None,
    backbone: Annotated[str | None, typer.Option("--backbone", "-b", help="Any timm name, or small.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Backbone weights (safetensors) instead of the hub's.")] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", "-r", help="TOML file; flags win over it.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder; runs/<data>-<method> by default.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images, at most.")] = None,
    batch: Annotated[int | None, typer.Option(help="Images in a step.")] = None,
    size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    dim: Annotated[int | None, typer.Option(help="Dimensions of the embedding.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the encoder; proxies have 100 times that.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes a run repeatable.")] = None,
    cache: Annotated[str | None, typer.Option(help="Decoded images: none, memory or device.")] = None,
    device: Device = None,
    frozen: Annotated[
        bool | None,
        typer.Option("--frozen/--no-frozen", help="Train head and proxies on cached features: no GPU needed."),
    ] = None,
    refit: Annotated[
        bool | None,
        typer.Option("--refit/--no-refit", help="Then train on all classes for the chosen number of epochs."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any key of the recipe; repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in --out.")] = False,
) -> None:
    """Train on labelled images, choose the epoch on held-out classes, measure, write a report."""
    from proxymetric import training
    from proxymetric.progress import Terminal, result_lines, score_table

    terminal = Terminal()
    try:
        run = training.train(
            data, recipe=recipe, method=method, backbone=backbone, weights=weights, out=out, epochs=epochs, batch=batch,
            size=size, dim=dim, lr=lr, seed=seed, cache=cache, device=device, frozen=frozen, refit=refit,
            settings=settings or (), resume=resume, overwrite=overwrite, watcher=terminal,
        )  # fmt: skip
    except training.Interrupted:
        terminal.close()
        terminal.say("saved; the same command with --resume goes on from here")
        raise typer.Exit(130) from None
    finally:
        terminal.close()
    where = "on classes never seen in training, %"
    terminal.console.print(score_table(where, run.result["rows"]))
    terminal.say(result_lines(run.result))
    page = run.folder / "report.html"
    terminal.say(f"report: {page}" if page.is_file() else f"result: {run.folder / 'result.json'}")


@app.command(epilog="Example: proxymetric evaluate runs/birds --data NEW_PHOTOS --metrics R@1,MAP@R,nDCG@8")
def evaluate(
    run: RunFolder,
    data: Data = None,
    metrics: Annotated[str, typer.Option(help="Comma-separated: R@K, P@K, P@R, MAP@R, MAP@K, nDCG@K.")] = (
        "R@1,R@2,R@4,R@8,P@R,MAP@R,nDCG@8"
    ),
    layout: Annotated[str, typer.Option(help="auto, folder, csv, cub or cars.")] = "auto",
    split: Annotated[str, typer.Option(help="Which classes: all, test or train.")] = "all",
    distance: Annotated[str, typer.Option(help="cosine or euclidean.")] = "cosine",
    which: Which = "best",
    device: Device = None,
) -> None:
    """Measure a trained model on labelled images."""
    from proxymetric import metrics as scoring
    from proxymetric.data import open_data
    from proxymetric.data import split as class_split
    from proxymetric.learner import embedded, load
    from proxymetric.progress import Terminal, score_table

    if data is None:
        raise ValueError("data: say which images to measure on: --data FOLDER")
    names = scoring.names(tuple(name.strip() for name in metrics.split(",")))
    model, images = load(run, which, device), open_data(data, layout)
    if split not in ("all", "test", "train"):
        raise ValueError(f"split: got {split!r}, wanted all, test or train")
    if split != "all":
        chosen = getattr(class_split(images, validation=0.0), split)
        if chosen is None:
            raise ValueError(f"split: {images.name} has no test classes of its own; wanted --split all")
        images = chosen
    terminal = Terminal()
    vectors, kept = model.embed(images, errors="skip", progress=lambda i, n: terminal.work("embedding", i, n))
    _report_unreadable(terminal, images, kept)
    labels = embedded(images.labels, kept)
    rows = {str(run): scoring.evaluate(vectors, labels, names, distance=distance)}
    title = f"{len(kept)} images of {len(images.classes)} classes, %"
    terminal.console.print(score_table(title, rows, names))
    alone = scoring.left_out(labels)
    if alone:
        terminal.say(f"{alone} images are alone in their class and were not used as queries")


@app.command(epilog="Example: proxymetric embed runs/birds PHOTOS --out photos.safetensors")
def embed(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of images, searched below.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; DIR.safetensors by default.")] = None,
    which: Which = "best",
    device: Device = None,
) -> None:
    """Embed all images below a folder: writes vectors (safetensors) and the list of files beside them (JSON)."""
    from proxymetric.progress import Terminal

    terminal = Terminal()
    vectors, files = _embedded_folder(run, folder, which, device, terminal)
    target = out if out is not None else Path(f"{folder.resolve().name}.safetensors")
    from proxymetric.search import Index

    Index(vectors, files).save(target)
    terminal.say(f"{len(files)} vectors of {vectors.shape[1]} dimensions in {target}")


@app.command(epilog="Example: proxymetric query runs/birds PHOTOS unknown.jpg -k 5")
def query(
    run: RunFolder,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of images to search, or a file that embed wrote.")
    ],
    image: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="What to look for.")],
    k: Annotated[int, typer.Option("-k", help="Results for each image.")] = 8,
    which: Which = "best",
    device: Device = None,
) -> None:
    """Find the images of a folder that are most like a given one."""
    from rich.table import Table

    from proxymetric.learner import load
    from proxymetric.progress import Terminal
    from proxymetric.search import Index

    terminal = Terminal()
    model = load(run, which, device)
    wanted = model.embed(image)
    if folder.is_file():
        index = Index.load(folder)
    else:
        index = Index(*_embedded_folder(run, folder, which, device, terminal, model))
    for picture, found in zip(image, index.search(wanted, k, without=[str(p) for p in image]), strict=True):
        table = Table(title=f"most like {picture}", title_justify="left")
        for name in ("", "similarity", "file"):
            table.add_column(name, justify="left" if name == "file" else "right")
        for place, (file, score) in enumerate(found, 1):
            table.add_row(str(place), f"{score:.3f}", file)
        terminal.console.print(table)


@app.command(epilog="Example: proxymetric methods mpa-ap")
def methods(
    name: Annotated[str | None, typer.Argument(help="One method: its arguments and defaults.")] = None,
) -> None:
    """The catalogue: what can be trained, whose it is and when to choose it."""
    from rich.console import Console
    from rich.table import Table

    from proxymetric.papers import CATALOGUE, lookup, options

    console = Console()
    if name is not None:
        row = lookup(name)
        console.print(f"{name}: {(row.__doc__ or '').strip()}", highlight=False, markup=False)
        console.print(f"paper: {row.about.paper}\nchoose: {row.about.choose}", highlight=False, markup=False)
        for key, parameter in options(name).items():
            console.print(f"  --set loss.{key}={parameter.default}", highlight=False, markup=False)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("method", "paper", "choose it"):
        table.add_column(heading, no_wrap=heading == "method")
    for key, row in CATALOGUE.items():
        table.add_row(key, row.about.paper.split(",")[0], row.about.choose)
    console.print(table)


def _embedded_folder(
    run: Path, folder: Path, which: str, device: str | None, terminal: Any, model: Any = None
) -> tuple[Any, list[str]]:
    from proxymetric.data.folders import image_files
    from proxymetric.learner import load

    if not folder.is_dir():
        raise ValueError(f"DIR: there is no folder {folder}")
    files = image_files(folder)
    if not files:
        raise ValueError(f"DIR: there are no images below {folder} (jpg, png, webp, bmp, gif, tif)")
    model = load(run, which, device) if model is None else model
    vectors, kept = model.embed(files, errors="skip", progress=lambda i, n: terminal.work("embedding", i, n))
    if len(kept) < len(files):
        terminal.say(f"{len(files) - len(kept)} files cannot be read as images and were left out")
    return vectors, [str(files[i]) for i in kept]


def _report_unreadable(terminal: Any, images: Any, kept: list[int]) -> None:
    for i in sorted(set(range(len(images))) - set(kept))[:10]:
        terminal.say(f"left out, cannot be read: {images.title(i)}")


def main() -> None:
    """Run the command line; a person's mistake is one sentence and exit code 1."""
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(f"proxymetric: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("proxymetric: stopped", err=True)
        sys.exit(130)
