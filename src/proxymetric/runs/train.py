"""A whole run: data, training, choice of the epoch, test, report, refit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from proxymetric import recipe as recipes
from proxymetric.checkpoint import Checkpoint
from proxymetric.core.watcher import Silent, Watcher
from proxymetric.data import ImageSet, Split, singletons, split
from proxymetric.data.splits import altered
from proxymetric.device import pick_device
from proxymetric.encoders import Encoder, build
from proxymetric.files import write_json
from proxymetric.metrics import left_out
from proxymetric.models.load import load
from proxymetric.models.model import Model
from proxymetric.papers import method as make_method
from proxymetric.papers import needs as needs_of
from proxymetric.recipe import Recipe
from proxymetric.runs import folder as folders
from proxymetric.runs import result
from proxymetric.runs.assemble import (
    RunContext,
    embedder,
    eval_view,
    make_encoder,
    make_learner,
    make_pool,
    open_split,
    pixels_of,
    scored,
    scored_on,
    train_feed,
)
from proxymetric.runs.class_uncertainty import class_uncertainty, knows_uncertainty
from proxymetric.runs.report import draw_report
from proxymetric.training import parallel
from proxymetric.training.learner import Learner
from proxymetric.training.optim import first_rates, warm_up
from proxymetric.training.process_group import ProcessGroup, restarts
from proxymetric.training.trainer import Trainer

PIXELS = 64
"""images up to this side are compared as raw pixels too, as the baseline under every encoder"""


@dataclass
class Run:
    """A finished run: its folder and what `result.json` says."""

    folder: Path
    result: dict[str, Any]

    @property
    def scores(self) -> dict[str, float]:
        """The metrics of the trained encoder on classes never seen in training, as fractions."""
        return self.result["rows"]["trained encoder"]

    def load(self, **options: Any) -> Model:
        return load(self.folder, **options)


def train(
    data: str | Path | None = None,
    *,
    recipe: str | Path | None = None,
    method: str | None = None,
    backbone: str | None = None,
    tuning: str | dict[str, Any] | None = None,
    weights: str | Path | None = None,
    out: str | Path | None = None,
    epochs: int | None = None,
    batch: int | None = None,
    size: int | None = None,
    dim: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    cache: str | None = None,
    device: str | None = None,
    frozen: bool | None = None,
    refit: bool | None = None,
    protocol: str | None = None,
    settings: Iterable[str] | Mapping[str, Any] = (),
    resume: bool = False,
    overwrite: bool = False,
    report: bool = True,
    watcher: Watcher | None = None,
) -> Run:
    """Train an embedding on labelled images and measure it on classes it has never seen.

    data: a folder of class folders, a CSV of file and class, a benchmark's folder, "glyphs" or "digits". recipe: a TOML
    file. The other names are short for keys of the recipe (`proxymetric.recipe`) and win over the file; `settings`
    reaches every key: `{"loss.margin": 0.2}`. protocol: which classes choose the epoch (`proxymetric.protocol`). out:
    the run's folder, `runs/<data>-<method>` by default. resume: go on with the run in that folder. overwrite: start
    anew there. report: draw the page `report.html`. watcher: who is told how it goes; None draws a progress bar in the
    terminal, `training.Silent()` says nothing.

    >>> run = train("digits", backbone="small", epochs=1, out="runs/digits")    # doctest: +SKIP
    >>> run.scores["R@1"]                                                       # doctest: +SKIP
    """
    short = {
        "data.path": data, "method": method, "encoder.backbone": backbone, "encoder.tuning": tuning,
        "encoder.weights": weights,
        "train.epochs": epochs, "train.batch": batch, "view.size": size, "encoder.dim": dim, "train.lr": lr,
        "seed": seed, "data.cache": cache, "train.device": device, "train.frozen": frozen, "train.refit": refit,
        "protocol": protocol,
    }  # fmt: skip
    said = {key: str(v) if isinstance(v, Path) else v for key, v in short.items() if v is not None}
    raw = recipes.merged(
        {} if recipe is None else recipes.load(recipe), recipes.settings(said), recipes.settings(settings)
    )
    folder = folders.default_folder(raw) if out is None else Path(out)
    if restarts():
        # They go on, whatever was asked at first.
        resume, overwrite = True, False
    with ProcessGroup.joined() as world:
        before = world.from_first(lambda: folders.claim(folder, resume, overwrite))
        if before is not None:
            raw = recipes.merged(before["said"], raw)
        checked = recipes.check(raw)
        if before is not None:
            folders.same_recipe(checked, before, folder)
        told = (watcher or _terminal()) if world.first else Silent()
        if resume and before is None:
            told.say(f"there is no run in {folder} to go on with: starting one")
        try:
            return RunSession(checked, folder, told, before, overwrite, world, report).run()
        finally:
            told.close()


def _terminal() -> Watcher:
    from proxymetric.cli.terminal import Terminal

    return Terminal()


class RunSession:
    """One process's work on a run, from the beginning or from where it was left."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        watcher: Watcher,
        before: dict[str, Any] | None,
        overwrite: bool,
        world: ProcessGroup,
        report: bool,
    ) -> None:
        if recipe.train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(recipe.train.deterministic)
        self.recipe, self.folder, self.watcher, self.before, self.overwrite = recipe, folder, watcher, before, overwrite
        self.report, self.begun = report, time.perf_counter()
        self.first_step: dict[Path, int] = {}
        """the step at which this sitting began, of each folder that it trains in"""
        self.desk = RunContext(recipe, pick_device(recipe.train.device), world, watcher, {})
        if self.desk.device.type == "cuda":
            torch.cuda.set_device(self.desk.device)
            torch.set_float32_matmul_precision("highest" if recipe.train.deterministic else "high")

    def run(self) -> Run:
        recipe = self.recipe
        needs = needs_of(recipe.method, recipe.loss)
        self._can_serve(needs)
        parallel.check(recipe.train, needs, self.desk.world, self.desk.device)
        make_method(recipe.method, classes=2, dim=2, **recipe.loss)  # wrong values are said before anything is opened
        images, parts = open_split(recipe, self.watcher)
        if self.before is not None:
            folders.same_data(images.identity(), self.before, self.folder)
        alone = singletons(parts.train)
        if alone:
            self.watcher.say(f"classes with a single image: {len(alone)}, such as {alone[0]}; they are never held out")
        shown = parts.test if parts.test is not None else parts.validation
        choosing = parts.test if recipe.protocol == "papers" else parts.validation
        if recipe.protocol == "papers" and choosing is None:
            raise ValueError(
                f"protocol: got 'papers', which chooses the epoch on the test classes, but {images.name} has none; "
                "expected data with test classes, or a share of them (--set data.test=0.5)"
            )
        trainer = self._begin(self.folder, parts.train, choosing, images, shown)
        trainer.run()
        result, learner, seen = self._result(trainer, images, parts), trainer.learner, parts.train
        if recipe.train.refit and parts.validation is not None and not result["chosen_epoch"]:
            self.watcher.say("no refit: no epoch was better than the untrained model")
        elif recipe.train.refit and parts.validation is not None:
            learner, seen, result["refit"] = self._refit(images, result["chosen_epoch"])
        if "refit" not in result and (self.folder / "best.safetensors").is_file():
            best = Checkpoint.read(self.folder / "best.safetensors")
            best.tensors = trainer.sharded.own(best.tensors)
            best.load_into(learner.encoder, "encoder.", what="this run's encoder")
            best.load_into(learner.criterion, "criterion.", what="this run's method")
        with parallel.gathered_parameters(learner.encoder):
            result = self.desk.world.from_first(lambda: self._measured(result, learner, trainer, shown, parts, seen))
        return Run(self.folder, result)

    def _can_serve(self, needs: Iterable[str]) -> None:
        """Refuse what the method cannot do without, before anything is opened."""
        recipe = self.recipe
        choosing = recipe.data.validation or recipe.protocol == "papers"
        if "validation" in needs and (not choosing or recipe.train.refit):
            raise ValueError(
                f"{recipe.method} needs held-out classes all the way: protocol 'held-out', data.validation above 0, "
                "and no refit"
            )

    def _begin(
        self,
        folder: Path,
        training: ImageSet,
        validation: ImageSet | None,
        images: ImageSet,
        shown: ImageSet | None,
        stop_after: float | None = None,
    ) -> Trainer:
        """A trainer, ready to run or to go on."""
        recipe, desk = self.recipe, self.desk
        torch.manual_seed(recipe.seed)
        last = folder / "last.safetensors"
        begun = self.before is not None and last.is_file()
        if begun:
            encoder = build(**folders.read_json(folder / "run.json")["encoder"])
            folders.checkpoint(last).load_into(encoder, "encoder.", what="this run's encoder")
        else:
            encoder = make_encoder(recipe)
            if encoder.report is not None:
                self.watcher.say(str(encoder.report))
        learner = make_learner(desk, encoder, len(training.classes))
        feed = train_feed(desk, encoder, training)
        score = None
        if validation is not None:
            held_out = embedder(desk, encoder, validation, scored_on(recipe))

            def score() -> dict[str, float]:
                vectors, labels, kept = held_out("vectors")
                return scored(validation, (learner.criterion.normalised(vectors), labels, kept), recipe.train.metrics)

        trainer = Trainer(
            learner, feed, recipe.train, folder, self.watcher, score, None, stop_after, desk.world, desk.device
        )
        trainer.scored_on = scored_on(recipe)
        if "pool" in learner.criterion.needs:
            trainer.pool = make_pool(desk, encoder, feed, lambda: trainer.step)
        baselines = None
        if shown is not None and not begun:
            with parallel.gathered_parameters(encoder):
                baselines = desk.world.from_first(lambda: self._baselines(encoder, shown))
        if trainer.resume(begun):
            self.watcher.say(f"going on from epoch {trainer.epoch}, step {trainer.step}")
        self.first_step[folder] = trainer.step
        if said := warm_up(recipe.train, trainer.optimizer, trainer.epoch, trainer.epochs):
            self.watcher.say(said)
        # What an earlier sitting could not read belongs into the result too.
        desk.bad.update(trainer.facts.get("bad", {}))
        trainer.facts["bad"] = desk.bad
        if baselines is not None:
            trainer.facts["before"] = baselines
        if encoder.report is not None:
            report = encoder.report
            trainer.facts["weights"] = {
                "file": Path(report.file).name, "applied": report.applied, "overridden": report.overridden
            }  # fmt: skip
        trainer.facts.setdefault("seconds", 0.0)
        trainer.clock = lambda: time.perf_counter() - self.begun
        # Only now that everything could be made and the images could be read: a mistake costs no earlier run.
        if desk.world.first:
            folders.sweep(folder)
            if not begun and self.overwrite and folder == self.folder:
                folders.clear(folder)
            # Also of a run that goes on: it may have been told of more epochs, or that its images lie elsewhere now.
            write_json(folder / "run.json", self._about(encoder, learner.criterion.normalise, training, images))
        return trainer

    def _about(self, encoder: Encoder, normalise: str, training: ImageSet, images: ImageSet) -> dict[str, Any]:
        """`run.json`: all that is needed to go on with the run, or to use its model."""
        return {
            "recipe": self.recipe.as_dict(),
            "said": self.recipe.changed,
            "encoder": encoder.config,
            "normalise": normalise,
            "view": eval_view(self.recipe),
            "classes": training.classes,
            "data": {"name": images.name, "identity": images.identity()},
            "versions": result.versions(),
        }

    def _baselines(self, encoder: Encoder, shown: ImageSet) -> dict[str, dict[str, float]]:
        """What the set scores before training: as raw pixels where images are small, and by the untrained backbone."""
        metrics, rows = self.recipe.train.metrics, {}
        if self.recipe.view["size"] <= PIXELS:
            rows["raw pixels"] = scored(shown, pixels_of(self.desk, shown), metrics)
        features = embedder(self.desk, encoder, shown, "unseen classes, untrained")("features")
        rows["untrained encoder"] = scored(shown, features, metrics)
        return rows

    def _refit(self, images: ImageSet, epochs: float) -> tuple[Learner, ImageSet, dict[str, Any]]:
        """Train anew on all classes but the test's, for the number of epochs that the held-out ones chose."""
        options, seed = self.recipe.data, self.recipe.seed
        everything = altered(split(images, 0.0, options.test, seed).train, options.fraction, options.wrong_labels, seed)
        counts = f"{len(everything)} images of {len(everything.classes)} classes"
        self.watcher.say(f"refit: {counts}, {round(epochs, 2)} epochs")
        folder, world = self.folder / "refit", self.desk.world
        if world.first and folders.has_more_than(folder, epochs):
            folders.clear(folder)  # of an earlier sitting, before the held-out classes chose fewer
        world.wait()
        trainer = self._begin(folder, everything, None, images, None, stop_after=epochs)
        trainer.run()
        facts = {"epochs": epochs, "images": len(everything), "classes": len(everything.classes)}
        facts |= self._cost(trainer, folder)
        if self.desk.world.first:
            write_json(folder / "result.json", facts)
        return trainer.learner, everything, facts

    def _known(self, trainer: Trainer, folder: Path) -> dict[str, Any]:
        """The result of an earlier sitting that had come to this end: this one trained nothing, and cost nothing."""
        if trainer.step > self.first_step[folder] or not (folder / "result.json").is_file():
            return {}
        known = folders.read_json(folder / "result.json")
        return known if known.get("steps") == trainer.step else {}

    def _cost(self, trainer: Trainer, folder: Path) -> dict[str, Any]:
        """What a training took and what it trained."""
        rows = sum(table.values.numel() for table in trainer.learner.criterion.row_tables())
        return {
            "training_seconds": round(trainer.seconds, 1),
            "images_per_second": round(trainer.images / trainer.seconds, 1) if trainer.seconds else None,
            "memory": self._known(trainer, folder).get("memory") or result.peak_memory(self.desk.device),
            "parameters": result.counts(trainer.learner, trainer.trained, rows, trainer.sharded.elsewhere),
            "steps": trainer.step,
            "skipped_steps": trainer.skipped,
        }

    def _result(self, trainer: Trainer, images: ImageSet, parts: Split) -> dict[str, Any]:
        recipe, chosen = self.recipe, trainer.chosen
        counted = zip(("train", "validation", "test"), parts)
        return {
            "schema": result.SCHEMA,
            "commit": result.commit(),
            "protocol": recipe.protocol,
            "recipe": recipe.as_dict(),
            "weights": trainer.facts.get("weights"),
            "data": {"name": images.name, "identity": images.identity()}
            | {name: {"images": len(part), "classes": len(part.classes)} for name, part in counted if part is not None},
            "versions": result.versions(),
            "machine": result.machine(self.desk.device),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "rates": first_rates(trainer.optimizer, trainer.learner.criterion, trainer.options),
            **self._cost(trainer, self.folder),
            "epochs": trainer.passed,
            "chosen_epoch": chosen["epoch"],
            "chosen_step": chosen["step"],
            "chosen_by": recipe.train.monitor if trainer.best is not None else "last",
            "validation": chosen,
            "curve": trainer.curve,
        }

    def _measured(
        self,
        result: dict[str, Any],
        learner: Learner,
        trainer: Trainer,
        shown: ImageSet | None,
        parts: Split,
        seen: ImageSet,
    ) -> dict[str, Any]:
        """The result with the scores on the unseen classes, written down, and the page that shows them."""
        encoder, criterion = learner.encoder, learner.criterion
        result["rows"] = dict(trainer.facts.get("before", {}))
        result["evaluated_on"] = None if shown is None else "test" if parts.test is not None else "validation"
        result["queries_left_out"] = 0
        if shown is not None and not (result.get("refit") and parts.test is None):
            vectors, labels, kept = embedder(self.desk, encoder, shown, "unseen classes")("vectors")
            vectors = criterion.normalised(vectors)
            result["rows"]["trained encoder"] = scored(shown, (vectors, labels, kept), self.recipe.train.metrics)
            result["queries_left_out"] = left_out(labels) if shown.gallery is None else 0
        if self.recipe.protocol == "papers":
            names = self.recipe.train.metrics
            result["rows"]["last epoch"] = {name: trainer.curve[-1][name] for name in names}
        if knows_uncertainty(criterion):
            embed = embedder(self.desk, encoder, seen, "training images")
            result["uncertainty"] = class_uncertainty(criterion, seen.classes, lambda: embed("vectors")[:2])
        result["bad_images"] = dict(self.desk.bad)
        # From opening the images to here: features, training, evaluations, refit; of all sittings that were saved.
        result["seconds"] = round(trainer.facts["seconds"] + time.perf_counter() - self.begun, 1)
        known = self._known(trainer, self.folder)
        if known.get("refit") == result.get("refit"):
            kept_from = ("finished", "machine", "versions", "seconds")
            result |= {name: known[name] for name in kept_from if name in known}
        if "trained encoder" not in result["rows"]:
            # The refitted model has seen every class; what can be said of it is what the choice was made by.
            result["rows"]["trained encoder"] = {
                name: result["validation"][name] for name in self.recipe.train.metrics if name in result["validation"]
            }
        elif shown is not None and self.report:
            self.watcher.say("drawing the report")
            draw_report(
                self.folder / "report.html",
                title=f"{result['data']['name']}: {self.recipe.method}",
                result=result,
                images=shown,
                vectors=vectors.cpu(),
                kept=kept,
                seed=self.recipe.seed,
                seen=seen,
            )
        write_json(self.folder / "result.json", result)
        return result
