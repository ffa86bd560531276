"""Verbs that train: train, mlrc."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from proxymetric.cli.root import Data, Device, app, example

Method = Annotated[str | None, typer.Option("--method", "-m", help="See `proxymetric methods`.")]
Backbone = Annotated[str | None, typer.Option("--backbone", "-b", help="Any timm name, bn_inception or small.")]
Weights = Annotated[Path | None, typer.Option(help="Backbone weights (safetensors) instead of the hub's.")]
RecipeFile = Annotated[Path | None, typer.Option("--recipe", "-r", help="TOML file; flags win over it.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the training images, at most.")]
Size = Annotated[int | None, typer.Option(help="Side of the images in pixels.")]
Seed = Annotated[int | None, typer.Option(help="Makes a run repeatable.")]
Cache = Annotated[str | None, typer.Option(help="Decoded images: auto, none, memory or device.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="TABLE.KEY=VALUE", help="Any key of the recipe; repeatable, wins over flags."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start anew in --out.")]


@app.command(
    short_help="Train on labelled images and measure on unseen classes.",
    epilog=example(
        "proxymetric train --data PHOTOS --backbone resnet50 --method proxy-anchor",
        "proxymetric train --data PHOTOS --frozen --set loss.margin=0.2 --set train.patience=5",
    ),
)
def train(
    data: Data = None,
    method: Method = None,
    backbone: Backbone = None,
    weights: Weights = None,
    tuning: Annotated[
        str | None,
        typer.Option(
            help="What is trained of the backbone: full, linear, bitfit; of ViTs vpt, adapter, lora; several: vpt+lora."
        ),
    ] = None,
    recipe: RecipeFile = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Run folder; runs/<data>-<method> by default.")
    ] = None,
    epochs: Epochs = None,
    batch: Annotated[int | None, typer.Option(help="Images in a step.")] = None,
    size: Size = None,
    dim: Annotated[int | None, typer.Option(help="Dimensions of the embedding.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the encoder; proxies have 100 times that.")] = None,
    seed: Seed = None,
    cache: Cache = None,
    device: Device = None,
    frozen: Annotated[
        bool | None,
        typer.Option("--frozen/--no-frozen", help="Train head and proxies on cached features: no GPU needed."),
    ] = None,
    refit: Annotated[
        bool | None,
        typer.Option("--refit/--no-refit", help="Then train on all classes for the chosen number of epochs."),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="Which classes choose the epoch: held-out (a fifth of the training classes, the default), last (none, "
            "the last epoch counts) or papers (the test classes: scores as papers report them, labelled so)."
        ),
    ] = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    overwrite: Overwrite = False,
    report: Annotated[bool, typer.Option("--report/--no-report", help="Draw the page report.html at the end.")] = True,
) -> None:
    """Train on labelled images, choose the epoch on held-out classes, measure, write a report."""
    from proxymetric.cli.terminal import Terminal, result_lines, score_table
    from proxymetric.protocol import CHOSEN_ON_TEST
    from proxymetric.runs import train as whole_run
    from proxymetric.training import Interrupted

    terminal = Terminal()
    # A flag like the others, before the settings that win over it; `pm.train` reaches it as a setting too.
    said = [*([] if tuning is None else [f"encoder.tuning={tuning}"]), *(settings or ())]
    try:
        run = whole_run.train(
            data, recipe=recipe, method=method, backbone=backbone, weights=weights, out=out, epochs=epochs, batch=batch,
            size=size, dim=dim, lr=lr, seed=seed, cache=cache, device=device, frozen=frozen, refit=refit,
            protocol=protocol, settings=said, resume=resume, overwrite=overwrite, report=report, watcher=terminal,
        )  # fmt: skip
    except Interrupted:
        terminal.close()
        terminal.say("saved; the same command with --resume goes on from here")
        raise typer.Exit(130) from None
    finally:
        terminal.close()
    if any(run.result["rows"].values()):
        chosen = f"; {CHOSEN_ON_TEST}" if run.result["protocol"] == "papers" else ""
        terminal.console.print(score_table(f"on classes never seen in training, %{chosen}", run.result["rows"]))
    terminal.say(result_lines(run.result))
    page = run.folder / "report.html"
    terminal.say(f"report: {page}" if page.is_file() else f"result: {run.folder / 'result.json'}")


@app.command(
    short_help="Compare fairly: one model per fold, averaged and joined.",
    epilog=example("proxymetric mlrc --data CUB_200_2011 --recipe recipes/cub/proxy-anchor.toml --out runs/mlrc-cub"),
)
def mlrc(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the folds' runs and the result.")],
    data: Data = None,
    method: Method = None,
    backbone: Backbone = None,
    weights: Weights = None,
    recipe: RecipeFile = None,
    epochs: Epochs = None,
    size: Size = None,
    folds: Annotated[int, typer.Option(help="Blocks of the training classes, one model each.")] = 4,
    dim: Annotated[int, typer.Option(help="Dimensions of each model.")] = 128,
    seed: Seed = None,
    cache: Cache = None,
    device: Device = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where it was interrupted.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """The protocol of "A Metric Learning Reality Check".

    The training classes are cut into folds; one model per fold, its epoch chosen by MAP@R on that fold; on the test
    classes the mean over the models, and all of them side by side.
    """
    from proxymetric.cli.terminal import Terminal, score_table
    from proxymetric.runs import mlrc as protocol
    from proxymetric.training import Interrupted

    terminal = Terminal()
    try:
        result = protocol.mlrc(
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
