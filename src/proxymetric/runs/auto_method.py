"""`--method auto`: try candidates on cached features of the known classes, and choose one.

The backbone is not trained in a trial. The known classes, held-out ones included, are divided into folds
(`runs.trials`): each candidate learns from the other classes and is scored on the fold, by MAP@R of each query. Which
of two similar candidates is higher often depends on the division. A run with a frozen backbone therefore makes D = 2
of them, any other run one:

``m = 1 / (D N) * sum_d sum_i MAP@R(i, d)``

where i is one of N queries, and d the division whose fold scored it. A simple candidate is taken unless another one is
clearly better (`runs.clear_gain`).

A run with a frozen backbone can be any candidate: the untrained backbone and the closed forms, which are simple, or a
trained head. A run that trains the backbone chooses among losses only, because no trial says what the network gains.
Proxy-Anchor is its simple candidate, and another loss must gain `LEAST_GAIN_OF_LOSS`.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.data import ImageSet
from proxymetric.encoders import Encoder
from proxymetric.runs.assemble import RunContext, embed_features, make_encoder
from proxymetric.runs.clear_gain import LEAST_GAIN, ClassScores, keep_simple
from proxymetric.runs.closed_form import joined
from proxymetric.runs.defaults import is_pretrained
from proxymetric.runs.recipe import Recipe
from proxymetric.runs.time_on_cpu import TRAINING_COST, pass_seconds
from proxymetric.runs.trials import (
    EPOCHS,
    METRIC,
    MIN_CLASSES,
    Candidate,
    Task,
    outer_folds,
    run_trial,
    several_images,
    some_of,
    tried_recipe,
)
from proxymetric.system.files import read_json, write_json

AUTO = "auto"
"""the name that stands for a choice"""
DEFAULT_METHOD = "proxy-anchor"
FEW_CLASSES = Candidate("untrained")
"""what a frozen run takes if there are too few classes to compare candidates: the simplest one, which cannot do harm"""
LOSSES = tuple(
    Candidate(name) for name in (DEFAULT_METHOD, "multi-similarity", "vcpa", "mpa-ap", "soft-triple", "norm-softmax")
)
"""what a run that trains the backbone can be, the default first"""
FROZEN_CANDIDATES = (
    Candidate("untrained"),
    Candidate("whitening"),
    Candidate("lda"),
    *LOSSES[:2],
    Candidate("multi-similarity", "whitening"),
    Candidate(DEFAULT_METHOD, "whitening"),
    *LOSSES[2:],
)
"""what a run with a frozen backbone can be; where time is short, the last ones are not tried"""
LEAST_GAIN_OF_LOSS = 0.03
"""MAP@R that another loss must gain on features if the run trains the backbone, too. The order of the methods then
changes: on CUB, multi-similarity is above Proxy-Anchor on features (held-out classes), and below it once the whole
network is trained (studies/auto.toml). On features of drawn characters it gains more than this."""
FROZEN_DIVISIONS = 2
"""into folds, whose scores are averaged"""
FROZEN_SHARE, WHOLE_SHARE = 0.3, 0.1
"""the time of the trials, as a share of that of the run; features do not count"""
NUMBERS = (4, 2, 1)
"""how many candidates are trained where the time does not allow all of them"""
COST_OF_LOSS = 1.5
"""the trial of a loss, as trials of Proxy-Anchor: `vcpa` takes two to three times as long as the others"""
PLAN = ".run.json.auto.part"
"""the file in the folder of a run that says which trials its time allows; `run.json` replaces it"""


class Trial(NamedTuple):
    """A candidate that was tried.

    Attributes:
        method: its name.
        start: the closed form that its head started from; None: as in the recipe.
        score: MAP@R over the queries of all folds, a fraction.
        seconds: how long its trials took.
    """

    method: str
    start: str | None
    score: float
    seconds: float


class Choice(NamedTuple):
    """What was chosen, and why.

    Attributes:
        method: the chosen method.
        start: the closed form that its head starts from; None: as in the recipe.
        reason: a sentence.
        trials: the candidates that were tried, the best first; empty if there was nothing to compare them on.
        folds: number of folds of a division of the classes.
        classes: that were scored in these folds.
        divisions: into folds, over which the scores are means.
        dropped: sentences about what was not tried.
        seconds: how long the trials took, with an encoder that is built for them and without features.
        run_seconds: how long the run takes at least without the trials and without features, as estimated before.
    """

    method: str
    start: str | None
    reason: str
    trials: tuple[Trial, ...] = ()
    folds: int = 0
    classes: int = 0
    dropped: tuple[str, ...] = ()
    seconds: float = 0.0
    run_seconds: float = 0.0
    divisions: int = 1

    def as_dict(self) -> dict[str, Any]:
        """The entry `auto` of `run.json` and `result.json`."""
        return self._asdict() | {"trials": [trial._asdict() for trial in self.trials], "dropped": list(self.dropped)}

    def settings(self) -> dict[str, Any]:
        """What the choice changes in the recipe."""
        return Candidate(self.method, self.start).settings()


class Plan(NamedTuple):
    """Which trials the time allows.

    Attributes:
        trained: the number of candidates that are trained.
        epochs: of each of them.
        run_seconds: how long the run takes at least.
    """

    trained: int
    epochs: int
    run_seconds: float


def describe_choice(choice: Mapping[str, Any]) -> str:
    """What was chosen and why, in one or two sentences.

    Args:
        choice: the entry `auto` of a result.

    Example:
        >>> trials = (Trial("lda", None, 0.523, 1.0), Trial("untrained", None, 0.5, 0.1))
        >>> describe_choice(Choice("lda", None, "2.3 above untrained", trials, folds=4, classes=12).as_dict())
        'lda: 2.3 above untrained. MAP@R on 4 folds of the known classes (12 scored): lda 52.3, untrained 50.0'
    """
    sentence = f"{Candidate(choice['method'], choice.get('start'))}: {choice['reason']}"
    return f"{sentence}. {trials}" if (trials := describe_trials(choice)) else sentence


def describe_trials(choice: Mapping[str, Any]) -> str:
    """The scores of the candidates that were tried, in one line; empty if none was.

    Args:
        choice: the entry `auto` of a result.
    """
    if not choice["trials"]:
        return ""
    names = [str(Candidate(trial["method"], trial.get("start"))) for trial in choice["trials"]]
    scores = ", ".join(
        f"{name} {100 * trial['score']:.1f}" for name, trial in zip(names, choice["trials"], strict=True)
    )
    if "folds" not in choice:  # a result of an earlier version
        return f"{METRIC} of the methods that were tried on features, on held-out classes: {scores}"
    dropped = f"; not tried: {'; '.join(choice['dropped'])}" if choice["dropped"] else ""
    divisions = choice.get("divisions", 1)
    folds = f"{choice['folds']} folds" if divisions == 1 else f"{divisions} times {choice['folds']} folds"
    return f"{METRIC} on {folds} of the known classes ({choice['classes']} scored): {scores}{dropped}"


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


def chooses_by_default(raw: Mapping[str, Any]) -> bool:
    """Whether a run that names no method chooses one: its backbone is pre-trained and frozen.

    There no method is best for all images, and closed forms are often above trained heads (docs: frozen backbone).
    A run with a setting that only a trained head has trains Proxy-Anchor.

    Args:
        raw: the unchecked tables of its recipe.

    Example:
        >>> chooses_by_default({"train": {"frozen": True}}), chooses_by_default({"train": {"frozen": False}})
        (True, False)
        >>> chooses_by_default({"train": {"frozen": True}, "loss": {"margin": 0.2}})
        False
    """
    train = raw.get("train", {})
    of_heads = raw.get("loss") or train.get("whiten") or train.get("start", "none") not in (None, "none")
    keeps_trained = train.get("keep", "simplest") != "simplest" or raw.get("protocol", "held-out") != "held-out"
    is_frozen = train.get("frozen") is True and is_pretrained(raw.get("encoder", {}))
    return "method" not in raw and is_frozen and not of_heads and not keeps_trained


def decide(scores: ClassScores, candidates: Sequence[Candidate], frozen: bool) -> tuple[Candidate, str]:
    """Choose among candidates that were tried (`runs.clear_gain.keep_simple`).

    Args:
        scores: of the candidates, by their names.
        candidates: what the names stand for.
        frozen: the run trains on features, as the trials did, and what no step trains is simple; otherwise
            Proxy-Anchor is, and another loss must gain `LEAST_GAIN_OF_LOSS`.

    Returns:
        The candidate, and why.

    Example:
        >>> scores = ClassScores("MAP@R", [2, 2, 2], {"lda": [1.0, 1.5, 1.0], "vcpa": [1.3, 1.4, 1.0]})
        >>> decide(scores, [Candidate("lda"), Candidate("vcpa")], frozen=True)
        (Candidate(method='lda', start=None), 'vcpa is higher by 3.3, not more than one standard error (6.0)')
    """
    simple = [str(each) for each in candidates if (each.is_computed if frozen else each.method == DEFAULT_METHOD)]
    kept = keep_simple(scores, simple, LEAST_GAIN if frozen else LEAST_GAIN_OF_LOSS)
    reason = kept.reason
    if not frozen and kept.name == kept.simple and kept.gain > kept.error:
        reason += "; this run trains the backbone, too, and features alone say little about that"
    return next(candidate for candidate in candidates if str(candidate) == kept.name), reason


def choose_method(
    context: RunContext,
    training: ImageSet,
    held_out: ImageSet | None,
    folder: Path | None = None,
    spent: float = 0.0,
    encoder: Encoder | None = None,
) -> Choice:
    """Try the candidates and choose one.

    Args:
        context: what the parts of the run share; trials are run by one process.
        training: the training images of the run.
        held_out: the classes that are held out of the training, if any; they are known classes, too.
        folder: of the run; a choice that is interrupted and begun again tries the same candidates. None: nothing is
            written.
        spent: seconds that the run has taken so far.
        encoder: the new encoder of the recipe, whose head the trials replace; None: it is built.

    Returns:
        The choice. Without any trial, it is Proxy-Anchor if the backbone has no pre-trained weights, because its
        features say nothing about the images; and with too few classes Proxy-Anchor, or with a frozen backbone
        `FEW_CLASSES`.

    Raises:
        ValueError: a feature is not finite.
    """
    recipe = context.recipe
    if not is_pretrained(recipe.encoder):
        reason = "no trials: the backbone has no pre-trained weights, and its features say little"
        return Choice(DEFAULT_METHOD, None, reason)
    parts = [training] if held_out is None else [training, held_out]
    if (count := _scorable(parts)) < MIN_CLASSES:
        return _too_few(recipe, count)
    torch.manual_seed(recipe.seed)
    started = time.perf_counter()
    encoder = (make_encoder(recipe) if encoder is None else encoder).to(context.device)
    built = time.perf_counter() - started
    known = joined([embed_features(context, encoder, part, "known classes") for part in parts])
    if not known.vectors.isfinite().all():
        raise ValueError(
            "features: got NaN or infinity, expected finite numbers; the weights of the backbone are damaged, or it "
            "overflows"
        )
    if (count := len(several_images(known))) < MIN_CLASSES:  # images that cannot be read
        return _too_few(recipe, count)
    candidates, refused = _allowed(recipe, FROZEN_CANDIDATES if recipe.train.frozen else LOSSES, encoder.width)
    tried = some_of(known, recipe.seed)
    divisions = range(FROZEN_DIVISIONS if recipe.train.frozen else 1)
    tasks = [outer_folds(tried, recipe.seed, division) for division in divisions]
    trials = _Trials(context, encoder, candidates, tasks, refused)
    context.watcher.say(f"trying {len(candidates)} candidates on features of {len(known.kept)} images: {count} classes")
    choice = trials.choose(folder, spent, built, len(training))
    return choice._replace(seconds=round(built + choice.seconds, 1))


class _Trials:
    """The trials of one choice.

    Args:
        context: what the parts of the run share.
        encoder: its backbone made the features.
        candidates: the recipes that are tried.
        divisions: the folds of each division.
        dropped: sentences about the candidates that are not tried.
    """

    def __init__(
        self,
        context: RunContext,
        encoder: Encoder,
        candidates: Mapping[Candidate, Recipe],
        divisions: list[list[Task]],
        dropped: Iterable[str],
    ) -> None:
        self.context, self.encoder, self.divisions = context, encoder, divisions
        self.tasks = [task for division in divisions for task in division]
        self.candidates, self.dropped = dict(candidates), list(dropped)
        self.values: dict[Candidate, list[Tensor]] = {candidate: [] for candidate in candidates}
        self.seconds = dict.fromkeys(candidates, 0.0)
        self.epochs = min(EPOCHS, context.recipe.train.epochs)

    def choose(self, folder: Path | None, spent: float, built: float, images: int) -> Choice:
        """Try as many candidates on as many folds as the time allows, and choose one.

        Args:
            folder: where the plan is kept.
            spent: seconds that the run takes for what is before its training.
            built: seconds that the choice took to build an encoder.
            images: training images of the run.
        """
        started = time.perf_counter()
        computed = [candidate for candidate in self.candidates if candidate.is_computed]
        trained = [candidate for candidate in self.candidates if not candidate.is_computed]
        plan = self._stored_plan(folder)
        if plan is None:
            for candidate in computed:
                self._try(candidate, len(self.divisions[0]))
            plan = self._plan(computed, trained, spent, built, images)
            if folder is not None:
                write_json(folder / PLAN, plan._asdict() | {"of": self._identity()})
        if left_out := trained[plan.trained :]:
            self.dropped.append(f"{', '.join(map(str, left_out))} (no time)")
        if plan.epochs != self.epochs:
            for candidate in trained:
                self.values[candidate].clear()
            self.epochs = plan.epochs
        for candidate in (*computed, *trained[: plan.trained]):
            self._try(candidate, len(self.tasks))
        tried = [candidate for candidate in self.candidates if len(self.values[candidate]) == len(self.tasks)]
        if not tried:
            reason = "no trials: they would take too large a share of the time of the run"
            return Choice(DEFAULT_METHOD, None, reason, dropped=tuple(self.dropped), run_seconds=plan.run_seconds)
        scores = self._scores(tried)
        chosen, reason = decide(scores, tried, self.context.recipe.train.frozen)
        trials = [
            Trial(*each, sum(scores.sums[str(each)]) / sum(scores.queries), round(self.seconds[each], 2))
            for each in tried
        ]
        return Choice(
            *chosen,
            reason,
            tuple(sorted(trials, key=lambda trial: -trial.score)),
            len(self.divisions[0]),
            len(scores.queries),
            tuple(self.dropped),
            round(time.perf_counter() - started, 1),
            round(plan.run_seconds, 1),
            len(self.divisions),
        )

    def _try(self, candidate: Candidate, folds: int) -> None:
        """Score a candidate on the first folds, as far as it was not."""
        values = self.values[candidate]
        for number in range(len(values), folds):
            started = time.perf_counter()
            self.context.watcher.work(f"trying {candidate}", number, folds)
            task, division = self.tasks[number], self.divisions[number // len(self.divisions[0])]
            others, recipe = [other for other in division if other is not task], self.candidates[candidate]
            try:
                values.append(run_trial(self.context, self.encoder, recipe, task, self.epochs, others))
            except ValueError as error:
                self.dropped.append(f"{candidate} ({error})")
                return
            finally:
                self.seconds[candidate] += time.perf_counter() - started

    def _plan(
        self, computed: list[Candidate], trained: list[Candidate], spent: float, built: float, images: int
    ) -> Plan:
        """Which trials the time allows, from how long those of the first division or fold take."""
        train = self.context.recipe.train
        of_closed_forms = sum(self.seconds[candidate] for candidate in computed)
        divisions, folds = len(self.divisions), len(self.tasks)
        epochs = min(train.epochs, (train.patience or train.epochs) + 1)
        if train.frozen:
            # Every report has rows of the closed forms, which try at least twice as much as a division.
            run_seconds, share = spent + 2 * of_closed_forms, FROZEN_SHARE
        else:
            run_seconds, share = spent + self._whole_seconds(epochs, images), WHOLE_SHARE
        of_trained = 0.0
        if trained and divisions * of_closed_forms <= share * run_seconds - built:
            self._try(trained[0], 1)
            of_trained = self.seconds[trained[0]]
            if train.frozen:
                run_seconds += epochs * images / max(1, len(self.tasks[0].inner.kept)) * of_trained / self.epochs
        else:
            trained = []
        limit = share * run_seconds - built
        numbers = [len(trained), *(number for number in NUMBERS if number < len(trained))] if trained else []
        for number in numbers:
            for length in (self.epochs, math.ceil(self.epochs / 2)):
                of_losses = folds * number * COST_OF_LOSS * of_trained * length / self.epochs
                cost = divisions * of_closed_forms + of_losses
                if cost <= limit:
                    return Plan(number, length, run_seconds)
        return Plan(0, self.epochs, run_seconds)  # closed forms alone: without them, there is nothing to choose

    def _whole_seconds(self, epochs: int, images: int) -> float:
        """How long a run that trains the backbone takes at least."""
        train = self.context.recipe.train
        cost = 1.0 if self.context.recipe.encoder["tuning"] == "linear" else TRAINING_COST
        warmup = min(train.warmup, epochs)
        return pass_seconds(self.encoder) * images * (warmup + cost * (epochs - warmup))

    def _scores(self, tried: list[Candidate]) -> ClassScores:
        """MAP@R of the candidates that were scored on all folds."""
        groups = torch.cat([task.groups for task in self.tasks])
        numbers, counts = (each.cpu().numpy() for each in groups.unique(return_inverse=True, return_counts=True)[1:])
        sums = {
            str(candidate): np.bincount(numbers, torch.cat(self.values[candidate]).double().cpu().numpy()).tolist()
            for candidate in tried
        }
        return ClassScores(METRIC, counts.tolist(), sums)

    def _identity(self) -> str:
        """What a plan is made for."""
        sizes = [[len(task.inner.kept), len(task.scored.kept)] for task in self.tasks]
        content = [self.context.recipe.changed, [str(candidate) for candidate in self.candidates], sizes]
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()

    def _stored_plan(self, folder: Path | None) -> Plan | None:
        """The plan of a choice that was interrupted."""
        try:
            stored = read_json(folder / PLAN) if folder is not None else {}
        except (OSError, ValueError):
            return None
        if stored.get("of") != self._identity():
            return None
        return Plan(**{name: stored[name] for name in Plan._fields})


def _scorable(parts: Iterable[ImageSet]) -> int:
    """The number of classes with two images or more; a class in several parts is one class."""
    counts: dict[str, int] = {}
    for part in parts:
        for label in part.labels.tolist():
            counts[part.classes[label]] = counts.get(part.classes[label], 0) + 1
    return sum(count > 1 for count in counts.values())


def _allowed(recipe: Recipe, candidates: Iterable[Candidate], width: int) -> tuple[dict[Candidate, Recipe], list[str]]:
    """The candidates that a recipe allows, with their recipes, and why the others are left out."""
    named = recipe.changed.get("encoder", {}).get("dim")
    allowed, refused = {}, []
    for candidate in candidates:
        if candidate.start is not None and "start" in recipe.changed.get("train", {}):
            candidate = Candidate(candidate.method)
        try:
            if candidate.method == "untrained" and named is not None and named != width:
                raise ValueError(f"its vectors have {width} dimensions, and encoder.dim={named} is named")
            allowed[candidate] = tried_recipe(recipe, candidate)
        except ValueError as error:
            refused.append(f"{candidate} ({error})")
    return allowed, refused


def _too_few(recipe: Recipe, count: int) -> Choice:
    """Say that there are too few classes for trials, how many are needed, and what is taken instead."""
    reason = (
        f"no trials: got {count} known classes with two images or more, expected at least {MIN_CLASSES} to compare "
        "candidates"
    )
    if recipe.train.frozen and _allowed(recipe, [FEW_CLASSES], 0)[0]:
        return Choice(*FEW_CLASSES, reason)
    return Choice(DEFAULT_METHOD, None, reason)
