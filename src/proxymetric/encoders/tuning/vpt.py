"""Deep visual prompt tuning (Jia et al. 2022): each block gets its own trained tokens before the others."""

from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.encoders.tuning.base import Tuning, block_count


class VPT(Tuning):
    """Puts trained prompts t_1 .. t_n before the class token of block i and drops their outputs after the block.

    ``[ ], x'_cls, x'_1, .. = BLK_i(t_1 .. t_n, x_cls, x_1, ..)``, ``n = max(prompts - step i, 0)`` for i < depth
    (Eq. 1 of VPTSP, Ren et al. 2024; the decreasing step of its Table 9). Prompts have no position embedding and are
    inserted after a ViT's `norm_pre`. The prompts of a block start as part of a xavier-normal tensor (1, prompts, D),
    with standard deviation sqrt(2 / ((prompts + 1) D)). Blocks with n = 0 have no parameters.

    Args:
        backbone: a timm VisionTransformer.
        prompts: number of prompts of the first block, at least 0; 10 (CUB), 80 (Cars) and 90 (SOP, In-Shop) for ViT-S.
        depth: how many of the first blocks have prompts; None: all.
        step: how many fewer prompts each block has than the block before it, at least 0.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> vit = SimpleNamespace(blocks=range(12), embed_dim=384, cls_token=torch.zeros(1))
        >>> sum(p.numel() for p in VPT(vit).parameters())  # 12 x 10 x 384
        46080
    """

    part = "prompts"
    on_blocks = True

    def __init__(self, backbone: Any, *, prompts: int = 10, depth: int | None = None, step: int = 0) -> None:
        super().__init__(backbone)
        depth = block_count("depth", depth, len(backbone.blocks))
        for name, value in (("prompts", prompts), ("step", step)):
            if value < 0:
                raise ValueError(f"tuning.{name}: got {value}, expected a whole number of at least 0")
        counts = [max(prompts - step * i, 0) for i in range(depth)]
        self.tokens = nn.ParameterList(
            nn.init.xavier_normal_(torch.empty(1, prompts, backbone.embed_dim))[0, :n].clone() for n in counts if n
        )

    def prompts(self, block: int) -> Tensor | None:
        return self.tokens[block] if block < len(self.tokens) else None
