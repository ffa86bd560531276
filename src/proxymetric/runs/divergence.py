"""A run without a single finite step has no result."""

from __future__ import annotations

from proxymetric.runs.recipe import Recipe
from proxymetric.training.trainer import Trainer


def check_trained(trainer: Trainer, recipe: Recipe) -> None:
    """Refuse to give a result for a run whose steps were all skipped: its model is the untrained one.

    Args:
        trainer: the training loop after its last step.
        recipe: the recipe of the run.

    Raises:
        ValueError: no step had a finite loss and gradient.
    """
    if not trainer.skipped or any("loss" in record for record in trainer.curve):
        return
    rate, proxy_rate = recipe.train.base_rates
    weights = f", or other weights than {recipe.encoder['weights']}" if recipe.encoder["weights"] else ""
    raise ValueError(
        f"train: got no step with a finite loss and gradient (all {trainer.skipped} were skipped), so there is no "
        f"result; expected lower learning rates (train.lr is {rate:g}, train.proxy_lr {proxy_rate:g}){weights}"
    )
