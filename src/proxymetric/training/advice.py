"""What a training run says about itself: what its steps wait for, what would be faster, what has no effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from proxymetric.training.options import TrainOptions

MIN_WAITING_SHARE = 0.25
"""share of the time of the steps from which on waiting for images is worth a message"""
MIN_SECONDS_BEFORE_ADVICE = 10.0
"""seconds of training before a message"""
MIN_SECONDS_TO_COMPILE = 300.0
"""seconds of steps to come from which on compiling them is worth a message: compilation takes about half a minute"""

MIN_NARROW_COSINE = 0.9
"""mean cosine of two training images from which on the embeddings are worth a message"""
MAX_NARROW_SHARE = 0.1
"""the message is shown if 1 - mean cosine is less than this share of its value before training. A mean cosine above 0.9
alone is ordinary: that of an untrained small network is close to 1. Trainings that worked kept a larger share"""


def waiting_advice(waited: float, seconds: float, advice: str) -> str:
    """Say how much of the training was spent waiting for images, and what to try.

    Args:
        waited: seconds that the steps waited.
        seconds: seconds of the steps, waiting included.
        advice: what to try.

    Returns:
        A sentence; empty if the share is small, the time is short, or there is nothing to try.

    Example:
        >>> waiting_advice(40.0, 100.0, "try --cache memory")
        'the steps wait for images 40 % of the time: try --cache memory'
        >>> waiting_advice(4.0, 100.0, "try --cache memory")
        ''
    """
    if not advice or seconds < MIN_SECONDS_BEFORE_ADVICE or waited < MIN_WAITING_SHARE * seconds:
        return ""
    return f"the steps wait for images {100 * waited / seconds:.0f} % of the time: {advice}"


def own_batch_norm(encoder: nn.Module, batch: int, processes: int) -> str:
    """Say that BatchNorm sees only the images of each process.

    Args:
        encoder: the encoder; its mode does not change.
        batch: images of a step in all processes together.
        processes: their number.

    Returns:
        A sentence; empty with a single process, or if training does not change the averages of BatchNorm.

    Example:
        >>> from proxymetric.encoders import build
        >>> own_batch_norm(build("small", dim=8), 128, processes=8)
        'BatchNorm normalises the 16 images of each process by themselves; encoder.freeze_bn=true keeps its averages'
        >>> own_batch_norm(build("small", dim=8, freeze_bn=True), 128, processes=8)
        ''
    """
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    if processes == 1:
        return ""
    mode = encoder.training
    is_trained = any(isinstance(layer, kinds) and layer.training for layer in encoder.train().modules())
    encoder.train(mode)
    if not is_trained:
        return ""
    return (
        f"BatchNorm normalises the {batch // processes} images of each process by themselves; encoder.freeze_bn=true "
        "keeps its averages"
    )


def late_memory(loss: Mapping[str, Any], steps: int, epochs: int) -> str:
    """Say that the memory of a method starts after the training ends, so that it is never used.

    Args:
        loss: the table `[loss]` of the recipe: `start` is a step, `memory_epoch` an epoch.
        steps: number of steps of the training.
        epochs: number of its epochs.

    Returns:
        A sentence; empty if the memory is used, or if the method has none.

    Example:
        >>> late_memory({"memory": 4096, "start": 1000}, steps=640, epochs=40)
        'loss.start: the memory starts after 1000 steps, but the training has 640, so it is never used; try --set
        loss.start=64'
        >>> late_memory({"memory": 4096, "start": 1000}, steps=6400, epochs=40)
        ''
        >>> late_memory({"memory": 4096, "memory_epoch": 100.0}, steps=6400, epochs=40)
        'loss.memory_epoch: the memory starts after 100 epochs, but the training has 40, so it is never used; try --set
        loss.memory_epoch=4'
    """
    for key, unit, end in (("start", "steps", steps), ("memory_epoch", "epochs", epochs)):
        start = loss.get(key) if "memory" in loss else None
        if isinstance(start, int | float) and start >= max(end, 1):
            return (
                f"loss.{key}: the memory starts after {start:g} {unit}, but the training has {end}, so it is never "
                f"used; try --set loss.{key}={end // 10}"
            )
    return ""


def could_compile(options: TrainOptions, frozen: bool, epoch: int, device: torch.device) -> bool:
    """Whether `train.compile` is off, but would make the steps faster.

    Args:
        options: of the run.
        frozen: whether the backbone is not trained at all.
        epoch: the number of the epoch, from 0; in the warm-up the backbone is not trained yet.
        device: of the run.

    Example:
        >>> could_compile(TrainOptions(), frozen=False, epoch=1, device=torch.device("cpu"))
        False
    """
    is_off = not options.compile and not frozen and epoch >= options.warmup and options.parallel != "fsdp"
    return is_off and device.type == "cuda" and find_spec("triton") is not None


def compile_advice(seconds: float, step: int, steps: int) -> str:
    """Say how long the steps will take, and that compiled ones take less.

    Args:
        seconds: of the steps so far.
        step: number of steps so far.
        steps: number of all steps.

    Returns:
        A sentence; empty if the time is short.

    Example:
        >>> compile_advice(60.0, 100, 4100)
        'the steps take about 40 minutes more: compiled, they often take half the time; Ctrl-C, then --resume --set
        train.compile=true'
        >>> compile_advice(60.0, 100, 500)
        ''
    """
    seconds_left = seconds / max(step, 1) * (steps - step)
    if seconds < MIN_SECONDS_BEFORE_ADVICE or seconds_left < MIN_SECONDS_TO_COMPILE:
        return ""
    return (
        f"the steps take about {seconds_left / 60:.0f} minutes more: compiled, they often take half the time; Ctrl-C, "
        "then --resume --set train.compile=true"
    )


def narrow_cone(curve: Sequence[Mapping[str, Any]], loss: Mapping[str, Any]) -> str:
    """Say that the embeddings of all images have fallen into a narrow cone, at the first evaluation that shows it.

    Args:
        curve: the records of all evaluations so far; the first one is that of the untrained model.
        loss: the arguments of the method.

    Returns:
        A sentence; empty if the last record shows no narrow cone, if an earlier one has shown it, or if the figures of
        the untrained model are missing.

    Example:
        >>> curve = [{"epoch": 0, "mean_cosine": 0.58}, {"epoch": 1, "mean_cosine": 0.97}]
        >>> narrow_cone(curve, {"margin": 0.5})
        'epoch 1: the embeddings of all images have nearly the same direction: the mean cosine of two training images is
        0.970 (0.580 before training). Try a lower loss.margin, a lower learning rate, or another method'
        >>> narrow_cone([*curve, {"epoch": 2, "mean_cosine": 0.98}], {"margin": 0.5})
        ''
    """
    start = curve[0].get("mean_cosine") if curve else None
    if start is None:
        return ""
    cosines = [record.get("mean_cosine", start) for record in curve]
    *earlier, is_narrow = [
        cosine >= MIN_NARROW_COSINE and 1 - cosine < MAX_NARROW_SHARE * (1 - start) for cosine in cosines
    ]
    if any(earlier) or not is_narrow:
        return ""
    # A lower loss.scale is not named: on CUB with wrong labels, sub-centre ArcFace collapses with 20 as with 64.
    lower = "a lower loss.margin, " if isinstance(loss.get("margin"), int | float) else ""
    return (
        f"epoch {round(curve[-1]['epoch'], 2)}: the embeddings of all images have nearly the same direction: the "
        f"mean cosine of two training images is {cosines[-1]:.3f} ({start:.3f} before training). "
        f"Try {lower}a lower learning rate, or another method"
    )
