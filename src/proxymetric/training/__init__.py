"""Training runs: from a recipe to a folder with a model, its scores and a report."""

from proxymetric.training.run import Run, train
from proxymetric.training.trainer import Interrupted, Trainer
from proxymetric.training.watch import Silent

__all__ = ["Interrupted", "Run", "Silent", "Trainer", "train"]
