"""One optimiser step: launched on the device, and finished when its loss and gradient norm are read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.core.pieces import Batch, nothing
from proxymetric.training.committed_state import CommittedState, committed_state
from proxymetric.training.learner import Learner
from proxymetric.training.optim import (
    autocast_type,
    can_step_unchecked,
    clip_gradients,
    set_rates,
    step_if,
)
from proxymetric.training.options import TrainOptions
from proxymetric.training.parallel import Parallel
from proxymetric.training.process_group import ProcessGroup
from proxymetric.training.sharded_state import ShardedState

AHEAD_DEVICES = ("cuda",)
"""types of devices that compute a step while the next one is launched; a CPU computes when it launches"""


class StepResult(NamedTuple):
    """What a finished step has done."""

    loss: float | None
    """the loss; None if the step was skipped"""
    batches: int
    """batches of the feed that the step has used"""
    images: int
    """images in these batches"""
    unread: bool = False
    """whether none of the images could be read"""


@dataclass
class _LaunchedStep:
    """A step that the device computes."""

    batches: list[Batch]
    used: tuple[int, int]
    """number of batches and of images, those of empty batches included"""
    figures: Tensor
    """loss and gradient norm (2,); in pinned memory if `arrived` is an event"""
    begun: torch.cuda.Event | None
    """when the device came to the step; None: the device is not a GPU"""
    arrived: torch.cuda.Event | None
    """when the figures were in pinned memory"""
    finite: Tensor
    """whether the figures of this step, and of the steps that it was launched after, are finite; on the device"""
    has_gradients: bool
    tensors: list[Tensor]
    """the tensors that the step may have to restore, before the step"""
    attributes: list[Any]
    """the Python attributes of the memory before the step"""
    criterion_step: int
    """commits of the criterion before the step"""
    random: list[Tensor]
    """the states of the random generators before the step; empty if the step cannot be repeated"""


class Stepper:
    """Makes optimiser steps; the device may compute one step while the next one is launched.

    A step whose loss or gradient is not finite must leave no trace: neither in the parameters, nor in the running
    averages of BatchNorm, nor in the memory of the method. If the commit of the method can be undone
    (`committed_state`) and the optimiser can check on the device whether to step, the figures of a step are read after
    the next step is launched (`runs_ahead`), so the device never waits. The averages and the memory are copied before
    each step. If a step turns out not to be finite, the step launched after it has not moved the parameters, because it
    makes the same check on the device: the state before the two steps is restored, and the second step is repeated with
    its own random numbers. The results are therefore those of steps that wait.

    Args:
        learner: encoder and criterion.
        parallel: the wrapped learner.
        optimizer: the optimiser of the learner.
        sharded: tells which parameters are divided among processes.
        options: the table `[train]` of a recipe.
        world: the processes that train together.
        device: the device of the learner.

    Attributes:
        runs_ahead: whether the figures of a step are read after the next step is launched.
        idle: seconds that the GPU has waited between steps that were launched ahead.
        precision: the type in which the encoder computes under autocast; None for float32.
        scaler: scales the loss in half precision.
    """

    def __init__(
        self,
        learner: Learner,
        parallel: Parallel,
        optimizer: torch.optim.Optimizer,
        sharded: ShardedState,
        options: TrainOptions,
        world: ProcessGroup,
        device: torch.device,
    ) -> None:
        self.learner = learner
        self.parallel = parallel
        self.optimizer = optimizer
        self.sharded = sharded
        self.options = options
        self.world = world
        self.device = device
        self.precision = autocast_type(options.amp, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.precision is torch.half)
        self.trainable: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._steps_unchecked = can_step_unchecked(optimizer) and not self.scaler.is_enabled() and world.size == 1
        steps_late = device.type in AHEAD_DEVICES and self._steps_unchecked
        memory = committed_state(learner.criterion, self.trainable) if steps_late else None
        self.runs_ahead = memory is not None
        self._memory = CommittedState() if memory is None else memory
        """what the commit of a step that runs ahead changes; empty if the steps wait"""
        self.idle = 0.0
        self._in_flight: list[_LaunchedStep] = []
        self._launches = 0
        self._statistics: list[Tensor] = []
        """running averages of the encoder that a forward pass changes"""
        self._snapshots: list[list[Tensor]] = [[], []]
        """the values of `_restorable` before the last two steps, used in turn"""
        self._rates = (0.0, 0.0)
        self._host_figures: list[Tensor] = []
        """where the figures of the last two steps are copied to, used in turn; empty without a GPU"""

    @property
    def in_flight(self) -> int:
        """Steps that are launched but not finished: 0 or 1."""
        return len(self._in_flight)

    def begin_epoch(self) -> None:
        """Prepare the steps of an epoch."""
        assert not self._in_flight
        training_modules = [module for module in self.learner.encoder.modules() if module.training]
        self._statistics = [buffer for module in training_modules for buffer in module.buffers(recurse=False)]
        self._snapshots = [[value.clone() for value in self._restorable()] for _ in range(2)]
        if self.device.type == "cuda" and not self._host_figures:
            self._host_figures = [torch.empty(2, pin_memory=True) for _ in range(2)]

    def set_rates(self, factor: float) -> None:
        """Set all learning rates to `factor` times their initial values."""
        set_rates(self.optimizer, factor)
        network_lr, proxy_lr = self.options.base_rates
        self._rates = proxy_lr * factor, network_lr * factor

    def advance(
        self, batches: list[Batch], cpu_work: Callable[[], None] = nothing, wait: bool = False
    ) -> list[StepResult]:
        """Launch a step.

        Args:
            batches: the batches whose gradients are averaged.
            cpu_work: called while an accelerator computes the step, if this step waits for its figures.
            wait: wait until all steps are finished, also if the stepper runs ahead.

        Returns:
            The results of the steps that are finished, in order.
        """
        used = len(batches), sum(len(batch.labels) for batch in batches)
        batches = [batch for batch in batches if self.world.any(len(batch.labels) > 0)]
        if not batches:
            return [*self.finish(), StepResult(None, *used, unread=True)]
        self._in_flight.append(self._launch(batches, used))
        if wait or not self.runs_ahead:
            cpu_work()
            return self.finish()
        return [] if len(self._in_flight) == 1 else self._finish_first()

    def finish(self) -> list[StepResult]:
        """Wait until all launched steps are finished, and return their results in order."""
        results: list[StepResult] = []
        while self._in_flight:
            results += self._finish_first()
        return results

    def _launch(self, batches: list[Batch], used: tuple[int, int]) -> _LaunchedStep:
        """Launch forward and backward pass and, if the optimiser can check by itself, its step."""
        criterion = self.learner.criterion
        criterion_step, random = criterion.step, self._random_states() if self.runs_ahead else []
        turn = self._launches % 2
        self._launches += 1
        begun = self._now()
        self.optimizer.zero_grad(set_to_none=True)
        _copy(self._snapshots[turn], self._restorable())
        attributes = self._memory.attributes()
        total = torch.zeros((), device=self.device)
        for i, batch in enumerate(batches):
            assert batch.images is not None
            with self.parallel.synchronised_if(i == len(batches) - 1):
                with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
                    loss = self.parallel.module(batch.images, batch.labels) / len(batches)
                if loss.requires_grad:
                    self.scaler.scale(loss).backward()
            total += loss.detach()
        self.parallel.average_gradients()
        rows = [leaf for table in criterion.row_tables() for leaf in table.leaves()]
        has_gradients = any(p.grad is not None for p in self.trainable)
        if self.scaler.is_enabled():
            if has_gradients:
                self.scaler.unscale_(self.optimizer)
            for leaf in rows:
                if leaf.grad is not None:
                    leaf.grad /= self.scaler.get_scale()
        norm = clip_gradients(self.trainable, rows, self.options, self.sharded)
        figures = torch.stack([total, norm.to(total)])
        finite = figures.isfinite().all()
        if self._in_flight:
            finite = finite & self._in_flight[-1].finite
        if self._host_figures:
            # The copy precedes the optimiser's step: a step that waits for the figures does not wait for that.
            figures = self._host_figures[turn].copy_(figures, non_blocking=True)
        arrived = self._now()
        if has_gradients and self._steps_unchecked:
            step_if(self.optimizer, finite)
        if self.runs_ahead:
            self._commit()
        return _LaunchedStep(
            batches,
            used,
            figures,
            begun,
            arrived,
            finite,
            has_gradients,
            self._snapshots[turn],
            attributes,
            criterion_step,
            random,
        )

    def _finish_first(self) -> list[StepResult]:
        """Wait for the figures of the oldest step; if they are not finite, undo it and repeat the step after it."""
        step = self._in_flight.pop(0)
        if step.arrived is not None:
            step.arrived.synchronize()
        loss, norm = step.figures.tolist()
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if is_finite and not self.runs_ahead:
            if step.has_gradients and not self._steps_unchecked:
                self.scaler.step(self.optimizer)
            self._commit()
        if not is_finite:
            self.learner.criterion.discard()
            self.learner.criterion.step = step.criterion_step
            # Infinite activations went through BatchNorm, and into the memory if the step was committed.
            _copy(self._restorable(), step.tensors)
            self._memory.set_attributes(step.attributes)
        if step.has_gradients:
            self.scaler.update()
        result = StepResult(loss if is_finite else None, *step.used)
        if step.arrived is not None and self._in_flight and (begun := self._in_flight[0].begun) is not None:
            begun.synchronize()
            self.idle += step.arrived.elapsed_time(begun) / 1000
        if is_finite or not self._in_flight:
            return [result]
        later = self._in_flight.pop()
        self._set_random_states(later.random)
        self._in_flight.append(self._launch(later.batches, later.used))
        return [result, *self._finish_first()]

    def _now(self) -> torch.cuda.Event | None:
        """Return an event at this place in the queue of the GPU; None for other devices."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _restorable(self) -> list[Tensor]:
        """The tensors that a step changes whether it is finite or not."""
        return self._statistics + self._memory.tensors()

    def _commit(self) -> None:
        lr, network_lr = self._rates
        self.learner.criterion.commit(lr=lr, network_lr=network_lr)

    def _random_states(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]

    def _set_random_states(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)


@torch.no_grad()
def _copy(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy values to targets, all tensors of a type in one call."""
    for dtype in {value.dtype for value in values}:
        pairs = [(target, value) for target, value in zip(targets, values, strict=True) if value.dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])
