"""Verbs for a trained run: embed, query, export."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxymetric.cli.results import AsJson, ImageArgument, OpenPage
from proxymetric.cli.root import CutDim, Device, RunFolder, RunOrFile, SlimWeights, VectorKind, Which, app, example

if TYPE_CHECKING:
    from PIL import Image

    from proxymetric.models.model import Model
    from proxymetric.search import VectorFile
    from proxymetric.system.terminal import Terminal


@app.command(
    short_help="Embed all images of a folder into one file.",
    epilog=example("proxymetric embed runs/birds PHOTOS --out photos.safetensors"),
)
def embed(
    run: RunOrFile,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of images; subfolders are searched too.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File to write. Default: DIR.safetensors.")] = None,
    dim: CutDim = None,
    vectors: VectorKind = None,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace vectors of another model.")] = False,
) -> None:
    """Embed all images of a folder into one file (safetensors).

    The file holds `vectors` (N, dim) and, in its header under `names`, the N file names as JSON. `query` searches it.
    With --vectors it holds `codes` (int8) instead, and for binary also `bits`.
    Earlier vectors of the same model are replaced; any other file is kept.
    """
    from proxymetric.core.quantisation import check_kind
    from proxymetric.search import VectorFile
    from proxymetric.search.stored_vectors import stored_bytes
    from proxymetric.system.files import check_output
    from proxymetric.system.terminal import Terminal

    check_kind(vectors or "float32")
    terminal = Terminal()
    target = out if out is not None else Path(f"{folder.resolve().name}.safetensors")
    if target.suffix != ".safetensors":
        raise ValueError(f"--out: got {target}, expected a name that ends in .safetensors")
    kind = "a file that `proxymetric embed` wrote"
    file = check_output("--out", target, kind, lambda earlier: VectorFile.model_of(earlier) is not None)
    check_folder(folder)
    model = load_model(run, which, device, weights)
    if dim is not None:
        model = model.cut_to(dim)
    for sentence in unfinished(run):
        terminal.say(sentence)
    if file.exists() and not overwrite and VectorFile.model_of(file) != model.fingerprint():
        raise ValueError(
            f"--out: got {target}, which holds vectors of a model other than {run} ({which}); expected a new file, or "
            "--overwrite"
        )
    embedded = _embed_folder(model, folder, terminal)
    embedded.kind = vectors or "float32"
    embedded.save(file)
    size = f"{stored_bytes(embedded.kind, embedded.dim):,} bytes each ({embedded.kind})"
    terminal.print(f"{len(embedded)} vectors of {embedded.dim} dimensions in {target}: {size}")


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
    image: ImageArgument,
    k: Annotated[int, typer.Option("-k", help="Results for each image.")] = 8,
    as_json: AsJson = False,
    open_page: OpenPage = False,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
) -> None:
    """Find the images of a folder that are most similar to a given image.

    In a terminal each IMAGE gets a table. Elsewhere each result is a line of query, rank, similarity, class and file,
    separated by tabs; messages go to the error stream. The class is the folder of the file directly under DIR. An IMAGE
    that cannot be read is named, the others are searched, and the exit code is 1.
    """
    from rich.console import Console

    from proxymetric.cli.results import Queries, print_results
    from proxymetric.search import VectorFile
    from proxymetric.search.manifest import is_index
    from proxymetric.search.result_page import Found
    from proxymetric.system.terminal import Terminal

    if k < 1:
        raise ValueError(f"k: got {k}, expected at least 1")
    _check_order(folder, image)
    if is_index(folder):
        raise ValueError(
            f"DIR: got {folder}, which is an index; expected a folder of images or a file that `embed` wrote. To "
            f"search the index: `proxymetric search {folder} {image[0]}`"
        )
    terminal = Terminal(Console(stderr=True))
    model = load_model(run, which, device, weights)
    for sentence in unfinished(run):
        terminal.say(sentence)
    if folder.is_file():
        stored = VectorFile.load(folder)
        if stored.dim < model.dim:
            with contextlib.suppress(ValueError):  # the vectors are those of another model
                model = model.cut_to(stored.dim, warn=False)
        if stored.model != model.fingerprint():
            raise ValueError(
                f"DIR: got {folder}, which holds vectors of a model other than {run} ({which}); expected a file that "
                "`proxymetric embed` wrote with this model"
            )
        queries = Queries.embed(model, image)
    else:
        queries = Queries.embed(model, image)  # first, so that a bad image costs no embedding of the folder
        stored = _embed_folder(model, folder, terminal)
    class_of = dict(zip(stored.names, stored.classes, strict=True))
    hit_lists = stored.search(queries.vectors, k, without=[str(path) for path in queries.files])
    results = [
        (file, [Found(name, class_of[name], score, partial(_image, name)) for name, score in hits])
        for file, hits in zip(queries.files, hit_lists, strict=True)
    ]
    print_results(results, as_json, open_page, queries.errors())
    queries.end()


def _image(name: str) -> Image.Image | None:
    """The image of a result; None if it cannot be read any more."""
    from proxymetric.data.decoding import BadImage, read_image

    try:
        return read_image(name)
    except BadImage:
        return None


def _check_order(folder: Path, images: list[Path]) -> None:
    """Refuse arguments of `query` that are missing or in the wrong order, before anything is loaded."""
    from proxymetric.arguments.signatures import neighbour
    from proxymetric.cli.searching import check_images
    from proxymetric.data.folders import ENDINGS

    order = "the order is: query RUN DIR IMAGE"
    for image in images:
        if image.is_dir():
            raise ValueError(f"IMAGE: got {image}, which is a folder; expected an image file; {order}")
    if folder.is_file() and folder.name.lower().endswith(ENDINGS):
        raise ValueError(f"DIR: got {folder}, which is an image; expected a folder or a file of `embed`; {order}")
    if not folder.exists():
        hint = neighbour(folder, Path.exists)
        raise ValueError(f"DIR: got {folder}, which does not exist; expected a folder or a file of `embed`{hint}")
    check_images(images)


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


def load_model(run: str, which: str, device: str | None, weights: Path | None) -> Model:
    """Load the model that a verb uses."""
    from proxymetric.models.load import is_run, load

    if weights is not None and Path(run).is_dir() and is_run(run):
        raise ValueError(
            f"--weights: got {weights} with the run {run}, which has its own weights; expected it only with a file of "
            "`export --slim`"
        )
    return load(run, which, device, weights)


def check_folder(folder: Path) -> None:
    """Refuse what is not a folder."""
    if not folder.is_dir():
        raise ValueError(f"DIR: got {folder}, which is not a folder; expected a folder of images")


def unfinished(run: str) -> list[str]:
    """A sentence about a run that is not finished; an empty list for a finished run, a slim file or a shared model."""
    from proxymetric.models.load import is_run

    if not is_run(run) or (Path(run) / "result.json").is_file():
        return []
    return [f"{run} is not finished: this is its best model so far; `proxymetric train --resume` continues it"]


def _embed_folder(model: Model, folder: Path, terminal: Terminal) -> VectorFile:
    """Embed all images of a folder that can be read: what a file of vectors holds."""
    from proxymetric.data.folders import ENDINGS, image_files
    from proxymetric.models.embedding import embed_images
    from proxymetric.search import VectorFile

    check_folder(folder)
    unlisted: dict[str, str] = {}
    files = image_files(folder, unlisted)
    for name, reason in unlisted.items():
        terminal.say(f"left out, cannot be listed: {name} ({reason})")
    if not files:
        raise ValueError(f"DIR: got {folder}, which has no images; expected files that end in {', '.join(ENDINGS)}")
    vectors, indices = embed_images(model, files, terminal)
    readable_files = [files[i] for i in indices]
    classes = [path.relative_to(folder).parts[0] if path.parent != folder else "" for path in readable_files]
    return VectorFile(vectors, [str(path) for path in readable_files], model.fingerprint(), classes)
