"""Optimiser groups, rates as a function of the epoch, and clipping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from proxymetric.criterion import Criterion
from proxymetric.recipe import TrainOptions
from proxymetric.training.learner import Learner
from proxymetric.training.rowwise_adagrad import with_rowwise
from proxymetric.training.sharded_state import ShardedState, here, is_part


def rates(options: TrainOptions) -> tuple[float, float]:
    """The encoder's and the proxies' first rate."""
    lr = options.lr if options.lr is not None else (1e-3 if options.frozen else 1e-4)
    return lr, options.proxy_lr if options.proxy_lr is not None else 100 * lr


def warm_up(options: TrainOptions, optimizer: torch.optim.Optimizer, epoch: int, epochs: int) -> str:
    """What a person should know of the epochs in which only head and proxies move, where more is trained later."""
    if epoch >= options.warmup or "backbone" not in trained_groups(optimizer):
        return ""
    which = "epoch 1 warms" if options.warmup == 1 else f"epochs 1 to {options.warmup} warm"
    said = f"{which} up: only head and proxies move (train.warmup={options.warmup})"
    return (
        said if options.warmup < epochs else f"{said}, and there are no more: expected more epochs, or train.warmup=0"
    )


def trained_groups(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Names and first rates of the groups of which something is trained."""
    groups = [group for group in optimizer.param_groups if any(p.requires_grad for p in group["params"])]
    return {group["name"]: group["first_lr"] for group in groups}


def first_rates(optimizer: torch.optim.Optimizer, criterion: Criterion, options: TrainOptions) -> dict[str, float]:
    """The first learning rate of each part, row tables included."""
    lr, proxy_lr = rates(options)
    row_rates = {"proxies": ("proxies", proxy_lr), "network": ("criterion", lr)}
    return trained_groups(optimizer) | dict(row_rates[table.rate] for table in criterion.row_tables())


def make_optimizer(learner: Learner, options: TrainOptions) -> torch.optim.Optimizer:
    """One optimiser over head, backbone, and what the criterion owns; each group remembers its first rate."""
    lr, proxy_lr = rates(options)
    encoder = learner.encoder
    groups: list[dict[str, Any]] = [{"params": encoder.head_parameters(), "lr": lr, "name": "head"}]
    if not learner.frozen:
        groups.append({"params": encoder.backbone_parameters(), "lr": lr, "name": "backbone"})
    groups += learner.criterion.param_groups(lr=proxy_lr, network_lr=lr)
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(
            "nothing to train: the encoder has no head, its backbone is frozen and the method owns nothing"
        )
    for table in learner.criterion.row_tables():
        own = table.rate == "proxies" and options.proxy_optimizer
        table.follow(own or options.optimizer, options.betas, options.weight_decay, options.momentum)
    for group in groups:
        group["first_lr"] = group["lr"]
        group["rowwise"] = group["name"] == "proxies" and options.proxy_optimizer is not None
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.optimizer]
    memory = {"momentum": options.momentum} if options.optimizer == "sgd" else {"betas": options.betas}
    kind = with_rowwise(kind) if options.proxy_optimizer is not None else kind
    fused = _fused(next(encoder.parameters()), options)
    return kind(groups, lr=lr, weight_decay=options.weight_decay, fused=fused, **memory)


def _fused(first: Tensor, options: TrainOptions) -> bool | None:
    """One kernel for all parameters instead of a dozen; on a CPU as ever. What is divided knows it of Adam alone."""
    return True if first.is_cuda and not (options.optimizer == "sgd" and is_part(first)) else None


def can_step_unchecked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_where` can be asked of it. SGD's memory would be of nothing after a first step that is none."""
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and bool(optimizer.defaults["fused"])


def step_if(optimizer: Any, fine: Tensor) -> None:
    """Step if `fine`, which the device knows and need not tell: nobody waits for it.

    >>> p = torch.nn.Parameter(torch.ones(1))
    >>> p.grad, optimizer = torch.ones(1), torch.optim.AdamW([p], lr=0.5, fused=True)
    >>> step_where(optimizer, torch.tensor(False)); p.item()
    1.0
    """
    optimizer.found_inf = (~fine).float()
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf


def steps_in(epochs: float, steps_per_epoch: int) -> int:
    """The steps that so many epochs make, at least one.

    >>> steps_in(2, 8), steps_in(2.4, 8)
    (16, 19)
    """
    return max(1, round(epochs * steps_per_epoch))


def decay_factor(options: TrainOptions, epoch: int) -> float:
    """What the first rates are multiplied with in epoch `epoch` (from 0): a pure function, so nothing to save.

    >>> [decayed(TrainOptions(decay="step", decay_every=10, decay_by=0.5), e) for e in (0, 9, 10, 25)]
    [1.0, 1.0, 0.5, 0.25]
    >>> round(decayed(TrainOptions(decay="cosine", decay_every=None, epochs=40), 20), 6)
    0.5
    """
    if options.decay == "step":
        return options.decay_by ** (epoch // (options.decay_every or options.epochs))
    if options.decay == "cosine":
        length = options.decay_every or options.epochs
        return 0.5 * (1 + math.cos(math.pi * min(epoch, length) / length))
    return 1.0


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["first_lr"] * factor


def clip_gradients(
    parameters: list[Tensor], rows: list[Tensor], options: TrainOptions, sharded: ShardedState | None = None
) -> Tensor:
    """Clip the gradients in place as the options say; the norm they had, not finite where the step must be skipped.

    rows: leaves of row tables, clipped like any other gradient. sharded: of what other processes hold other parts.
    """
    found = [p for p in (*parameters, *rows) if p.grad is not None]
    if not found:
        return torch.zeros(())
    parts = [sharded is not None and sharded.divides(p) for p in found]
    found = [here(p) for p in found]
    norms = torch.stack(torch._foreach_norm([p.grad for p in found if p.grad is not None]))
    if sharded is not None and any(parts):
        apart = torch.tensor(parts, device=norms.device)
        norm = sharded.norm(norms[~apart], norms[apart])
    else:
        norm = norms.norm()
    if options.clip_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(found, options.clip_norm, norm)
    if options.clip_value is not None:
        torch.nn.utils.clip_grad_value_(found, options.clip_value)
    return norm


def autocast_type(amp: str, device: torch.device) -> torch.dtype | None:
    """The type that the encoder computes in under autocast; None for plain float32."""
    if amp == "off" or device.type != "cuda":
        return None
    if amp == "fp16" or (amp == "auto" and not torch.cuda.is_bf16_supported()):
        return torch.half
    return torch.bfloat16
