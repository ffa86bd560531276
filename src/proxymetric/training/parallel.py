"""Several processes, one encoder: each trains all of it on its part of the batch (DDP), or holds a part of it (FSDP2).

Either way all processes compute the same loss from the embeddings of all of them, and the gradients of the encoder are
averaged. With FSDP2 a stage of the encoder is put together when it is needed, there and back, and its gradients and
optimiser state are divided as it is.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from proxymetric.encoders import Encoder
from proxymetric.encoders.vit import run_block
from proxymetric.recipe import TrainOptions
from proxymetric.training.learner import Learner
from proxymetric.training.optim import autocast_type
from proxymetric.training.process_group import ProcessGroup

SMALL = 0.01
"""a stage with less than this fraction of the parameters stays with the rest of the encoder: messages cost time"""


def check(options: TrainOptions, needs: Collection[str], world: ProcessGroup, device: torch.device) -> None:
    """Refuse what does not go together with an encoder in parts; needs: of the method."""
    if options.parallel != "fsdp" or world.size == 1:
        return
    half = options.amp == "fp16" or autocast_type(options.amp, device) is torch.half
    for wrong, said, wanted in (
        (options.warmup > 0, f"train.warmup={options.warmup}: what has gradients cannot change on the way", "0"),
        (half, f"train.amp={options.amp!r}: the parts would scale their gradients apart", "'bf16' or 'off'"),
        (options.frozen, "train.frozen: there is no encoder to train, only features of it", "'ddp'"),
        (options.compile, "train.compile, which knows nothing of parts", "'ddp'"),
        ("encoder" in needs, "a method that looks into the encoder's weights or runs it itself", "'ddp'"),
    ):
        if wrong:
            raise ValueError(f"train.parallel: got 'fsdp' with {said}; wanted {wanted}")


class Parallel:
    """The learner as all processes of a world train it.

    With `train.parallel="fsdp"` the encoder is divided at once, so that an optimiser made afterwards has its own part
    of every parameter; a world of one process changes nothing.
    """

    def __init__(self, learner: Learner, options: TrainOptions, world: ProcessGroup) -> None:
        self.learner, self.world = learner, world
        self.divided = options.parallel == "fsdp" and world.size > 1
        self.module: nn.Module = learner
        """what a step calls"""
        self._apart = [f"criterion.{name}" for name in learner.criterion.sharded()]
        if self.divided:
            with torch.no_grad():
                for name, value in learner.named_parameters():
                    if name not in self._apart:
                        torch.distributed.broadcast(value, 0)
            divide(learner.encoder)
        self._alike = [
            p for name, p in learner.named_parameters() if name.startswith("criterion.") and name not in self._apart
        ]

    def begin_epoch(self) -> None:
        """Which parameters take part is fixed when the wrapper of DDP is made."""
        if self.world.size > 1 and not self.divided:
            # Memories are kept equal by `commit`.
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.learner, self._apart)
            self.module = nn.parallel.DistributedDataParallel(self.learner, broadcast_buffers=False)

    @contextlib.contextmanager
    def quiet_until(self, last: bool) -> Iterator[None]:
        """Between micro-batches gradients need not travel between processes, unless each has room for its part only."""
        if last or not isinstance(self.module, nn.parallel.DistributedDataParallel):
            yield
        else:
            with self.module.no_sync():
                yield

    def average(self) -> None:
        """Average the gradients that no wrapper looks after.

        Those of replicated proxies are the same everywhere but for rounding that differs from device to device: this
        keeps the proxies from drifting apart.
        """
        if self.divided:
            for parameter in self._alike:
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= self.world.size


def divide(encoder: Encoder) -> None:
    """Divide the parameters of `encoder` among all processes with FSDP2, by their first dimension, stage by stage."""
    try:
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    except ImportError:
        raise ValueError(
            f"train.parallel: 'fsdp' needs torch 2.6 or newer, and this is {torch.__version__}; expected 'ddp'"
        ) from None
    single = next((name for name, p in encoder.named_parameters() if not p.ndim), None)
    if single is not None:
        raise ValueError(
            f"train.parallel: got 'fsdp', but {single} is one number and cannot be divided; expected 'ddp'"
        )
    device = next(encoder.parameters()).device
    mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    encoder.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    try:
        for stage in list(encoder.backbone.blocks) if encoder.is_vit else stages(encoder.backbone):
            fully_shard(stage, mesh=mesh)
            if encoder.is_vit:
                # Blocks are run in pieces: not a call of the block but the whole of it is what parameters must be for.
                stage.run = functools.partial(run_block, stage)
                stage._forward_pre_hooks, stage._forward_hooks = OrderedDict(), OrderedDict()
                register_fsdp_forward_method(stage, "run")
        fully_shard(encoder, mesh=mesh)
        _rehearse(encoder, device)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        backbone = encoder.config["backbone"]
        raise ValueError(
            f"train.parallel: got 'fsdp', but {backbone} cannot be divided ({error}); expected 'ddp'"
        ) from error


def stages(backbone: nn.Module) -> list[nn.Module]:
    """The parts of a backbone that are called one after the other and hold a good part of its parameters.

    >>> from proxymetric.encoders import build
    >>> [type(stage).__name__ for stage in stages(build("small").backbone)]
    ['Sequential', 'Sequential', 'Sequential']
    """
    lists = (nn.ModuleList, nn.ModuleDict)
    found: list[nn.Module] = []
    for child in backbone.children():
        found += child.children() if isinstance(child, (nn.Sequential, *lists)) else [child]
    while any(isinstance(stage, lists) for stage in found):  # nobody calls a list
        found = [part for stage in found for part in (stage.children() if isinstance(stage, lists) else [stage])]
    least = SMALL * _size(backbone)
    return [stage for stage in found if _size(stage) >= least]


@contextlib.contextmanager
def gathered_parameters(encoder: nn.Module) -> Iterator[None]:
    """Inside, every process has all of a divided encoder and can run it alone: nobody waits. All must ask.

    Parameters must not change inside, nor be saved or loaded: that divides them again.
    """
    stages, around = _divided(encoder), []
    for stage in stages:
        stage.unshard()
        around.append((stage._forward_pre_hooks, stage._forward_hooks, vars(stage).pop("run", None)))
        stage._forward_pre_hooks, stage._forward_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        for stage, (before, after, run) in zip(stages, around, strict=True):
            stage._forward_pre_hooks, stage._forward_hooks = before, after
            if run is not None:
                stage.run = run
            stage.reshard()


def _rehearse(encoder: Encoder, device: torch.device) -> None:
    """A black image there and back: a backbone that uses parameters of a stage without calling it fails here."""
    training = encoder.training
    encoder.eval()
    vectors = encoder(torch.zeros(1, 3, encoder.size, encoder.size, device=device))
    if vectors.requires_grad:
        vectors.sum().backward()
    encoder.zero_grad(set_to_none=True)
    encoder.train(training)
    for stage in _divided(encoder):
        stage.reshard()


def _divided(encoder: nn.Module) -> list[Any]:
    """The modules whose parameters FSDP2 has divided."""
    return [module for module in encoder.modules() if hasattr(module, "unshard")]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
