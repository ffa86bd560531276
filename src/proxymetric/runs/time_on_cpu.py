"""How long a training without a GPU would take, said before it begins, and how long with `--frozen`."""

from __future__ import annotations

import time

import torch

import proxymetric.runs.recipe as recipes
from proxymetric.encoders import Encoder
from proxymetric.runs.recipe import Recipe
from proxymetric.system.clock import clock

MIN_SECONDS = 1800.0
"""trainings that take less time need no message"""
PROBED_IMAGES = 8
"""images of a pass that is timed"""
TRAINING_COST = 3.0
"""a forward and a backward pass, as forward passes: the backward pass computes gradients of inputs and of weights"""


def slow_training(recipe: Recipe, encoder: Encoder, trained: int, choosing: int, unseen: int) -> str:
    """Say how long a training on this CPU would take, and what takes less time.

    Args:
        recipe: of the run.
        encoder: its encoder, on the CPU.
        trained: number of training images.
        choosing: number of images that choose the epoch; they are embedded at every evaluation.
        unseen: number of images that are scored before and after the training.

    Returns:
        A sentence; empty if the time is short.
    """
    train = recipe.train
    if train.frozen:
        return ""
    seconds_per_image = pass_seconds(encoder)
    cost = 1.0 if recipe.encoder["tuning"] == "linear" else TRAINING_COST
    warmup = min(train.warmup, train.epochs)
    passes = trained * (warmup + cost * (train.epochs - warmup)) + choosing * train.epochs / train.evaluate_every
    seconds = seconds_per_image * (passes + 2 * unseen)
    if seconds < MIN_SECONDS:
        return ""
    rate = 1 / seconds_per_image
    note = (
        f"on the CPU, {train.epochs} epochs take about {clock(seconds)} "
        f"({rate:.{0 if rate >= 10 else 1}f} images/s through the network)"
    )
    if not could_freeze(recipe):
        return f"{note}; a smaller --backbone, or fewer pixels (--size), take less time"
    features = seconds_per_image * (trained + choosing + unseen)
    return f"{note}; --frozen trains head and proxies on features that are computed once, in about {clock(features)}"


@torch.inference_mode()
def pass_seconds(encoder: Encoder) -> float:
    """Time a forward pass.

    Args:
        encoder: its mode and its state do not change.

    Returns:
        Seconds for one image, the shorter time of two passes.
    """
    training, size = encoder.training, encoder.config["size"]
    encoder.eval()
    images = torch.zeros(PROBED_IMAGES, 3, size, size, dtype=torch.uint8)
    times = []
    for _ in range(2):
        started = time.perf_counter()
        encoder(images)
        times.append(time.perf_counter() - started)
    encoder.train(training)
    return min(times) / PROBED_IMAGES


def could_freeze(recipe: Recipe) -> bool:
    """Whether the recipe allows `--frozen`."""
    try:
        recipes.check(recipes.merged(recipe.changed, {"train": {"frozen": True}}))
    except ValueError:
        return False
    return True
