"""One process's work on a run: open the data, train, choose the epoch, refit, score the unseen classes, report."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proxymetric.data import ImageSet, Split, singletons, split
from proxymetric.data.open import check_source
from proxymetric.data.splits import altered
from proxymetric.encoders import Encoder, check_weights_file
from proxymetric.models.load import load
from proxymetric.models.model import Model
from proxymetric.models.run_folder import REFIT, SIMPLER, build_encoder, read_run, read_state
from proxymetric.papers import CLOSED_FORMS
from proxymetric.papers import needs as needs_of
from proxymetric.runs import folder as folders
from proxymetric.runs import recipe as recipes
from proxymetric.runs import result as results
from proxymetric.runs.assemble import (
    RunContext,
    check_loss,
    embedder,
    images_by_class,
    make_encoder,
    make_learner,
    make_pool,
    open_split,
    scored_on,
    small_pixels,
    train_feed,
)
from proxymetric.runs.auto_method import choose_method, describe_choice
from proxymetric.runs.checkpoint_facts import CheckpointFacts
from proxymetric.runs.class_uncertainty import class_uncertainty, has_uncertainty
from proxymetric.runs.clear_gain import ClassScores, Kept
from proxymetric.runs.closed_form import Fit, closed_form_rows, compute_head, nothing_trained
from proxymetric.runs.divergence import check_trained
from proxymetric.runs.fewer_classes import among_fewer
from proxymetric.runs.mean_cosine import cosine_meter
from proxymetric.runs.recipe import Recipe
from proxymetric.runs.records import describe_run, readable, result_of_refit, result_of_training
from proxymetric.runs.report import draw_report
from proxymetric.runs.result import Result
from proxymetric.runs.same_everywhere import check_images
from proxymetric.runs.score import EmbeddedSet, queries_left_out, score, score_sizes
from proxymetric.runs.simplest import (
    TRAINED,
    OnlyProgress,
    as_candidates,
    closed_form_recipe,
    may_keep_another,
    simplest,
)
from proxymetric.runs.thresholds import store_thresholds
from proxymetric.runs.time_on_cpu import slow_training
from proxymetric.runs.training_part import Training
from proxymetric.runs.whiten import describe_whitening, whiten_run
from proxymetric.search.run_knowledge import HELD_OUT, RunKnowledge, copy_knowledge, write_knowledge
from proxymetric.system.checkpoint import Checkpoint
from proxymetric.system.device import pick_device
from proxymetric.system.files import write_json
from proxymetric.system.watcher import Watcher
from proxymetric.training import parallel
from proxymetric.training.advice import late_memory, own_batch_norm
from proxymetric.training.learner import Learner
from proxymetric.training.optim import autocast_type, warmup_message
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.trainer import Trainer


@dataclass
class Run:
    """A finished run.

    Attributes:
        folder: the run's folder.
        result: the content of `result.json`.
    """

    folder: Path
    result: Result

    @property
    def scores(self) -> dict[str, float]:
        """The metrics of the trained encoder on classes never seen in training, as fractions."""
        return self.result.scores

    def load(self, **options: Any) -> Model:
        """Load the run's model; the options are those of `proxymetric.load`."""
        return load(self.folder, **options)


class RunSession:
    """The work of one process on a run, from its beginning or from its last checkpoint.

    Args:
        recipe: the checked recipe.
        folder: the folder of the run.
        watcher: receives messages and progress.
        earlier_run: the `run.json` of the run to continue; None for a new run.
        overwrite: replace a run in `folder`.
        world: the processes that train together.
        report: write `report.html`.
        chooses: choose the method of a new run, see `runs.auto_method`.
        score_test: score the test classes; False: score the held-out classes instead.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        watcher: Watcher,
        earlier_run: dict[str, Any] | None,
        overwrite: bool,
        world: ProcessGroup,
        report: bool,
        chooses: bool = False,
        score_test: bool = True,
    ) -> None:
        if recipe.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self.recipe = recipe
        self.folder = folder
        self.watcher = watcher
        self.earlier_run = earlier_run
        self.overwrite = overwrite
        self.report = report
        self.score_test = score_test
        self.chooses = chooses and earlier_run is None
        self.choice: dict[str, Any] | None = (earlier_run or {}).get("auto")
        """how the method was chosen; None if the user named it"""
        self.new_encoder: tuple[Encoder, torch.Tensor] | None = None
        """the untrained encoder and the state of torch's random numbers after it was built; None once it is used"""
        self.simpler: RunSession | None = None
        """the session of the simpler model that the run keeps; None: it keeps the trained one"""
        self.held_out: EmbeddedSet | None = None
        """the held-out classes as the trained model embeds them, once they are embedded"""
        self.best: Learner | None = None
        """the learner of the model that was scored, once the run is done"""
        self.result: Result | None = None
        """the result, once the run is done"""
        self.fit: Fit | None = None
        """the closed form that the head began with; None: a random head, or it is not chosen yet"""
        self.started = time.perf_counter()
        self.context = RunContext(recipe, pick_device(recipe.train.device), world, watcher, {})
        if self.context.device.type == "cuda":
            torch.cuda.set_device(self.context.device)

    def run(self) -> Run:
        """Do the whole run."""
        recipe, world = self.recipe, self.context.world
        needs = needs_of(recipe.method, recipe.loss)
        self._check_needs(needs)
        parallel.check(recipe.train, needs, world, self.context.device)
        check_loss(recipe)
        self._check_encoder()
        images, parts = open_split(recipe, self.watcher)
        if not self.score_test:
            parts = parts._replace(test=None)
        check_images(world, images)
        self.context.bad.update(images.unlisted)
        if self.earlier_run is not None:
            folders.check_same_data(images, recipe.data.path, self.earlier_run, self.folder)
        single_image_classes = singletons(parts.train)
        if single_image_classes:
            self.watcher.say(
                f"classes with a single image: {len(single_image_classes)}, such as {single_image_classes[0]}; they "
                "are never held out"
            )
        unseen = parts.test if parts.test is not None else parts.validation
        choosing = parts.test if recipe.protocol == "papers" else parts.validation
        if recipe.protocol == "papers" and choosing is None:
            raise ValueError(
                f"protocol: got 'papers', which chooses the epoch on the test classes, but {images.name} has none; "
                "expected data with test classes, or a share of its classes: --set data.test=0.5"
            )
        if self.chooses:
            self._choose_method(parts)
            recipe = self.recipe
        is_computed = recipe.method in CLOSED_FORMS
        if is_computed:
            self.watcher.say(nothing_trained(recipe))
        stop_after = 0 if is_computed else None
        training = self._begin(self.folder, parts.train, choosing, images, unseen, stop_after=stop_after)
        training.trainer.run()
        check_trained(training.trainer, recipe)
        result = result_of_training(self.context, training, images, parts, self.choice)
        learner, training_images = training.trainer.learner, parts.train
        last_scores = self._last_scores(training.trainer, unseen)
        self._load_chosen(training)
        if recipe.train.whiten:
            result.whiten = self._whiten(training, parts, result.chosen_step)
        kept = self._keep_simplest(training, parts)
        result.kept = None if kept is None else kept._asdict()
        if self.simpler is not None:
            pass  # it was fitted on all known classes
        elif recipe.train.refit and parts.validation is not None and not result.chosen_epoch and not is_computed:
            self.watcher.say("no refit: no epoch was better than the untrained model")
        elif recipe.train.refit and parts.validation is not None:
            learner, training_images, result.refit = self._refit(images, result.chosen_epoch)
            if result.whiten is not None and result.whiten["kept"]:
                fit, step = Fit(**result.whiten["fit"]), result.refit["steps"]
                whiten_run(self.context, self.folder / REFIT, learner, training_images, None, step, fit)
        for bad_images in world.gather(dict(self.context.bad))[1:]:
            for title, reason in bad_images.items():
                self.context.on_bad(title, reason)
        with parallel.gathered_parameters(learner.encoder):
            result = world.from_first(
                lambda: self._finish(result, learner, training, unseen, parts, training_images, last_scores)
            )
        return Run(self.folder, result)

    def _check_encoder(self) -> None:
        """Refuse an unknown backbone, or weights that do not fit it, before the images are listed."""
        recipe = self.recipe
        if (self.folder / "last.safetensors").is_file() and self.earlier_run is not None:
            return
        check_source(recipe.data.path)
        recipes.check_backbone(recipe.encoder["backbone"])
        if recipe.encoder["weights"]:
            check_weights_file(recipe.encoder["weights"])
            torch.manual_seed(recipe.seed)
            self.new_encoder = make_encoder(recipe), torch.get_rng_state()

    def _make_encoder(self) -> Encoder:
        """The encoder of a new training; the random numbers after it are those after its construction."""
        if self.new_encoder is None:
            return make_encoder(self.recipe)
        encoder, random_state = self.new_encoder
        self.new_encoder = None
        torch.set_rng_state(random_state)
        return encoder

    def _choose_method(self, parts: Split) -> None:
        """Replace the method of the recipe by the one that some trials choose."""
        context, spent = self.context, time.perf_counter() - self.started
        encoder = None if self.new_encoder is None else self.new_encoder[0]
        choice = context.world.from_first(
            lambda: choose_method(context, parts.train, parts.validation, self.folder, spent, encoder)
        )
        self.choice = choice.as_dict()
        self.watcher.say(f"method {describe_choice(self.choice)}")
        self.recipe = recipes.check(recipes.merged(self.recipe.changed, choice.settings()))
        self.context = dataclasses.replace(context, recipe=self.recipe)
        self.new_encoder = None  # the trials replaced its head

    def _check_needs(self, needs: Iterable[str]) -> None:
        """Refuse a recipe without the held-out classes that the method needs."""
        recipe = self.recipe
        choosing = recipe.data.validation or recipe.protocol == "papers"
        if "validation" in needs and (not choosing or recipe.train.refit):
            raise ValueError(
                f"method: got {recipe.method!r}, which needs held-out classes during the whole training; expected "
                "protocol 'held-out', data.validation above 0, and no refit"
            )

    def _begin(
        self,
        folder: Path,
        training: ImageSet,
        validation: ImageSet | None,
        images: ImageSet,
        unseen: ImageSet | None,
        stop_after: float | None = None,
    ) -> Training:
        """Build everything that is needed to train, load the checkpoint if there is one, and write `run.json`.

        Args:
            folder: the folder for the checkpoints.
            training: the images to train on.
            validation: the images that choose the epoch, if any.
            images: all images of the data.
            unseen: the images to score before training, if any.
            stop_after: epochs to train instead of the recipe's.
        """
        recipe, context = self.recipe, self.context
        torch.manual_seed(recipe.seed)
        last = folder / "last.safetensors"
        resumes = self.earlier_run is not None and last.is_file()
        stored_facts: dict[str, Any] = {}
        if resumes:
            checkpoint = folders.read_checkpoint(last)
            stored_facts = checkpoint.state["facts"]
            encoder = build_encoder(read_run(folder), folder / "run.json")
            checkpoint.load_into(encoder, "encoder.", what="this run's encoder")
        else:
            encoder = self._make_encoder()
            if encoder.report is not None:
                self.watcher.say(str(encoder.report))
            if encoder.config["pooling"] != recipe.encoder["pooling"]:
                self.watcher.say("features: average + maximum of the last map (encoder.pooling='avg+max')")
            if context.device.type == "cpu" and context.world.size == 1 and folder == self.folder:
                counts = (len(training), len(validation or ()), len(unseen or ()))
                if message := slow_training(recipe, encoder, *counts):
                    self.watcher.say(message)
            self._compute_head(encoder, training, validation)
        if stored := stored_facts.get("closed_form"):
            self.fit = Fit(**stored)
        learner = make_learner(context, encoder, images_by_class(training))
        if recipe.train.whiten and has_uncertainty(learner.criterion):
            raise ValueError(
                f"train.whiten: got true with method {recipe.method!r}, whose uncertainty is that of the trained "
                "vectors; expected false"
            )
        feed = train_feed(context, encoder, training)
        facts = self._facts(encoder, stored_facts)
        trainer = Trainer(
            learner,
            feed,
            recipe.train,
            folder,
            self.watcher,
            score=None if validation is None else self._scorer(learner, validation),
            scored_on="" if validation is None else scored_on(recipe, validation),
            pool=make_pool(context, encoder, feed) if "pool" in learner.criterion.needs else None,
            mean_cosine=cosine_meter(context, encoder, training, feed),
            facts=facts.as_dict,
            stop_after=stop_after,
            world=context.world,
            device=context.device,
        )
        if unseen is not None and not resumes:
            with parallel.gathered_parameters(encoder):
                held_out = validation if recipe.protocol == "held-out" else None
                baselines = functools.partial(self._baselines, encoder, training, held_out, unseen)
                facts.baselines, facts.candidates, facts.fewer_classes = context.world.from_first(baselines)
        if trainer.resume(resumes):
            self.watcher.say(f"continuing from epoch {trainer.epoch}, step {trainer.step}")
        if message := warmup_message(recipe.train, trainer.optimizer, trainer.epoch, trainer.epochs):
            self.watcher.say(message)
        if message := late_memory(recipe.loss, trainer.steps, trainer.epochs):
            self.watcher.say(message)
        message = own_batch_norm(encoder, recipe.train.batch, context.world.size)
        if message and not recipe.train.frozen:
            self.watcher.say(message)
        # Nothing is written until all is built and the images can be read: an error must not cost an earlier run.
        if context.world.first:
            folders.remove_partial_files(folder)
            if not resumes and folder == self.folder and (self.overwrite or folders.was_cleared(folder)):
                folders.clear(folder)
            # A resumed run writes run.json too: its epochs or the path of its images may have changed.
            normalise = learner.criterion.normalise
            write_json(folder / "run.json", describe_run(context, self.choice, encoder, normalise, training, images))
            folders.finish_clearing(folder)
        return Training(folder, trainer, facts, trainer.step)

    def _compute_head(self, encoder: Encoder, training: ImageSet, validation: ImageSet | None) -> None:
        """Compute the head of a new encoder in closed form, if the recipe asks for one."""
        context, random_state = self.context, torch.get_rng_state()
        encoder.to(context.device)
        held_out = validation if self.recipe.protocol == "held-out" else None
        # A method in closed form that is fitted on all known classes chooses again, on folds of them.
        earlier = None if self.recipe.method in CLOSED_FORMS else self.fit
        compute = functools.partial(compute_head, context, encoder, training, held_out, earlier)
        computed = context.world.from_first(compute)
        torch.set_rng_state(random_state)
        if computed is not None:
            self.fit, head = computed
            encoder.set_head(head.weight, head.bias)
            self.watcher.say(str(self.fit))

    def _load_chosen(self, training: Training) -> None:
        """Load the model of the chosen epoch into the learner of a training."""
        trainer, file = training.trainer, training.folder / "best.safetensors"
        if trainer.best is None and read_state(file).get("step") != trainer.step:
            return
        best = Checkpoint.read(file)
        if best.state.get("whiten") and not self.recipe.train.whiten:
            raise ValueError(
                f"train.whiten: got false, but the model in {training.folder} is whitened; expected true, or a new run"
            )
        best.tensors = trainer.sharded.local_part(best.tensors)
        best.load_into(trainer.learner.encoder, "encoder.", what="this run's encoder")
        if not best.state.get("whiten"):
            best.load_into(trainer.learner.criterion, "criterion.", what="this run's method")

    def _whiten(self, training: Training, parts: Split, step: int | None) -> dict[str, Any]:
        """Put a whitening behind the trained head, unless it scores lower on the held-out classes (`runs.whiten`)."""
        held_out = parts.validation if self.recipe.protocol == "held-out" else None
        record = whiten_run(self.context, self.folder, training.trainer.learner, parts.train, held_out, step)
        self.watcher.say(describe_whitening(record))
        return record

    def _keep_simplest(self, training: Training, parts: Split) -> Kept | None:
        """Compare the trained model with simpler ones; make the one that is kept (`runs.simplest`)."""
        candidates, learner, folder = training.facts.candidates, training.trainer.learner, self.folder / SIMPLER
        kept: Kept | None = None
        if candidates is not None and parts.validation is not None and may_keep_another(self.recipe):
            embed = embedder(self.context, learner.encoder, parts.validation, "held-out classes")

            def decide() -> Kept | None:
                self.held_out = self._normalised(learner, embed("vectors"))
                return simplest(candidates, self.held_out)

            with parallel.gathered_parameters(learner.encoder):
                kept = self.context.world.from_first(decide)
        if kept is None or kept.name == TRAINED:
            if self.context.world.first:
                folders.remove_part(folder)  # an earlier process may have kept another model
            self.context.world.wait()
            return kept
        self.watcher.say(str(kept))
        recipe = closed_form_recipe(self.recipe, kept.name)
        earlier = self.context.world.from_first(lambda: folders.same_run(folder, recipe))
        self.simpler = RunSession(
            recipe, folder, OnlyProgress(self.watcher), earlier, earlier is None, self.context.world, report=False
        )
        self.simpler.run()
        return kept

    def _scorer(self, learner: Learner, validation: ImageSet) -> Callable[[], dict[str, float]]:
        """Make the function that scores the learner on the classes that choose the epoch."""
        options, device = self.recipe.train, self.context.device
        precision = autocast_type(options.amp, device) if options.evaluate_amp else None
        embed = embedder(self.context, learner.encoder, validation, scored_on(self.recipe, validation), precision)

        def score_learner() -> dict[str, float]:
            return score(self._normalised(learner, embed("vectors")), self.recipe.train.metrics)

        return score_learner

    def _last_scores(self, trainer: Trainer, unseen: ImageSet | None) -> dict[str, float] | None:
        """The scores of the last epoch on the test classes, in protocol `papers`, in float32."""
        if self.recipe.protocol != "papers" or unseen is None:
            return None
        metrics, learner = self.recipe.train.metrics, trainer.learner
        if not self.recipe.train.evaluate_amp:
            return {name: trainer.curve[-1][name] for name in metrics if name in trainer.curve[-1]}
        embed = embedder(self.context, learner.encoder, unseen, "unseen classes")
        with parallel.gathered_parameters(learner.encoder):
            return self.context.world.from_first(lambda: score(self._normalised(learner, embed("vectors")), metrics))

    @staticmethod
    def _normalised(learner: Learner, embedded: EmbeddedSet) -> EmbeddedSet:
        return embedded._replace(vectors=learner.criterion.normalised(embedded.vectors))

    def _facts(self, encoder: Encoder, stored: dict[str, Any]) -> CheckpointFacts:
        """The facts for the checkpoint, starting from those of the checkpoint that the run continues."""
        # The result also lists the images that earlier processes could not read.
        self.context.bad.update(stored.get("bad", {}))
        weights = stored.get("weights")
        if encoder.report is not None:
            report = encoder.report
            weights = {"file": Path(report.file).name, "applied": report.applied, "overridden": report.overridden}
        return CheckpointFacts(
            bad=self.context.bad,
            baselines=stored.get("before"),
            fewer_classes=stored.get("fewer_classes"),
            weights=weights,
            earlier_seconds=stored.get("seconds", 0.0),
            clock=lambda: time.perf_counter() - self.started,
            closed_form=None if self.fit is None else self.fit.as_dict(),
            candidates=as_candidates(stored.get("candidates")),
        )

    def _baselines(
        self, encoder: Encoder, training: ImageSet, held_out: ImageSet | None, unseen: ImageSet
    ) -> tuple[dict[str, dict[str, float]], ClassScores | None, dict[str, list[Any]]]:
        """What needs no training: scores of small images' raw pixels, of the backbone's features, and of closed forms.

        Returns:
            The rows of the result, the scores on the held-out classes of the models that the run may keep, and the
            scores among fewer classes.
        """
        pixels = small_pixels(self.context, unseen)
        features = embedder(self.context, encoder, unseen, "unseen classes, untrained")("features")
        sets = ({} if pixels is None else {results.PIXELS: pixels}) | {results.UNTRAINED: features}
        rows = {name: score(embedded, self.recipe.train.metrics) for name, embedded in sets.items()}
        fewer = {name: among_fewer(embedded, rows[name]) for name, embedded in sets.items()}
        forms = closed_form_rows(self.context, encoder, training, held_out, features)
        return rows | forms.rows, forms.candidates, fewer

    def _refit(self, images: ImageSet, epochs: float) -> tuple[Learner, ImageSet, dict[str, Any]]:
        """Train a new model on all classes but the test classes, for the number of epochs that was chosen.

        Returns:
            The learner, its training images, and the entry `refit` of the result.
        """
        options, seed = self.recipe.data, self.recipe.seed
        all_images = altered(split(images, 0.0, options.test, seed).train, options.fraction, options.wrong_labels, seed)
        counts = f"{len(all_images)} images of {len(all_images.classes)} classes"
        self.watcher.say(f"refit: {counts}, {round(epochs, 2)} epochs")
        folder, world = self.folder / REFIT, self.context.world
        if world.first and folders.has_more_than(folder, epochs):
            folders.clear(folder)  # an earlier process refitted for more epochs than are chosen now
        world.wait()
        training = self._begin(folder, all_images, None, images, None, stop_after=epochs)
        training.trainer.run()
        refit = result_of_refit(self.context, training, all_images, epochs)
        if world.first:
            write_json(folder / "result.json", refit)
        return training.trainer.learner, all_images, refit

    def _finish(
        self,
        result: Result,
        learner: Learner,
        training: Training,
        unseen: ImageSet | None,
        parts: Split,
        training_images: ImageSet,
        last_scores: dict[str, float] | None,
    ) -> Result:
        """Score the unseen classes, draw the report and write `result.json`.

        Args:
            result: the result of the training, without scores.
            learner: the learner with the chosen or the refitted model.
            training: the first training, not the refit.
            unseen: the images to score, if any.
            parts: the split of the data.
            training_images: the images that the model was trained on.
            last_scores: the scores of the last epoch, in protocol `papers`.
        """
        encoder, criterion, metrics = learner.encoder, learner.criterion, self.recipe.train.metrics
        embedded = None
        # A refitted model may know every class: then the model that chose its epochs is scored.
        scored = training.trainer.learner if result.refit and parts.test is None else learner
        self.best = scored
        result.rows = dict(training.facts.baselines or {})
        result.evaluated_on = None if unseen is None else "test" if parts.test is not None else "validation"
        if unseen is not None:
            embedded = self.held_out if unseen is parts.validation and result.refit is None else None
            if embedded is None:
                embed_unseen = embedder(self.context, scored.encoder, unseen, "unseen classes")
                embedded = self._normalised(scored, embed_unseen("vectors"))
            result.rows[results.TRAINED] = score(embedded, metrics)
            result.queries_left_out = queries_left_out(embedded)
            if self.simpler is not None:
                embedded = self._score_simpler(result, unseen)
            elif (sizes := self.recipe.loss["nested"]) is not None:
                result.sizes = score_sizes(embedded, sizes, metrics, criterion.normalise)
            if fewer := among_fewer(embedded, result.scores):
                result.fewer_classes = (training.facts.fewer_classes or {}) | {result.kept_row: fewer}
        if last_scores is not None:
            result.rows[results.LAST_EPOCH] = last_scores
        uncertainty: dict[str, float] = {}
        if has_uncertainty(criterion) and self.simpler is None:
            of_classes = criterion.uncertainty()
            uncertainty = dict(zip(training_images.classes, of_classes.double().cpu().tolist(), strict=True))
            embed = embedder(self.context, encoder, training_images, "training images")

            def embed_seen() -> tuple[torch.Tensor, torch.Tensor]:
                images = embed("vectors")
                return images.vectors, images.labels

            result.uncertainty = class_uncertainty(criterion, of_classes, training_images.classes, embed_seen)
        if self.simpler is not None:
            result.thresholds = self.simpler.result.thresholds if self.simpler.result else None
            copy_knowledge(self.folder / SIMPLER, self.folder)
        elif parts.validation is not None and result.refit is None:
            held_out = embedded if parts.test is None else self.held_out
            if held_out is None:
                embed_held_out = embedder(self.context, encoder, parts.validation, "held-out classes")
                held_out = self._normalised(learner, embed_held_out("vectors"))
            result.thresholds = store_thresholds(
                self.folder, held_out, uncertainty, training_images.classes, self.recipe.seed
            )
        elif uncertainty or (self.folder / HELD_OUT).is_file():
            # Nothing was held out of this model, but `search --identify` needs the uncertainty of its classes.
            write_knowledge(self.folder, RunKnowledge(training_images.classes, torch.empty(0, 0), [], uncertainty))
        result.bad_images = dict(self.context.bad)
        for name, part in zip(("train", "validation", "test"), parts):
            if part is not None:
                result.data[name]["images"] = readable(self.context, part)
        # The time since the images were opened: features, training, evaluations and refit. Earlier processes count
        # until their last checkpoint.
        result.seconds = round(training.facts.seconds, 1)
        earlier = training.earlier_result()
        if earlier.get("refit") == result.refit:
            for name in ("finished", "machine", "versions", "seconds"):
                if name in earlier:
                    setattr(result, name, earlier[name])
        if embedded is not None and self.report:
            self.watcher.say("drawing the report")
            embedded = embedded._replace(vectors=embedded.vectors.cpu())
            draw_report(self.folder / "report.html", result=result, embedded=embedded, training_images=training_images)
        result.write(self.folder / "result.json")
        self.result = result
        return result

    def _score_simpler(self, result: Result, unseen: ImageSet) -> EmbeddedSet:
        """Embed the unseen classes with the simpler model that is kept, and put its scores into the result."""
        assert self.simpler is not None
        assert self.simpler.best is not None
        learner = self.simpler.best
        embed = embedder(self.context, learner.encoder, unseen, "unseen classes")
        embedded = self._normalised(learner, embed("vectors"))
        result.rows[result.kept_row] = score(embedded, self.recipe.train.metrics)
        return embedded
