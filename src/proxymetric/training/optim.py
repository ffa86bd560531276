"""The optimiser: parameter groups, learning rates by epoch, conditional steps and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from proxymetric.criterion import Criterion
from proxymetric.training.learner import Learner
from proxymetric.training.options import TrainOptions
from proxymetric.training.rowwise_adagrad import with_rowwise
from proxymetric.training.sharded_state import ShardedState, is_dtensor, local_tensor


def warmup_message(options: TrainOptions, optimizer: torch.optim.Optimizer, epoch: int, epochs: int) -> str:
    """Describe the warm-up, in which only head and proxies are trained.

    Args:
        options: the training options.
        optimizer: the optimiser.
        epoch: number of the next epoch, from 0.
        epochs: number of epochs of the whole training.

    Returns:
        A message; empty if the warm-up is over, or if the backbone is never trained.
    """
    if epoch >= options.warmup or "backbone" not in trained_groups(optimizer):
        return ""
    subject = "epoch 1 warms" if options.warmup == 1 else f"epochs 1 to {options.warmup} warm"
    message = f"{subject} up: only head and proxies are trained (train.warmup={options.warmup})"
    if options.warmup < epochs:
        return message
    return f"{message}, and the backbone is never trained; expected more epochs, or train.warmup=0"


def trained_groups(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the names and initial learning rates of the parameter groups with at least one trained parameter."""
    groups = [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]
    return {group["name"]: group["first_lr"] for group in groups}


def first_rates(optimizer: torch.optim.Optimizer, criterion: Criterion, options: TrainOptions) -> dict[str, float]:
    """Return the initial learning rate of each part, including the row tables."""
    lr, proxy_lr = options.base_rates
    row_rates = {"proxies": ("proxies", proxy_lr), "network": ("criterion", lr)}
    return trained_groups(optimizer) | dict(row_rates[table.rate] for table in criterion.row_tables())


def make_optimizer(learner: Learner, options: TrainOptions) -> torch.optim.Optimizer:
    """Make one optimiser for the head, the backbone and the parameters of the criterion.

    Each group stores its initial learning rate as `first_lr`. Row tables, which update their own rows, get the
    settings of their optimiser.

    Raises:
        ValueError: there is no parameter to train.
    """
    lr, proxy_lr = options.base_rates
    encoder = learner.encoder
    groups: list[dict[str, Any]] = [{"params": encoder.head_parameters(), "lr": lr, "name": "head"}]
    if not learner.frozen:
        groups.append({"params": encoder.backbone_parameters(), "lr": lr, "name": "backbone"})
    groups += learner.criterion.param_groups(lr=proxy_lr, network_lr=lr)
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(
            "train: got nothing to train, since the encoder has no head, its backbone is frozen and the method has no "
            "parameters; expected encoder.dim, or train.frozen=false"
        )
    for table in learner.criterion.row_tables():
        proxy_optimizer = table.rate == "proxies" and options.proxy_optimizer
        table.follow(proxy_optimizer or options.optimizer, options.betas, options.weight_decay, options.momentum)
    for group in groups:
        group["first_lr"] = group["lr"]
        group["rowwise"] = group["name"] == "proxies" and options.proxy_optimizer is not None
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.optimizer]
    momentum = {"momentum": options.momentum} if options.optimizer == "sgd" else {"betas": options.betas}
    kind = with_rowwise(kind) if options.proxy_optimizer is not None else kind
    fused = _fused(next(encoder.parameters()), options)
    return kind(groups, lr=lr, weight_decay=options.weight_decay, fused=fused, **momentum)


def _fused(parameter: Tensor, options: TrainOptions) -> bool | None:
    """Return True on a GPU, to use fused kernels, except for SGD on sharded parameters (DTensors); else None."""
    return True if parameter.is_cuda and not (options.optimizer == "sgd" and is_dtensor(parameter)) else None


def can_step_unchecked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_if` works with this optimiser: fused Adam and AdamW.

    SGD is excluded: if its first step is skipped, its momentum buffer stays uninitialised.
    """
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and bool(optimizer.defaults["fused"])


def step_if(optimizer: Any, finite: Tensor) -> None:
    """Step if `finite` is true, without waiting for the GPU, which may not have computed `finite` yet.

    Args:
        optimizer: an optimiser for which `can_step_unchecked` is true.
        finite: a bool tensor on the device of the parameters.

    Example:
        >>> p = torch.nn.Parameter(torch.ones(1))
        >>> p.grad, optimizer = torch.ones(1), torch.optim.AdamW([p], lr=0.5, fused=True)
        >>> step_if(optimizer, torch.tensor(False)); p.item()
        1.0
    """
    optimizer.found_inf = (~finite).float()
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def steps_in(epochs: float, steps_per_epoch: int) -> int:
    """Return the number of steps in `epochs` epochs, at least 1.

    Example:
        >>> steps_in(2, 8), steps_in(2.4, 8)
        (16, 19)
    """
    return max(1, round(epochs * steps_per_epoch))


def decay_factor(options: TrainOptions, epoch: int, scores: Sequence[float] = ()) -> float:
    """Return the factor of the initial learning rates in epoch `epoch`, counted from 0.

    The factor depends only on its arguments. A checkpoint has them all, so it needs no state of a schedule.

    Args:
        options: the training options.
        epoch: the epoch.
        scores: the scores of all evaluations so far, higher is better; "plateau" uses them.

    Example:
        >>> [decay_factor(TrainOptions(decay="step", decay_every=10, decay_by=0.5), e) for e in (0, 9, 10, 25)]
        [1.0, 1.0, 0.5, 0.25]
        >>> round(decay_factor(TrainOptions(decay="cosine", decay_every=None, epochs=40), 20), 6)
        0.5
        >>> plateau = TrainOptions(decay="plateau", decay_every=2, decay_by=0.5)
        >>> [decay_factor(plateau, 0, scores) for scores in ([0.4, 0.5], [0.4, 0.5, 0.5, 0.4], [0.5, 0.4, 0.4, 0.6])]
        [1.0, 0.5, 0.5]
    """
    if options.decay == "plateau":
        return options.decay_by ** _plateaus(scores, options.decay_every or 1)
    if options.decay == "step":
        return options.decay_by ** (epoch // (options.decay_every or options.epochs))
    if options.decay == "cosine":
        length = options.decay_every or options.epochs
        return 0.5 * (1 + math.cos(math.pi * min(epoch, length) / length))
    return 1.0


def _plateaus(scores: Sequence[float], patience: int) -> int:
    """Count how often `patience` scores in a row were not above the best one before them."""
    best, stale, plateaus = -math.inf, 0, 0
    for score in scores:
        best, stale = (score, 0) if score > best else (best, stale + 1)
        if stale == patience:
            plateaus, stale = plateaus + 1, 0
    return plateaus


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of each group to `factor` times its initial learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = group["first_lr"] * factor


def clip_gradients(
    parameters: list[Tensor], rows: list[Tensor], options: TrainOptions, sharded: ShardedState | None = None
) -> Tensor:
    """Clip gradients in place.

    Args:
        parameters: the parameters of the optimiser.
        rows: the leaf tensors of row tables, whose gradients are clipped as well.
        options: the training options; `clip_norm` and `clip_value` are used.
        sharded: tells which parameters have parts in other processes; None: no parameter has such parts.

    Returns:
        The norm of all gradients before clipping; if it is not finite, the step must be skipped.
    """
    with_gradient = [p for p in (*parameters, *rows) if p.grad is not None]
    if not with_gradient:
        return torch.zeros(())
    is_sharded = [sharded is not None and sharded.is_part(p) for p in with_gradient]
    with_gradient = [local_tensor(p) for p in with_gradient]
    norms = torch.stack(torch._foreach_norm([p.grad for p in with_gradient if p.grad is not None]))
    if sharded is not None and any(is_sharded):
        mask = torch.tensor(is_sharded, device=norms.device)
        norm = sharded.norm(norms[~mask], norms[mask])
    else:
        norm = norms.norm()
    if options.clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(with_gradient, options.clip_norm, norm)
    if options.clip_value is not None:
        torch.nn.utils.clip_grad_value_(with_gradient, options.clip_value)
    return norm


def autocast_type(amp: str, device: torch.device) -> torch.dtype | None:
    """Return the type in which the encoder computes under autocast; None for float32."""
    if amp == "off" or device.type != "cuda":
        return None
    if amp == "fp16" or (amp == "auto" and not torch.cuda.is_bf16_supported()):
        return torch.half
    return torch.bfloat16
