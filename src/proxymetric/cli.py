"""The command line: a thin layer over the library. Heavy imports stay inside the verbs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric import __version__

if TYPE_CHECKING:
    from torch import Tensor

    from proxymetric.data import ImageSet
    from proxymetric.learner import Model
    from proxymetric.progress import Terminal
    from proxymetric.search import Index


def _example(*lines: str) -> str:
    """The foot of a help page: commands that are not broken at hyphens."""
    return "\b\n" + "\n".join(("Examples:" if len(lines) > 1 else "Example:", *(f"  {line}" for line in lines)))


app = typer.Typer(
    name="proxymetric",
    help="Learn an embedding from labelled images, to find things of classes it has never seen by similarity.",
    epilog=_example(
        "proxymetric train --data PHOTOS --out runs/photos    (PHOTOS/<class>/*.jpg)",
        "proxymetric query runs/photos PHOTOS unknown.jpg",
    ),
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
Which = Annotated[str, typer.Option(help="best; last; or chosen, the best before a refit.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the verb."""


@app.command(
    short_help="Train on labelled images and measure on unseen classes.",
    epilog=_example(
        "proxymetric train --data PHOTOS --backbone resnet50 --method proxy-anchor",
        "proxymetric train --data PHOTOS --frozen --set loss.margin=0.2 --set train.patience=5",
    ),
)
def train(
    data: Data = None,
    method: Annotated[str | None, typer.Option("--method", "-m", help="See `proxymetric methods`.")] = None,
    backbone: Annotated[
        str | None, typer.Option("--backbone", "-b", help="Any timm name, bn_inception or small.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Backbone weights (safetensors) instead of the hub's.")] = None,
    tuning: Annotated[
        str | None,
        typer.Option(
            help="What of the backbone is trained: full, linear, bitfit; for ViTs vpt, adapter, lora, vpt+bitfit."
        ),
    ] = None,
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
    cache: Annotated[str | None, typer.Option(help="Decoded images: auto, none, memory or device.")] = None,
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
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any key of the recipe; repeatable, wins over flags."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in --out.")] = False,
) -> None:
    """Train on labelled images, choose the epoch on held-out classes, measure, write a report."""
    from proxymetric import training
    from proxymetric.progress import Terminal, result_lines, score_table

    terminal = Terminal()
    # A flag like the others, before the settings that win over it; `pm.train` reaches it as a setting too.
    said = [*([] if tuning is None else [f"encoder.tuning={tuning}"]), *(settings or ())]
    try:
        run = training.train(
            data, recipe=recipe, method=method, backbone=backbone, weights=weights, out=out, epochs=epochs, batch=batch,
            size=size, dim=dim, lr=lr, seed=seed, cache=cache, device=device, frozen=frozen, refit=refit,
            settings=said, resume=resume, overwrite=overwrite, watcher=terminal,
        )  # fmt: skip
    except training.Interrupted:
        terminal.close()
        terminal.say("saved; the same command with --resume goes on from here")
        raise typer.Exit(130) from None
    finally:
        terminal.close()
    if any(run.result["rows"].values()):
        terminal.console.print(score_table("on classes never seen in training, %", run.result["rows"]))
    terminal.say(result_lines(run.result))
    page = run.folder / "report.html"
    terminal.say(f"report: {page}" if page.is_file() else f"result: {run.folder / 'result.json'}")


@app.command(epilog=_example("proxymetric evaluate runs/birds --data NEW_PHOTOS --metrics R@1,MAP@R,nDCG@8"))
def evaluate(
    run: RunFolder,
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
    device: Device = None,
) -> None:
    """Measure a trained model on labelled images."""
    from proxymetric import metrics as scoring
    from proxymetric.learner import embedded, load
    from proxymetric.progress import Terminal, score_table
    from proxymetric.training.unseen import evaluation_set

    names = scoring.names(tuple(name.strip() for name in metrics.split(",")))
    images, words = evaluation_set(run, data, layout, split, which)
    model = load(run, which, device)
    terminal = Terminal()
    vectors, kept = _embedded(model, images, images.title, terminal)
    labels = embedded(images.labels, kept)
    rows = {str(run): scoring.evaluate(vectors, labels, names, distance=distance)}
    title = f"{len(kept)} images of {len(set(labels.tolist()))} classes{f' ({words})' if words else ''}, %"
    terminal.console.print(score_table(title, rows, names))
    alone = scoring.left_out(labels)
    if alone:
        terminal.say(f"images alone in their class, which were not used as queries: {alone}")


@app.command(epilog=_example("proxymetric embed runs/birds PHOTOS --out photos.safetensors"))
def embed(
    run: RunFolder,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of images, searched at any depth.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write; DIR.safetensors by default.")] = None,
    which: Which = "best",
    device: Device = None,
) -> None:
    """Embed all images of a folder into one file (safetensors).

    It holds `vectors` (N, dim) and in its header the N files, as JSON under `names`; `query` searches it.
    """
    from proxymetric.learner import load
    from proxymetric.progress import Terminal

    terminal = Terminal()
    index = _indexed(load(run, which, device), folder, terminal)
    target = out if out is not None else Path(f"{folder.resolve().name}.safetensors")
    index.save(target)
    terminal.say(f"{len(index)} vectors of {index.vectors.shape[1]} dimensions in {target}")


@app.command(
    epilog=_example(
        "proxymetric query runs/birds PHOTOS unknown.jpg -k 5",
        "proxymetric query runs/birds photos.safetensors one.jpg two.jpg",
    )
)
def query(
    run: RunFolder,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of images to search, or a file that embed wrote.")
    ],
    image: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="What to look for.")],
    k: Annotated[int, typer.Option("-k", help="Results for each image.")] = 8,
    which: Which = "best",
    device: Device = None,
) -> None:
    """Find the images of a folder that are most like a given one."""
    from proxymetric.learner import load
    from proxymetric.progress import Terminal, hits_table
    from proxymetric.search import Index

    if k < 1:
        raise ValueError(f"k: got {k}, wanted at least 1")
    terminal = Terminal()
    model = load(run, which, device)
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
    short_help="Compare fairly: one model per fold, averaged and joined.",
    epilog=_example("proxymetric mlrc --data CUB_200_2011 --recipe recipes/cub/proxy-anchor.toml --out runs/mlrc-cub"),
)
def mlrc(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the folds' runs and the result.")],
    data: Data = None,
    method: Annotated[str | None, typer.Option("--method", "-m", help="See `proxymetric methods`.")] = None,
    backbone: Annotated[
        str | None, typer.Option("--backbone", "-b", help="Any timm name, bn_inception or small.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="Backbone weights (safetensors) instead of the hub's.")] = None,
    recipe: Annotated[Path | None, typer.Option("--recipe", "-r", help="TOML file; flags win over it.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training images, at most.")] = None,
    size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    folds: Annotated[int, typer.Option(help="Blocks of the training classes, one model each.")] = 4,
    dim: Annotated[int, typer.Option(help="Dimensions of each model.")] = 128,
    seed: Annotated[int | None, typer.Option(help="Makes a run repeatable.")] = None,
    cache: Annotated[str | None, typer.Option(help="Decoded images: auto, none, memory or device.")] = None,
    device: Device = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any key of the recipe; repeatable, wins over flags."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it was interrupted.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start anew in --out.")] = False,
) -> None:
    """The protocol of "A Metric Learning Reality Check".

    The training classes are cut into folds; one model per fold, its epoch chosen by MAP@R on that fold; on the test
    classes the mean over the models, and all of them side by side.
    """
    from proxymetric import protocols
    from proxymetric.progress import Terminal, score_table
    from proxymetric.training import Interrupted

    terminal = Terminal()
    try:
        result = protocols.mlrc(
            data, out=out, recipe=recipe, method=method, backbone=backbone, weights=weights, epochs=epochs, size=size,
            folds=folds, dim=dim, seed=seed, cache=cache, device=device, settings=settings or (), resume=resume,
            overwrite=overwrite, watcher=terminal,
        )  # fmt: skip
    except Interrupted:
        terminal.say("saved; the same command with --resume goes on from here")
        raise typer.Exit(130) from None
    rows = {f"average of {folds} x {dim}-D": result["average"], f"joined, {folds * dim}-D": result["concatenated"]}
    terminal.console.print(score_table("on the test classes, %", rows, ("P@1", "R@1", "P@R", "MAP@R", "nDCG@8")))
    terminal.say(f"result: {out / 'result.json'}")


@app.command(
    short_help="Write a run's model to one file for use elsewhere.",
    epilog=_example(
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
    from proxymetric import export as writing

    asked = {"torch": torch, "onnx": onnx, "slim": slim}
    files = {kind: file for kind, file in asked.items() if file is not None}
    for file, words in writing.export(run, files, which=which, takes=takes, overwrite=overwrite).items():
        typer.echo(f"{file}: {words}")


@app.command(epilog=_example("proxymetric report runs/birds"))
def report(run: RunFolder) -> None:
    """Draw a finished run's report again."""
    from proxymetric.progress import Terminal
    from proxymetric.training.remake import remake_report

    terminal = Terminal()
    terminal.say(f"report: {remake_report(run, terminal)}")


@app.command(
    short_help="List the methods: paper, and when to choose which.",
    epilog=_example("proxymetric methods mpa-ap"),
)
def methods(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One method: its arguments and defaults.")] = None,
) -> None:
    """The catalogue: what can be trained, whose it is and when to choose it."""
    from proxymetric.papers import CATALOGUE, lookup
    from proxymetric.papers import options as arguments
    from proxymetric.progress import Terminal, catalogue_table

    terminal = Terminal()
    if name is None:
        terminal.console.print(catalogue_table({key: row.about for key, row in CATALOGUE.items()}))
        terminal.say("\nproxymetric methods NAME shows the arguments of one")
        return
    row = lookup(name)
    first, *rest = (row.__doc__ or "").strip().splitlines()
    terminal.say(f"{name}: {first}")
    for line in rest:
        terminal.say(line.strip())
    terminal.say(f"\npaper: {row.about.paper}\nchoose it: {row.about.choose}\n\narguments with their defaults:")
    for key, parameter in arguments(name).items():
        terminal.say(f"  --set loss.{key}={parameter.default}")


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


def main() -> None:
    """Run the command line; a person's mistake is one sentence and exit code 1."""
    # Threads that spin while they wait are several times slower as soon as anything else runs on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except (ValueError, OSError) as error:
        typer.echo(f"proxymetric: {error}", err=True)
        sys.exit(1)
    except RuntimeError as error:
        if not any(sign in str(error) for sign in ("out of memory", "can't allocate memory")):
            raise
        typer.echo("proxymetric: not enough memory; smaller --batch or --size need less", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        typer.echo("proxymetric: stopped", err=True)
        sys.exit(130)
