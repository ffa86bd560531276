"""Adapters (AdaptFormer, Chen et al. 2022): a narrow MLP beside or behind that of each block."""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from proxymetric.encoders.tuning.base import Tuning, upto


class Adapter(Tuning):
    """A bottleneck of d neurons changes what each block's MLP adds to the tokens; the MLP itself is frozen.

    ``a(x) = scale * W_up relu(W_down x)``; x' = x + mlp(x) + a(x), in parallel, or x + mlp(x) + a(mlp(x)), in sequence,
    with mlp(x) behind the block's own norm. Attention is the ViT's own, with its heads and its qkv bias, which the
    baseline released with VPTSP loses. That code has norm="post", scale 1 and all blocks; its Table 1 does not say, and
    counts as norm="none" does. With "post" an adapter's first steps move tokens by their whole length however small
    the rate, because what is normalised starts at zero: hence "none" here.

    Args:
        backbone: a timm VisionTransformer of plain blocks.
        bottleneck: d; 256 in Table 1 of VPTSP, 64 in AdaptFormer and here.
        blocks: how many of the last blocks have one, as in the code released with VPTSP (7 and 1 in its Table 1);
            None: all. Parameters are named by the number of their block.
        position: "parallel" (to the MLP) or "sequential" (behind it).
        norm: a LayerNorm of its own before ("pre") or behind the bottleneck ("post"), or "none".
        init: "lora" (W_down as nn.Linear draws it, W_up = 0: the backbone is unchanged at first), "bert" (normal of
            standard deviation 0.02), "uniform" (in +-1 / sqrt(inputs)) or "kaiming" (in +-sqrt(6 / inputs)); all biases
            start at 0.
        scale: s above 0; 0.1 in AdaptFormer, 1 in VPTSP and here.
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
        blocks = upto("blocks", blocks, len(backbone.blocks))
        if bottleneck < 1:
            raise ValueError(f"bottleneck={bottleneck} of tuning 'adapter'; a whole number of at least 1 is expected")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale={scale} of tuning 'adapter'; a number above 0 is expected")
        kind = type(backbone.blocks[0])
        if kind.forward is not Block.forward:
            raise ValueError(
                f"tuning='adapter' needs blocks of attention, then MLP; this backbone is made of {kind.__name__}: "
                "vpt, bitfit, linear and full suit it"
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
    """`(x, mlp) -> mlp + a(x)` or `mlp + a(mlp)`, of one block.

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
        inner = x if self.position == "parallel" else mlp
        change = self.up(torch.relu(self.down(self.pre(inner))))
        return mlp + self.post(self.scale * change if self.scale != 1 else change)
