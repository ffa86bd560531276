"""The verb that scores a trained model: evaluate."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from proxymetric.cli.root import Device, RunOrFile, SlimWeights, Which, app, example

if TYPE_CHECKING:
    from proxymetric.data import ImageSet
    from proxymetric.models.model import Model
    from proxymetric.runs.comparison import Comparison
    from proxymetric.runs.score import EmbeddedSet
    from proxymetric.system.terminal import Terminal


@app.command(
    short_help="Score a trained model on labelled images.",
    epilog=example(
        "proxymetric evaluate runs/birds",
        "proxymetric evaluate runs/birds --data NEW_PHOTOS --metrics R@1,MAP@R,NMI",
        "proxymetric evaluate runs/people --data people.csv --differs camera",
        "proxymetric evaluate runs/new --against runs/old --data NEW_PHOTOS",
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
            "sum divided by min(K, R), R relevant images), AP (of the whole ranking), MRR, MRR@K, nDCG@K, NMI, AMI, "
            "covering_radius, inter_class_distance; of all pairs EER (equal error rate) and FNMR@FMR=0.001 "
            "(genuine pairs rejected at that false-match rate)."
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
            "classes that the run was not trained on; of other data, its test images (test/), or all if it has none."
        ),
    ] = "auto",
    distance: Annotated[str, typer.Option(help="cosine or euclidean.")] = "cosine",
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
    import numpy as np
    import torch

    from proxymetric import metrics as scoring
    from proxymetric.cli.tables import comparison_table
    from proxymetric.cli.trained import embed_images, load_model, unfinished
    from proxymetric.runs.comparison import compare
    from proxymetric.runs.evaluation_page import check_target, default_page, draw_evaluation
    from proxymetric.runs.evaluation_set import class_notes, evaluation_set
    from proxymetric.runs.result import TRAINED, UNTRAINED
    from proxymetric.runs.score import EmbeddedSet, describe, score_sizes, size_rows
    from proxymetric.system.tables import score_table
    from proxymetric.system.terminal import Terminal

    if report is not None and no_report:
        raise ValueError("report, no-report: got both, expected one")
    names = scoring.names(tuple(name.strip() for name in metrics.split(",")))
    if against is not None and Path(against).resolve() == Path(run).resolve():
        raise ValueError(f"--against: got {against}, which is the run itself; expected another run")
    other = None if against is None else load_model(against, which, device, None)
    images, note = evaluation_set(run, data, layout, split, which)
    on = images.name if against is None else f"{images.name} against {Path(against).name}"
    page = report if report is not None else default_page(run, on)
    if report is not None or (not no_report and os.access(page.parent, os.W_OK)):
        check_target(page)  # without --report, a folder that cannot be written is no error: no page is written
    model = load_model(run, which, device, weights)
    terminal = Terminal()
    for opening_note in images.notes:
        terminal.say(opening_note)
    EmbeddedSet(images, torch.empty(len(images), 0), np.arange(len(images)), differs).sides()  # refuses a wrong column
    titles = (UNTRAINED, TRAINED)
    untrained = untrained and other is None
    trained, baseline, reason = _embed_both(run, model, images, untrained, device, terminal)
    if other is not None and against is not None:
        vectors, indices = embed_images(other, images, terminal, f"embedding by {against}", again=True)
        baseline, titles = EmbeddedSet(images, vectors, np.asarray(indices, dtype=np.int64)), (against, run)
    trained = trained._replace(differs=differs)
    baseline = None if baseline is None else baseline._replace(differs=differs)
    comparison = compare(trained, baseline, names, distance, titles)
    description = f"{describe(trained)}{f' ({note})' if note else ''}"
    terminal.show(comparison_table(f"{description}, %", comparison))
    sizes = []
    if model.nested is not None:
        sizes = score_sizes(trained, model.nested, comparison.metrics, model.normalise, distance)
        terminal.show(score_table("its vectors cut and made smaller, %", size_rows(sizes), comparison.metrics))
    sentences = [*unfinished(run), *([] if "trained on" in note else class_notes(run, images, model.classes))]
    if other is not None and against is not None:
        sentences += [f"{against}: {each}" for each in class_notes(against, images, other.classes)]
    sentences += comparison.verdict()
    if other is None:
        sentences += _about_training(run, model, comparison, untrained, reason)
    sentences += _about_queries(trained, names)
    if thresholds := _add_missing_thresholds(run, which, model, trained, terminal):
        sentences.append(thresholds)
    for sentence in sentences:
        terminal.say(sentence)
    if no_report:
        return
    content: dict[str, Any] = {
        "embedded": trained,
        "comparison": comparison,
        "note": note,
        "remarks": sentences,
        "sizes": sizes,
    }
    try:
        draw_evaluation(page, run=str(run), **content)
    except OSError as error:
        if report is not None:
            raise
        terminal.say(f"no page: {error}; --report PATH writes it elsewhere")
    else:
        terminal.say(f"report: {page}")


def _about_training(run: str, model: Model, comparison: Comparison, untrained: bool, reason: str) -> list[str]:
    """What to do if training has not helped, and what the row of the untrained encoder means or why it is missing."""
    from proxymetric.models.load import is_run, read_run
    from proxymetric.runs.comparison import UNTRAINED_MEANS, advice

    sentences = []
    if not comparison.helped and is_run(run):
        sentences.append(advice(read_run(run)["recipe"], len(model.classes)))
    if untrained:
        sentences.append(f"no row for the untrained encoder: {reason}" if reason else UNTRAINED_MEANS)
    return sentences


def _about_queries(embedded: EmbeddedSet, names: Sequence[str]) -> list[str]:
    """Which images were no queries, which have equals in other classes, which rates are below one pair."""
    from proxymetric.runs.score import equal_to_other_classes, queries_left_out, rates_below_one_pair

    sentences = []
    if left_out := queries_left_out(embedded):
        sentences.append(f"images that were not used as queries, because no other image has their class: {left_out}")
    if equal := equal_to_other_classes(embedded):
        sentences.append(
            f"images with exactly the vector of an image of another class: {equal}. Which of the two is found first, "
            "and with it R@1, depends on the order of the images. Perhaps a picture has two labels: proxymetric "
            "inspect lists copies"
        )
    return [*sentences, *rates_below_one_pair(embedded, names).values()]


def _add_missing_thresholds(
    run: str, which: str, model: Model, evaluated: EmbeddedSet, terminal: Terminal
) -> str | None:
    """Give thresholds to a run that has none; return what was done in a sentence, None for nothing."""
    import numpy as np

    from proxymetric.cli.trained import embed_images
    from proxymetric.runs.missing_thresholds import add_missing_thresholds
    from proxymetric.runs.score import EmbeddedSet

    def embed(images: ImageSet) -> EmbeddedSet:
        vectors, indices = embed_images(model, images, terminal, "embedding held-out classes")
        return EmbeddedSet(images, vectors, np.asarray(indices, dtype=np.int64))

    return add_missing_thresholds(run, evaluated, embed, which)


def _embed_both(
    run: str, model: Model, images: ImageSet, untrained: bool, device: str | None, terminal: Terminal
) -> tuple[EmbeddedSet, EmbeddedSet | None, str]:
    """Embed a set by the trained and by the untrained encoder.

    Returns:
        The set embedded by each encoder, and the reason if the second is None.
    """
    import numpy as np

    from proxymetric.cli.trained import embed_images
    from proxymetric.models.features import FeatureModel, is_frozen, load_untrained
    from proxymetric.runs.score import EmbeddedSet

    def embed(encoder: Model, what: str, again: bool = False) -> EmbeddedSet:
        vectors, indices = embed_images(encoder, images, terminal, what, again)
        return EmbeddedSet(images, vectors, np.asarray(indices, dtype=np.int64))

    if untrained and is_frozen(run):
        # The backbone was not trained: one pass computes its features, and the head maps them to the vectors.
        features = FeatureModel.of(model)
        baseline = embed(features, "embedding")
        return baseline._replace(vectors=features.vectors(baseline.vectors)), baseline, ""
    trained = embed(model, "embedding")
    if not untrained:
        return trained, None, ""
    try:
        encoder = load_untrained(run, device)
    except (ValueError, OSError) as error:
        return trained, None, str(error)
    return trained, embed(encoder, "embedding by the untrained encoder", again=True), ""
