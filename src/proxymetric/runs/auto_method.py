"""`--method auto`: try a short list of methods on cached features of the training images, and take the best.

The backbone is not trained in a trial: its features of the training images are computed once, and each method trains a
head on them for a few epochs. The classes that are held out of the training choose. Proxy-Anchor is the default:
another method is taken only if it is better by more than chance, and by `LEAST_GAIN` if the run also trains the
backbone.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.data import ImageSet, split
from proxymetric.data.splits import some_classes
from proxymetric.encoders import Encoder
from proxymetric.metrics import interval
from proxymetric.runs import recipe as recipes
from proxymetric.runs.assemble import (
    FeatureFeed,
    RunContext,
    embed_features,
    make_batches,
    make_encoder,
    make_learner,
)
from proxymetric.runs.comparison import score_queries
from proxymetric.runs.recipe import Recipe
from proxymetric.runs.score import EmbeddedSet
from proxymetric.system.watcher import Silent
from proxymetric.training.optim import make_optimizer
from proxymetric.training.process_group import ProcessGroup

AUTO = "auto"
"""the name that stands for a choice"""
DEFAULT_METHOD = "proxy-anchor"
CANDIDATES = (DEFAULT_METHOD, "vcpa", "mpa-ap", "soft-triple", "norm-softmax", "multi-similarity")
"""the methods that are tried; all of them train on features"""
METRIC = "MAP@R"
TRIAL_EPOCHS = 8
"""epochs of a head on features; the best evaluation counts, as in a run"""
EPOCHS_BETWEEN_EVALUATIONS = 2
MAX_TRAINING_IMAGES = 8_000
MAX_HELD_OUT_IMAGES = 4_000
"""whole classes are left out of the trials beyond these numbers, so that a trial takes seconds"""
MIN_HELD_OUT_CLASSES = 10
"""with fewer held-out classes, no difference between methods can be told from chance"""
HELD_OUT_SHARE = 0.2
"""of the training classes, if the run itself holds out none"""
MAX_HELD_OUT_SHARE = 0.5
"""the largest share that a message recommends"""
LEVEL = 0.99
"""level of the interval of a difference: five methods are compared with Proxy-Anchor, so 95 % for all of them"""
LEAST_GAIN = 0.03
"""MAP@R that another method must gain on features if the run trains the backbone, too. The order of the methods then
changes: on CUB, multi-similarity is above Proxy-Anchor on features (held-out classes), and below it once the whole
network is trained (studies/auto.toml). On features of drawn characters it gains more than this."""


class Trial(NamedTuple):
    """A method that was tried.

    Attributes:
        method: its name.
        score: MAP@R on the held-out classes, a fraction.
        difference: the score less that of Proxy-Anchor.
        low: lower end of the interval of the difference (bootstrap over classes).
        high: upper end.
        seconds: how long the trial took.
    """

    method: str
    score: float
    difference: float
    low: float
    high: float
    seconds: float


class Choice(NamedTuple):
    """What was chosen, and why.

    Attributes:
        method: the chosen method.
        reason: a sentence.
        trials: the methods that were tried, the best first; empty if there was nothing to compare them on.
        seconds: how long everything took, features included.
    """

    method: str
    reason: str
    trials: tuple[Trial, ...] = ()
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """The entry `auto` of `run.json` and `result.json`."""
        return self._asdict() | {"trials": [trial._asdict() for trial in self.trials]}


def describe_trials(choice: Mapping[str, Any]) -> str:
    """The scores of the methods that were tried, in one line; empty if none was.

    Args:
        choice: the entry `auto` of a result.

    Example:
        >>> describe_trials(Choice("vcpa", "...", (Trial("vcpa", 0.523, 0.02, 0.01, 0.03, 1.0),)).as_dict())
        'MAP@R of the methods that were tried on features, on held-out classes: vcpa 52.3'
    """
    if not choice["trials"]:
        return ""
    scores = ", ".join(f"{trial['method']} {100 * trial['score']:.1f}" for trial in choice["trials"])
    return f"{METRIC} of the methods that were tried on features, on held-out classes: {scores}"


def without_auto(raw: dict[str, Any]) -> dict[str, Any]:
    """Return unchecked tables with Proxy-Anchor in the place of "auto", which is no method.

    Raises:
        ValueError: the tables set arguments of a loss, which the other methods do not have.

    Example:
        >>> without_auto({"method": "auto", "seed": 1})
        {'method': 'proxy-anchor', 'seed': 1}
    """
    settings = [key for key in raw.get("loss", {}) if key != "nested"]
    if settings:
        raise ValueError(
            f"loss.{settings[0]}: got a setting of one method together with method 'auto', which tries "
            "several; expected no settings of [loss], or a method by name"
        )
    return raw | {"method": DEFAULT_METHOD}


def decide(trials: list[Trial], frozen: bool) -> tuple[str, str]:
    """Choose among methods that were tried.

    Args:
        trials: one of them is Proxy-Anchor.
        frozen: the run trains on features, as the trials did; otherwise a method must gain `LEAST_GAIN`.

    Returns:
        The method with the highest score among those that are better than Proxy-Anchor with their whole interval, or
        Proxy-Anchor; and why.

    Example:
        >>> plain = Trial("proxy-anchor", 0.50, 0.0, 0.0, 0.0, 1.0)
        >>> decide([plain, Trial("vcpa", 0.52, 0.02, 0.01, 0.03, 1.0)], frozen=True)
        ('vcpa', '+2.0 MAP@R (1.0 to 3.0) over proxy-anchor on held-out classes')
        >>> decide([plain, Trial("vcpa", 0.52, 0.02, -0.01, 0.05, 1.0)], frozen=True)
        ('proxy-anchor', 'no other method is better by more than chance on held-out classes')
        >>> decide([plain, Trial("vcpa", 0.52, 0.02, 0.01, 0.03, 1.0)], frozen=False)[0]
        'proxy-anchor'
    """
    better = [trial for trial in trials if trial.low > 0]
    if not better:
        return DEFAULT_METHOD, "no other method is better by more than chance on held-out classes"
    if not frozen:
        better = [trial for trial in better if trial.difference >= LEAST_GAIN]
        if not better:
            return DEFAULT_METHOD, (
                f"no other method gains {100 * LEAST_GAIN:.0f} points of {METRIC} on held-out classes, which is "
                "required because this run also trains the backbone"
            )
    best = max(better, key=lambda trial: trial.score)
    gain = f"{100 * best.difference:+.1f} {METRIC} ({100 * best.low:.1f} to {100 * best.high:.1f})"
    return best.method, f"{gain} over {DEFAULT_METHOD} on held-out classes"


def choose_method(context: RunContext, training: ImageSet, held_out: ImageSet | None) -> Choice:
    """Try the methods and choose one.

    Args:
        context: what the parts of the run share; trials are run by one process.
        training: the training images of the run.
        held_out: the classes that are held out of the training; None takes a fifth of the training classes.

    Returns:
        The choice. It is Proxy-Anchor without any trial if the backbone has no pre-trained weights, because its
        features say nothing about the images, or if there are too few classes.
    """
    started = time.perf_counter()
    recipe = context.recipe
    if not recipe.encoder["weights"] and not _is_pretrained(recipe):
        return Choice(DEFAULT_METHOD, "no trials: the backbone has no pre-trained weights, and its features say little")
    tried = training
    if held_out is None:
        tried, held_out, _ = split(training, HELD_OUT_SHARE, "none", recipe.seed)
    if held_out is None or len(held_out.classes) < MIN_HELD_OUT_CLASSES:
        return Choice(DEFAULT_METHOD, _too_few(recipe, training, held_out))
    torch.manual_seed(recipe.seed)
    encoder = make_encoder(recipe).to(context.device)
    tried = tried.subset(some_classes(tried.labels, MAX_TRAINING_IMAGES, recipe.seed))
    held_out = held_out.subset(some_classes(held_out.labels, MAX_HELD_OUT_IMAGES, recipe.seed))
    features = embed_features(context, encoder, tried, "training images")
    queries = embed_features(context, encoder, held_out, "held-out images")
    context.watcher.say(f"trying {len(CANDIDATES)} methods on the features of {len(features.kept)} training images")
    untrained_head = {name: value.clone() for name, value in encoder.head.state_dict().items()}
    scores: dict[str, tuple[Tensor, float]] = {}
    groups: Tensor | None = None
    for method in CANDIDATES:
        trial_started = time.perf_counter()
        encoder.head.load_state_dict(untrained_head)
        values, groups = _trial(context, method, encoder, features, queries)
        scores[method] = values, time.perf_counter() - trial_started
    reference = scores[DEFAULT_METHOD][0]
    trials = []
    for method, (values, seconds) in scores.items():
        low, high = interval(values - reference, groups, level=LEVEL)
        means = float(values.mean()), float((values - reference).mean())
        trials.append(Trial(method, *means, low, high, round(seconds, 2)))
    trials.sort(key=lambda trial: -trial.score)
    return Choice(*decide(trials, recipe.train.frozen), tuple(trials), round(time.perf_counter() - started, 1))


def _too_few(recipe: Recipe, training: ImageSet, held_out: ImageSet | None) -> str:
    """Say that there are too few held-out classes for trials, how many are needed, and how to get them."""
    count = 0 if held_out is None else len(held_out.classes)
    total, share = len(training.classes) + count, recipe.data.validation
    way_out = "more classes"
    # Classes that come as validation classes, or in folds, do not depend on the share.
    if isinstance(share, float) and share > 0 and count == max(2, round(share * total)):
        way_out = f"more classes ({math.ceil(MIN_HELD_OUT_CLASSES / share)} for data.validation={share:g})"
        needed_share = math.ceil(100 * MIN_HELD_OUT_CLASSES / total) / 100
        if needed_share <= MAX_HELD_OUT_SHARE:
            way_out += f", or a larger share of them: --set data.validation={needed_share:g}"
    return (
        f"no trials: {count} held-out classes are too few to compare methods, expected at least "
        f"{MIN_HELD_OUT_CLASSES}: {way_out}"
    )


def _is_pretrained(recipe: Recipe) -> bool:
    return bool(recipe.encoder["pretrained"]) and recipe.encoder["backbone"] != "small"


def _trial(
    context: RunContext, method: str, encoder: Encoder, features: EmbeddedSet, queries: EmbeddedSet
) -> tuple[Tensor, Tensor]:
    """Train a head by one method, and score it at its best epoch.

    Returns:
        MAP@R of each query, and the labels of the queries.
    """
    recipe = trial_recipe(context.recipe, method)
    # A trial says nothing, and the first process runs it alone.
    trial_context = RunContext(recipe, context.device, ProcessGroup(), Silent(), {})
    labels = np.unique(features.images.labels[features.kept], return_inverse=True)[1]
    feed = FeatureFeed(features.vectors, labels, make_batches(trial_context, labels), trial_context.device)
    torch.manual_seed(recipe.seed)
    learner = make_learner(trial_context, encoder, np.bincount(labels).tolist())
    head, criterion = encoder.head, learner.criterion
    criterion.steps_per_epoch = len(feed)
    optimizer = make_optimizer(learner, recipe.train)
    held_out = queries.vectors.to(trial_context.device)
    best, best_values, groups = -1.0, Tensor(), Tensor()
    for epoch in range(TRIAL_EPOCHS):
        learner.train()
        encoder.eval()
        criterion.epoch(epoch)
        for batch in feed.epoch(epoch):
            assert batch.images is not None
            optimizer.zero_grad()
            criterion(head(batch.images), batch.labels).backward()
            optimizer.step()
            criterion.commit()
        if epoch % EPOCHS_BETWEEN_EVALUATIONS:
            with torch.no_grad():
                vectors = criterion.normalised(head(held_out).float())
            values, groups = score_queries(queries._replace(vectors=vectors), [METRIC])
            mean = float(values[METRIC].mean())
            if mean > best:
                best, best_values = mean, values[METRIC].cpu()
    return best_values, groups


def trial_recipe(recipe: Recipe, method: str) -> Recipe:
    """The recipe of a trial: the method's defaults, on features; other learning rates only if the run is frozen too."""
    defaults, train = recipes.check({"method": method}), recipe.train
    options = dataclasses.replace(
        defaults.train,
        batch=train.batch,
        optimizer=train.optimizer,
        weight_decay=train.weight_decay,
        frozen=True,
        warmup=0,
        lr=train.lr if train.frozen else None,
        proxy_lr=train.proxy_lr if train.frozen else None,
    )
    return dataclasses.replace(recipe, method=method, loss=defaults.loss, train=options)
