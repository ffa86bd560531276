"""The report of a finished run: what the page `report.html` shows, and how to draw it again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from proxymetric.data import BadImage, ImageSet
from proxymetric.models.load import read_run
from proxymetric.models.run_folder import is_refitted, model_folder
from proxymetric.runs.auto_method import describe_trials
from proxymetric.runs.clear_gain import Kept
from proxymetric.runs.closed_form import Fit
from proxymetric.runs.comparison import UNTRAINED_MEANS, compare, remarks
from proxymetric.runs.evaluation_set import seen_set, unseen_vectors
from proxymetric.runs.fewer_classes import result_sentences
from proxymetric.runs.protocol import CHOSEN_ON_TEST
from proxymetric.runs.result import TRAINED, UNTRAINED, Result
from proxymetric.runs.score import EmbeddedSet, break_down, describe, images_per_class, name_classes, rank_set
from proxymetric.runs.whiten import describe_whitening
from proxymetric.system.clock import clock
from proxymetric.system.files import check_output
from proxymetric.system.watcher import Silent, Watcher

if TYPE_CHECKING:
    from proxymetric.metrics.breakdown import Confusion
    from proxymetric.plots import Certainty, ConfusedPair, GalleryRow

PAGE_MARK = b'<link rel="icon" href="data:,"><title>'
"""bytes in the head of every report, also of those that earlier versions wrote"""
NEEDED_KEYS = {"recipe": {"method", "seed", "encoder", "train"}, "data": {"name", "train"}, "machine": {"processor"}}
"""keys of a result's tables that the page shows"""
MAX_TSNE_IMAGES = 2000
GALLERY_QUERIES = 10
RESULTS_PER_QUERY = 8
HARDEST_QUERIES = 6
CONFUSED_PAIRS = 10
SAMPLES_PER_CLASS = 4


def draw_report(file: Path, *, result: Result, embedded: EmbeddedSet, training_images: ImageSet | None = None) -> Path:
    """Write the page: scores, training curve, retrieval gallery and t-SNE of classes never seen in training.

    Args:
        file: where the page is written.
        result: the result of the run.
        embedded: the evaluated set with its normalised embeddings, on the CPU.
        training_images: for the classes that the method is most and least certain of; None leaves these out.

    Returns:
        The file.
    """
    certainty = None
    if training_images is not None and result.uncertainty is not None:
        certainty = _certainty(result.uncertainty, training_images)
    table = [{"name": name, **scores} for name, scores in result.rows.items()]
    for row in table:
        if row["name"] == result.kept_row:
            row["intervals"] = compare(embedded, None, list(result.scores)).intervals[TRAINED]
    return draw_page(
        file,
        embedded=embedded,
        title=f"{result.data['name']}: {result.recipe['method']}",
        facts=_facts(result, embedded),
        table=table,
        results_note=_results_note(result),
        remarks=[*remarks(result), *result_sentences(result)],
        fewer_classes=result.fewer_classes or {},
        sizes=result.sizes or [],
        curve=_curve(result),
        curve_classes=_choosing_classes(result),
        certainty=certainty,
        thresholds=result.thresholds,
        notes=_notes(result),
        seed=result.recipe["seed"],
    )


def draw_page(file: Path, *, embedded: EmbeddedSet, seed: int = 0, **parts: Any) -> Path:
    """Write a page with the gallery, the confused classes, the hardest queries and the map of an embedded set.

    Args:
        file: where the page is written.
        embedded: the set with its normalised embeddings, on the CPU.
        seed: random seed for the choice of queries and for the map.
        **parts: the other arguments of `plots.write_report`.

    Returns:
        The file.
    """
    from proxymetric.plots import gallery_rows, pick_queries, tsne, write_report

    images, vectors, labels = embedded.images, embedded.vectors, embedded.labels
    ranking = rank_set(embedded, RESULTS_PER_QUERY)
    breakdown = break_down(embedded, HARDEST_QUERIES, 4 * CONFUSED_PAIRS)
    ranking_row = {int(query): row for row, query in enumerate(ranking.queries)}

    def read(i: int) -> Image.Image:
        return images.read(int(embedded.kept[i]))

    def title(i: int) -> str:
        return images.title(int(embedded.kept[i]))

    def gallery(rows: list[int]) -> list[GalleryRow]:
        return gallery_rows(ranking, rows, vectors, labels, images.classes, read, file=title)

    return write_report(
        file,
        gallery=gallery(pick_queries(ranking, GALLERY_QUERIES, seed)),
        confused=_confused(breakdown.confused, embedded, read, title),
        hardest=gallery([ranking_row[query.query] for query in breakdown.worst]),
        scatter=tsne(vectors, labels, images.classes, limit=MAX_TSNE_IMAGES, seed=seed),
        **parts,
    )


def _confused(
    pairs: list[Confusion], embedded: EmbeddedSet, read: Callable[[int], Image.Image], title: Callable[[int], str]
) -> list[ConfusedPair]:
    """The most confused pairs of classes; (a, b) and (b, a) are merged into one pair."""
    from proxymetric.plots import ConfusedPair

    names = embedded.images.classes
    example = {int(label): int(i) for i, label in reversed(list(enumerate(embedded.labels)))}
    share = {(pair.label, pair.wrong_label): pair.share for pair in pairs}
    merged: list[ConfusedPair] = []
    seen_pairs = set()
    for pair in pairs:
        if len(merged) == CONFUSED_PAIRS or frozenset((pair.label, pair.wrong_label)) in seen_pairs:
            continue
        seen_pairs.add(frozenset((pair.label, pair.wrong_label)))
        first, second = example[pair.label], example[pair.wrong_label]
        merged.append(
            ConfusedPair(
                names[pair.label],
                names[pair.wrong_label],
                pair.share,
                read(first),
                read(second),
                reverse_share=share.get((pair.wrong_label, pair.label), 0.0),
                file=title(first),
                found_file=title(second),
            )
        )
    return merged


def remake_report(run: str | Path, watcher: Watcher | None = None) -> Path:
    """Draw the report of a finished run again: embed its unseen classes with its model and write `report.html`.

    Args:
        run: folder of the run; its data must be where it was.
        watcher: receives the progress.

    Returns:
        The page.

    Raises:
        ValueError: the run is not finished, or its model was trained on every class of its data.
    """
    folder = Path(run)
    read_run(folder)
    file = folder / "result.json"
    if not file.is_file():
        raise ValueError(
            f"run: got {folder}, which is not finished (it has no result.json); expected a finished run: `proxymetric "
            "train --resume` continues it"
        )
    result = Result.read(file)
    for table, keys in NEEDED_KEYS.items():
        missing = sorted(keys - getattr(result, table).keys())
        if missing:
            raise ValueError(
                f"{file}: got no {table}.{missing[0]}, expected the result of a finished run; the file is damaged, and "
                "`proxymetric train --resume` writes it again"
            )
    page = check_page(folder)
    part = result.evaluated_on
    if part is None:
        raise ValueError(
            f"run: got {folder}, whose model was trained on every class of its data; expected a run with classes that "
            "it was not trained on. `proxymetric evaluate --data` writes a page for other images"
        )
    # A refitted model may know every class: then the model before the refit was scored.
    known = part == "validation" and is_refitted(folder)
    model = model_folder(folder).parent if known else folder
    return draw_report(
        page,
        result=result,
        embedded=unseen_vectors(model, watcher or Silent(), part, "chosen" if known else "best"),
        training_images=seen_set(folder) if result.uncertainty is not None else None,
    )


def check_page(folder: Path) -> Path:
    """Check that the page of a run may be written.

    Returns:
        The file of the page.

    Raises:
        ValueError: `report.html` is something other than a report.
    """
    page = folder / "report.html"
    return check_output("report.html", page, "a report of proxymetric", lambda file: PAGE_MARK in _head(file))


def _head(file: Path) -> bytes:
    with open(file, "rb") as page:
        return page.read(2000)


def _facts(result: Result, embedded: EmbeddedSet) -> dict[str, str]:
    """The facts at the head of the page, without those that an older result lacks."""
    recipe = result.recipe
    classes = result.scored_classes
    trained = result.refit or {**result.data["train"], "parameters": result.parameters}
    chosen = str(round(result.chosen_epoch, 2))
    if result.protocol == "papers":
        chosen += f" ({CHOSEN_ON_TEST}, as in the papers)"
    facts = {
        "method": recipe["method"] if result.auto is None else f"{recipe['method']} (auto: {result.auto['reason']})",
        "backbone": recipe["encoder"]["backbone"],
        "tuning": _tuning("head alone" if recipe["train"]["frozen"] else recipe["encoder"].get("tuning", "full")),
        "data": f"{result.data['name']}: {trained['images']} images of {trained['classes']} classes in training",
        "evaluated on": f"{describe(embedded)}: {classes}" if embedded.has_sides else classes,
        "images per class": images_per_class(embedded),
        "protocol": result.protocol,
        "chosen epoch": chosen,
        "weights": _weights(result.weights),
        "trained parameters": _trained_parameters(trained["parameters"]),
        "learning rate": ", ".join(f"{part} {rate:g}" for part, rate in result.rates.items()),
        "time": f"{clock(result.seconds)} on {_machine(result.machine)}",
        "seed": str(recipe["seed"]),
    }
    return {name: value for name, value in facts.items() if value}


def _results_note(result: Result) -> str:
    note = f"Retrieval on {result.scored_classes}, in per cent."
    if result.protocol == "papers":
        note += f" The trained encoder: {CHOSEN_ON_TEST}."
    return f"{note} {UNTRAINED_MEANS}" if UNTRAINED in result.rows else note


def _machine(facts: dict[str, Any]) -> str:
    """The machine in words.

    >>> _machine({"processor": "x86_64", "cores": 2})
    'a CPU (x86_64, 2 cores)'
    """
    if "gpu" in facts:
        return str(facts["gpu"])
    cores = f", {facts['cores']} cores" if facts.get("cores") else ""
    return f"a CPU ({facts['processor']}{cores})"


def _curve(result: Result) -> list[dict[str, Any]]:
    """The evaluations with the columns that the page shows."""
    columns = ("epoch", "loss", result.recipe["train"]["monitor"], "R@1")
    return [
        {name: record[name] for name in columns if name in record} | {"chosen": record["epoch"] == result.chosen_epoch}
        for record in result.curve
    ]


def _choosing_classes(result: Result) -> str:
    """The classes of the training curve, with their numbers."""
    part, kind = ("test", "test") if result.protocol == "papers" else ("validation", "held-out")
    return name_classes(kind, result.data[part]) if part in result.data else f"{kind} classes"


def _notes(result: Result) -> list[str]:
    """The sentences under the table."""
    notes = [] if result.closed_form is None else [str(Fit(**result.closed_form))]
    if result.refit is not None and "closed_form" in result.refit:
        notes.append(f"refitted: {Fit(**result.refit['closed_form'])}")
    if result.kept is not None:
        notes.append(str(Kept(**result.kept)))
    if result.whiten is not None:
        notes.append(describe_whitening(result.whiten))
    notes += [f"{path} could not be read ({reason}) and was left out" for path, reason in result.bad_images.items()]
    if result.auto is not None and (trials := describe_trials(result.auto)):
        notes.append(trials)
    if result.protocol == "papers":
        notes.append(f"{CHOSEN_ON_TEST}: the row of the last epoch is what a user can expect")
    if figures := result.validation.get("figures"):
        values = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        notes.append(f"figures of the method at the chosen epoch: {values}")
    if "mean_cosine" in result.validation:
        start, chosen = result.curve[0].get("mean_cosine"), result.validation["mean_cosine"]
        before = "" if start is None else f" ({start:.3f} before training)"
        notes.append(f"mean cosine of two training images at the chosen epoch: {chosen:.3f}{before}")
    if result.queries_left_out:
        notes.append(
            f"{result.queries_left_out} images have no other image of their class and were not used as queries"
        )
    return notes


def _certainty(uncertainty: dict[str, Any], training_images: ImageSet) -> Certainty:
    from proxymetric.plots import Certainty, ClassSamples

    note = (
        f"The mean uncertainty is {uncertainty['mean']:.3g}. 0 means certain; the square root of the dimension means "
        "that nothing is known."
    )
    if "correlation" in uncertainty:
        note += (
            " The correlation between the uncertainty of a class and the similarity of its images to their proxy is "
            f"{uncertainty['correlation']:.2f}."
        )

    def samples(pairs: list[tuple[str, float]]) -> list[ClassSamples]:
        return [ClassSamples(name, value, *_samples(training_images, name)) for name, value in pairs]

    return Certainty(samples(uncertainty["least"]), samples(uncertainty["most"]), note)


def _samples(images: ImageSet, name: str) -> tuple[list[Image.Image], list[str]]:
    """The first readable images of a class, and their file names."""
    samples: list[Image.Image] = []
    files: list[str] = []
    for row in np.flatnonzero(images.labels == images.classes.index(name)):
        if len(samples) == SAMPLES_PER_CLASS:
            break
        with contextlib.suppress(BadImage):
            samples.append(images.read(int(row)))
            files.append(images.title(int(row)))
    return samples, files


def _tuning(tuning: str | dict[str, Any]) -> str:
    """The name of a tuning with all its arguments.

    >>> _tuning({"name": "vpt+bitfit", "prompts": 10, "depth": None, "step": 0})
    'vpt+bitfit (prompts 10, step 0)'
    """
    if isinstance(tuning, str):
        return tuning
    arguments = ", ".join(f"{name} {value}" for name, value in tuning.items() if name != "name" and value is not None)
    return f"{tuning['name']} ({arguments})" if arguments else str(tuning["name"])


def _weights(loaded: dict[str, Any] | None) -> str:
    """The weights file and what its header changed."""
    if loaded is None:
        return ""
    applied = ", ".join(f"{name} {value}" for name, value in loaded["applied"].items())
    return f"{loaded['file']} ({applied})" if applied else loaded["file"]


def _trained_parameters(counts: dict[str, Any]) -> str:
    """How many of all parameters are trained, and how many in each part."""
    total = f"{counts['trained']:,} of {counts['total']:,}"
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.get("parts", {}).items())
    return f"{total} ({parts})" if parts else total
