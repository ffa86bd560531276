"""Visual prompt tuning (Jia et al. 2022), deep: learned tokens before the others, fresh ones at each block."""

from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.encoders.tuning.base import Tuning, upto


class VPT(Tuning):
    """Prompts t_1 .. t_n of block i stand before the class token, and are dropped behind the block.

    ``[ ], x'_cls, x'_1, .. = BLK_i(t_1 .. t_n, x_cls, x_1, ..)``, ``n = max(prompts - step i, 0)`` for i < depth
    (Eq. 1 of VPTSP, Ren et al. 2024; the decreasing step of its Table 9). They have no position embedding and come
    behind a ViT's `norm_pre`. Drawn xavier-normal as one tensor (1, prompts, D), so of standard deviation
    sqrt(2 / ((prompts + 1) D)); prompts that no block carries are not made.

    Args:
        backbone: a timm VisionTransformer.
        prompts: N of the first block, at least 0; 10 (CUB), 80 (Cars) and 90 (SOP, In-Shop) for ViT-S.
        depth: how many of the first blocks carry prompts; None: all.
        step: how many fewer from block to block.

    >>> from types import SimpleNamespace
    >>> vit = SimpleNamespace(blocks=range(12), embed_dim=384, cls_token=torch.zeros(1))
    >>> sum(p.numel() for p in VPT(vit).parameters())  # 12 x 10 x 384
    46080
    """

    part = "prompts"
    on_blocks = True

    def __init__(self, backbone: Any, *, prompts: int = 10, depth: int | None = None, step: int = 0) -> None:
        super().__init__(backbone)
        depth = upto("depth", depth, len(backbone.blocks))
        for name, value in (("prompts", prompts), ("step", step)):
            if value < 0:
                raise ValueError(f"{name}={value} of tuning 'vpt'; a whole number of at least 0 is expected")
        counts = [max(prompts - step * i, 0) for i in range(depth)]
        self.tokens = nn.ParameterList(
            nn.init.xavier_normal_(torch.empty(1, prompts, backbone.embed_dim))[0, :n].clone() for n in counts if n
        )

    def prompts(self, block: int) -> Tensor | None:
        return self.tokens[block] if block < len(self.tokens) else None
