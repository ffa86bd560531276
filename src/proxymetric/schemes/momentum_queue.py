"""A momentum encoder that fills a queue: many more samples in each step, without their forward pass."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from proxymetric.checks import at_least_zero
from proxymetric.core.pieces import Batch, Boundary, Context, Objective, Outcome
from proxymetric.sources.queue import Queue


class MomentumQueue(Objective):
    """The wrapped objective on the batch and the last `size` embeddings of a slowly following encoder (He et al. 2020).

    ``w <- momentum w + (1 - momentum) theta`` after each step; the batch as w sees it enters the queue, and only the
    batch as theta sees it has a gradient. It needs `bind(encoder)` and the batch's images.

    size: embeddings kept; 900 beside a batch of 180 in VCPA's comparison. momentum: in [0, 1], 0.999 there.
    """

    def __init__(self, objective: Objective, dim: int, size: int = 900, momentum: float = 0.999) -> None:
        super().__init__()
        at_least_zero(momentum=momentum)
        if momentum > 1:
            raise ValueError(f"momentum: got {momentum}, expected at most 1")
        self.objective, self.momentum = objective, momentum
        self.normalise, self.classes, self.dim = objective.normalise, objective.classes, dim
        self.queue = Queue(size, dim)
        self._theta: list[nn.Module] = []
        self._followed = -1

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
            raise ValueError("bind: the momentum encoder is a copy of the encoder; expected bind(encoder) before")
        stored, of = self.queue.vectors[: len(self.queue)], self.queue.labels[: len(self.queue)]
        together = Batch(None, torch.cat([batch.labels, of]))
        embeddings = torch.cat([ctx.embeddings, stored.to(ctx.embeddings)])
        outcome: Outcome = self.objective(ctx._replace(batch=together, embeddings=embeddings))
        if not (self.training and torch.is_grad_enabled()):
            return outcome
        if batch.images is None:
            raise ValueError(
                "images: the momentum encoder embeds them; expected criterion(embeddings, labels, images=...)"
            )
        with torch.no_grad():
            keys: Tensor = self.encoder(batch.images)

        @torch.no_grad()
        def commit() -> None:
            outcome.commit()
            self.queue.remember(keys, batch.labels)
            if self._followed == ctx.progress.step:  # several passes before one commit are one step
                return
            self._followed = ctx.progress.step
            for own, theirs in zip(
                self.encoder.state_dict().values(), self._theta[0].state_dict().values(), strict=True
            ):
                if own.is_floating_point():
                    own.lerp_(theirs, 1 - self.momentum)
                else:
                    own.copy_(theirs)

        return outcome._replace(commit=commit)

    def boundary(self, run: Boundary) -> None:
        self.objective.boundary(run)
