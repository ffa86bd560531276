"""LoRA (Hu et al. 2021): a low-rank change of the attention's weights, which can be folded into them afterwards."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxymetric.encoders.tuning.base import Tuning


class LoRA(Tuning):
    """The frozen weight W of a layer is used as W + alpha / rank * B A, A (rank, inputs) and B (outputs, rank) trained.

    ``y = W x + alpha / rank * B (A x)`` (Eq. 3). B starts at 0 and so changes nothing; A is drawn as the weights of an
    nn.Linear (the paper says Gaussian, its code does this). The three thirds of `qkv` share their A.

    Args:
        backbone: a timm VisionTransformer.
        rank: r, at least 1.
        alpha: above 0; rank 8 and alpha 8 for RoBERTa base in the paper's Table 9.
        layers: of each block's attention: "qkv", "proj" or "qkv+proj".
    """

    part = "lora"
    on_blocks = True

    def __init__(
        self,
        backbone: Any,
        *,
        rank: int = 8,
        alpha: float = 8.0,
        layers: Literal["qkv", "proj", "qkv+proj"] = "qkv",
    ) -> None:
        super().__init__(backbone)
        if rank < 1:
            raise ValueError(f"rank={rank} of tuning 'lora'; a whole number of at least 1 is expected")
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha={alpha} of tuning 'lora'; a number above 0 is expected")
        self.blocks = nn.ModuleList()
        for block in backbone.blocks:
            attention: Any = getattr(block, "attn", None)
            found: dict[str, Any] = {name: getattr(attention, name, None) for name in layers.split("+")}
            if not all(isinstance(layer, nn.Linear) for layer in found.values()):
                raise ValueError(
                    f"tuning='lora' needs blocks whose attention has linear layers qkv and proj, not "
                    f"{type(block).__name__}: vpt, bitfit, linear and full suit it"
                )
            changes = {name: LowRank(layer, rank, alpha / rank) for name, layer in found.items()}
            for name, layer in found.items():
                # A method, not a closure: a deep copy of the encoder then has the copy's A and B.
                layer.register_forward_hook(changes[name].added)
            self.blocks.append(nn.ModuleDict(changes))

    @torch.no_grad()
    def fold(self, backbone: Any) -> None:
        """Add the changes to the weights of `backbone` and set B to 0: the same function, now without LoRA."""
        for block, changes in zip(backbone.blocks, self.blocks, strict=True):
            assert isinstance(changes, nn.ModuleDict)
            for name, change in changes.items():
                assert isinstance(change, LowRank)
                getattr(block.attn, name).weight += change.scale * change.b @ change.a
                change.b.zero_()


class LowRank(nn.Module):
    """x -> scale * B A x, added to what `layer` gives.

    >>> layer = nn.Linear(4, 6)
    >>> change = LowRank(layer, 2, 1.0)
    >>> change.a.shape, change.b.shape, change(torch.ones(1, 4)).abs().sum().item()
    (torch.Size([2, 4]), torch.Size([6, 2]), 0.0)
    """

    def __init__(self, layer: Any, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.a = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(rank, layer.in_features), a=math.sqrt(5)))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.scale * functional.linear(x, self.a), self.b)

    def added(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """A forward hook."""
        return output + self(inputs[0])
