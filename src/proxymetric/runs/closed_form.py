"""Heads in closed form in a run: what is chosen, on which classes, and the rows of the report that need no training."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.closed_forms import LinearHead, Scatter
from proxymetric.closed_forms.scatter import check_finite, eigenvectors
from proxymetric.core.normalisation import unit
from proxymetric.data import ImageSet
from proxymetric.data.splits import some_classes
from proxymetric.encoders import Encoder
from proxymetric.papers import closed_form
from proxymetric.papers.closed_form import UNTRAINED, ClosedForm
from proxymetric.runs.assemble import RunContext, embed_features
from proxymetric.runs.clear_gain import ClassScores
from proxymetric.runs.comparison import score_queries
from proxymetric.runs.recipe import Recipe
from proxymetric.runs.score import EmbeddedSet, score
from proxymetric.runs.simplest import deciding_metric, held_out_scores, may_keep_another

METRIC = "MAP@R"
SHRINKAGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""the shrinkages that are tried"""
FALLBACK_SHRINKAGE = 0.5
"""where there are too few classes to choose one"""
DIVISORS = (1, 2, 4)
"""all principal directions, half of them and a quarter of them are tried"""
MAX_PRINCIPAL = 512
MAX_REDUCED = 1_024
"""directions to which wider features are reduced first. These come from the images of all folds: a head that could keep
no others would have directions of the images that it is scored on, and too large a shrinkage would be chosen"""
MIN_PRINCIPAL = 16
"""fewer directions are only tried if there are no more"""
MIN_HELD_OUT_CLASSES = 10
"""with fewer held-out classes, folds of the training classes choose"""
FOLDS = 4
MAX_CHOOSING_IMAGES = 2_000
"""held-out images that are scored for each candidate; whole classes are left out beyond this number"""
MAX_ROW_IMAGES = 20_000
"""training images whose features are computed for the rows of a report only; whole classes are left out beyond"""
USED_OPTIONS = {"frozen", "refit", "metrics", "monitor", "device", "deterministic", "track", "start", "whiten"}
"""keys of the table `[train]` that have an effect without steps"""
ROWS = ("whitening", "lda")
"""the closed forms that every report shows"""


class Fit(NamedTuple):
    """A closed form as it was chosen and fitted.

    Attributes:
        name: the name of the method.
        shrinkage: a of its equation.
        principal: K, principal directions of the features; None: all.
        dim: dimensions of the vectors; None: all that the form has.
        score: MAP@R on the classes that chose, a fraction; None if nothing was chosen on classes.
        chosen_on: the classes that chose, in words.
        images: that the head was fitted on.
        classes: of these images.
        single: classes of one image among them, which say nothing about the covariance within classes.
        seconds: processor time of the choice and of the fit, without the features; 0: not known.
    """

    name: str
    shrinkage: float
    principal: int | None
    dim: int | None
    score: float | None
    chosen_on: str
    images: int = 0
    classes: int = 0
    single: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.name == UNTRAINED:
            return "untrained: the features of the backbone"
        value = "" if self.score is None else f" ({METRIC} {100 * self.score:.1f})"
        single = f", {self.single} of them with a single image" if self.single else ""
        directions = "all" if self.principal is None else f"{self.principal} principal"
        cost = f" in {self.seconds:.1f} s" if self.seconds else ""
        return (
            f"{self.name}: shrinkage {self.shrinkage:g}, {directions} directions, {self.chosen_on}{value}; fitted on "
            f"{self.images} images of {self.classes} classes{single}{cost}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The entry `closed_form` of a result, which does not depend on the speed of the machine."""
        return {name: value for name, value in self._asdict().items() if name != "seconds"}


class ClosedFormScores(NamedTuple):
    """What closed forms score without training.

    Attributes:
        rows: name -> metrics on the unseen classes, as fractions.
        candidates: what they and the untrained features score on the held-out classes; None if they are no candidates.
    """

    rows: dict[str, dict[str, float]]
    candidates: ClassScores | None


class Folds(NamedTuple):
    """What candidates are fitted on and then scored on.

    Attributes:
        tasks: for each fold, the sums that a candidate is fitted on, and the features that it is scored on.
        words: which classes choose.
        width: the most principal directions that these images have.
    """

    tasks: list[tuple[Scatter, EmbeddedSet]]
    words: str
    width: int


class Limits(NamedTuple):
    """Which heads are candidates.

    Attributes:
        dim: the dimensions that the recipe names, at most all features; None: they are chosen.
        most: the most dimensions otherwise.
        starts: the head starts a training: it keeps as many directions as it may.
    """

    dim: int | None
    most: int
    starts: bool = False

    @classmethod
    def of(cls, recipe: Recipe, width: int) -> Limits:
        """The limits that a recipe sets for features of some width."""
        named, dim = recipe.changed.get("encoder", {}).get("dim"), min(recipe.encoder["dim"] or width, width)
        return cls(None if named is None else dim, dim, recipe.train.start is not None)


def nothing_trained(recipe: Recipe) -> str:
    """Say that a method in closed form takes no step, and which settings of the recipe therefore have no effect."""
    without_effect = [f"train.{key}" for key in recipe.changed.get("train", {}) if key not in USED_OPTIONS]
    end = f"; without effect: {', '.join(without_effect)}" if without_effect else ""
    what = "the features are compared as they are"
    if recipe.method != UNTRAINED:
        what = "the head is computed from frozen features in one pass"
    return f"{recipe.method}: nothing is trained; {what}{end}"


def start_dim(recipe: Recipe, width: int) -> int:
    """The dimensions of a head that starts a training: those that the recipe names, or at most all features."""
    limits = Limits.of(recipe, width)
    return int(recipe.encoder["dim"]) if limits.dim is not None else limits.most


def chosen_form(recipe: Recipe) -> tuple[str, ClosedForm] | None:
    """The closed form that a run begins with, and its name; None for a random head."""
    name = recipe.train.start or recipe.method
    form = closed_form(name, recipe.loss if name == recipe.method else {})
    return None if form is None else (name, form)


def unit_features(embedded: EmbeddedSet) -> EmbeddedSet:
    """A set with its features divided by their length, as `encoder.normalise_features` does."""
    return embedded._replace(vectors=unit(embedded.vectors.float()))


def joined(parts: Sequence[EmbeddedSet]) -> EmbeddedSet:
    """Features of several sets as one set without pixels; classes of the same name are one class.

    The classes are sorted by name, so that a division into folds does not depend on which of them were held out.
    """
    names = {name: number for number, name in enumerate(sorted({name for p in parts for name in p.images.classes}))}
    labels = np.concatenate(
        [np.array([names[name] for name in part.images.classes])[part.labels.numpy()] for part in parts]
    )
    images = ImageSet("known classes", labels, list(names), arrays=np.empty((len(labels), 1, 1), np.uint8))
    return EmbeddedSet(images, torch.cat([part.vectors for part in parts]), np.arange(len(labels)))


def reduced(known: EmbeddedSet, most: int, rows: np.ndarray | None = None) -> tuple[EmbeddedSet, LinearHead | None]:
    """Wide features in fewer directions, and the map to these; None if they are not wider than `most`.

    The directions are the principal ones, or a basis of features that are few: a closed form of K principal directions
    is the same on these features if K <= `most`, and costs far less.

    Args:
        known: the features.
        most: the number of directions.
        rows: the features that give the directions; None: all.

    Raises:
        ValueError: a feature is not finite.
    """
    if known.vectors.shape[1] <= most:
        return known, None
    check_finite(known.vectors)
    features = (known.vectors if rows is None else known.vectors[torch.from_numpy(rows)]).double()
    mean = features.mean(0)
    features = features - mean
    if len(features) <= most:
        directions = torch.linalg.qr(features.T)[0].T  # all directions that so few features have
    else:
        directions = eigenvectors(features.T @ features)[1][:most]
    projection = LinearHead(directions, -directions @ mean)
    return projected(known, projection), projection


def projected(embedded: EmbeddedSet, projection: LinearHead | None) -> EmbeddedSet:
    """A set with its features in the directions of a projection; None: as they are."""
    return embedded if projection is None else embedded._replace(vectors=projection(embedded.vectors))


def scatter_of(parts: Sequence[EmbeddedSet], rows: Sequence[np.ndarray] | None = None) -> Scatter:
    """The sums over embedded sets; classes of the same name are one class.

    Args:
        parts: the sets.
        rows: of each set, the embeddings that count; None: all.
    """
    names = {name: number for number, name in enumerate(dict.fromkeys(n for p in parts for n in p.images.classes))}
    result = Scatter(len(names), parts[0].vectors.shape[1])
    for place, part in enumerate(parts):
        numbers = torch.tensor([names[name] for name in part.images.classes])
        chosen = slice(None) if rows is None else torch.from_numpy(rows[place])
        result.add(part.vectors[chosen], numbers[part.labels[chosen]])
    return result


def make_folds(known: EmbeddedSet, held_out: EmbeddedSet | None, seed: int, most: int = FOLDS) -> Folds:
    """Divide classes into those that candidates are fitted on and those that they are scored on.

    Args:
        known: features of the training images.
        held_out: features of the held-out images; None, or too few classes: folds of the training classes choose.
        seed: of the folds.
        most: folds of the training classes, at most.
    """
    labels, width = known.labels.numpy(), known.vectors.shape[1]
    several = np.flatnonzero(np.bincount(labels) > 1)
    folds = min(most, len(several) // 2)
    if held_out is not None:
        count = int((np.bincount(held_out.labels.numpy()) > 1).sum())
        if count >= (MIN_HELD_OUT_CLASSES if folds > 1 else 2):
            rows = some_classes(held_out.labels.numpy(), MAX_CHOOSING_IMAGES, seed)
            tasks = [(scatter_of([known]), subset_of(held_out, rows))]
            return Folds(tasks, f"chosen on {count} held-out classes", min(width, max(1, len(labels) - 1)))
    if folds < 2:
        words = f"not chosen: {len(several)} classes with two images or more are too few, expected at least 4"
        return Folds([], words, min(width, max(1, len(labels) - 1)))
    order = np.random.default_rng([seed, len(several)]).permutation(several)
    tasks = []
    for fold in range(folds):
        is_scored = np.isin(labels, order[fold::folds])
        rows = np.flatnonzero(is_scored)
        rows = rows[some_classes(labels[rows], MAX_CHOOSING_IMAGES // folds, seed)]
        tasks.append((scatter_of([known], [np.flatnonzero(~is_scored)]), subset_of(known, rows)))
    words = f"chosen on {folds} folds of the {len(several)} training classes"
    return Folds(tasks, words, min(width, *(max(1, scatter.images - 1) for scatter, _ in tasks)))


def choose(name: str, form: ClosedForm, folds: Folds, limits: Limits, tried: tuple[float, ...] = SHRINKAGES) -> Fit:
    """Choose shrinkage and directions by MAP@R on classes that the candidates are not fitted on.

    Args:
        name: the name of the closed form.
        form: the closed form.
        folds: what the candidates are fitted on, and what they are scored on.
        limits: which heads are candidates.
        tried: the shrinkages that are tried, if the form names none.
    """
    if name == UNTRAINED:
        return Fit(name, 0.0, None, None, None, "")
    named = form.shrinkage if isinstance(form.shrinkage, float) else None
    shrinkages = tried if named is None else (named,)
    numbers = principal_numbers(name, folds.width, limits)
    if len(shrinkages) * len(numbers) == 1:
        return Fit(name, shrinkages[0], numbers[0], limits.dim, None, "as named")
    if not folds.tasks:
        return Fit(name, named or FALLBACK_SHRINKAGE, numbers[0], limits.dim, None, folds.words)

    def value(shrinkage: float, principal: int) -> float:
        return _mean_score(form, shrinkage, principal, limits.dim, folds.tasks)

    shrinkage, principal, best = best_of(value, shrinkages, numbers)
    return Fit(name, shrinkage, principal, limits.dim, best, folds.words)


def best_of(
    value: Callable[[float, int], float], shrinkages: Sequence[float], numbers: Sequence[int]
) -> tuple[float, int, float]:
    """The shrinkage and the number of directions with the highest value, and this value.

    The best shrinkage hardly depends on the number of directions: first the one is chosen, then the other.

    Args:
        value: of a shrinkage and a number of directions.
        shrinkages: that are tried, with the first number of directions.
        numbers: of directions that are tried.

    Example:
        >>> best_of(lambda shrinkage, principal: shrinkage / principal, [0.1, 0.5], [4, 2, 1])
        (0.5, 1, 0.5)
    """
    values = {(shrinkage, numbers[0]): value(shrinkage, numbers[0]) for shrinkage in shrinkages}
    best = max(values, key=values.__getitem__)[0]
    values |= {(best, principal): value(best, principal) for principal in numbers[1:]}
    best, principal = max(values, key=values.__getitem__)
    return best, principal, values[best, principal]


def fitted(
    fit: Fit, form: ClosedForm, scatter: Scatter, projection: LinearHead | None = None
) -> tuple[Fit, LinearHead]:
    """Fit a chosen head on the sums over all its images.

    Args:
        fit: what was chosen.
        form: the closed form.
        scatter: the sums.
        projection: the sums are over what it makes of the features; None: over the features.

    Returns:
        What was fitted, and the head with the length of a new one.
    """
    started = time.process_time()
    if fit.name == UNTRAINED:
        head = form.form(0.0, None)(scatter)
    else:
        head = _head(form, fit.shrinkage, min(fit.principal or scatter.width, scatter.width), fit.dim, scatter)
        head = (head if projection is None else head.after(*projection)).scaled()
    seconds = round(fit.seconds + time.process_time() - started, 2)
    counts = fit._replace(images=scatter.images, classes=scatter.classes, single=scatter.single)
    return counts._replace(seconds=seconds), head


def compute_head(
    context: RunContext, encoder: Encoder, training: ImageSet, held_out: ImageSet | None, fit: Fit | None
) -> tuple[Fit, LinearHead] | None:
    """The head that a run begins with; None if it begins with a random one.

    Args:
        context: what the parts of the run share.
        encoder: its backbone computes the features.
        training: the images that the head is fitted on.
        held_out: the classes that choose; None: folds of the training classes do.
        fit: what an earlier fit on fewer classes chose; None: it is chosen now.
    """
    chosen = chosen_form(context.recipe)
    if chosen is None:
        return None
    name, form = chosen
    known, others = unit_features(embed_features(context, encoder, training, "training images")), None
    if fit is None and held_out is not None:
        others = unit_features(embed_features(context, encoder, held_out, "held-out classes"))
    (computed,) = _computed({name: form}, known, others, Limits.of(context.recipe, encoder.width), context, fit)
    fit, head = computed
    if context.recipe.train.start is not None:
        head = head.widened(start_dim(context.recipe, encoder.width))
    return fit, head


def closed_form_rows(
    context: RunContext, encoder: Encoder, training: ImageSet, held_out: ImageSet | None, unseen: EmbeddedSet
) -> ClosedFormScores:
    """The scores of the closed forms on features of the untrained backbone.

    On the unseen classes each is chosen on folds of all known classes and fitted on them; as a candidate
    (`runs.simplest`), it is fitted on those that are not held out.

    Args:
        context: what the parts of the run share.
        encoder: the untrained encoder.
        training: the training images.
        held_out: the held-out classes, if they may choose.
        unseen: features of the images that are scored.
    """
    recipe, started = context.recipe, time.perf_counter()
    if recipe.train.parallel == "fsdp":
        # The key of the cache of features is a hash of all weights, and reading them would divide them again.
        context.watcher.say("no closed forms for comparison: train.parallel='fsdp' divides the weights")
        return ClosedFormScores({}, None)
    if not recipe.train.frozen:
        training = training.subset(some_classes(training.labels, MAX_ROW_IMAGES, recipe.seed))
    try:
        scores = _closed_form_scores(context, encoder, training, held_out, unseen)
    except (ValueError, OSError) as error:  # OSError: a file of the images cannot be read
        context.watcher.say(f"no closed forms for comparison: {error}")
        return ClosedFormScores({}, None)
    if not recipe.train.frozen:
        seconds = time.perf_counter() - started
        context.watcher.say(
            f"{' and '.join(ROWS)} for comparison: one pass of the untrained backbone over {len(training)} training "
            f"images, {seconds:.0f} s"
        )
    return scores


def _closed_form_scores(
    context: RunContext, encoder: Encoder, training: ImageSet, held_out: ImageSet | None, unseen: EmbeddedSet
) -> ClosedFormScores:
    """The scores of `closed_form_rows`."""
    recipe = context.recipe
    known = unit_features(embed_features(context, encoder, training, "training images"))
    others = None
    if held_out is not None:
        others = unit_features(embed_features(context, encoder, held_out, "held-out classes"))
    # Held-out classes that are scored choose at most, and no row is fitted on them.
    parts, chosen_by = [known], others
    if others is not None and held_out is not unseen.images:
        parts, chosen_by = [known, others], None
    limits = Limits.of(recipe, encoder.width)._replace(starts=False)
    forms = {name: form for name in ROWS if name != recipe.method and (form := closed_form(name)) is not None}
    features = unit_features(unseen).vectors
    rows = {}
    for fit, head in _computed(forms, known if len(parts) == 1 else joined(parts), chosen_by, limits, context):
        rows[fit.name] = score(unseen._replace(vectors=head(features)), recipe.train.metrics)
    if others is None or not may_keep_another(recipe):
        return ClosedFormScores(rows, None)
    # The untrained features may have more dimensions than the recipe names.
    candidates = {} if limits.dim is not None and limits.dim < encoder.width else {UNTRAINED: others}
    for fit, head in _computed(forms, known, others, limits, context):
        candidates[fit.name] = others._replace(vectors=head(others.vectors))
    return ClosedFormScores(rows, held_out_scores(deciding_metric(recipe.train.monitor), candidates))


def _computed(
    forms: Mapping[str, ClosedForm],
    known: EmbeddedSet,
    others: EmbeddedSet | None,
    limits: Limits,
    context: RunContext,
    chosen: Fit | None = None,
) -> list[tuple[Fit, LinearHead]]:
    """Choose closed forms and fit them.

    Args:
        forms: by name.
        known: features of length 1 that they are fitted on.
        others: those of classes that choose; None: folds of the known classes choose.
        limits: which heads are candidates.
        context: what the parts of the run share.
        chosen: what was chosen earlier; None: it is chosen now.
    """
    started, projection, folds = time.process_time(), None, Folds([], "", known.vectors.shape[1])
    if UNTRAINED not in forms:
        known, projection = reduced(known, max(MAX_REDUCED, limits.most))
        if chosen is None:
            folds = make_folds(known, None if others is None else projected(others, projection), context.recipe.seed)
    scatter, computed = scatter_of([known]), []
    for name, form in forms.items():
        fit = chosen or choose(name, form, folds, limits)
        computed.append(fitted(fit._replace(seconds=time.process_time() - started), form, scatter, projection))
        started = time.process_time()
    return computed


def subset_of(embedded: EmbeddedSet, rows: np.ndarray) -> EmbeddedSet:
    """Some embeddings of a set."""
    return embedded._replace(vectors=embedded.vectors[torch.from_numpy(rows)], kept=embedded.kept[rows])


def principal_numbers(name: str, width: int, limits: Limits) -> list[int]:
    """The numbers of principal directions that are tried."""
    if limits.dim is not None and name != "lda":
        return [limits.dim]
    most = min(width, MAX_PRINCIPAL) if name == "lda" else min(width, limits.most)
    if limits.starts:
        return [most]
    return list(dict.fromkeys(k for k in (most // d for d in DIVISORS) if k >= min(MIN_PRINCIPAL, most)))


def _head(form: ClosedForm, shrinkage: float, principal: int, dim: int | None, scatter: Scatter) -> LinearHead:
    candidate = form.form(shrinkage, principal)
    return candidate(scatter, None if dim is None else min(dim, candidate.most(scatter)))


def _mean_score(
    form: ClosedForm, shrinkage: float, principal: int, dim: int | None, tasks: Iterable[tuple[Scatter, EmbeddedSet]]
) -> float:
    """The mean of MAP@R over the queries of all tasks."""
    values: list[Tensor] = []
    for scatter, embedded in tasks:
        head = _head(form, shrinkage, principal, dim, scatter)
        values.append(score_queries(embedded._replace(vectors=head(embedded.vectors)), [METRIC])[0][METRIC])
    return float(torch.cat(values).mean())
