"""The batch itself as references: every sample is compared with every other sample."""

from __future__ import annotations

from proxymetric.core.pieces import Commit, Context, Energy, References, Source, nothing


class InBatch(Source):
    """The references are the embeddings of the batch, with gradient; a sample is not a pair with itself."""

    def forward(self, ctx: Context, energy: Energy) -> tuple[References, Commit]:
        return References(ctx.embeddings, ctx.batch.labels, are_queries=True), nothing
