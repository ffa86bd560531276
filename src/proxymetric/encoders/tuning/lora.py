"""LoRA (Hu et al. 2021): a low-rank change of the attention's weights, which can be merged into them after training."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from proxymetric.encoders.tuning.base import Tuning


class LoRA(Tuning):
    """Trains A (rank, inputs) and B (outputs, rank) of a change B A to the frozen weight W of a layer.

    ``y = W x + alpha / rank * B (A x)`` (Eq. 3). B starts at 0, so the layer is unchanged at first. A starts like the
    weights of an nn.Linear, as in the paper's code (the paper says Gaussian). Queries, keys and values share one A.

    Args:
        backbone: a timm VisionTransformer.
        rank: r, at least 1.
        alpha: above 0; rank 8 and alpha 8 for RoBERTa base in the paper's Table 9.
        layers: the layers of each block's attention that are changed: "qkv", "proj" or "qkv+proj".

    Raises:
        ValueError: an argument is out of range, or the attention has no such linear layers.
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
            raise ValueError(f"tuning.rank: got {rank}, expected a whole number of at least 1")
        if not 0 < alpha < math.inf:
            raise ValueError(f"tuning.alpha: got {alpha}, expected a number above 0")
        self.blocks = nn.ModuleList()
        for block in backbone.blocks:
            attention: Any = getattr(block, "attn", None)
            linears: dict[str, Any] = {name: getattr(attention, name, None) for name in layers.split("+")}
            if not all(isinstance(layer, nn.Linear) for layer in linears.values()):
                raise ValueError(
                    f"tuning: got 'lora' with blocks of type {type(block).__name__}, expected an attention with linear "
                    "layers qkv and proj; such a backbone can use vpt, bitfit, linear or full"
                )
            changes = {name: LowRank(layer, rank, alpha / rank) for name, layer in linears.items()}
            for name, layer in linears.items():
                # The hook is a method, so a deep copy of the encoder uses the copy's A and B.
                layer.register_forward_hook(changes[name].hook)
            self.blocks.append(nn.ModuleDict(changes))

    @torch.no_grad()
    def fold(self, backbone: Any) -> None:
        """Add the changes to the weights of `backbone` and set B to 0; the encoder computes the same function."""
        for block, changes in zip(backbone.blocks, self.blocks, strict=True):
            assert isinstance(changes, nn.ModuleDict)
            for name, change in changes.items():
                assert isinstance(change, LowRank)
                getattr(block.attn, name).weight += change.scale * change.b @ change.a
                change.b.zero_()


class LowRank(nn.Module):
    """The change x -> scale * B A x to the output of one linear layer.

    Example:
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

    def hook(self, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        """Add the change to the output of `layer`: a forward hook."""
        return output + self(inputs[0])
