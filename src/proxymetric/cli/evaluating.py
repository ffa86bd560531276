"""The verb that scores a trained model: evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.arguments.written import source
from proxymetric.cli.results import AsJson
from proxymetric.cli.root import Device, RunOrFile, SlimWeights, Which, app, example, local, typed

if TYPE_CHECKING:
    from proxymetric.system.terminal import Terminal


def _defaults() -> dict[str, Any]:
    from proxymetric.training.options import TrainOptions

    return source("runs/evaluate.py").defaults("evaluate_run") | {"metrics": TrainOptions.metrics}


@app.command(
    defaults=_defaults,
    short_help="Score a trained model on labelled images.",
    epilog=example(
        "proxymetric evaluate runs/birds",
        "proxymetric evaluate runs/birds --data NEW_IMAGES --metrics R@1,MAP@R,NMI",
        "proxymetric evaluate runs/people --data people.csv --differs camera",
        "proxymetric evaluate runs/new --against runs/old --data NEW_IMAGES",
        "proxymetric evaluate runs/birds --redraw",
    ),
)
def evaluate(
    ctx: typer.Context,
    run: RunOrFile,
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", help="Labelled images, as for train. Default: the data of the run."),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Separated by commas: R@K, P@K, P@R, MAP@R, MAP@K (divided by K, as in the papers), AP@K (the same "
            "sum divided by min(K, R), R relevant images), AP (of the whole ranking), MRR, MRR@K, nDCG@K, NMI, AMI, "
            "covering_radius, inter_class_distance; of all pairs EER (equal error rate) and FNMR@FMR=0.001 "
            "(genuine pairs rejected at that false-match rate)."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(
            help="Layout of --data: auto, folder, nested, csv, or a benchmark (cub, cars, sop, in-shop, inaturalist, "
            "omniglot, mnist)."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Classes to score: all, or the test, validation or train classes of the run's split. auto: the "
            "classes that the run was not trained on; of other data, its test images (test/), or all if it has none."
        ),
    ] = None,
    distance: Annotated[str | None, typer.Option(help="cosine or euclidean.")] = None,
    differs: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Column of a CSV, such as camera: images with the value of a query are left out of its results.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Another run or model to compare with, in the place of the untrained encoder."
        ),
    ] = None,
    untrained: Annotated[
        bool,
        typer.Option(
            "--untrained/--no-untrained", help="Also score the untrained encoder: the backbone before training."
        ),
    ] = True,
    report: Annotated[
        Path | None, typer.Option("--report", help="Page to write. Default: RUN-on-DATA.html, next to the run.")
    ] = None,
    no_report: Annotated[bool, typer.Option("--no-report", help="Write no page.")] = False,
    redraw: Annotated[
        bool,
        typer.Option(
            "--redraw", help="Score nothing; draw the page report.html of a finished run again, from its own images."
        ),
    ] = False,
    as_json: AsJson = False,
    which: Which = "best",
    weights: SlimWeights = None,
    device: Device = None,
) -> None:
    """Score a trained model and its untrained encoder, or another run, on labelled images, and write a page.

    Each image is a query against all other images. A run that was trained with --nested is also scored with its vectors
    cut to each size. A benchmark with queries and a gallery (In-Shop) is scored queries
    against gallery, as in training. A finished run without thresholds (of an earlier version) gets them, chosen on its
    held-out classes. Intervals are 95 % intervals over classes; the difference is paired by query.
    """
    from proxymetric.cli.tables import comparison_table
    from proxymetric.runs.score import size_rows
    from proxymetric.system.tables import score_table
    from proxymetric.system.terminal import Terminal

    terminal = Terminal()
    if redraw:
        _redraw(ctx, run, terminal)
        return
    if report is not None and no_report:
        raise ValueError("report, no-report: got both, expected one")
    from proxymetric.runs.evaluate import evaluate_run

    names = None if metrics is None else [name.strip() for name in metrics.split(",")]
    options = {"metrics": names, "layout": layout, "split": split, "distance": distance}
    evaluation = evaluate_run(
        run,
        data,
        **{key: value for key, value in options.items() if value is not None},  # type: ignore[arg-type]
        differs=differs,
        against=against,
        untrained=untrained,
        report=not no_report if report is None else report,
        which=which,
        weights=weights,
        device=device,
        watcher=terminal,
    )
    if as_json:
        terminal.dump(evaluation.as_dict())
        return
    terminal.show(comparison_table(f"{evaluation.description}, %", evaluation.comparison))
    if evaluation.sizes:
        rows = size_rows(evaluation.sizes)
        terminal.show(score_table("its vectors cut and made smaller, %", rows, evaluation.comparison.metrics))
    for sentence in evaluation.remarks:
        terminal.print(sentence)
    if evaluation.page is not None:
        terminal.print(f"report: {evaluation.page}")


def _redraw(ctx: typer.Context, run: str, terminal: Terminal) -> None:
    """Draw the report of a run again; refuse options that say how to score."""
    from proxymetric.runs.report import remake_report

    if others := set(typed(ctx)) - {"run", "redraw"}:
        raise ValueError(f"redraw: got it with {', '.join(sorted(others))}, expected it alone: nothing is scored")
    terminal.print(f"report: {remake_report(local(Path(run)), terminal)}")
