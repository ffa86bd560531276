"""A momentum encoder fills a queue, so that a step has many more samples without a forward pass for them."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from proxymetric.arguments.checks import at_least_zero
from proxymetric.core.pieces import Batch, Boundary, Context, Objective, Outcome
from proxymetric.core.step_encoder import StepEncoder
from proxymetric.sources.queue import Queue


class MomentumQueue(Objective):
    """The wrapped objective on the batch and on the last `memory` embeddings of a momentum encoder (He et al. 2020).

    ``w <- momentum w + (1 - momentum) theta`` after each step. The momentum encoder w embeds the batch for the queue;
    only the embeddings by the encoder theta have a gradient. The scheme needs `bind(encoder)` and the images of the
    batch.

    Args:
        objective: what is minimised.
        dim: width of the embeddings, D.
        memory: embeddings in the queue; 900 with a batch of 180 in VCPA's comparison.
        momentum: in [0, 1], of the momentum encoder; 0.999 in VCPA's comparison.
    """

    def __init__(self, objective: Objective, dim: int, memory: int = 900, momentum: float = 0.999) -> None:
        super().__init__()
        at_least_zero(momentum=momentum)
        if momentum > 1:
            raise ValueError(f"momentum: got {momentum}, expected at most 1")
        self.objective, self.momentum = objective, momentum
        self.normalise, self.classes, self.dim = objective.normalise, objective.classes, dim
        self.queue = Queue(memory, dim)
        self._theta: list[nn.Module] = []  # a list, so that the encoder does not become a submodule
        self._last_step = -1
        """the step after which the momentum encoder last moved"""

    def bind(self, encoder: nn.Module) -> None:
        self._theta[:] = [encoder]
        self.encoder = copy.deepcopy(encoder).requires_grad_(False).eval()
        self.objective.bind(encoder)

    def train(self, mode: bool = True) -> MomentumQueue:
        super().train(mode)
        if self._theta:
            self.encoder.eval()
        return self

    def forward(self, ctx: Context) -> Outcome:
        batch = ctx.batch
        if not self._theta:
            raise ValueError(
                "bind: got no encoder, expected bind(encoder) before the first step: the momentum encoder copies it"
            )
        stored_count = len(self.queue) if len(batch.labels) else 0  # an empty batch has a loss of 0
        stored_vectors, stored_labels = self.queue.vectors[:stored_count], self.queue.labels[:stored_count]
        joined_batch = Batch(None, torch.cat([batch.labels, stored_labels]))
        embeddings = torch.cat([ctx.embeddings, stored_vectors.to(ctx.embeddings)])
        outcome: Outcome = self.objective(ctx._replace(batch=joined_batch, embeddings=embeddings))
        if not (self.training and torch.is_grad_enabled()):
            return outcome
        if batch.images is None:
            raise ValueError(
                "images: got None, expected criterion(embeddings, labels, images=...) for the momentum encoder"
            )
        with torch.no_grad():
            precision = ctx.encode.precision if isinstance(ctx.encode, StepEncoder) else None
            keys = StepEncoder(self.encoder, precision)(batch.images)

        @torch.no_grad()
        def commit() -> None:
            outcome.commit()
            self.queue.remember(keys, batch.labels)
            if self._last_step == ctx.progress.step:  # several forward passes before one commit are one step
                return
            self._last_step = ctx.progress.step
            slow_state, fast_state = self.encoder.state_dict(), self._theta[0].state_dict()
            for slow, fast in zip(slow_state.values(), fast_state.values(), strict=True):
                if slow.is_floating_point():
                    slow.lerp_(fast, 1 - self.momentum)
                else:
                    slow.copy_(fast)

        return outcome._replace(commit=commit)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._last_step = -1  # the next step is a new one, even if it has the number of the last one

    def boundary(self, run: Boundary) -> None:
        self.objective.boundary(run)
