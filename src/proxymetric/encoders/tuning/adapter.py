"""Adapters (AdaptFormer, Chen et al. 2022): a narrow MLP in parallel to, or after, the MLP of each block."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from proxymetric.encoders.tuning.base import Tuning, block_count


class Adapter(Tuning):
    """Adds a trained bottleneck of d neurons to the frozen MLP of each block.

    ``a(x) = scale * W_up relu(W_down x)``. In parallel, x' = x + mlp(x) + a(x); in sequence, x' = x + mlp(x) +
    a(mlp(x)). mlp(x) includes the block's norm.

    The attention is the ViT's own, with all its heads and its qkv bias; the baseline released with VPTSP lacks that
    bias. The released code uses norm="post", scale 1 and all blocks. Table 1 of VPTSP does not state the norm, but its
    parameter counts agree with norm="none". With norm="post", the input of the LayerNorm starts at zero, so the first
    steps change the tokens by as much as their own length at any learning rate. The default is therefore "none".

    Args:
        backbone: a timm VisionTransformer with plain blocks.
        bottleneck: d, at least 1; 256 in Table 1 of VPTSP, 64 in AdaptFormer and by default.
        blocks: how many of the last blocks get an adapter, as in the code released with VPTSP (7 and 1 in its Table 1);
            None: all. Parameters are named by the number of their block.
        position: "parallel" (to the MLP) or "sequential" (after it).
        norm: where the adapter has a LayerNorm: before the bottleneck ("pre"), after it ("post") or nowhere ("none").
        init: how the weights start: "lora" (W_down as in nn.Linear, W_up = 0, so the backbone is unchanged at first),
            "bert" (normal with standard deviation 0.02), "uniform" (in +-1 / sqrt(inputs)) or "kaiming" (in
            +-sqrt(6 / inputs)). All biases start at 0.
        scale: above 0; 0.1 in AdaptFormer, 1 in VPTSP and by default.

    Raises:
        ValueError: an argument is out of range, or the blocks are not attention followed by an MLP.
    """

    part = "adapters"
    on_blocks = True

    def __init__(
        self,
        backbone: Any,
        *,
        bottleneck: int = 64,
        blocks: int | None = None,
        position: Literal["parallel", "sequential"] = "parallel",
        norm: Literal["none", "pre", "post"] = "none",
        init: Literal["lora", "bert", "uniform", "kaiming"] = "lora",
        scale: float = 1.0,
    ) -> None:
        from timm.models.vision_transformer import Block

        super().__init__(backbone)
        blocks = block_count("blocks", blocks, len(backbone.blocks))
        if bottleneck < 1:
            raise ValueError(f"tuning.bottleneck: got {bottleneck}, expected a whole number of at least 1")
        if not 0 < scale < math.inf:
            raise ValueError(f"tuning.scale: got {scale}, expected a number above 0")
        kind = type(backbone.blocks[0])
        if kind.forward is not Block.forward:
            raise ValueError(
                f"tuning: got 'adapter' with blocks of type {kind.__name__}, expected blocks of attention followed by "
                "an MLP; such a backbone can use vpt, bitfit, linear or full"
            )
        width = backbone.embed_dim
        depth = len(backbone.blocks)
        self.blocks = nn.ModuleDict(
            {str(i): Bottleneck(width, bottleneck, position, norm, init, scale) for i in range(depth - blocks, depth)}
        )

    def beside(self, block: int) -> nn.Module | None:
        number = str(block)
        if number not in self.blocks:
            return None
        return self.blocks[number]


class Bottleneck(nn.Module):
    """The adapter of one block: `(x, mlp) -> mlp + a(x)`, or `mlp + a(mlp)` in sequence.

    Example:
        >>> x, mlp = torch.ones(1, 2, 4), torch.zeros(1, 2, 4)
        >>> torch.equal(Bottleneck(4, 2, "parallel", "none", "lora", 1.0)(x, mlp), mlp)
        True
    """

    def __init__(self, width: int, bottleneck: int, position: str, norm: str, init: str, scale: float) -> None:
        super().__init__()
        self.position, self.scale = position, scale
        self.pre = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
        self.down = nn.Linear(width, bottleneck)
        self.up = nn.Linear(bottleneck, width)
        self.post = nn.LayerNorm(width) if norm == "post" else nn.Identity()
        for layer in (self.down, self.up):
            nn.init.zeros_(layer.bias)
            if init == "bert":
                nn.init.normal_(layer.weight, std=0.02)
            elif init == "kaiming":
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        if init == "lora":
            nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor, mlp: Tensor) -> Tensor:
        source = x if self.position == "parallel" else mlp
        change = self.up(torch.relu(self.down(self.pre(source))))
        return mlp + self.post(self.scale * change if self.scale != 1 else change)
