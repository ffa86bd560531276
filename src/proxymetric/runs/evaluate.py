"""Evaluate a trained model on labelled images: its scores beside those of the untrained encoder or of another run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from proxymetric import metrics as scoring
from proxymetric.data import ImageSet
from proxymetric.models.embedding import embed_images
from proxymetric.models.features import FeatureModel, is_frozen, load_untrained
from proxymetric.models.load import is_run, load, load_model, next_to, read_run, unfinished
from proxymetric.models.model import Model
from proxymetric.models.run_folder import SIMPLER, keeps_simpler
from proxymetric.runs.assemble import MAX_PIXELS_SIDE, embed_pixels
from proxymetric.runs.comparison import UNTRAINED_MEANS, Comparison, advice, compare
from proxymetric.runs.evaluation_set import class_notes, evaluation_set
from proxymetric.runs.fewer_classes import among_fewer, score_sentences
from proxymetric.runs.missing_thresholds import add_missing_thresholds
from proxymetric.runs.report import draw_page
from proxymetric.runs.result import PIXELS, TRAINED, UNTRAINED
from proxymetric.runs.score import (
    EmbeddedSet,
    describe,
    equal_to_other_classes,
    images_per_class,
    queries_left_out,
    rates_below_one_pair,
    score_sizes,
)
from proxymetric.system.files import check_output
from proxymetric.system.watcher import Silent, Watcher
from proxymetric.training.options import TrainOptions


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on labelled images.

    Attributes:
        embedded: the images with the vectors of the model.
        comparison: the scores, with intervals and differences.
        note: which of the classes the model was trained on; may be empty.
        remarks: sentences that say what the scores mean.
        sizes: of a nested model: the scores of smaller vectors, see `score.score_sizes`.
        fewer_classes: by row, the scores among fewer classes, see `fewer_classes.among_fewer`.
        page: the page that was written; None if none was.
    """

    embedded: EmbeddedSet
    comparison: Comparison
    note: str
    remarks: list[str]
    sizes: list[dict[str, Any]]
    fewer_classes: dict[str, list[dict[str, Any]]]
    page: Path | None = None

    @property
    def description(self) -> str:
        """How many images of which classes were scored."""
        return f"{describe(self.embedded)}{f' ({self.note})' if self.note else ''}"

    def as_dict(self) -> dict[str, Any]:
        """The evaluation in plain types, for JSON; scores are fractions."""
        return {
            "images": len(self.embedded.kept),
            "classes": self.comparison.classes,
            "evaluated_on": self.description,
            "rows": self.comparison.rows,
            "intervals": self.comparison.intervals,
            "differences": {name: each._asdict() for name, each in self.comparison.differences.items()},
            "sizes": self.sizes,
            "fewer_classes": self.fewer_classes,
            "remarks": self.remarks,
            "page": None if self.page is None else str(self.page),
        }


def evaluate_run(
    run: str | Path,
    data: str | Path | None = None,
    *,
    metrics: Sequence[str] = TrainOptions.metrics,
    layout: str = "auto",
    split: str = "auto",
    distance: str = "cosine",
    differs: str | None = None,
    against: str | Path | None = None,
    untrained: bool = True,
    report: str | Path | bool = True,
    which: str = "best",
    weights: str | Path | None = None,
    device: str | None = None,
    watcher: Watcher | None = None,
) -> Evaluation:
    """Score a trained model and its untrained encoder, or another run, on labelled images, and write a page.

    A finished run without thresholds (of an earlier version) gets them, chosen on its held-out classes.

    Args:
        run: folder of a run, a slim file, or a shared model.
        data: labelled images, as for `proxymetric.train`; None: those that the run was trained on.
        metrics: names, as for `proxymetric.evaluate`.
        layout: layout of `data`, as for `proxymetric.open_data`.
        split: which classes are scored, see `evaluation_set`.
        distance: "cosine" or "euclidean".
        differs: a column of a CSV: images with the value of a query are left out of its results.
        against: another run or model, in the place of the untrained encoder.
        untrained: score the untrained encoder, too.
        report: the page; True: RUN-on-DATA.html next to the run, if its folder can be written; False: no page.
        which: the model, as for `proxymetric.load`.
        weights: for a slim file: the backbone's weights.
        device: where to compute; None or "auto": on a GPU if there is one.
        watcher: receives messages and progress; None means no output.

    Returns:
        The scores, and what they mean in words.

    Raises:
        ValueError: an argument is wrong, or nothing can be scored.

    Example:
        >>> evaluate_run("runs/birds", "NEW_IMAGES", metrics=["R@1"]).comparison.rows   # doctest: +SKIP
    """
    watcher = watcher or Silent()
    names = scoring.names(tuple(metrics))
    if against is not None and Path(against).resolve() == Path(run).resolve():
        raise ValueError(f"--against: got {against}, which is the run itself; expected another run")
    other = None if against is None else load(against, which, device)
    images, note = evaluation_set(run, data, layout, split, which)
    page = _page(run, images.name if against is None else f"{images.name} against {Path(against).name}", report)
    model = load_model(run, which, device, weights)
    for opening_note in images.notes:
        watcher.say(opening_note)
    EmbeddedSet(images, torch.empty(len(images), 0), np.arange(len(images)), differs).sides()  # refuses a wrong column
    title = _title(run, which)
    untrained = untrained and other is None and title != UNTRAINED
    trained, baseline, reason = _embed_both(run, which, model, images, untrained, device, watcher)
    titles = (UNTRAINED, title)
    if other is not None:
        baseline, titles = (
            _embed(other, images, watcher, f"embedding by {against}", again=True),
            (str(against), str(run)),
        )
    trained = trained._replace(differs=differs)
    baseline = None if baseline is None else baseline._replace(differs=differs)
    comparison = compare(trained, baseline, names, distance, titles)
    sizes = []
    if model.nested is not None:
        sizes = score_sizes(trained, model.nested, comparison.metrics, model.normalise, distance)
    remarks = [*unfinished(run), *([] if "trained on" in note else class_notes(run, images, model.classes))]
    if other is not None and against is not None:
        remarks += [f"{against}: {each}" for each in class_notes(against, images, other.classes)]
    remarks += comparison.verdict()
    if other is None:
        remarks += _about_training(run, model, comparison, untrained, reason)
    fewer = _fewer_classes(model, trained, baseline, comparison, distance)
    remarks += _about_classes(trained, comparison, fewer.get(comparison.titles[1], []), "epoch" in note)
    remarks += _about_queries(trained, names)
    thresholds = add_missing_thresholds(
        run, trained, lambda held_out: _embed(model, held_out, watcher, "embedding held-out classes"), which
    )
    remarks += [] if thresholds is None else [thresholds]
    evaluation = Evaluation(trained, comparison, note, remarks, sizes, fewer)
    return evaluation if page is None else _with_page(evaluation, page, run, report is not True, watcher)


def default_page(run: str | Path, data: str) -> Path:
    """The default page of an evaluation: next to the run's folder, named after run and data.

    Example:
        >>> print(default_page("runs/birds", "new photos"))
        runs/birds-on-new-photos.html
    """
    return next_to(run, "on", data, ".html")


def _page(run: str | Path, on: str, report: str | Path | bool) -> Path | None:
    """The page to write; before the work begins, refuse one that would replace anything but an earlier page."""
    from proxymetric.plots.report import is_page

    if report is False:
        return None
    page = default_page(run, on) if report is True else Path(report)
    if report is True and not os.access(page.parent, os.W_OK):
        return None  # a folder that cannot be written is no error where nobody asked for the page
    return check_output("report", page, "a page of proxymetric", is_page, "--report with another file, or --no-report")


def _with_page(evaluation: Evaluation, page: Path, run: str | Path, needed: bool, watcher: Watcher) -> Evaluation:
    """Write the page of an evaluation; a page that nobody asked for and that cannot be written is no error."""
    try:
        draw_evaluation(page, str(run), evaluation)
    except OSError as error:
        if needed:
            raise
        watcher.say(f"no page: {error}; --report PATH writes it elsewhere")
        return evaluation
    return replace(evaluation, page=page)


def draw_evaluation(page: Path, run: str, evaluation: Evaluation) -> Path:
    """Write the page of an evaluation.

    Args:
        page: the file.
        run: name of the run.
        evaluation: the scores.

    Returns:
        The file.
    """
    comparison, embedded = evaluation.comparison, evaluation.embedded
    table: list[dict[str, Any]] = [
        {"name": name, **scores, "intervals": comparison.intervals.get(name, {})}
        for name, scores in comparison.rows.items()
    ]
    if comparison.differences:
        table.append({"name": "difference"} | {name: str(each) for name, each in comparison.differences.items()})
    explanation = f" {UNTRAINED_MEANS}" if UNTRAINED in comparison.rows else ""
    return draw_page(
        page,
        embedded=embedded,
        title=f"{embedded.images.name}: {Path(run).name}",
        facts={
            "run": run,
            "evaluated on": describe(embedded),
            "classes": evaluation.note,
            "images per class": images_per_class(embedded),
        },
        table=table,
        results_note=f"Retrieval on these classes, in per cent.{explanation}",
        remarks=[remark for remark in evaluation.remarks if remark != UNTRAINED_MEANS],
        sizes=evaluation.sizes,
        fewer_classes=evaluation.fewer_classes,
        curve=[],
        notes=[],
        map_heading="Map of the classes",
    )


def _title(run: str | Path, which: str) -> str:
    """What a model is called beside the untrained encoder: by its closed form, if the run keeps one."""
    if which != "best" or not is_run(run) or not keeps_simpler(run):
        return TRAINED
    name = str(read_run(Path(run) / SIMPLER)["recipe"]["method"])
    return {"untrained": UNTRAINED}.get(name, name)


def _about_training(run: str | Path, model: Model, comparison: Comparison, untrained: bool, reason: str) -> list[str]:
    """What to do if training has not helped, and what the row of the untrained encoder means or why it is missing."""
    sentences = []
    if not comparison.helped and is_run(run):
        sentences.append(advice(read_run(run)["recipe"], len(model.classes)))
    if untrained:
        sentences.append(f"no row for the untrained encoder: {reason}" if reason else UNTRAINED_MEANS)
    return sentences


def _fewer_classes(
    model: Model, trained: EmbeddedSet, baseline: EmbeddedSet | None, comparison: Comparison, distance: str
) -> dict[str, list[dict[str, Any]]]:
    """The scores of both encoders, and of small images' raw pixels, among fewer classes."""
    first, second = comparison.titles
    sets: dict[str, EmbeddedSet] = {second: trained}
    if baseline is not None:
        sets = {first: baseline} | sets
    if model.view.size <= MAX_PIXELS_SIDE:
        images = trained.images
        pixels = embed_pixels(images, model.view, lambda title, reason: None)._replace(differs=trained.differs)
        sets = {PIXELS: pixels} | sets
    fewer = {name: among_fewer(each, comparison.rows.get(name, {}), distance) for name, each in sets.items()}
    return {name: records for name, records in fewer.items() if records}


def _about_classes(
    embedded: EmbeddedSet, comparison: Comparison, records: list[dict[str, Any]], chosen: bool
) -> list[str]:
    """What R@1 means, and how it falls with the number of classes."""
    classes = f"{comparison.classes} classes ({len(embedded.kept)} images)"
    return score_sentences(comparison.rows[comparison.titles[1]], records, classes, chosen)


def _about_queries(embedded: EmbeddedSet, names: Sequence[str]) -> list[str]:
    """Which images were no queries, which have equals in other classes, which rates are below one pair."""
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


def _embed(model: Model, images: ImageSet, watcher: Watcher, what: str, again: bool = False) -> EmbeddedSet:
    vectors, indices = embed_images(model, images, watcher, what, again)
    return EmbeddedSet(images, vectors, np.asarray(indices, dtype=np.int64))


def _embed_both(
    run: str | Path, which: str, model: Model, images: ImageSet, untrained: bool, device: str | None, watcher: Watcher
) -> tuple[EmbeddedSet, EmbeddedSet | None, str]:
    """Embed a set by the trained and by the untrained encoder.

    Returns:
        The set embedded by each encoder, and the reason if the second is None.
    """
    if untrained and is_frozen(run, which):
        # The backbone was not trained: one pass computes its features, and the head maps them to the vectors.
        features = FeatureModel.of(model)
        baseline = _embed(features, images, watcher, "embedding")
        return baseline._replace(vectors=features.vectors(baseline.vectors)), baseline, ""
    trained = _embed(model, images, watcher, "embedding")
    if not untrained:
        return trained, None, ""
    try:
        encoder = load_untrained(run, device)
    except (ValueError, OSError) as error:
        return trained, None, str(error)
    return trained, _embed(encoder, images, watcher, "embedding by the untrained encoder", again=True), ""
