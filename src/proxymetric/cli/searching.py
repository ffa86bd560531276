"""Verbs for an index: index, search."""

from __future__ import annotations

import os
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.cli.images import check_images, check_searched, index_of, is_image
from proxymetric.cli.results import AsJson, OpenPage, index_as_json, print_answers, print_results
from proxymetric.cli.root import Backbone, CutDim, Device, SlimWeights, VectorKind, Which, app, example, typed
from proxymetric.system.text import visible

if TYPE_CHECKING:
    from proxymetric.search import Index

IndexFolder = Annotated[Path, typer.Argument(metavar="INDEX", help="Folder that `index` wrote.")]
OtherRun = Annotated[
    str | None,
    typer.Option(
        "--run", help="The run that made the index, or hf://owner/name. Default: the place that the index names."
    ),
]
FORMS = {"index": "an INDEX", "identify": "--identify", "folder": "--in IMAGES"}
"""what `search` does -> how it is asked for"""
FITS = {
    "-k": ("index", "folder"), "--open": ("index", "folder"), "--where": ("index",), "--differs": ("index",),
    "--offset": ("index",), "--min-similarity": ("index",), "--one-per": ("index",), "--together": ("index",),
    "--far": ("identify",), "--run": ("index", "identify"), "--which": ("folder",), "--weights": ("folder",),
    "--backbone": ("folder",),
}  # fmt: skip
"""option of `search` -> the forms that take it"""
LOADING = {"from_parquet", "out", "engine", "uri", "engine_settings", "vectors", "map_method", "as_json"}
"""the parameters of `index` that fit --from-parquet"""
OF_IMAGES = {"run": "IMAGES", "images": "IMAGES"}
"""parameter of `index` -> how it is called, if it is no option"""
FIRST_RESULTS = 10
FAR = 0.01


@app.command(
    short_help="Index images so that they can be searched; add or remove some.",
    epilog=example(
        "proxymetric index IMAGES",
        "proxymetric index runs/birds IMAGES --out birds.index",
        "proxymetric index runs/birds IMAGES --out birds.index --metadata items.csv",
        "proxymetric index --from-parquet blocks --out birds.index",
        "proxymetric index add-class --help",
        "proxymetric index remove --help",
        "proxymetric index metadata --help",
        "proxymetric index switch --help",
        "proxymetric index verify --help",
        "proxymetric index compact --help",
    ),
)
def index(
    ctx: typer.Context,
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Folder of a run (`train --out`), file of `export --slim`, folder of `export --hub`, its address on "
            "the Hugging Face hub: hf://owner/name, or a pre-trained backbone: backbone:NAME. Default: the model that "
            "the index has; for a new index --backbone.",
        ),
    ] = None,
    images: Annotated[
        Path | None, typer.Argument(metavar="IMAGES", help="Folder of images; subfolders are searched too.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the index. Default: IMAGES.index.")] = None,
    backbone: Backbone = None,
    metadata: Annotated[
        Path | None,
        typer.Option(
            help="CSV with a column `file` (path in IMAGES); the column `class` gives labels, and `search --where` "
            "filters by the others. Default: what the index has. `index metadata` changes some of it."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Which classes the images have, as data.layout in training: auto (the folders directly under IMAGES, "
            "or under its parts train/, test/, ..., or the classes of a benchmark such as CUB-200-2011), folder "
            "(always the folders directly under IMAGES), nested (the whole path), or a benchmark: cub, cars, sop, ... "
            "Default: as before; for a new index auto, or nested if the model was trained so."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="What searches: exact, faiss beyond about 200,000 images (extra `index`), or a database that has the "
            "images: pgvector or milvus (extras of these names). Default: as before; for a new index exact."
        ),
    ] = None,
    uri: Annotated[
        str | None,
        typer.Option(
            help="For pgvector postgresql://user@host/database, for milvus http://host:19530 or a file such as "
            "shop.db; without a password. Default: none; pgvector starts a PostgreSQL in the index, milvus needs one."
        ),
    ] = None,
    engine_settings: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-set",
            metavar="KEY=VALUE",
            help="Setting of the engine: kind (faiss); m, ef_construction, ef, partitions, timeout (pgvector, milvus); "
            "replicas, consistency, batch (milvus). Repeatable. Default: the engine's own.",
        ),
    ] = None,
    dim: CutDim = None,
    vectors: VectorKind = None,
    map_method: Annotated[
        str | None,
        typer.Option("--map", help="How the map is made: tsne, pca or none. Default: as before; for a new index tsne."),
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(
            help="Also write ids, classes, metadata, vectors and thumbnails to this Parquet file (extra `parquet`). "
            "Default: none."
        ),
    ] = None,
    from_parquet: Annotated[
        Path | None,
        typer.Option(
            "--from-parquet",
            metavar="DIR",
            help="Load what `embed --parquet DIR` wrote, or a file of --parquet, instead of embedding IMAGES (extra "
            "`parquet`). Default: none.",
        ),
    ] = None,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Embed all images of IMAGES again, such as after the model changed.")
    ] = False,
    drop_added: Annotated[
        bool,
        typer.Option(
            "--drop-added",
            help="With --rebuild: drop the images that `index add-class` or Python code added, which are no files of "
            "IMAGES.",
        ),
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="IMAGES takes the place of the folder that the index was made of.")
    ] = False,
    as_json: AsJson = False,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
) -> None:
    """Index a folder of images: vectors, classes, thumbnails and a map, in a folder that `search` and `serve` open.

    Without a RUN, a backbone that is only pre-trained makes the vectors: no training, and no classes are needed.

    The same command again brings the index up to date: only new and changed files are embedded, and deleted ones drop
    out. Another folder for the same index is refused if images would be deleted, unless --replace says so. A command
    that was killed is continued by the same command. The class is the folder directly under IMAGES, or under its parts
    train/, test/ and so on; in the folder of a benchmark such as CUB-200-2011 it is the class that training reads.
    --layout and --metadata say otherwise.

    `index add-class` adds images of a class, `index remove` takes images out, `index metadata` changes what --where
    filters by, `index switch` puts an index of another model in the place of one that is in use, `index verify`
    compares all files with their checksums, and `index compact` writes them anew; a RUN of such a name is written
    ./remove. Images that `index add-class` added stay, also with --rebuild. Another model cannot
    embed them again, so that --rebuild by another model is refused if there are any, unless --drop-added says that they
    drop out.
    """
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    _check_source(from_parquet, run, typed(ctx))
    place, folder = (None, from_parquet or Path(str(run))) if images is None else (run, images)
    target = index_of(folder, out, terminal)
    from proxymetric.search import Index
    from proxymetric.serve.folder import check_images, model_of_words, training_adds

    stored: dict[str, Any] = {
        "engine": engine_of(engine, uri, engine_settings or []),
        "vectors": vectors,
        "map": map_method,
    }
    shown: dict[str, Any] = {"say": terminal.say, "report": None if as_json else terminal.print}
    if from_parquet is not None:
        built = Index.from_parquet(target, from_parquet, **stored, **shown, progress=partial(terminal.work, "loading"))
    else:
        check_images(folder)
        built = Index.build(
            target,
            folder,
            partial(model_of_words, place, target, backbone, weights, which, device, terminal.say),
            metadata=metadata,
            layout=layout,
            dim=dim,
            parquet=parquet,
            rebuild=rebuild,
            drop_added=drop_added,
            replace=replace,
            **stored,
            **shown,
            progress=partial(terminal.work, "embedding"),
        )
    if as_json:
        terminal.dump(index_as_json(built))
    if from_parquet is None and (added := training_adds(built, folder)):
        terminal.say(added)
    quoted = shlex.quote(visible(target))
    terminal.say(f"next:\n  proxymetric search {quoted} unknown.jpg\n  proxymetric serve {quoted}")


@app.command(
    short_help="Find the most similar images, or the class of an image.",
    epilog=example(
        "proxymetric search birds.index unknown.jpg -k 5",
        "proxymetric search birds.index unknown.jpg --where class=wren --where 'price<50' --json",
        "proxymetric search birds.index front.jpg side.jpg --together --one-per product",
        "proxymetric search birds.index IMAGES/wren/7.jpg --differs camera",
        "proxymetric search birds.index unknown.jpg --identify --far 0.001",
        "proxymetric search unknown.jpg --in IMAGES",
        "proxymetric search runs/birds unknown.jpg --in IMAGES",
        "proxymetric search runs/birds one.jpg two.jpg --in images.safetensors",
    ),
)
def search(
    place: Annotated[
        str,
        typer.Argument(
            metavar="INDEX",
            help="Folder that `index` wrote; with --in, a RUN as for `index`. Default with --in: --backbone.",
        ),
    ],
    image: Annotated[
        list[Path] | None, typer.Argument(metavar="IMAGE", help="Image to find similar images for.")
    ] = None,
    searched: Annotated[
        Path | None,
        typer.Option(
            "--in",
            metavar="IMAGES",
            help="Search this folder of images, or a file that `embed` wrote, with a RUN. Default: search INDEX.",
        ),
    ] = None,
    k: Annotated[int | None, typer.Option("-k", help=f"Results for each image. Default: {FIRST_RESULTS}.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only images that match: brand=VALUE, brand=ONE,OTHER, brand!=VALUE, 'price<50', 'added>=2026-01-31' "
            "(quoted for the shell); `class`, or a metadata column. Repeatable: all hold. Default: all.",
        ),
    ] = None,
    differs: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN[=VALUE]",
            help="Leave out images with the value of IMAGE in this column, such as its camera. Without VALUE, IMAGE "
            "must be in the index. Repeatable. Default: none is left out.",
        ),
    ] = None,
    offset: Annotated[
        int | None,
        typer.Option(help="Results left out first: -k 20 --offset 20 is the second page. Default: 0."),
    ] = None,
    min_similarity: Annotated[
        float | None, typer.Option(help="Only images at least this similar, from -1 to 1. Default: all.")
    ] = None,
    one_per: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="One result for each value of a column, the most similar. Default: all."),
    ] = None,
    together: Annotated[
        bool, typer.Option("--together", help="All IMAGES are one query: the mean of their vectors of unit length.")
    ] = False,
    identify: Annotated[
        bool, typer.Option("--identify", help="Say which class of the index is on each image, or none of them.")
    ] = False,
    far: Annotated[
        float | None,
        typer.Option(
            help="With --identify: the false-accept rate, the share of images of other classes that are taken for one "
            f"of these. Default: {FAR}."
        ),
    ] = None,
    as_json: AsJson = False,
    open_page: OpenPage = False,
    run: OtherRun = None,
    which: Which = "best",
    backbone: Backbone = None,
    weights: SlimWeights = None,
    device: Device = None,
) -> None:
    """Find the images of an index that are most similar to a given image.

    In a terminal each IMAGE gets a table. Elsewhere each result is a line of query, rank, similarity, class and file,
    separated by tabs; messages go to the error stream. Files are relative to the folder that was indexed. An IMAGE that
    cannot be read is named, the others are searched, and the exit code is 1. An IMAGE that is in the index itself is
    left out of its own results.

    With --in there is no index: the images of a folder are embedded and searched, and their class is the folder
    directly under IMAGES. Without a RUN, a backbone that is only pre-trained embeds them.

    With --identify each image is a line of file, class, score and runner-up (or, if it is none of these, the closest
    class), separated by tabs. The threshold is chosen so that images of classes that the index does not have are
    refused, all but the share --far; a message says by which images. An IMAGE that is in the index itself is left out
    of its own class.
    """
    from proxymetric.search.questions import identify_files, search_folder, search_index
    from proxymetric.serve.folder import model_of_words
    from proxymetric.serve.searcher import model_of
    from proxymetric.system.terminal import Terminal

    form = "folder" if searched is not None else "identify" if identify else "index"
    given = {"-k": k, "--open": open_page, "--where": where, "--differs": differs, "--far": far, "--run": run,
             "--which": which != "best", "--weights": weights, "--backbone": backbone, "--offset": offset,
             "--min-similarity": min_similarity, "--one-per": one_per, "--together": together}  # fmt: skip
    _check_form(form, identify, given)
    if searched is not None:
        terminal = Terminal()
        named, images = (None, [Path(place), *(image or [])]) if is_image(place) else (place, image or [])
        check_images(images)
        check_searched(searched)
        model = partial(model_of_words, named, searched, backbone, weights, which, device, terminal.say)
        count, progress = FIRST_RESULTS if k is None else k, partial(terminal.work, "embedding")
        results = search_folder(searched, model, images, count, terminal.say, progress)
        print_results(results, as_json, open_page)
        return
    opened = _index_at(place)
    check_images(image := image or [])
    made_by = partial(model_of, opened, run, device)
    if identify:
        rate = FAR if far is None else far
        print_answers(identify_files(opened, made_by, image, rate, run), rate, as_json)
        return
    results = search_index(
        opened, made_by, image, FIRST_RESULTS if k is None else k, where, differences_of(differs or []),
        offset=offset or 0, min_similarity=min_similarity, one_per=one_per, together=together,
    )  # fmt: skip
    if not any(results.hits):
        _say_nothing_matches(place, given)
    print_results(results, as_json, open_page)


def _check_source(from_parquet: Path | None, run: str | None, names: list[str]) -> None:
    """Refuse options about images that are embedded where images are loaded that were embedded before."""
    if from_parquet is None and run is None:
        raise ValueError("IMAGES: got none, expected a folder of images, or --from-parquet DIR")
    others = [name for name in names if name not in LOADING]
    if from_parquet is not None and others:
        option = OF_IMAGES.get(others[0]) or f"--{others[0].replace('_', '-')}"
        raise ValueError(
            f"{option}: got it with --from-parquet, which loads what was embedded before; expected one of them"
        )


def _say_nothing_matches(place: str, given: dict[str, Any]) -> None:
    """Say that there are no results, and which conditions there were."""
    words = []
    for option in ("--where", "--differs", "--min-similarity", "--offset"):
        value = given[option]
        words += [f"{option} {text}" for text in (value if isinstance(value, list) else [value]) if text is not None]
    if words:
        typer.echo(f"no other image of {visible(place)} matches {' '.join(map(visible, words))}", err=True)


def _check_form(form: str, identify: bool, given: dict[str, Any]) -> None:
    """Refuse options that this form of `search` does not take."""
    if form == "folder" and identify:
        raise ValueError("--identify: got it with --in, expected an INDEX, whose classes are calibrated")
    for option, value in given.items():
        if value not in (None, False) and value != [] and form not in FITS[option]:
            wanted = " or ".join(FORMS[each] for each in FITS[option])
            raise ValueError(f"{option}: got it with {FORMS[form]}, expected it only with {wanted}")


def _index_at(place: str) -> Index:
    """Open the index that is searched."""
    from proxymetric.models.place import RunFolder, place_of
    from proxymetric.search import Index
    from proxymetric.search.manifest import is_index

    folder = Path(place)
    if is_image(place):
        raise ValueError(
            f"INDEX: got {place}, an image; expected an index, or a folder to search: `search {place} --in IMAGES`"
        )
    if not is_index(folder):
        model = place_of(place)
        if not isinstance(model, RunFolder) or (folder / "run.json").is_file():
            raise ValueError(
                f"INDEX: got {place}, which is a model; expected an index, or --in IMAGES to search a folder with it"
            )
    return Index(folder)


def engine_of(name: str | None, uri: str | None, settings: list[str]) -> dict[str, Any] | None:
    """Return the engine and its settings as the options say; None if they say nothing."""
    from proxymetric.search.engines import check_settings

    if name is None:
        if uri is not None or settings:
            raise ValueError("--engine: got none with --uri or --engine-set, expected faiss, pgvector or milvus")
        return None
    chosen: dict[str, Any] = {"name": name}
    if uri is not None:
        chosen["uri"] = uri if "://" in uri else os.path.abspath(uri)
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--engine-set: got {text!r}, expected KEY=VALUE")
        chosen[key] = int(value) if value.isdecimal() else value
    check_settings(chosen)
    return chosen


def differences_of(differs: list[str]) -> dict[str, str | None]:
    """Read conditions such as `camera=left`, or `camera` for the value that each image has in the index."""
    pairs = [text.partition("=") for text in differs]
    return {column: value if equals else None for column, equals, value in pairs}
