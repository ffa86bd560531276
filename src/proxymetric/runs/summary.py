"""What is said of a result under its scores."""

from __future__ import annotations

from proxymetric.runs.clear_gain import Kept
from proxymetric.runs.closed_form import Fit
from proxymetric.runs.comparison import remarks
from proxymetric.runs.fewer_classes import result_sentences
from proxymetric.runs.protocol import CHOSEN_ON_TEST
from proxymetric.runs.result import Result
from proxymetric.runs.whiten import describe_whitening


def score_heading(result: Result) -> str:
    """The title of the table of scores: which classes are scored."""
    label = f"; {CHOSEN_ON_TEST}" if result.protocol == "papers" else ""
    return f"on {result.scored_classes}, %{label}"


def result_lines(result: Result) -> str:
    """The lines under the table of scores."""
    counts = result.data.get(result.evaluated_on or "", {})
    images = f"{counts.get('images', 0)} images of {counts.get('classes', 0)}"
    scored_on = {
        "test": f"scores on {images} test classes",
        "validation": f"scores on the {images} held-out classes that chose it",
        None: "no classes were held out, so there are no scores; `proxymetric evaluate` scores other images",
    }[result.evaluated_on]
    choice = f"chosen by {result.chosen_by}" if result.chosen_by != "last" else "is the last one"
    if result.protocol == "papers":
        choice += f" ({CHOSEN_ON_TEST}, as in the papers; the score of the last epoch is the honest one)"
    lines = [f"epoch {round(result.chosen_epoch, 2)} of {round(result.epochs, 2)} {choice}; {scored_on}"]
    if result.closed_form is not None:
        lines.insert(0, str(Fit(**result.closed_form)))
        if not result.steps:
            where = "test" if result.evaluated_on == "test" else "held-out"
            lines[1] = scored_on if result.evaluated_on is None else f"scores on {images} {where} classes"
            if where == "held-out" and result.refit:
                lines[1] += ", of the head that was fitted without them"
    if result.whiten is not None:
        lines.append(describe_whitening(result.whiten))
    if result.kept is not None:
        lines.append(str(Kept(**result.kept)))
    if result.skipped_steps:
        lines.append(f"{result.skipped_steps} of {result.steps} steps skipped: loss or gradient not finite")
    if result.bad_images:
        lines.append(f"images that could not be read and were left out: {len(result.bad_images)} (see result.json)")
    if result.refit:
        epochs = f", epochs: {round(result.refit['epochs'], 2)}" if result.refit["epochs"] else ""
        computed = f": {Fit(**result.refit['closed_form'])}" if "closed_form" in result.refit else ""
        lines.append(f"refitted on all {result.refit['classes']} classes{epochs}{computed}")
    return "\n".join([*lines, *remarks(result), *result_sentences(result)])
