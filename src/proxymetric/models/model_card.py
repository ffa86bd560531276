"""The card of a shared model: README.md with the fields that the Hugging Face hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LIBRARY = "proxymetric"
UNKNOWN = "unknown"
"""the hub's identifier for a licence that is not stated"""
TASK = "image-feature-extraction"


def check_licence(licence: str | None) -> str:
    """Return the hub's identifier of a licence; without one, the card says that it is unknown.

    Raises:
        ValueError: this is not the form of an identifier.

    Example:
        >>> check_licence("apache-2.0"), check_licence(None)
        ('apache-2.0', 'unknown')
        >>> check_licence("Apache License 2.0")
        Traceback (most recent call last):
        ValueError: licence: got 'Apache License 2.0', expected an identifier of the hub, such as apache-2.0, mit,
        cc-by-nc-4.0 or other
    """
    if licence is None:
        return UNKNOWN
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", licence):
        raise ValueError(
            f"licence: got {licence!r}, expected an identifier of the hub, such as apache-2.0, mit, cc-by-nc-4.0 or "
            "other"
        )
    return licence


def card(
    name: str, config: Mapping[str, Any], recipe: Mapping[str, Any], result: Mapping[str, Any], licence: str
) -> str:
    """Write the card of a model.

    Args:
        name: the name of the model.
        config: the content of its `config.json`.
        recipe: the recipe of its run.
        result: the content of the run's `result.json`; empty if the run is not finished.
        licence: an identifier of the hub.

    Returns:
        The text of README.md: fields in YAML, then the description.
    """
    from huggingface_hub import ModelCardData

    fields = ModelCardData(
        license=licence,
        library_name=LIBRARY,
        pipeline_tag=TASK,
        tags=["metric-learning", "image-retrieval", recipe["method"]],
        model_name=name,
        eval_results=_eval_results(result) or None,
    )
    dim, size = config["encoder"]["dim"], config["view"]["size"]
    intended = f"Images of {size} x {size} pixels to vectors of {dim or 'the backbone’s'} dimensions"
    sections = [
        f"# {name}",
        f"{intended}: images of one class lie close together, also of classes that were not trained.",
        f'```python\nimport proxymetric as pm\n\nmodel = pm.load("hf://OWNER/{name}")\n'
        'vectors = model.embed(["a.jpg", "b.jpg"])\n```',
        "## Results",
        _results(result),
        "## Training",
        _training(config, recipe, result),
        "## Licence",
        _licence(licence),
    ]
    return f"---\n{fields.to_yaml().rstrip()}\n---\n\n" + "\n\n".join(sections) + "\n"


def _scores(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The metrics by what was scored: the trained encoder first."""
    rows = result.get("rows") or {}
    return dict(sorted(rows.items(), key=lambda row: row[0] != "trained encoder"))


def _dataset(result: Mapping[str, Any]) -> str:
    return str((result.get("data") or {}).get("name") or "own images")


def _eval_results(result: Mapping[str, Any]) -> list[Any]:
    """The scores of the trained encoder in the hub's form."""
    from huggingface_hub import EvalResult

    dataset = _dataset(result)
    identifier = re.sub(r"[^\w.-]+", "-", dataset).strip("-.") or "data"
    return [
        EvalResult(
            task_type=TASK,
            dataset_type=identifier,
            dataset_name=dataset,
            dataset_split=str(result.get("evaluated_on") or "test"),
            metric_type=metric,
            metric_name=metric,
            metric_value=round(100 * value, 2),
        )
        for metric, value in _scores(result).get("trained encoder", {}).items()
    ]


def _results(result: Mapping[str, Any]) -> str:
    rows = _scores(result)
    if not rows.get("trained encoder"):
        return "No classes were held out, so there are no scores."
    metrics = list(rows["trained encoder"])
    lines = [f"| % | {' | '.join(metrics)} |", f"|---|{'---|' * len(metrics)}"]
    for name, scores in rows.items():
        lines.append(f"| {name} | {' | '.join(_percent(scores.get(metric)) for metric in metrics)} |")
    part = result.get("evaluated_on")
    counts = (result.get("data") or {}).get(part or "", {})
    about = f"Scored on the {part} part of {_dataset(result)}: {counts.get('images')} images of {counts.get('classes')}"
    chosen = " These classes also chose the epoch." if part == "validation" else ""
    return "\n".join(lines) + f"\n\n{about} classes; protocol `{result.get('protocol')}`.{chosen}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.2f}"


def _training(config: Mapping[str, Any], recipe: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    options = recipe["encoder"]
    start = options["weights"].rsplit("/", 1)[-1] if options["weights"] else None
    if start is None:
        start = "the hub's weights" if options["pretrained"] and options["backbone"] != "small" else "random weights"
    rows = {
        "method": recipe["method"],
        "backbone": f"{options['backbone']}, from {start}",
        "training classes": f"{len(config['classes'])} of {_dataset(result)}",
        "vectors": f"{config['encoder']['dim'] or 'backbone’s'} dimensions, normalised: {config['normalise']}",
        "epochs": result.get("chosen_epoch"),
        "proxymetric": config["versions"]["proxymetric"],
    }
    return "\n".join(
        ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items() if value is not None)]
    )


def _licence(licence: str) -> str:
    stated = "The licence of this model is not stated." if licence == UNKNOWN else f"`{licence}`, stated by its author."
    return f"{stated} The weights that the training started from and the images have licences of their own."
