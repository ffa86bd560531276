"""The options of a training: the table `[train]` of a recipe, with the values that each key may have."""

from __future__ import annotations

import math
from dataclasses import dataclass

from proxymetric.arguments.signatures import did_you_mean, one_of
from proxymetric.training.tracking.tracker import TRACKERS

CHOICES: dict[str, tuple[str | None, ...]] = {
    "optimizer": ("adamw", "adam", "sgd"),
    "proxy_optimizer": (None, "rowwise-adagrad"),
    "decay": ("none", "step", "cosine", "plateau"),
    "amp": ("auto", "bf16", "fp16", "off"),
    "parallel": ("ddp", "fsdp"),
    "start": (None, "whitening", "lda"),
    "keep": ("simplest", "trained"),
    "track": (None, *TRACKERS),
}
"""key of `[train]` -> the values it may have"""
MINIMA = {
    "epochs": 1,
    "batch": 1,
    "accumulate": 1,
    "evaluate_every": 1,
    "evaluate_steps": 1,
    "save_every": 1,
    "decay_every": 1,
    "patience": 1,
    "lr": 0,
    "proxy_lr": 0,
    "weight_decay": 0,
    "warmup": 0,
    "per_class": 0,
}
"""key of `[train]` -> its smallest value"""
MAXIMA: dict[str, float] = {"epochs": 10**6, "batch": 10**7, "accumulate": 10**6, "lr": 10, "proxy_lr": 1000}
"""key of `[train]` -> its largest value; with larger ones a run can only fail"""


@dataclass(frozen=True)
class TrainOptions:
    """The table `[train]`: how a run trains.

    Attributes:
        epochs: passes over the training images.
        batch: images in a forward pass.
        accumulate: forward passes in an optimiser step.
        per_class: images of each class in a batch. None: the number that the method recommends; 0: random batches.
        optimizer: "adamw", "adam" or "sgd".
        proxy_optimizer: "rowwise-adagrad" keeps one number of state per proxy. None: the same as `optimizer`.
        lr: learning rate of the encoder. None: 1e-4, or 1e-3 with `frozen`.
        proxy_lr: learning rate of the proxies. None: 100 times `lr`.
        weight_decay: weight decay of all parameters.
        momentum: momentum of "sgd".
        betas: betas of "adam" and "adamw".
        warmup: epochs in which only head and proxies are trained. A recipe of a pre-trained network that is trained as
            a whole has 5 by default, at most a quarter of its epochs.
        decay: schedule of the learning rates: "none", "step" (times `decay_by` every `decay_every` epochs), "cosine"
            (over `decay_every` epochs; None: over all) or "plateau" (times `decay_by` after `decay_every` evaluations
            without a better `monitor`).
        decay_every: number of epochs, see `decay`. A recipe of a pre-trained network that is trained as a whole has an
            eighth of its epochs by default, from 1 to 5.
        decay_by: factor of the learning rates, see `decay`.
        clip_value: each entry of a gradient is clipped to this absolute value.
        clip_norm: the norm of all gradients together is clipped to this value.
        amp: "auto" (bfloat16 on a GPU that has it), "bf16", "fp16" or "off".
        metrics: the metrics of an evaluation.
        monitor: the metric that chooses the epoch; in protocol `papers` R@1 by default, as in the papers.
        evaluate_every: epochs between evaluations. The end of the training is always evaluated.
        evaluate_steps: optimiser steps between evaluations, instead of `evaluate_every`.
        evaluate_amp: score images during training in the precision of `amp`, not in float32: faster on a GPU, and the
            scores differ a little. The scores of the result are always those of float32.
        patience: evaluations without improvement after which training stops. None: never.
        save_every: optimiser steps between checkpoints.
        frozen: train head and proxies on cached features of the backbone.
        refit: after this training, train again on all classes, for the number of epochs that the held-out classes
            chose. A method in closed form does so unless this is false.
        start: "whitening" or "lda" starts the head from this closed form on the features of the backbone before
            training, divided by their length (`closed_forms`). None: a random head.
        whiten: at the end, put the whitening of the trained vectors behind the head, and keep the better of the two on
            the held-out classes; without such classes, the whitened one.
        keep: which model the run keeps. "simplest": the best of untrained, whitening and lda on the held-out classes,
            unless the trained one is above it by more than one standard error and by at least one point
            (`runs.clear_gain`); the trained one stays in the folder. "trained": the model of the chosen epoch.
        deterministic: make repeated runs bit-identical on a GPU, as they are on a CPU.
        compile: compile the training steps of the backbone with torch.compile and, on a GPU, record them as a CUDA
            graph. The first step takes about half a minute longer; later steps are faster than without compilation.
        shard: each of several processes holds the proxies of some classes, and their optimiser state.
        parallel: how several processes train the encoder. "ddp": each holds all of it. "fsdp": each holds a part of its
            parameters and of their optimiser state (FSDP2; not with warmup, frozen, compile or fp16).
        device: "auto", "cpu", "cuda" or "cuda:0".
        track: "tensorboard" also writes the curves to the folder `tensorboard` of the run (needs the extra `track`);
            "wandb" and "mlflow" send them to Weights & Biases and MLflow (extras `wandb` and `mlflow`).
    """

    epochs: int = 40
    batch: int = 128
    accumulate: int = 1
    per_class: int | None = None
    optimizer: str = "adamw"
    proxy_optimizer: str | None = None
    lr: float | None = None
    proxy_lr: float | None = None
    weight_decay: float = 1e-4
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    warmup: int = 1
    decay: str = "step"
    decay_every: int | None = 10
    decay_by: float = 0.5
    clip_value: float | None = 10.0
    clip_norm: float | None = None
    amp: str = "auto"
    metrics: tuple[str, ...] = ("R@1", "R@2", "R@4", "R@8", "P@R", "MAP@R", "nDCG@8")
    monitor: str = "MAP@R"
    evaluate_every: int = 1
    evaluate_steps: int | None = None
    evaluate_amp: bool = False
    patience: int | None = 10
    save_every: int = 200
    frozen: bool = False
    refit: bool = False
    start: str | None = None
    whiten: bool = False
    keep: str = "simplest"
    deterministic: bool = False
    compile: bool = False
    shard: bool = False
    parallel: str = "ddp"
    device: str = "auto"
    track: str | None = None

    def __post_init__(self) -> None:
        for name, minimum in MINIMA.items():
            value = getattr(self, name)
            if value is not None and not minimum <= value < math.inf:
                raise ValueError(f"train.{name}: got {value}, expected at least {minimum}")
        for name, maximum in MAXIMA.items():
            value = getattr(self, name)
            if value is not None and value > maximum:
                raise ValueError(f"train.{name}: got {value:g}, expected at most {maximum:g}")
        for name in ("decay_by", "clip_value", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"train.{name}: got {value}, expected more than 0")
        for name, values in (("momentum", (self.momentum,)), ("betas", self.betas)):
            if not all(0 <= value < 1 for value in values):
                raise ValueError(f"train.{name}: got {getattr(self, name)}, expected at least 0 and less than 1")
        for name, choices in CHOICES.items():
            one_of(f"train.{name}", getattr(self, name), choices)
        if self.decay == "plateau" and self.decay_every is None:
            raise ValueError(
                "train.decay_every: got none with train.decay='plateau', expected a number of evaluations without "
                "improvement, at least 1"
            )
        if self.decay == "plateau" and self.refit:
            raise ValueError(
                "train.decay: got 'plateau' with train.refit, which has no held-out classes to score; expected 'step', "
                "'cosine' or 'none', or train.refit=false"
            )
        if self.monitor not in self.metrics:
            raise ValueError(
                f"train.monitor: got {self.monitor!r}, expected one of train.metrics ({', '.join(self.metrics)})"
                f"{did_you_mean(self.monitor, self.metrics)}"
            )

    @property
    def base_rates(self) -> tuple[float, float]:
        """The initial learning rates of the encoder and of the proxies."""
        lr = self.lr if self.lr is not None else (1e-3 if self.frozen else 1e-4)
        return lr, self.proxy_lr if self.proxy_lr is not None else 100 * lr

    @property
    def monitors_error(self) -> bool:
        """Whether the metric that chooses the epoch is an error rate, where lower is better."""
        from proxymetric.metrics.names import lower_is_better

        return lower_is_better(self.monitor)
