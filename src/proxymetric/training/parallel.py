"""Train one encoder in several processes: with DDP each holds a copy of it, with FSDP2 each holds a part of it.

In both cases every process computes the loss from the embeddings of all processes, and the gradients of the encoder are
averaged. FSDP2 gathers the parameters of a stage when the forward or backward pass needs them; gradients and optimiser
state are sharded like the parameters.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from proxymetric.encoders import Encoder
from proxymetric.encoders.vit import run_block
from proxymetric.training.learner import Learner
from proxymetric.training.optim import autocast_type
from proxymetric.training.options import TrainOptions
from proxymetric.training.process_group import ProcessGroup

MIN_STAGE_FRACTION = 0.01
"""a stage with a smaller fraction of the parameters is not sharded on its own: the memory saved would not be worth the
time of its messages"""


def check(options: TrainOptions, needs: Collection[str], world: ProcessGroup, device: torch.device) -> None:
    """Check that the options allow `train.parallel="fsdp"`.

    Args:
        options: the training options.
        needs: the needs of the method (`papers.needs`).
        world: the processes that train together.
        device: the device of this process.

    Raises:
        ValueError: an option or the method does not work with FSDP2.
    """
    if options.parallel != "fsdp" or world.size == 1:
        return
    uses_float16 = options.amp == "fp16" or autocast_type(options.amp, device) is torch.half
    for conflict, reason, expected in (
        (
            options.warmup > 0,
            f"train.warmup={options.warmup}, but the set of trained parameters cannot change",
            "train.warmup=0",
        ),
        (
            uses_float16,
            f"train.amp={options.amp!r}, where each process would scale its gradients differently",
            "train.amp 'bf16' or 'off'",
        ),
        (options.frozen, "train.frozen, where no encoder is trained", "'ddp'"),
        (options.compile, "train.compile, which does not support sharded parameters", "'ddp'"),
        ("encoder" in needs, "a method that reads the encoder's weights or runs the encoder itself", "'ddp'"),
    ):
        if conflict:
            raise ValueError(f"train.parallel: got 'fsdp' with {reason}; expected {expected}")


class Parallel:
    """The learner, prepared for training in all processes of a group.

    With `train.parallel="fsdp"` the constructor shards the encoder, so that an optimiser made afterwards holds only
    this process's part of every parameter. With a single process, the learner does not change.

    Args:
        learner: encoder and criterion.
        options: the training options; `parallel` is used.
        world: the processes that train together.

    Attributes:
        module: the module that a training step calls.
        sharded: whether the encoder is sharded.
    """

    def __init__(self, learner: Learner, options: TrainOptions, world: ProcessGroup) -> None:
        self.learner = learner
        self.world = world
        self.sharded = options.parallel == "fsdp" and world.size > 1
        self.module: nn.Module = learner
        self._sharded_proxies = [f"criterion.{name}" for name in learner.criterion.sharded()]
        if self.sharded:
            with torch.no_grad():
                for name, value in learner.named_parameters():
                    if name not in self._sharded_proxies:
                        torch.distributed.broadcast(value, 0)
            shard_encoder(learner.encoder)
        self._replicated = [
            p
            for name, p in learner.named_parameters()
            if name.startswith("criterion.") and name not in self._sharded_proxies
        ]

    def begin_epoch(self) -> None:
        """Wrap the learner with DDP again, because DDP fixes the set of trained parameters when it wraps a module."""
        if self.world.size > 1 and not self.sharded:
            # Buffers are not broadcast: `commit` keeps the memories of all processes equal.
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
                self.learner, self._sharded_proxies
            )
            with warnings.catch_warnings():
                # Newer versions of torch have another argument, which would send buffers once; see the line above.
                warnings.filterwarnings("ignore", ".*broadcast_buffers.* is deprecated", FutureWarning)
                self.module = nn.parallel.DistributedDataParallel(self.learner, broadcast_buffers=False)

    @contextlib.contextmanager
    def synchronised_if(self, is_last: bool) -> Iterator[None]:
        """Let DDP exchange gradients only after the last micro-batch; FSDP2 exchanges them after each."""
        if is_last or not isinstance(self.module, nn.parallel.DistributedDataParallel):
            yield
        else:
            with self.module.no_sync():
                yield

    def average_gradients(self) -> None:
        """Average the gradients that neither DDP nor FSDP2 averages.

        The gradients of replicated proxies are equal in all processes except for rounding, which differs between
        devices. Averaging the gradients keeps the proxies equal.
        """
        if self.sharded:
            for parameter in self._replicated:
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= self.world.size


def shard_encoder(encoder: Encoder) -> None:
    """Shard the parameters of `encoder` among all processes with FSDP2, by their first dimension, stage by stage.

    Raises:
        ValueError: this torch has no FSDP2, or the backbone cannot be sharded.
    """
    try:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    except ImportError:
        raise ValueError(
            f"train.parallel: got 'fsdp', which needs torch 2.6 or newer, but this is {torch.__version__}; "
            "expected 'ddp'"
        ) from None
    scalar = next((name for name, p in encoder.named_parameters() if not p.ndim), None)
    if scalar is not None:
        raise ValueError(
            f"train.parallel: got 'fsdp', but {scalar} is a single number and cannot be sharded; expected 'ddp'"
        )
    device = next(encoder.parameters()).device
    mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    encoder.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    try:
        for stage in list(encoder.backbone.blocks) if encoder.is_vit else stages(encoder.backbone):
            fully_shard(stage, mesh=mesh)
            if encoder.is_vit:
                # The encoder calls the parts of a block, not the block. Parameters must be gathered once for the whole
                # block, so its hooks move to `run`, which runs all parts.
                stage.run = functools.partial(run_block, stage)
                stage._forward_pre_hooks, stage._forward_hooks = OrderedDict(), OrderedDict()
                register_fsdp_forward_method(stage, "run")
        fully_shard(encoder, mesh=mesh)
        _try_once(encoder, device)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        backbone = encoder.config["backbone"]
        raise ValueError(
            f"train.parallel: got 'fsdp', but {backbone} cannot be sharded ({error}); expected 'ddp'"
        ) from error


def stages(backbone: nn.Module) -> list[nn.Module]:
    """Return the parts of a backbone that are called one after the other, without those that have few parameters.

    Example:
        >>> from proxymetric.encoders import build
        >>> [type(stage).__name__ for stage in stages(build("small").backbone)]
        ['Sequential', 'Sequential', 'Sequential']
    """
    lists = (nn.ModuleList, nn.ModuleDict)
    parts: list[nn.Module] = []
    for child in backbone.children():
        parts += child.children() if isinstance(child, (nn.Sequential, *lists)) else [child]
    while any(isinstance(part, lists) for part in parts):  # a list of modules is never called itself
        parts = [child for part in parts for child in (part.children() if isinstance(part, lists) else [part])]
    min_size = MIN_STAGE_FRACTION * _size(backbone)
    return [part for part in parts if _size(part) >= min_size]


@contextlib.contextmanager
def gathered_parameters(encoder: nn.Module) -> Iterator[None]:
    """Give every process all parameters of a sharded encoder, so that one process can run it alone.

    All processes must enter and leave the context. Inside it, parameters must not be changed, saved or loaded, because
    that would shard them again.
    """
    stages, hooks = _sharded_modules(encoder), []
    for stage in stages:
        stage.unshard()
        hooks.append((stage._forward_pre_hooks, stage._forward_hooks, vars(stage).pop("run", None)))
        stage._forward_pre_hooks, stage._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for stage, (pre_hooks, post_hooks, run) in zip(stages, hooks, strict=True):
            stage._forward_pre_hooks, stage._forward_hooks = pre_hooks, post_hooks
            if run is not None:
                stage.run = run
            stage.reshard()


def _try_once(encoder: Encoder, device: torch.device) -> None:
    """Run a black image forward and backward; this fails if a stage's parameters are used without calling the stage."""
    training = encoder.training
    encoder.eval()
    vectors = encoder(torch.zeros(1, 3, encoder.size, encoder.size, device=device))
    if vectors.requires_grad:
        vectors.sum().backward()
    encoder.zero_grad(set_to_none=True)
    encoder.train(training)
    for stage in _sharded_modules(encoder):
        stage.reshard()


def _sharded_modules(encoder: nn.Module) -> list[Any]:
    """Return the modules whose parameters FSDP2 has sharded."""
    return [module for module in encoder.modules() if hasattr(module, "unshard")]


def _size(module: nn.Module) -> int:
    """Return the number of elements of all parameters."""
    return sum(p.numel() for p in module.parameters())
