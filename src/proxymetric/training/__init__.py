"""The training loop: steps, evaluations and checkpoints."""

from proxymetric.training.gathering import gather_batch
from proxymetric.training.trainer import Interrupted, Trainer

__all__ = ["Interrupted", "Trainer", "gather_batch"]
