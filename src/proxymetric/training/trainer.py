"""The training loop: steps, evaluations, checkpoints. A run that was killed at any point resumes bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from proxymetric.core.pieces import Batch
from proxymetric.system.checkpoint import Checkpoint, load_optimizer, module_tensors, optimizer_tensors
from proxymetric.system.signals import stop_on_signal
from proxymetric.system.watcher import Tick, Watcher
from proxymetric.training.advice import compile_advice, could_compile, narrow_cone, waiting_advice
from proxymetric.training.learner import Learner
from proxymetric.training.log import Log
from proxymetric.training.lookahead import Lookahead
from proxymetric.training.optim import decay_factor, make_optimizer, steps_in
from proxymetric.training.options import TrainOptions
from proxymetric.training.parallel import Parallel, gathered_parameters
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.sharded_state import ShardedState
from proxymetric.training.stepper import Stepper, StepResult
from proxymetric.training.tracking import Recorder

LOG_EVERY_STEPS = 10
REPORTED_SKIPPED_STEPS = (1, 10, 100, 1000)
"""numbers of skipped steps at which a message is shown"""
StepPool = Callable[[int, int], tuple[Tensor, Tensor]]
"""`pool(count, step)`: vectors (N, D) and labels (N,) of `count` training images of each class; the step decides
which"""


class Interrupted(Exception):
    """Training was asked to stop; the checkpoint is saved."""


class Feed(Protocol):
    """The training batches: a pure function of the epoch's number."""

    @property
    def advice(self) -> str:
        """What to try if training waits for these batches; empty if there is nothing to try."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from batch `start` on."""


class Trainer:
    """Trains a learner on a feed.

    Args:
        learner: encoder and criterion.
        feed: the training batches.
        options: the table `[train]` of a recipe.
        folder: for checkpoints and the log.
        watcher: receives messages and progress.
        score: evaluates the learner on the classes that choose the epoch; None if there are none.
        scored_on: what those classes are called in messages.
        pool: embeds random training images, for methods that pick proxies among them.
        mean_cosine: the mean cosine of two training images under the current encoder, for the curve; None if there are
            not two of them.
        facts: returns what the checkpoint stores under `facts` besides the state of the training, as JSON.
        stop_after: epochs to train, perhaps a fraction, instead of `options.epochs` (for a refit); 0: none, the model
            is only scored and saved.
        world: the processes that train together.
        device: the device of the learner.

    Attributes:
        epoch: the current epoch, from 0.
        position: batches of the current epoch that were trained on.
        step: optimiser steps, skipped ones included.
        steps: optimiser steps of the whole training.
        epochs: epochs of the whole training; the last one may be cut short.
        skipped: steps with a loss or gradient that was not finite.
        unread: steps of this process for which no image could be read.
        best: score and epoch of the best evaluation.
        stale: evaluations since the best one.
        losses: sum and number of the losses since the last evaluation.
        curve: the records of all evaluations.
        done: whether the training is over.
        seconds: time spent on steps, also by earlier processes.
        waited: the part of `seconds` in which the steps waited for images.
        images: images that were trained on, also by earlier processes.
        trained: number of parameters that the optimiser updates, counted before a warm-up freezes some of them.

    Raises:
        ValueError: the options do not fit the learner or the feed.
    """

    def __init__(
        self,
        learner: Learner,
        feed: Feed,
        options: TrainOptions,
        folder: Path,
        watcher: Watcher,
        score: Callable[[], dict[str, float]] | None = None,
        *,
        scored_on: str = "held-out classes",
        pool: StepPool | None = None,
        mean_cosine: Callable[[], float | None] | None = None,
        facts: Callable[[], dict[str, Any]] = dict,
        stop_after: float | None = None,
        world: ProcessGroup = ProcessGroup(),  # noqa: B008 - a tuple
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        if len(feed) < 1:
            raise ValueError(
                "data: got too few training images for a single batch, expected more images, or a smaller --batch"
            )
        self.learner = learner
        self.feed = feed
        self.options = options
        self.folder = folder
        self.watcher = watcher
        self.score = score
        self.scored_on = scored_on
        self.pool = pool
        self.mean_cosine = mean_cosine
        self.facts = facts
        self.world = world
        self.device = device
        if options.decay == "plateau" and score is None:
            raise ValueError(
                "train.decay: got 'plateau' without classes that are scored during training, expected "
                "data.validation above 0, or 'step', 'cosine' or 'none'"
            )
        self.parallel = Parallel(learner, options, world)
        self.optimizer = make_optimizer(learner, options)
        self.sharded = ShardedState(learner, self.optimizer)
        if self.sharded.shards and options.amp == "fp16":
            raise ValueError(
                "train.amp: got 'fp16' with train.shard, where each process would scale its gradients differently; "
                "expected 'bf16'"
            )
        if options.compile and not learner.frozen:
            # A step recorded as a CUDA graph reuses its memory, so gradients must neither accumulate nor be exchanged.
            learner.encoder.compile_steps(device.type == "cuda" and options.accumulate == 1 and world.size == 1)
        only_backbone = {group["name"] for group in self.optimizer.param_groups} == {"backbone"}
        if options.warmup > 0 and only_backbone and not learner.criterion.row_tables():
            raise ValueError(
                f"train.warmup: got {options.warmup}, but there is neither head nor proxies to warm up; expected 0"
            )
        self.stepper = Stepper(learner, self.parallel, self.optimizer, self.sharded, options, world, device)
        tracks = options.track is not None and world.first
        self.tracker = Recorder(str(options.track), folder, watcher.say) if tracks else None
        self.log = Log(folder / "log.jsonl", writes=world.first, on_record=self.tracker)
        self.steps_per_epoch = -(-len(feed) // options.accumulate)
        epochs = options.epochs if stop_after is None else stop_after
        self.steps = steps_in(epochs, self.steps_per_epoch) if epochs else 0
        self.epochs = -(-self.steps // self.steps_per_epoch)
        learner.criterion.steps_per_epoch = self.steps_per_epoch
        learner.criterion.careful = False
        self.epoch = 0
        self.position = 0
        self.step = 0
        self.skipped = 0
        self.unread = 0
        self.best: tuple[float, float] | None = None
        self.stale = 0
        self.losses = [0.0, 0]
        self.curve: list[dict[str, Any]] = []
        self.done = False
        self.seconds = 0.0
        self.waited = 0.0
        self.images = 0
        self._stop = False
        self._has_batch = False
        self._said_advice = False
        self._start_time, self._clock_images, self._clock_step = 0.0, 0, 0
        """when the clock of the steps was started, the images since then, and the step at that time"""
        self.trained = sum(p.numel() for p in self.stepper.trainable if p.requires_grad) + self.sharded.remote

    @property
    def passed(self) -> float:
        """Epochs trained so far; a fraction in the middle of an epoch."""
        return self.epoch if self.position == 0 else self.step / self.steps_per_epoch

    @property
    def chosen(self) -> dict[str, Any]:
        """The record of the best evaluation; of the last one if there are no scores."""
        if self.best is None:
            return self.curve[-1]
        return next(record for record in self.curve if record["epoch"] == self.best[1])

    def run(self) -> None:
        """Train until the epochs are over or `patience` evaluations brought no improvement.

        Raises:
            Interrupted: Ctrl-C or SIGTERM asked to stop; the checkpoint is saved.
        """
        if self.tracker is not None:
            self.tracker.begin(self.step, self.log.records())
        try:
            with stop_on_signal(self._request_stop):
                if self.step == 0 and self.epoch == 0 and not self.curve:
                    self._evaluate()
                    self.save()  # a run that has begun always has a checkpoint, so that a lost checkpoint is noticed
                while not self.done:
                    self._train_epoch()
        finally:
            if self.tracker is not None:
                self.tracker.end()
        self.world.wait()

    def _train_epoch(self) -> None:
        """Train the current epoch from its current position on."""
        options = self.options
        self._begin_epoch()
        end = min(len(self.feed), (self.steps - self.epoch * self.steps_per_epoch) * options.accumulate)
        self._restart_clock()
        micro_batches: list[Batch] = []
        remaining = itertools.islice(self.feed.epoch(self.epoch, self.position), end - self.position)
        # A step that waits for the GPU makes the next batch first; a step that runs ahead has a step's time for it.
        early = self.device.type == "cuda" and not self.stepper.runs_ahead
        batches = Lookahead(remaining, self.learner.criterion if self.world.size == 1 else None, early)
        used = self.position
        for batch in batches:
            if not self._has_batch:  # the first batch of a process waits until the cache is filled
                self._has_batch, batches.waited = True, 0.0
            micro_batches.append(batch)
            used += 1
            is_last = used == end
            if len(micro_batches) < options.accumulate and not is_last:
                continue
            pauses = is_last or self._pauses_after(self.step + self.stepper.in_flight + 1)
            self._count(self.stepper.advance(micro_batches, batches.announce, wait=pauses))
            micro_batches = []
            stop = self.world.any(self._stop)
            if stop:
                self._count(self.stepper.finish())
            if self.stepper.in_flight:
                continue
            is_best = False
            if self._evaluation_due(self.step) and not is_last:
                self._add_time(batches)
                is_best = self._evaluate()
                self._to_training()
                self._set_rates()
                self._restart_clock()
                stop = self.world.any(self._stop)
            # Save the checkpoint with every new best model: a resumed run must not fall behind its own best model.
            if stop or is_best or self.done or (self.step % options.save_every == 0 and not is_last):
                self._add_time(batches)
                self.save()
                self._restart_clock()
                if self.done:
                    return
                if stop:
                    raise Interrupted
        self._add_time(batches)
        if end == len(self.feed):
            self.epoch, self.position = self.epoch + 1, 0
        steps_between = options.evaluate_every * self.steps_per_epoch
        if self.step >= self.steps or self.step % (options.evaluate_steps or steps_between) == 0:
            self._evaluate()
        self.save()
        if self.world.any(self._stop) and not self.done:
            raise Interrupted

    def _evaluation_due(self, step: int) -> bool:
        """Whether there is an evaluation after this step, within an epoch."""
        return self.options.evaluate_steps is not None and step % self.options.evaluate_steps == 0

    def _pauses_after(self, step: int) -> bool:
        """Whether this step must be finished before the next one begins: its state is scored or saved."""
        return self._stop or self._evaluation_due(step) or step % self.options.save_every == 0

    def _restart_clock(self) -> None:
        """Begin to measure the speed of the steps, for the display."""
        self._start_time, self._clock_images, self._clock_step = time.perf_counter(), 0, self.step

    def _count(self, results: list[StepResult]) -> None:
        """Add finished steps to the figures of the training, and report them."""
        for result in results:
            self.step += 1
            self.position += result.batches
            self.unread += result.unread
            self.skipped += result.loss is None and not result.unread
            self.images += result.images
            self._clock_images += result.images
            elapsed = time.perf_counter() - self._start_time
            images_per_second = self._clock_images / max(elapsed, 1e-9)
            self._report_step(result, images_per_second, elapsed / (self.step - self._clock_step))

    def _add_time(self, batches: Lookahead) -> None:
        """Add the time since the last call to the time of the steps; say once what would make them faster."""
        self.seconds += time.perf_counter() - self._start_time
        # While a step that was launched ahead keeps the GPU busy, nothing waits for the batch that is being read.
        overlaps = self.device.type == "cuda" and self.stepper.runs_ahead
        self.waited += min(batches.waited, self.stepper.idle) if overlaps else batches.waited
        batches.waited, self.stepper.idle = 0.0, 0.0
        advice = waiting_advice(self.waited, self.seconds, self.feed.advice)
        if not advice and could_compile(self.options, self.learner.frozen, self.epoch, self.device):
            advice = compile_advice(self.seconds, self.step, self.steps)
        if advice and not self._said_advice:
            self._said_advice = True
            self.watcher.say(advice)

    def _begin_epoch(self) -> None:
        learner, warms_up = self.learner, self.epoch < self.options.warmup
        self._to_training()
        learner.encoder.set_backbone_trainable(not (warms_up or learner.frozen))
        self.stepper.begin_epoch()
        learner.criterion.epoch(self.epoch)
        self._set_rates()
        self.parallel.begin_epoch()

    def _set_rates(self) -> None:
        """Set the learning rates of the current epoch; a plateau of the scores lowers them."""
        scores = [self._oriented(record) for record in self.curve]
        known_scores = [score for score in scores if score is not None]
        self.stepper.set_rates(decay_factor(self.options, self.epoch, known_scores))

    def _to_training(self) -> None:
        """Return to training mode: an evaluation leaves the encoder in evaluation mode."""
        self.learner.train()
        if self.learner.frozen:
            self.learner.encoder.eval()

    def _report_step(self, result: StepResult, images_per_second: float, seconds_per_step: float) -> None:
        """Write a step to the log and show it."""
        loss = result.loss
        if result.unread:
            self.log.add(event="unread", step=self.step, epoch=self.epoch)
            return
        if loss is None:
            self.log.add(event="skipped", step=self.step, epoch=self.epoch)
            if self.skipped in REPORTED_SKIPPED_STEPS:
                self.watcher.say(f"step {self.step}: loss or gradient not finite, skipped ({self.skipped} so far)")
            return
        self.losses = [self.losses[0] + loss, self.losses[1] + 1]
        if self.step % LOG_EVERY_STEPS == 0:
            lr = {group["name"]: group["lr"] for group in self.optimizer.param_groups}
            self.log.add(event="step", step=self.step, epoch=self.epoch, loss=loss, lr=lr)
        images_per_second *= self.world.size
        seconds_left = (self.steps - self.step) * seconds_per_step
        self.watcher.tick(
            Tick(self.step, self.steps, self.epoch + 1, self.epochs, loss, images_per_second, seconds_left)
        )

    def _evaluate(self) -> bool:
        """Score the learner and pass the score to the method; return whether it is the best score so far."""
        record: dict[str, Any] = {"epoch": self.passed, "step": self.step}
        if self.losses[1]:
            record["loss"] = self.losses[0] / self.losses[1]
        self.losses = [0.0, 0]
        if self.world.size > 1:
            for statistic in self.learner.encoder.buffers():
                torch.distributed.broadcast(statistic, 0)
        scores: dict[str, float] = {}
        if self.score is not None:
            with gathered_parameters(self.learner.encoder):
                scores = self.world.from_first(self.score)
        if self.mean_cosine is not None:
            with gathered_parameters(self.learner.encoder):
                cosine = self.world.from_first(self.mean_cosine)
            if cosine is not None:
                record["mean_cosine"] = cosine
        value = self._oriented(scores)  # the method, too, takes a higher score for a better one
        # The untrained model is a candidate too, because training does not always help.
        is_best = value is not None and (self.best is None or value > self.best[0])
        if is_best:
            assert value is not None
            self.best, self.stale = (value, self.passed), 0
            # Save the model that was scored, before the method changes it at the boundary.
            checkpoint = self._checkpoint(self._model())
            if self.world.first:
                checkpoint.write(self.folder / "best.safetensors")
        elif value is not None:
            self.stale += 1
        criterion = self.learner.criterion
        criterion.boundary(value, None if self.pool is None else self._draw_pool)
        figures = criterion.figures()
        record |= scores | ({"figures": figures} if figures else {})
        self.curve.append(record)
        self.log.add(event="evaluation", **record)
        self.done = self._is_over()
        if value is not None:
            self.watcher.evaluated(self.passed, scores, is_best, self.scored_on)
        if advice := narrow_cone(self.curve, criterion.arguments or {}):
            self.watcher.say(advice)
        return is_best

    def _oriented(self, scores: Mapping[str, Any]) -> float | None:
        """Return the score that chooses the epoch, higher is better; None if there is none."""
        value = scores.get(self.options.monitor)
        return -value if value is not None and self.options.monitors_error else value

    def _draw_pool(self, count: int) -> tuple[Tensor, Tensor]:
        assert self.pool is not None
        return self.pool(count, self.step)

    def _is_over(self) -> bool:
        """Whether the epochs or the patience are used up."""
        patience = self.options.patience
        # A run that was stopped after its last step still lacks the evaluation of that step.
        has_ended = self.epoch >= self.epochs or self.curve[-1]["step"] >= self.steps
        return has_ended or (patience is not None and self.stale >= patience)

    def _model(self) -> dict[str, Tensor]:
        """The tensors of the encoder and the criterion; of divided ones, the part of this process."""
        tensors = module_tensors(self.learner.encoder, "encoder.")
        return tensors | module_tensors(self.learner.criterion, "criterion.")

    def _checkpoint(self, tensors: dict[str, Tensor]) -> Checkpoint:
        """A checkpoint of the tensors of all processes, which the first process must write now."""
        whole, streamed = self.sharded.gather(tensors)
        return Checkpoint(whole, {"epoch": self.passed, "step": self.step}, streamed=streamed)

    def save(self) -> None:
        """Write the model and the whole state of the training to `last.safetensors`."""
        if not self.world.first and not self.sharded.is_sharded:
            return
        checkpoint = self._checkpoint(self._model() | optimizer_tensors(self.optimizer))
        if not self.world.first:
            return
        checkpoint.tensors["random.cpu"] = torch.get_rng_state()
        if self.device.type == "cuda":
            checkpoint.tensors["random.cuda"] = torch.cuda.get_rng_state(self.device)
        checkpoint.state |= {
            "epoch": self.epoch,
            "position": self.position,
            "steps_per_epoch": self.steps_per_epoch,
            "skipped": self.skipped,
            "best": self.best,
            "stale": self.stale,
            "losses": self.losses,
            "curve": self.curve,
            "done": self.done,
            "seconds": self.seconds,
            "waited": self.waited,
            "images": self.images,
            "scaler": self.stepper.scaler.state_dict(),
            "log": self.log.size,
            "facts": self.facts(),
        }
        checkpoint.write(self.folder / "last.safetensors")

    def resume(self, resumes: bool = True) -> bool:
        """Load `last.safetensors`.

        Args:
            resumes: False starts training anew, whatever the folder holds.

        Returns:
            Whether a checkpoint was loaded. If not, the training starts with an empty log.

        Raises:
            ValueError: the checkpoint does not fit the recipe.
        """
        file = self.folder / "last.safetensors"
        if not (resumes and file.is_file()):
            self.log.cut(0)
            return False
        checkpoint = Checkpoint.read(file)
        checkpoint.tensors = self.sharded.local_part(checkpoint.tensors)
        state = checkpoint.state
        try:
            checkpoint.load_into(self.learner.encoder, "encoder.", what="this recipe's encoder")
            checkpoint.load_into(self.learner.criterion, "criterion.", what="this recipe's method")
            load_optimizer(self.optimizer, checkpoint.under("optimizer."), origin=str(file))
        except ValueError as error:
            raise ValueError(
                f"resume: {error}; expected a checkpoint of this version of proxymetric. The model can still be used; "
                "--overwrite starts the run again"
            ) from None
        torch.set_rng_state(checkpoint.tensors["random.cpu"])
        if "random.cuda" in checkpoint.tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(checkpoint.tensors["random.cuda"], self.device)
        self.stepper.scaler.load_state_dict(state["scaler"])
        self.epoch = state["epoch"]
        self.step = state["step"]
        self.position = state["position"]
        self.skipped = state["skipped"]
        self.stale = state["stale"]
        self.curve = state["curve"]
        self.losses = state["losses"]
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self.seconds = state["seconds"]
        self.waited = state.get("waited", 0.0)
        self.images = state.get("images", 0)
        self.done = self._is_over()
        self.log.cut(state["log"])
        return True

    def _request_stop(self) -> bool:
        """Request a stop after the current step; return whether there was an earlier request."""
        was_requested, self._stop = self._stop, True
        if not was_requested:
            # A signal may come while a line is being printed, and printing cannot begin again inside itself.
            with contextlib.suppress(RuntimeError):
                self.watcher.say("stopping after this step and saving (press Ctrl-C again to stop now, without saving)")
        return was_requested
