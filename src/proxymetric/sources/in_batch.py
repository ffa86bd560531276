"""The batch itself as references: every sample is compared with every other one."""

from __future__ import annotations

import torch

from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing


class InBatch(Source):
    """References are the batch's own embeddings, with gradient; a sample is no pair with itself."""

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        itself = torch.eye(len(ctx.embeddings), dtype=torch.bool, device=ctx.embeddings.device)
        return References(ctx.embeddings, ctx.batch.labels, same=itself), nothing
