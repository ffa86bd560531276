"""Verbs that train: demo, train."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.cli.catalogue import complete_method
from proxymetric.cli.root import Data, Device, TrustCode, app, example
from proxymetric.cli.serving import serve_demo
from proxymetric.runs.protocol import FOLD_DIM, MLRC
from proxymetric.system.text import visible

if TYPE_CHECKING:
    from proxymetric.runs.train import Run
    from proxymetric.system.terminal import Terminal

Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        autocompletion=complete_method,
        help="Name of the method; `proxymetric methods` lists them. auto compares some on features of your images, "
        "from six classes on, and takes one that needs no training unless another is clearly better: the default with "
        "--frozen and pre-trained weights; whitening and lda compute the head in seconds; "
        "module:function is one of your own.",
    ),
]
Backbone = Annotated[
    str | None, typer.Option("--backbone", "-b", help="Backbone: any timm name, bn_inception or small.")
]
BackboneWeights = Annotated[
    Path | None, typer.Option("--weights", help="File with the backbone's weights (safetensors), instead of the hub's.")
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe", "-r", help="A shipped recipe by name, such as cub/proxy-anchor, or a TOML file. Flags win over it."
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training images, at most.")]
Size = Annotated[int | None, typer.Option(help="Side of the images in pixels.")]
Seed = Annotated[int | None, typer.Option(help="Seed of all random numbers.")]
Cache = Annotated[str | None, typer.Option(help="Where decoded images are kept: auto, none, memory or device.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="TABLE.KEY=VALUE", help="Set any key of the recipe. Repeatable; wins over the flags."
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the run in --out.")]
DEMO_RECIPE = "glyphs/demo"


@app.command(
    short_help="Train on drawn characters, in one to three minutes.",
    epilog=example("proxymetric demo", "proxymetric demo --out runs/demo --serve"),
)
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Run folder; an earlier demo in it is replaced.")] = Path(
        "runs/demo"
    ),
    serve: Annotated[
        bool, typer.Option("--serve", help="Then open a search among the other characters (extra `serve`).")
    ] = False,
    device: Device = None,
) -> None:
    """Train a small model on characters drawn in many fonts, and search among characters it was not trained on.

    The demo needs no download and no GPU.
    """
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    _check_demo(out)
    if serve and (out / "result.json").is_file():
        terminal.say(f"{out} holds a finished demo; without --serve it is trained again")
        serve_demo(out, terminal, device)
        return
    terminal.say("the demo trains a small network on drawn characters; it takes one to three minutes on two CPU cores")
    _train(terminal, recipe=DEMO_RECIPE, out=out, device=device, overwrite=True)
    if serve:
        serve_demo(out, terminal, device)
        return
    terminal.say(
        f"next: open {out / 'report.html'} in a browser; search among the characters it was not trained on:\n"
        f"  proxymetric demo{'' if out == Path('runs/demo') else f' --out {shlex.quote(visible(out))}'} --serve\n"
        "then train on your own images (IMAGES/<class>/*.jpg):\n"
        "  proxymetric train --data IMAGES --out runs/photos"
    )


def _check_demo(out: Path) -> None:
    """Refuse to replace a run that is not a demo."""
    from proxymetric.runs import recipe as recipes
    from proxymetric.system.files import read_json

    if not (out / "run.json").is_file():
        return
    try:
        earlier = read_json(out / "run.json")["said"]
        is_demo = all(earlier.get(key) == value for key, value in recipes.load(DEMO_RECIPE).items() if key != "train")
    except (ValueError, KeyError, TypeError, AttributeError):
        is_demo = False
    if not is_demo:
        raise ValueError(f"out: got {out}, which holds a run that is not a demo; expected another folder with --out")


def _defaults() -> dict[str, Any]:
    from proxymetric.runs.flags import defaults

    return defaults()


@app.command(
    defaults=_defaults,
    short_help="Train on labelled images and score unseen classes.",
    epilog=example(
        "proxymetric train --data IMAGES --backbone resnet50 --method proxy-anchor",
        "proxymetric train --data IMAGES --frozen --set loss.margin=0.2 --set train.patience=5",
        "proxymetric train --data CUB_200_2011 --recipe cub/proxy-anchor",
        "proxymetric train --data CUB_200_2011 --recipe cub/proxy-anchor --protocol mlrc --out runs/mlrc-cub",
    ),
)
def train(
    data: Data = None,
    method: Method = None,
    backbone: Backbone = None,
    weights: BackboneWeights = None,
    tuning: Annotated[
        str | None,
        typer.Option(
            help="Which parameters of the backbone are trained, such as full, linear, bitfit or, for ViTs, vpt, "
            "adapter and lora; an unknown name lists all. Join several with +, such as vpt+bitfit."
        ),
    ] = None,
    recipe: RecipeName = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder of the run. Default: runs/<data>-<method>.")
    ] = None,
    epochs: Epochs = None,
    batch: Annotated[int | None, typer.Option(help="Images in a forward pass.")] = None,
    size: Size = None,
    dim: Annotated[
        int | None, typer.Option(help=f"Dimensions of the embedding; {FOLD_DIM} with --protocol {MLRC}.")
    ] = None,
    nested: Annotated[
        str | None,
        typer.Option(
            help="Dimensions that the vectors can be cut to afterwards, such as 64,128,256,512; the last is --dim."
        ),
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the encoder; the proxies have 100 times this rate.")
    ] = None,
    seed: Seed = None,
    cache: Cache = None,
    device: Device = None,
    frozen: Annotated[
        bool | None,
        typer.Option(
            "--frozen/--no-frozen",
            help="Train only head and proxies, on cached features of the backbone. Fast without a GPU.",
        ),
    ] = None,
    refit: Annotated[
        bool | None,
        typer.Option("--refit/--no-refit", help="Afterwards train on all classes for the chosen number of epochs."),
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(help="Compute the head from the features of the backbone before training: whitening or lda."),
    ] = None,
    whiten: Annotated[
        bool | None,
        typer.Option(
            "--whiten/--no-whiten",
            help="Afterwards put a whitening behind the trained head, if it scores higher on held-out classes; with "
            "--resume also for a finished run.",
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="Which classes choose the epoch: held-out (a fifth of the training classes), last (none; the last "
            "epoch counts) or papers (the test classes, as most papers do; the scores are labelled). mlrc trains a "
            "model for each of several folds (Musgrave et al. 2020)."
        ),
    ] = None,
    folds: Annotated[int | None, typer.Option(help="With --protocol mlrc: the number of folds and of models.")] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    overwrite: Overwrite = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write the page report.html at the end.")] = True,
    trust_code: TrustCode = False,
) -> None:
    """Train on labelled images, choose the best epoch on held-out classes, score unseen classes and write a report.

    Ctrl-C saves the run; the same command with --resume continues it.

    --protocol mlrc cuts the training classes into folds. It trains one model for each fold, MAP@R on that fold chooses
    its epoch, and the test classes get two scores: the mean over the models, and that of their concatenated embeddings.
    """
    arguments = dict(locals())
    from proxymetric.system.terminal import Terminal

    # --tuning becomes the first setting, so that --set wins over it.
    arguments["settings"] = [*([] if tuning is None else [f"encoder.tuning={tuning}"]), *(settings or ())]
    del arguments["tuning"]
    terminal = Terminal()
    if protocol == MLRC:
        _train_folds(terminal, arguments)
        return
    if arguments.pop("folds") is not None:
        raise ValueError(f"folds: got {folds} without --protocol {MLRC}, which trains a model for each fold")
    run = _train(terminal, **arguments)
    folder = shlex.quote(visible(run.folder))
    terminal.say(
        "next:\n"
        f"  proxymetric evaluate {folder} --data OTHER_IMAGES   (scores on classes that the model has not seen)\n"
        f"  proxymetric index {folder} ALL_IMAGES --out all.index\n"
        "  proxymetric search all.index unknown.jpg"
    )


def _train(terminal: Terminal, **arguments: Any) -> Run:
    """Train and print the scores."""
    from proxymetric.runs import train as whole_run
    from proxymetric.runs.auto_method import describe_choice
    from proxymetric.runs.score import size_rows
    from proxymetric.runs.summary import result_lines, score_heading
    from proxymetric.system.tables import score_table

    with _until_stopped(terminal):
        run = whole_run.train(**arguments, watcher=terminal)
    if any(run.result.rows.values()):
        terminal.show(score_table(score_heading(run.result), run.result.rows))
    if run.result.sizes:
        terminal.show(score_table("its vectors cut and made smaller, %", size_rows(run.result.sizes)))
    terminal.print(result_lines(run.result))
    if run.result.auto is not None:
        terminal.print(f"--method auto took {describe_choice(run.result.auto)}")
    page = run.folder / "report.html"
    terminal.print(f"report: {page}" if page.is_file() else f"result: {run.folder / 'result.json'}")
    return run


def _train_folds(terminal: Terminal, arguments: dict[str, Any]) -> None:
    """Follow the protocol of "A Metric Learning Reality Check" and print its two scores."""
    from proxymetric.runs.mlrc import mlrc
    from proxymetric.runs.score import name_classes
    from proxymetric.system.tables import score_table

    if arguments["out"] is None:
        raise ValueError(f"out: got none with --protocol {MLRC}, expected a folder for the runs of all folds")
    typed = {key: value for key, value in arguments.items() if value is not None and key != "protocol"}
    with _until_stopped(terminal):
        result = mlrc(**typed, watcher=terminal)
    folds, dim = result["folds"], result["dim"]  # --set encoder.dim wins over --dim
    rows = {
        f"average of {folds} x {dim}-D": result["average"],
        f"concatenated, {folds * dim}-D": result["concatenated"],
    }
    heading = f"on {name_classes('test', result['data']['test'])}, %"
    terminal.show(score_table(heading, rows, ("P@1", "R@1", "P@R", "MAP@R", "nDCG@8")))
    terminal.print(f"result: {arguments['out'] / 'result.json'}")


@contextlib.contextmanager
def _until_stopped(terminal: Terminal) -> Iterator[None]:
    """Say what is kept when Ctrl-C or SIGTERM stops a training, and end with code 130."""
    from proxymetric.training.trainer import Interrupted

    try:
        yield
    except Interrupted:
        terminal.close()
        terminal.say("saved; the same command with --resume continues the run")
        raise typer.Exit(130) from None
    except KeyboardInterrupt as error:
        terminal.close()
        terminal.say(str(error) or "stopped")  # the error says how many features are kept
        raise typer.Exit(130) from None
    finally:
        terminal.close()
