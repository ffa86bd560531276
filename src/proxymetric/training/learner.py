"""The encoder and the criterion as one module, which is trained, saved and wrapped by DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from proxymetric.core.second_pass import SecondPassResult
from proxymetric.criterion import Criterion
from proxymetric.training.gathering import gather_rows, row_counts

if TYPE_CHECKING:
    from proxymetric.encoders import Encoder


class Learner(nn.Module):
    """Encoder and criterion: `learner(images, labels)` returns the loss.

    With several processes, the embeddings and labels of all processes are gathered, and every process computes the
    loss of the global batch. Averaging the gradients over processes then gives exactly the gradient that a single
    process would compute for the global batch.

    Args:
        encoder: maps images to embeddings.
        criterion: maps embeddings and labels to the loss; the constructor binds it to the encoder.
        frozen: True: `forward` gets cached features instead of images, and only the encoder's head runs and is trained.
        world: number of processes.
    """

    def __init__(self, encoder: Encoder, criterion: Criterion, frozen: bool = False, world: int = 1) -> None:
        super().__init__()
        self.encoder = encoder
        self.criterion = criterion
        self.frozen = frozen
        self.world = world
        if frozen:
            # This precedes `bind`: a method that copies the trainable parameters must copy those of the head only.
            encoder.set_backbone_trainable(False)
        criterion.bind(encoder)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch.

        Args:
            images: (B, 3, H, W), or cached features (B, F) if the learner is frozen.
            labels: (B,), preferably in host memory.
        """
        if labels.ndim != 1:
            raise ValueError(
                f"labels: got shape {tuple(labels.shape)}, expected one label for each image: training runs take one; "
                "give several labels to the criterion in a loop of your own"
            )
        device_labels = labels.to(images.device, non_blocking=True)
        if self.world > 1:
            return self._global_loss(images, device_labels)
        passes = None if self.frozen else self._two_passes(images, labels)
        if passes is not None:
            features, second_pass = passes
            return self.criterion(self.encoder.head(features), device_labels, images=images, second_pass=second_pass)
        encode = self.encoder.head if self.frozen else self.encoder
        return self.criterion(encode(images), device_labels, images=images)

    def _global_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the global batch, that of all processes."""
        counts = row_counts(len(images), images.device)
        labels = gather_rows(labels, counts)
        start = sum(counts[: torch.distributed.get_rank()])
        rows = slice(start, start + len(images))
        if not self.frozen and (passes := self._two_passes(images, labels, rows)) is not None:
            features, second_pass = passes
            second_pass = second_pass._replace(features=gather_rows(second_pass.features, counts))
            return self.criterion(gather_rows(self.encoder.head(features), counts), labels, second_pass=second_pass)
        encode = self.encoder.head if self.frozen else self.encoder
        embeddings = encode(images) if len(images) else _no_rows(encode, encode, images)
        needed_images = gather_rows(images, counts) if "images" in self.criterion.needs else None
        return self.criterion(gather_rows(embeddings, counts), labels, images=needed_images)

    def _two_passes(
        self, images: Tensor, labels: Tensor, rows: slice = slice(None)
    ) -> tuple[Tensor, SecondPassResult] | None:
        """Return the features (B, F) of both passes from one run of the encoder; None if no second pass is needed."""
        request = self.criterion.second_pass(labels, rows)
        if request is None:
            return None
        if len(images):
            features, second_features = self.encoder.features_twice(images, request.prompts, request.shared)
            return features, SecondPassResult(request, second_features)
        features = _no_rows(self.encoder, self.encoder.features, images)
        return features, SecondPassResult(request, features + 0 * request.prompts.rows.sum())


def _no_rows(module: nn.Module, encode: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return an output with 0 rows that takes part in the backward pass: other processes wait for its gradients.

    It is needed if a process could read none of its images. The encoder runs on one black image in evaluation mode, so
    that the statistics of BatchNorm do not change.
    """
    training = module.training
    module.eval()
    rows = encode(images.new_zeros((1, *images.shape[1:])))[:0]
    module.train(training)
    return rows
