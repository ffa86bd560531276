"""Triton kernels between the products of `fused`: from the similarities of a chunk to sums, shares and gradients.

A chunk is n columns of K rows each against B queries; its similarities S lie row after row, (n K, B), as the product
of rows and queries gave them: lengths are folded in here. A program sees a tile of `TILE` rows: several columns where a
column is one row, else the K rows of one column, padded to a power of two. All numbers are float32 but the shares,
which are of the products' type. Signatures have tensors first, then numbers, then constants. This package imports
triton: only `launches` imports it, when it is about to launch. Triton reads annotations as code, so there are none but
its own.
"""

from proxymetric.ops.triton.kernels.batch_classes import arrange, find, measure_and_find, own_means, place
from proxymetric.ops.triton.kernels.rows import add, back_rows, finish, measure, rescale
from proxymetric.ops.triton.kernels.sums import log_means, log_sums, shares
from proxymetric.ops.triton.kernels.totals import total, total_parts

__all__ = [
    "add", "arrange", "back_rows", "find", "finish", "log_means", "log_sums", "measure", "measure_and_find",
    "own_means", "place", "rescale", "shares", "total", "total_parts",
]  # fmt: skip
