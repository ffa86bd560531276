"""`train.whiten`: the whitening of the trained vectors, put behind the head of a trained encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from proxymetric.closed_forms import LinearHead
from proxymetric.data import ImageSet
from proxymetric.encoders import linear_layer
from proxymetric.metrics.names import lower_is_better
from proxymetric.models.run_folder import read_state
from proxymetric.papers import closed_form
from proxymetric.runs.assemble import RunContext, embedder
from proxymetric.runs.closed_form import Fit, Limits, choose, fitted, make_folds, scatter_of
from proxymetric.runs.score import score
from proxymetric.system.checkpoint import Checkpoint, module_tensors
from proxymetric.training.learner import Learner

FORM = "whitening"


class Whitened(NamedTuple):
    """A whitening of a trained head, and what it changes.

    Attributes:
        fit: what was chosen and fitted.
        before: the scores of the trained head on the held-out classes; empty without such classes.
        after: those with the whitening behind it.
        kept: whether it is the better one, or there are no scores.
        metric: the metric that decides.
    """

    fit: Fit
    before: dict[str, float]
    after: dict[str, float]
    kept: bool
    metric: str

    def as_dict(self) -> dict[str, Any]:
        """The entry `whiten` of the result."""
        return self._asdict() | {"fit": self.fit.as_dict()}


def whiten(
    context: RunContext, learner: Learner, training: ImageSet, held_out: ImageSet | None, fit: Fit | None = None
) -> tuple[Whitened, LinearHead]:
    """Fit the whitening of the trained vectors and compare it with the trained head on the held-out classes.

    The vectors are not divided by their length, so that both heads together are one linear head.

    Args:
        context: what the parts of the run share.
        learner: the trained encoder and its method.
        training: the images that it was trained on.
        held_out: classes that it was not trained on; None: there are none.
        fit: what was chosen before, for a refitted encoder.

    Returns:
        The comparison, and the head that replaces the trained one.
    """
    encoder, criterion = learner.encoder, learner.criterion
    form, limits = closed_form(FORM), Limits(encoder.dim, encoder.dim)
    assert form is not None
    known = embedder(context, encoder, training, "training images")("vectors")
    others = None if held_out is None else embedder(context, encoder, held_out, "held-out classes")("vectors")
    fit = fit or choose(FORM, form, make_folds(known, others, context.recipe.seed), limits)
    fit, head = fitted(fit, form, scatter_of([known]))
    options, before, after = context.recipe.train, {}, {}
    kept = True
    if others is not None:
        before, after = (
            score(others._replace(vectors=criterion.normalised(vectors)), options.metrics)
            for vectors in (others.vectors, head(others.vectors))
        )
        gain = after[options.monitor] - before[options.monitor]
        kept = gain < 0 if lower_is_better(options.monitor) else gain > 0
    linear = linear_layer(encoder.head)
    composed = head.after(linear.weight.detach().cpu(), linear.bias.detach().cpu()).scaled()
    return Whitened(fit, before, after, kept, options.monitor), composed


def whiten_run(
    context: RunContext,
    folder: Path,
    learner: Learner,
    training: ImageSet,
    held_out: ImageSet | None,
    step: int | None,
    fit: Fit | None = None,
) -> dict[str, Any]:
    """Whiten a learner and write it to `best.safetensors`, unless that is done; the other arguments are of `whiten`.

    Args:
        folder: where the checkpoints of the learner lie.
        step: the optimiser step of the learner.

    Returns:
        The entry `whiten` of the result.
    """
    file, world = folder / "best.safetensors", context.world
    state = read_state(file)
    if state.get("whiten") and state.get("step") == step:
        Checkpoint.read(file).load_into(learner.encoder, "encoder.", what="this run's encoder")
        return dict(state["whiten"])
    whitened, head = world.from_first(lambda: whiten(context, learner, training, held_out, fit))
    record = whitened.as_dict()
    if whitened.kept:
        learner.encoder.set_head(head.weight, head.bias)
        if world.first:
            # The proxies of the method do not belong to the new vectors.
            tensors = module_tensors(learner.encoder, "encoder.")
            Checkpoint(tensors, {"step": step, "whiten": record}).write(file)
    return record


def describe_whitening(record: dict[str, Any]) -> str:
    """The entry `whiten` of a result in words.

    Example:
        >>> fit = {"shrinkage": 0.3, "images": 90, "classes": 9}
        >>> scores = {"before": {"MAP@R": 0.47}, "after": {"MAP@R": 0.484}}
        >>> describe_whitening({"fit": fit, **scores, "kept": True, "metric": "MAP@R"})
        'whitened head (shrinkage 0.3): MAP@R 48.4 on held-out classes, 47.0 without; it is kept'
    """
    metric, name = record["metric"], f"whitened head (shrinkage {record['fit']['shrinkage']:g})"
    if not record["before"]:
        return f"{name}: kept; no classes were held out to compare it with the trained head"
    after, before = (f"{100 * record[key][metric]:.1f}" for key in ("after", "before"))
    end = "it is kept" if record["kept"] else "the trained head is kept"
    return f"{name}: {metric} {after} on held-out classes, {before} without; {end}"
