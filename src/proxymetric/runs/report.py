"""The report of a finished run: what its page shows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from proxymetric.data import BadImage, ImageSet
from proxymetric.metrics import breakdown, rank
from proxymetric.protocol import CHOSEN_ON_TEST

if TYPE_CHECKING:
    from proxymetric.plots import Certainty, GalleryRow

TSNE_LIMIT = 2000
GALLERY = 10
HARDEST = 6
CONFUSED = 10
SAMPLES = 4


def draw_report(
    file: Path,
    *,
    title: str,
    result: dict[str, Any],
    images: ImageSet,
    vectors: Tensor,
    kept: np.ndarray,
    seed: int,
    seen: ImageSet | None = None,
) -> Path:
    """Write the page: results, training curve, retrieval gallery and t-SNE of classes never seen in training.

    images: the evaluated set; vectors (N, D): its embeddings, normalised; kept (N,): which image each belongs to. seen:
    the images that were trained on, for the classes that the method knows best and least, where it can tell.
    """
    from proxymetric.plots import ConfusedPair, gallery_rows, pick_queries, tsne, write_report

    labels = torch.from_numpy(images.labels[kept])
    ranking = rank(vectors, labels, k=8)
    queries = pick_queries(ranking, GALLERY, seed)
    parts = breakdown(vectors, labels, worst=HARDEST, pairs=CONFUSED)
    row_of = {int(query): row for row, query in enumerate(ranking.queries)}
    example = {int(label): int(i) for i, label in reversed(list(enumerate(labels)))}

    def read(i: int) -> Image.Image:
        return images.read(int(kept[i]))

    def gallery(rows: list[int]) -> list[GalleryRow]:
        return gallery_rows(ranking, rows, vectors, labels, images.classes, read)

    recipe, papers = result["recipe"], result.get("protocol") == "papers"
    trained = result.get("refit") or {**result["data"]["train"], "parameters": result["parameters"]}
    facts = {
        "method": recipe["method"],
        "backbone": recipe["encoder"]["backbone"],
        "tuning": _tuning("head alone" if recipe["train"]["frozen"] else recipe["encoder"].get("tuning", "full")),
        "data": f"{result['data']['name']}: {trained['images']} images of {trained['classes']} classes in training",
        "evaluated on": f"{len(kept)} images of {len(images.classes)} classes never seen in training",
        "chosen epoch": str(round(result["chosen_epoch"], 2))
        + (f" ({CHOSEN_ON_TEST}, as in the papers)" if papers else ""),
        "weights": _weights(result.get("weights")),
        "trained parameters": _trained(trained["parameters"]),
        "learning rate": ", ".join(f"{part} {rate:g}" for part, rate in result.get("rates", {}).items()),
        "time": f"{result['seconds']:.0f} s on {result['machine'].get('gpu', result['machine']['processor'])}",
        "seed": str(recipe["seed"]),
    }
    facts = {name: value for name, value in facts.items() if value}  # a result of before there were rates has none
    curve = [dict(record) for record in result["curve"]]
    shown = ("epoch", "loss", recipe["train"]["monitor"], "R@1")
    for record in curve:
        record["chosen"] = record["epoch"] == result["chosen_epoch"]
    table = [{"name": name, **scores} for name, scores in result["rows"].items()]
    notes = [f"{path} could not be read ({reason}) and was left out" for path, reason in result["bad_images"].items()]
    if papers:
        notes.append(f"{CHOSEN_ON_TEST}: the row of the last epoch is what a user can expect")
    if figures := result["validation"].get("figures"):
        notes.append("inside, at the chosen epoch: " + ", ".join(f"{name} {v:.4g}" for name, v in figures.items()))
    if result["queries_left_out"]:
        notes.append(f"{result['queries_left_out']} images are alone in their class and were not used as queries")
    return write_report(
        file,
        title=title,
        facts=facts,
        table=table,
        curve=[{k: record[k] for k in (*shown, "chosen") if k in record} for record in curve],
        gallery=gallery(queries),
        confused=[
            ConfusedPair(
                images.classes[pair.label],
                images.classes[pair.found],
                pair.share,
                read(example[pair.label]),
                read(example[pair.found]),
            )
            for pair in parts.confused
        ],
        hardest=gallery([row_of[bad.query] for bad in parts.worst]),
        certainty=None if seen is None or "uncertainty" not in result else _certainty(result["uncertainty"], seen),
        scatter=tsne(vectors, labels, images.classes, limit=TSNE_LIMIT, seed=seed),
        notes=notes,
    )


def _certainty(found: dict[str, Any], seen: ImageSet) -> Certainty:
    from proxymetric.plots import Certainty, ClassSamples

    note = f"The mean uncertainty is {found['mean']:.3g}; 0 is certain, the root of the dimensions knows nothing."
    if "correlation" in found:
        note += f" Its correlation with how near a class's images lie to its proxy is {found['correlation']:.2f}."

    def shown(pairs: list[tuple[str, float]]) -> list[ClassSamples]:
        return [ClassSamples(name, value, _samples(seen, name)) for name, value in pairs]

    return Certainty(shown(found["least"]), shown(found["most"]), note)


def _samples(images: ImageSet, name: str) -> list[Image.Image]:
    """The first readable images of a class."""
    found: list[Image.Image] = []
    for row in np.flatnonzero(images.labels == images.classes.index(name)):
        if len(found) == SAMPLES:
            break
        with contextlib.suppress(BadImage):
            found.append(images.read(int(row)))
    return found


def _tuning(tuning: str | dict[str, Any]) -> str:
    """What of the backbone is trained, with all arguments.

    >>> _tuning({"name": "vpt+bitfit", "prompts": 10, "depth": None, "step": 0})
    'vpt+bitfit (prompts 10, step 0)'
    """
    if isinstance(tuning, str):
        return tuning
    told = ", ".join(f"{name} {value}" for name, value in tuning.items() if name != "name" and value is not None)
    return f"{tuning['name']} ({told})" if told else str(tuning["name"])


def _weights(loaded: dict[str, Any] | None) -> str:
    """The file of weights and what its header had applied."""
    if loaded is None:
        return ""
    applied = ", ".join(f"{name} {value}" for name, value in loaded["applied"].items())
    return f"{loaded['file']} ({applied})" if applied else loaded["file"]


def _trained(counts: dict[str, Any]) -> str:
    """How many parameters were trained of how many, and which."""
    said = f"{counts['trained']:,} of {counts['total']:,}"
    parts = ", ".join(f"{part} {count:,}" for part, count in counts.get("parts", {}).items())
    return f"{said} ({parts})" if parts else said
