"""Trials of `--method auto`: candidates on the features of a backbone, scored on folds of the known classes.

A fold is a set of classes that a candidate is scored on; it learns from the other ones, the inner classes. What it
chooses for itself, such as a shrinkage or an epoch, is never chosen by scores on the fold: a closed form takes the
shrinkage that is best on the other folds of the division, a trained head the epoch that is best on some inner classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.closed_forms import LinearHead, Scatter
from proxymetric.data.splits import some_classes
from proxymetric.encoders import Encoder
from proxymetric.encoders.head import make_head
from proxymetric.papers import CLOSED_FORMS, closed_form
from proxymetric.papers.closed_form import UNTRAINED, ClosedForm
from proxymetric.runs import recipe as recipes
from proxymetric.runs.assemble import FeatureFeed, RunContext, make_batches, make_learner
from proxymetric.runs.closed_form import (
    MAX_REDUCED,
    Fit,
    Folds,
    Limits,
    best_of,
    choose,
    fitted,
    make_folds,
    principal_numbers,
    reduced,
    scatter_of,
    start_dim,
    subset_of,
    unit_features,
)
from proxymetric.runs.comparison import score_queries
from proxymetric.runs.recipe import Recipe
from proxymetric.runs.score import EmbeddedSet
from proxymetric.system.watcher import Silent
from proxymetric.training.optim import make_optimizer
from proxymetric.training.process_group import ProcessGroup

METRIC = "MAP@R"
MIN_CLASSES = 6
"""with fewer classes of two images or more, there are no three folds of two classes"""
MAX_FOLDS = 4
MAX_IMAGES = 4_000
"""whole classes are left out of the trials beyond this number"""
MAX_PCA_IMAGES = 1_000
"""images that give the principal directions of features of more than `MAX_REDUCED` dimensions"""
TRIAL_SHRINKAGES = (0.1, 0.3, 0.7)
"""a closed form chooses among fewer shrinkages than in a run, which costs less than half"""
INNER_FOLDS, FEWER_FOLDS = 3, 2
"""on which it chooses; fewer if the images on either side of a fold are as many as the features"""
INNER_SHARE = 0.2
"""of the inner classes, which choose the epoch of a method that is trained"""
EPOCHS = 10
EPOCHS_BETWEEN_EVALUATIONS = 2


class Candidate(NamedTuple):
    """What a run could be.

    Attributes:
        method: the name of a method.
        start: the closed form that its head starts from, where the recipe does not name one; None: as in the recipe.
    """

    method: str
    start: str | None = None

    def __str__(self) -> str:
        return self.method if self.start is None else f"{self.method} from {self.start}"

    @property
    def is_computed(self) -> bool:
        """Whether no step trains it."""
        return self.method in CLOSED_FORMS

    def settings(self) -> dict[str, Any]:
        """What it changes in a recipe.

        Example:
            >>> Candidate("proxy-anchor", "whitening").settings()
            {'method': 'proxy-anchor', 'train': {'start': 'whitening'}}
        """
        return {"method": self.method} | ({} if self.start is None else {"train": {"start": self.start}})


def several_images(known: EmbeddedSet) -> np.ndarray:
    """The classes of two images or more: only they can be scored."""
    return np.flatnonzero(np.bincount(known.labels.numpy()) > 1)


def some_of(known: EmbeddedSet, seed: int) -> EmbeddedSet:
    """Whole classes of a set, together at most `MAX_IMAGES` images."""
    return subset_of(known, some_classes(known.labels.numpy(), MAX_IMAGES, seed, fewest=MIN_CLASSES))


def outer_folds(known: EmbeddedSet, seed: int, division: int = 0) -> list[Task]:
    """Divide the classes into folds of at least two classes that can be scored.

    Args:
        known: features of the known classes.
        seed: of all that is drawn.
        division: its number; each is another one.
    """
    labels, classes = known.labels.numpy(), several_images(known)
    order = np.random.default_rng([seed, len(classes), 2, division]).permutation(classes)
    folds = min(MAX_FOLDS, len(classes) // 2)
    tasks = []
    for number in range(folds):
        is_scored = np.isin(labels, order[number::folds])
        inner, scored = (subset_of(known, np.flatnonzero(mask)) for mask in (~is_scored, is_scored))
        tasks.append(Task(inner, scored, seed))
    return tasks


@dataclass
class Task:
    """A fold: the features that candidates learn from, and those that they are scored on.

    Attributes:
        inner: features of the inner classes.
        scored: features of the other classes.
        seed: of all that is drawn.
    """

    inner: EmbeddedSet
    scored: EmbeddedSet
    seed: int
    _fits: dict[str, Fit] = field(default_factory=dict)
    _values: dict[Fit, Tensor] = field(default_factory=dict)
    _scatter: Scatter | None = None
    _unit: tuple[EmbeddedSet, LinearHead | None] | None = None
    _folds: Folds | None = None

    def values(self, vectors: Tensor) -> Tensor:
        """MAP@R of each query of the scored classes, by its vectors."""
        return score_queries(self.scored._replace(vectors=vectors), [METRIC])[0][METRIC].cpu()

    @property
    def groups(self) -> Tensor:
        """The class of each query, in the order of `values`."""
        return score_queries(self.scored, [METRIC])[1]

    def head(self, name: str, recipe: Recipe, rows: np.ndarray | None = None) -> LinearHead:
        """A closed form for features of length 1; its shrinkage is chosen on folds of the inner classes.

        Args:
            name: of the closed form.
            recipe: says how many dimensions it may have, and perhaps its shrinkage.
            rows: of the inner features, those that it is fitted on; None: all.
        """
        form = closed_form(name, recipe.loss if name == recipe.method else {})
        assert form is not None
        features, projection = self._reduced()
        if name not in self._fits:
            if self._folds is None:
                self._folds = make_folds(features, None, self.seed, _inner_folds(features))
            self._fits[name] = choose(name, form, self._folds, self._limits(recipe), TRIAL_SHRINKAGES)
        scatter = scatter_of([features], None if rows is None else [rows])
        return fitted(self._fits[name], form, scatter, projection)[1]

    def computed_values(self, name: str, recipe: Recipe, others: Sequence[Task]) -> Tensor:
        """MAP@R of each query of the scored classes, by a closed form that other folds choose.

        Args:
            name: of the closed form.
            recipe: says how many dimensions it may have, and perhaps its shrinkage.
            others: the other folds of the division. The heads that choose know classes of this fold, but are not scored
                on them.
        """
        form = closed_form(name, recipe.loss if name == recipe.method else {})
        assert form is not None
        limits = self._limits(recipe)
        shrinkages = (form.shrinkage,) if isinstance(form.shrinkage, float) else TRIAL_SHRINKAGES
        width = min(min(task._reduced()[0].vectors.shape[1], len(task.inner.kept) - 1) for task in (self, *others))

        def fit(shrinkage: float, principal: int) -> Fit:
            return Fit(name, shrinkage, principal, limits.dim, None, "")

        def score(shrinkage: float, principal: int) -> float:
            return float(torch.cat([task._values_of(fit(shrinkage, principal), form) for task in others]).mean())

        shrinkage, principal, _ = best_of(score, shrinkages, principal_numbers(name, width, limits))
        return self._values_of(fit(shrinkage, principal), form)

    def _values_of(self, fit: Fit, form: ClosedForm) -> Tensor:
        """MAP@R of each query of the scored classes, by a closed form of the inner features."""
        if fit not in self._values:
            features, projection = self._reduced()
            self._scatter = self._scatter or scatter_of([features])
            head = fitted(fit, form, self._scatter, projection)[1]
            self._values[fit] = self.values(head(unit_features(self.scored).vectors))
        return self._values[fit]

    def _limits(self, recipe: Recipe) -> Limits:
        """Which closed forms of the reduced features are candidates."""
        limits, most = Limits.of(recipe, self.inner.vectors.shape[1]), self._reduced()[0].vectors.shape[1]
        return limits._replace(dim=limits.dim and min(limits.dim, most), most=min(limits.most, most))

    def _reduced(self) -> tuple[EmbeddedSet, LinearHead | None]:
        """The inner features of length 1 in at most `MAX_REDUCED` principal directions, and the map to these."""
        if self._unit is None:
            rows = np.random.default_rng(self.seed).permutation(len(self.inner.kept))[:MAX_PCA_IMAGES]
            self._unit = reduced(unit_features(self.inner), MAX_REDUCED, rows)
        return self._unit


def _inner_folds(inner: EmbeddedSet) -> int:
    """The number of folds on which a closed form chooses; few images need larger parts to be fitted on."""
    count, width = inner.vectors.shape
    return FEWER_FOLDS if count >= FEWER_FOLDS * width else INNER_FOLDS


def tried_recipe(recipe: Recipe, candidate: Candidate) -> Recipe:
    """The recipe of the run that a candidate would be.

    Raises:
        ValueError: the candidate contradicts the recipe.
    """
    return recipes.check(recipes.merged(recipe.changed, candidate.settings()))


def run_trial(
    context: RunContext, encoder: Encoder, recipe: Recipe, task: Task, epochs: int, others: Sequence[Task] = ()
) -> Tensor:
    """MAP@R of each query of a fold, by one candidate.

    Args:
        context: what the parts of the run share.
        encoder: its head is replaced; its backbone made the features.
        recipe: of the run that the candidate would be.
        task: the fold.
        epochs: of a candidate that is trained.
        others: the other folds of the division, which choose the shrinkage of a closed form; none: folds of the inner
            classes do.

    Raises:
        ValueError: the candidate cannot learn from these images.
    """
    if recipe.method == UNTRAINED:
        return task.values(task.scored.vectors)
    if recipe.method in CLOSED_FORMS and others:
        return task.computed_values(recipe.method, recipe, others)
    if recipe.method in CLOSED_FORMS:
        return task.values(task.head(recipe.method, recipe)(unit_features(task.scored).vectors))
    return _train_head(context, encoder, recipe, task, epochs)


def _train_head(context: RunContext, encoder: Encoder, recipe: Recipe, task: Task, epochs: int) -> Tensor:
    """Train a head on most inner classes, choose the epoch on the other ones, and score the fold at this epoch."""
    options = replace(
        recipe.train,
        frozen=True,
        warmup=0,
        lr=recipe.train.lr if recipe.train.frozen else None,
        proxy_lr=recipe.train.proxy_lr if recipe.train.frozen else None,
    )
    recipe = replace(recipe, train=options, loss=recipe.loss | {"nested": None})
    choosing = _choosing_classes(task)
    rows = np.flatnonzero(~np.isin(task.inner.labels.numpy(), choosing))
    training = subset_of(task.inner, rows)
    held_out = subset_of(task.inner, np.flatnonzero(np.isin(task.inner.labels.numpy(), choosing)))
    # A trial says nothing, and the first process runs it alone.
    trial_context = RunContext(recipe, context.device, ProcessGroup(), Silent(), {})
    torch.manual_seed(recipe.seed)
    _set_head(encoder, recipe, task, rows)
    labels = np.unique(training.labels.numpy(), return_inverse=True)[1]
    feed = FeatureFeed(training.vectors, labels, make_batches(trial_context, labels), context.device)
    learner = make_learner(trial_context, encoder, np.bincount(labels).tolist())
    head, criterion = encoder.head, learner.criterion
    criterion.steps_per_epoch = len(feed)
    optimizer = make_optimizer(learner, options)
    choosing_features, scored_features = (part.vectors.to(context.device) for part in (held_out, task.scored))
    best, best_vectors = -1.0, Tensor()
    for epoch in range(epochs):
        learner.train()
        encoder.eval()
        criterion.epoch(epoch)
        for batch in feed.epoch(epoch):
            assert batch.images is not None
            optimizer.zero_grad()
            criterion(head(batch.images), batch.labels).backward()
            optimizer.step()
            criterion.commit()
        if (epoch + 1) % EPOCHS_BETWEEN_EVALUATIONS and epoch + 1 < epochs:
            continue
        with torch.no_grad():
            vectors = criterion.normalised(head(choosing_features).float())
            score = float(score_queries(held_out._replace(vectors=vectors), [METRIC])[0][METRIC].mean())
            if score > best:
                best, best_vectors = score, criterion.normalised(head(scored_features).float())
    return task.values(best_vectors)


def _choosing_classes(task: Task) -> np.ndarray:
    """The inner classes that choose the epoch: a fifth, at least two."""
    classes = several_images(task.inner)
    count = max(2, round(INNER_SHARE * len(classes)))
    return np.random.default_rng([task.seed, len(classes), 3]).choice(classes, count, replace=False)


def _set_head(encoder: Encoder, recipe: Recipe, task: Task, rows: np.ndarray) -> None:
    """Give the encoder the head that a run begins with: a random one, or a closed form of the training images."""
    settings: Mapping[str, Any] = recipe.encoder
    dim = settings["dim"] or encoder.width
    encoder.head = make_head(
        settings["head"], encoder.width, dim, settings["layer_norm"], settings["head_init"],
        settings["normalise_features"],
    ).to(encoder.mean.device)  # fmt: skip
    encoder.dim = encoder.config["dim"] = dim
    if recipe.train.start is not None:
        computed = task.head(recipe.train.start, recipe, rows).widened(start_dim(recipe, encoder.width))
        encoder.set_head(computed.weight, computed.bias)
