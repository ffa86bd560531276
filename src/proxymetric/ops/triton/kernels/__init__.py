"""The Triton kernels between the matrix products: from the similarities of a chunk to sums, shares and gradients.

A chunk is n columns of K rows each against B queries. Its similarities S (n K, B) are the product of rows and queries;
the kernels apply the row lengths, unless the rows were divided by them before the product (SCALED). A program handles a
tile of `TILE` rows: several columns if a column is one row, otherwise the K rows of one column, padded to a power of
two. All numbers are float32 except the shares, which have the type of the products, and SCALED similarities, which are
float16. Signatures list tensors first, then numbers, then constants. This package imports triton, so only `launch`
imports it, when the first kernel starts. Triton evaluates annotations, so the only annotations are its own.
"""

from proxymetric.ops.triton.kernels.batch_classes import (
    find_columns,
    norms_and_columns,
    positive_means,
    sort_labels,
)
from proxymetric.ops.triton.kernels.class_sums import (
    finish_sums,
    positive_gradients,
    positive_sums,
    scale_queries,
)
from proxymetric.ops.triton.kernels.cross_entropy import cross_entropy, unit_gradients
from proxymetric.ops.triton.kernels.rows import (
    add_gradients,
    fused_row_gradients,
    radial_gradients,
    rescale,
    row_gradients,
    row_norms,
    unit_rows,
)
from proxymetric.ops.triton.kernels.sums import log_means, log_sums, shares
from proxymetric.ops.triton.kernels.totals import partial_totals, totals

__all__ = [
    "add_gradients",
    "cross_entropy",
    "find_columns",
    "finish_sums",
    "fused_row_gradients",
    "log_means",
    "log_sums",
    "norms_and_columns",
    "partial_totals",
    "positive_gradients",
    "positive_means",
    "positive_sums",
    "radial_gradients",
    "rescale",
    "row_gradients",
    "row_norms",
    "scale_queries",
    "shares",
    "sort_labels",
    "totals",
    "unit_gradients",
    "unit_rows",
]
