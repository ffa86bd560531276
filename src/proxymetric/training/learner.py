"""The encoder and the criterion as one module: what is trained, saved and wrapped by data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from proxymetric.core.second_pass import SecondPassResult
from proxymetric.criterion import Criterion

if TYPE_CHECKING:
    from proxymetric.encoders import Encoder


class Learner(nn.Module):
    """Encoder + criterion: what is trained, what is saved, and what data parallelism wraps.

    `forward(images, labels) -> loss`. With frozen=True `images` are cached features and only the head runs. In a world
    of several processes embeddings and labels of all of them are gathered, so that every rank computes the loss of the
    global batch; averaging gradients over ranks then gives exactly the gradient of one process.
    """

    def __init__(self, encoder: Encoder, criterion: Criterion, frozen: bool = False, world: int = 1) -> None:
        super().__init__()
        self.encoder = encoder
        self.criterion = criterion
        self.frozen = frozen
        self.world = world
        if frozen:
            # Before the criterion meets it: what copies trainable parameters copies the head alone.
            encoder.set_backbone_trainable(False)
        criterion.bind(encoder)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        here = labels.to(images.device, non_blocking=True)
        if self.world == 1:
            seen = None if self.frozen else self._looked_twice(images, labels)
            if seen is not None:
                return self.criterion(self.encoder.head(seen[0]), here, images=images, seen=seen[1])
            encode = self.encoder.head if self.frozen else self.encoder
            return self.criterion(encode(images), here, images=images)
        return self._of_all_processes(images, here)

    def _of_all_processes(self, images: Tensor, labels: Tensor) -> Tensor:
        counts = row_counts(len(images), images.device)
        labels = gather_rows(labels, counts)
        first = sum(counts[: torch.distributed.get_rank()])
        mine = slice(first, first + len(images))
        if not self.frozen and (found := self._looked_twice(images, labels, mine)) is not None:
            features, seen = found
            seen = seen._replace(features=gather_rows(seen.features, counts))
            return self.criterion(gather_rows(self.encoder.head(features), counts), labels, seen=seen)
        encode = self.encoder.head if self.frozen else self.encoder
        embeddings = encode(images) if len(images) else _of_no_image(encode, encode, images)
        needed = gather_rows(images, counts) if "images" in self.criterion.needs else None
        return self.criterion(gather_rows(embeddings, counts), labels, images=needed)

    def _looked_twice(
        self,
        images: Tensor,
        labels: Tensor,
        mine: slice = slice(None),
    ) -> tuple[Tensor, SecondPassResult] | None:
        """Features (B, F) and a second look at the images, if the method wants one, in one pass of the encoder."""
        look = self.criterion.look(labels, mine)
        if look is None:
            return None
        if len(images):
            features, again = self.encoder.features_twice(images, look.prompts, look.shared)
            return features, SecondPassResult(look, again)
        features = _of_no_image(self.encoder, self.encoder.features, images)
        return features, SecondPassResult(look, features + 0 * look.prompts.rows.sum())


def _of_no_image(module: nn.Module, encode: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """No rows, but with gradients: the other processes wait for this one's part of them.

    None of its images could be read; so a black one is looked at, which leaves no trace in running averages.
    """
    training = module.training
    module.eval()
    rows = encode(images.new_zeros((1, *images.shape[1:])))[:0]
    module.train(training)
    return rows


def row_counts(rows: int, device: torch.device) -> list[int]:
    """How many rows each process has: fewer than the others where images could not be read."""
    counts = torch.zeros(torch.distributed.get_world_size(), dtype=torch.int64, device=device)
    counts[torch.distributed.get_rank()] = rows
    torch.distributed.all_reduce(counts)
    return counts.tolist()


def gather_rows(part: Tensor, counts: list[int]) -> Tensor:
    """The rows of all processes in the order of their ranks; gradients flow to this process's own rows.

    All processes compute the same loss from what is gathered, and their gradients are averaged afterwards: what only
    one of them can know, the gradient through its own rows, is therefore multiplied by their number.
    """
    longest, world = max(counts), len(counts)
    padded = part.new_zeros((longest, *part.shape[1:]))
    padded[: len(part)] = part.detach()
    found = [torch.empty_like(padded) for _ in counts]
    torch.distributed.all_gather(found, padded)
    parts = [rows[:count] for rows, count in zip(found, counts, strict=True)]
    if part.requires_grad:
        own = part.view_as(part)
        own.register_hook(lambda grad: grad * world)
        parts[torch.distributed.get_rank()] = own
    return torch.cat(parts)
