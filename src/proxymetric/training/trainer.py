"""The training loop: steps, evaluations, checkpoints; killed anywhere, it goes on bit for bit."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from proxymetric.checkpoint import Checkpoint, load_optimizer, module_tensors, optimizer_tensors
from proxymetric.core.pieces import Batch, Pool, nothing
from proxymetric.core.watcher import Tick, Watcher
from proxymetric.recipe import TrainOptions
from proxymetric.training.learner import Learner
from proxymetric.training.log import Log
from proxymetric.training.lookahead import Lookahead
from proxymetric.training.optim import (
    autocast_type,
    can_step_unchecked,
    clip_gradients,
    decay_factor,
    make_optimizer,
    rates,
    set_rates,
    step_if,
    steps_in,
)
from proxymetric.training.parallel import Parallel, gathered_parameters
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.sharded_state import ShardedState
from proxymetric.training.signals import listening
from proxymetric.training.tensorboard import TensorBoard

LOG_EVERY = 10


class Interrupted(Exception):
    """Training was asked to stop; everything is saved."""


class Feed(Protocol):
    """Batches of an epoch, from any step on: a pure function of the epoch's number."""

    def __len__(self) -> int: ...

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]: ...


class Trainer:
    """Trains a learner on a feed.

    learner: encoder and criterion. feed: the training batches. options: how. folder: where checkpoints and the log go.
    score: evaluates the learner on the held-out classes, None where there are none. pool: embeddings and labels of
    random training images, for methods that pick proxies among them. stop_after: epochs to train, perhaps a fraction,
    where the held-out classes have chosen already (a refit).
    """

    def __init__(
        self,
        learner: Learner,
        feed: Feed,
        options: TrainOptions,
        folder: Path,
        watcher: Watcher,
        score: Callable[[], dict[str, float]] | None = None,
        pool: Pool | None = None,
        stop_after: float | None = None,
        world: ProcessGroup = ProcessGroup(),  # noqa: B008 - a tuple
        device: torch.device = torch.device("cpu"),  # noqa: B008
    ) -> None:
        if len(feed) < 1:
            raise ValueError("data: not one batch can be made of the training images")
        self.learner, self.feed, self.options, self.folder = learner, feed, options, folder
        self.watcher, self.score, self.pool, self.world, self.device = watcher, score, pool, world, device
        self.parallel = Parallel(learner, options, world)
        self.optimizer = make_optimizer(learner, options)
        self.sharded = ShardedState(learner, self.optimizer)
        if self.sharded.parts and options.amp == "fp16":
            raise ValueError("train.amp: got 'fp16' with train.shard, whose parts would scale apart; expected 'bf16'")
        if options.compile and not learner.frozen:
            # What is recorded uses its memory again: gradients that pile up or travel must not lie there.
            learner.encoder.compile_steps(device.type == "cuda" and options.accumulate == 1 and world.size == 1)
        only_backbone = {group["name"] for group in self.optimizer.param_groups} == {"backbone"}
        if options.warmup > 0 and only_backbone and not learner.criterion.row_tables():
            raise ValueError(
                f"train.warmup: got {options.warmup}, but there is neither head nor proxies to warm up; expected 0"
            )
        self.precision = autocast_type(options.amp, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision is torch.half)
        self._blind = can_step_unchecked(self.optimizer) and not self.scaler.is_enabled() and world.size == 1
        self.tracker = TensorBoard(folder / "tensorboard") if options.track == "tensorboard" and world.first else None
        self.log = Log(folder / "log.jsonl", writes=world.first, also=self.tracker)
        self.steps_per_epoch = -(-len(feed) // options.accumulate)
        self.steps = steps_in(options.epochs if stop_after is None else stop_after, self.steps_per_epoch)
        self.epochs = -(-self.steps // self.steps_per_epoch)
        """of which the last may be cut short"""
        learner.criterion.steps_per_epoch = self.steps_per_epoch
        learner.criterion.careful = False
        self.epoch = 0
        self.position = 0
        """batches of this epoch that were trained on"""
        self.step = 0
        self.skipped = 0
        self.unread = 0
        """steps of this sitting of which not one image could be read"""
        self.best: tuple[float, float] | None = None
        """score and epoch of the best evaluation"""
        self.stale = 0
        self.losses = [0.0, 0]
        """sum and number of the losses since the last evaluation"""
        self.curve: list[dict[str, Any]] = []
        self.done = False
        self.seconds = 0.0
        """spent training, over all sittings"""
        self.images = 0
        """that were trained on, over all epochs and sittings"""
        self.facts: dict[str, Any] = {}
        """JSON-able things that the run wants kept in the checkpoint"""
        self.scored_on = "held-out classes"
        """what `score` is on, in words"""
        self.clock: Callable[[], float] | None = None
        """seconds of this sitting, kept in the checkpoint on top of `facts["seconds"]`"""
        self._stop = False
        self._trainable = list(_parameters(self.optimizer))
        self.trained = sum(p.numel() for p in self._trainable if p.requires_grad) + self.sharded.elsewhere
        """numbers that training moves, counted before a warm-up holds some of them still"""
        self._statistics: list[Tensor] = []
        """running averages of the encoder that a forward pass changes"""
        self._before: list[Tensor] = []

    @property
    def passed(self) -> float:
        """Epochs so far, a fraction in the middle of one."""
        return self.epoch if self.position == 0 else self.step / self.steps_per_epoch

    @property
    def chosen(self) -> dict[str, Any]:
        """The record of the best evaluation; of the last one where there are no scores."""
        if self.best is None:
            return self.curve[-1]
        return next(record for record in self.curve if record["epoch"] == self.best[1])

    def run(self) -> None:
        """Train until the epochs are over or patience is; asked to stop, it saves and raises Interrupted."""
        if self.tracker is not None:
            self.tracker.begin(self.step)
        with listening(self._stop_here):
            if self.step == 0 and self.epoch == 0 and not self.curve:
                self._evaluate()
            while not self.done:
                self._one_epoch()
        self.world.wait()

    def _one_epoch(self) -> None:
        options = self.options
        self._begin_epoch()
        end = min(len(self.feed), (self.steps - self.epoch * self.steps_per_epoch) * options.accumulate)
        started, images, begun = time.perf_counter(), 0, self.step
        micro: list[Batch] = []
        following = itertools.islice(self.feed.epoch(self.epoch, self.position), end - self.position)
        batches = Lookahead(following, self.learner.criterion if self.world.size == 1 else None)
        for batch in batches:
            micro.append(batch)
            last = self.position + len(micro) == end
            if len(micro) < options.accumulate and not last:
                continue
            unread, loss = self.unread, self._step(micro, batches.announce)
            self.position += len(micro)
            images += sum(len(part.labels) for part in micro)
            self.images += sum(len(part.labels) for part in micro)
            micro = []
            spent = time.perf_counter() - started
            self._tell(loss, unread, images / max(spent, 1e-9), spent / (self.step - begun))
            due = options.evaluate_steps is not None and self.step % options.evaluate_steps == 0 and not last
            better = False
            if due:
                self.seconds += time.perf_counter() - started
                better = self._evaluate()
                self._to_training()
                started = time.perf_counter()
            stop = self.world.any(self._stop)
            # A best model without the checkpoint that goes with it could outlive the training that made it.
            if stop or better or self.done or (self.step % options.save_every == 0 and not last):
                self.seconds += time.perf_counter() - started
                self.save()
                started, images, begun = time.perf_counter(), 0, self.step
                if self.done:
                    return
                if stop:
                    raise Interrupted
        self.seconds += time.perf_counter() - started
        if end == len(self.feed):
            self.epoch, self.position = self.epoch + 1, 0
        steps_between = options.evaluate_every * self.steps_per_epoch
        if self.step >= self.steps or self.step % (options.evaluate_steps or steps_between) == 0:
            self._evaluate()
        self.save()
        if self.world.any(self._stop) and not self.done:
            raise Interrupted

    def _begin_epoch(self) -> None:
        learner, warm = self.learner, self.epoch < self.options.warmup
        self._to_training()
        learner.encoder.set_backbone_trainable(not (warm or learner.frozen))
        moving = [part for part in learner.encoder.modules() if part.training]
        self._statistics = [value for part in moving for value in part.buffers(recurse=False)]
        self._before = [value.clone() for value in self._statistics]
        learner.criterion.epoch(self.epoch)
        set_rates(self.optimizer, decay_factor(self.options, self.epoch))
        self.parallel.begin_epoch()

    def _to_training(self) -> None:
        """An evaluation leaves the encoder in evaluation mode."""
        self.learner.train()
        if self.learner.frozen:
            self.learner.encoder.eval()

    def _step(self, micro: list[Batch], meanwhile: Callable[[], None] = nothing) -> float | None:
        """One optimiser step over the micro-batches, and something beside it; None where it had to be skipped."""
        self.step += 1
        micro = [batch for batch in micro if self.world.any(len(batch.labels) > 0)]
        if not micro:
            self.unread += 1
            return None
        self.optimizer.zero_grad(set_to_none=True)
        _copy(self._before, self._statistics)
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(micro):
            assert batch.images is not None
            with self.parallel.quiet_until(i == len(micro) - 1):
                with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
                    loss = self.parallel.module(batch.images, batch.labels) / len(micro)
                if loss.requires_grad:
                    self.scaler.scale(loss).backward()
            total += loss.detach()
        self.parallel.average()
        rows = [leaf for table in self.learner.criterion.row_tables() for leaf in table.leaves()]
        if self.scaler.is_enabled() and any(p.grad is not None for p in self._trainable):
            self.scaler.unscale_(self.optimizer)
            for leaf in rows:
                if leaf.grad is not None:
                    leaf.grad /= self.scaler.get_scale()
        norm = clip_gradients(self._trainable, rows, self.options, self.sharded)
        told = torch.stack([total, norm.to(total)])
        moves = any(p.grad is not None for p in self._trainable)
        if moves and self._blind:
            step_if(self.optimizer, told.isfinite().all())
        meanwhile()
        # An accelerator is waited for once in a step: here.
        value, length = told.tolist()
        fine = math.isfinite(value) and math.isfinite(length)
        if fine:
            if moves and not self._blind:
                self.scaler.step(self.optimizer)
            factor = decay_factor(self.options, self.epoch)
            network_lr, proxy_lr = rates(self.options)
            self.learner.criterion.commit(lr=proxy_lr * factor, network_lr=network_lr * factor)
        else:
            self.learner.criterion.discard()
            # What went through BatchNorm left its trace there: infinite activations would ruin its averages for good.
            _copy(self._statistics, self._before)
            self.skipped += 1
        if moves:
            self.scaler.update()
        return value if fine else None

    def _tell(self, loss: float | None, unread: int, rate: float, seconds_a_step: float) -> None:
        if loss is None and self.unread > unread:
            self.log.add(event="unread", step=self.step, epoch=self.epoch)
            return
        if loss is None:
            self.log.add(event="skipped", step=self.step, epoch=self.epoch)
            if self.skipped in (1, 10, 100, 1000):
                self.watcher.say(f"step {self.step}: loss or gradient not finite, skipped ({self.skipped} so far)")
            return
        self.losses = [self.losses[0] + loss, self.losses[1] + 1]
        if self.step % LOG_EVERY == 0:
            lr = {group["name"]: group["lr"] for group in self.optimizer.param_groups}
            self.log.add(event="step", step=self.step, epoch=self.epoch, loss=loss, lr=lr)
        rate, left = rate * self.world.size, (self.steps - self.step) * seconds_a_step
        self.watcher.tick(Tick(self.step, self.steps, self.epoch + 1, self.epochs, loss, rate, left))

    def _evaluate(self) -> bool:
        """Score the held-out classes and tell the method; whether they never scored higher."""
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
        value = scores.get(self.options.monitor)
        # The untrained model is a candidate too: training does not always help.
        better = value is not None and (self.best is None or value > self.best[0])
        if better:
            assert value is not None
            self.best, self.stale = (value, self.passed), 0
            # What was measured, before the method turns to something else.
            model = self._model()
            if self.world.first:
                model.write(self.folder / "best.safetensors")
        elif value is not None:
            self.stale += 1
        criterion = self.learner.criterion
        criterion.boundary(value, self.pool)
        figures = criterion.figures()
        record |= scores | ({"figures": figures} if figures else {})
        self.curve.append(record)
        self.log.add(event="evaluation", **record)
        self.done = self._over()
        if value is not None:
            self.watcher.evaluated(self.passed, scores, better, self.scored_on)
        return better

    def _over(self) -> bool:
        patience = self.options.patience
        # Stopped at its very last step, a run still lacks the evaluation of it.
        ended = self.epoch >= self.epochs or self.curve[-1]["step"] >= self.steps
        return ended or (patience is not None and self.stale >= patience)

    def _model(self) -> Checkpoint:
        tensors = module_tensors(self.learner.encoder, "encoder.") | module_tensors(
            self.learner.criterion, "criterion."
        )
        return Checkpoint(self.sharded.whole(tensors), {"epoch": self.passed, "step": self.step})

    def save(self) -> None:
        """Write everything to `last.safetensors`."""
        if not self.world.first and not self.sharded.anything:
            return
        checkpoint = self._model()
        checkpoint.tensors |= self.sharded.whole(optimizer_tensors(self.optimizer))
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
            "images": self.images,
            "scaler": self.scaler.state_dict(),
            "log": self.log.size,
            "facts": self.facts | ({} if self.clock is None else {"seconds": self.facts["seconds"] + self.clock()}),
        }
        checkpoint.write(self.folder / "last.safetensors")

    def resume(self, begun: bool = True) -> bool:
        """Go on from `last.safetensors`; False where none was `begun`, and the run starts with an empty log."""
        file = self.folder / "last.safetensors"
        if not (begun and file.is_file()):
            self.log.cut(0)
            return False
        checkpoint = Checkpoint.read(file)
        checkpoint.tensors = self.sharded.own(checkpoint.tensors)
        state = checkpoint.state
        checkpoint.load_into(self.learner.encoder, "encoder.", what="this recipe's encoder")
        checkpoint.load_into(self.learner.criterion, "criterion.", what="this recipe's method")
        load_optimizer(self.optimizer, checkpoint.under("optimizer."))
        torch.set_rng_state(checkpoint.tensors["random.cpu"])
        if "random.cuda" in checkpoint.tensors and self.device.type == "cuda":
            torch.cuda.set_rng_state(checkpoint.tensors["random.cuda"], self.device)
        self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.step, self.position = state["epoch"], state["step"], state["position"]
        self.skipped, self.stale, self.curve = state["skipped"], state["stale"], state["curve"]
        self.losses = state["losses"]
        self.best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self.seconds, self.facts, self.images = state["seconds"], state["facts"], state.get("images", 0)
        self.done = self._over()
        self.log.cut(state["log"])
        return True

    def _stop_here(self) -> bool:
        """Someone asks to stop; whether they had asked before."""
        before, self._stop = self._stop, True
        if not before:
            self.watcher.say("stopping after this step and saving (Ctrl-C again: at once, without saving)")
        return before


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@torch.no_grad()
def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    for place, value in zip(into, values, strict=True):
        place.copy_(value)
