"""A script that compiles the kernels without a GPU: the interpreter also runs code that the compiler refuses."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from proxymetric.ops.triton import kernels

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"labels": "*i64", "query_labels": "*i32"} | dict.fromkeys(("W", "rows", "scaled", "values"), "*bf16")
POINTERS |= dict.fromkeys(("classes", "sorted_labels", "order", "columns"), "*i64")
POINTERS |= dict.fromkeys(("queries", "vectors", "grads"), "*bf16") | {"labels32": "*i32"}
NUMBERS = dict.fromkeys(("n", "m", "C", "B", "D", "R", "blocks", "tiles", "parts"), "i32") | {"size": "i64"}
NUMBERS |= dict.fromkeys(("slope", "offset", "inverse_gamma", "min_length", "min_weight_sum"), "fp32")
NUMBERS |= dict.fromkeys(("lift", "gradient_factor", "value_factor"), "fp32")


def compiled(kernel: Any, warps: int, types: dict[str, str] | None = None, **constants: Any) -> Any:
    names, pointers = kernel.arg_names, POINTERS | (types or {})
    kinds = {name: NUMBERS.get(name) or pointers.get(name, "*fp32") for name in names if name not in constants}
    signature = {name: kinds.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    assert made.asm["cubin"], kernel
    if kernel is not kernels.fused_row_gradients:
        assert "dot" not in made.asm["ttgir"], (
            f"{kernel}: the compiler turned sums into a matrix product, which rounds float32"
        )
    return made


def orders(made: Any) -> set[str]:
    """The layouts of sums over the rows of a column: they determine the order in which threads add the rows."""
    text = made.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.+)$", text, re.M))
    reduced = r'"tt.reduce"\(\S+\) <\{axis = 0 : i32\}> \(\{(.*?)\}\) : \(tensor<(\d+)x\w+, (#\w+)>'
    return {layouts[at] for body, rows, at in re.findall(reduced, text, re.S) if "addf" in body and rows != "1"}


def check_orders() -> None:
    """Forward and backward pass add the rows of a column in one order: a large scale multiplies the last bit."""
    for per_class, tile in ((3, 4), (10, 16), (20, 32)):
        for block in (8, 32, 4096 // tile):
            how = {
                "K": per_class,
                "KIND": 0,
                "LABEL_STRIDE": per_class,
                "NORMALISE": True,
                "TILE": tile,
            }
            how |= {"EDGES": -1, "NO_TAIL": block > 8, "SCALED": False}
            forward = compiled(kernels.log_sums, 4, **how, FIRST=False, BLOCK=block)
            backward = compiled(kernels.shares, 4, **how, FOLD=True, BLOCK=block)
            assert len(orders(forward) | orders(backward)) == 1, (per_class, block, orders(forward), orders(backward))
            both = compiled(kernels.log_means, 8, **how, FOLD=True, NEEDS_GRAD=True, WHOLE_BATCH=False, BLOCK=2 * block)
            assert len(orders(both)) == 1, (per_class, block, orders(both))
            # A thread must round the numbers that it adds exactly as other threads round theirs.
            ptx = forward.asm["ptx"]
            sent = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", ptx))
            assert sent or block > 8, "threads no longer exchange sums: test another size"
            assert not any(into in sent for into in re.findall(r"fma\.rn\.f32\s+.*, (%\w+);", ptx))


def main() -> None:
    one = {"K": 1, "KIND": 0, "LABEL_STRIDE": 1}
    ten = {"K": 10, "KIND": 0, "LABEL_STRIDE": 10}
    plain = {"NORMALISE": True, "EDGES": -1, "NO_TAIL": True, "SCALED": False}
    weighted = {"NORMALISE": False, "EDGES": 2, "NO_TAIL": False, "SCALED": False}
    scaled = plain | {"SCALED": True, "types": {"S": "*fp16"}}
    for fold in (True, False):
        compiled(kernels.log_means, 8, **one, **plain, FOLD=fold, NEEDS_GRAD=True, WHOLE_BATCH=True, TILE=1, BLOCK=4096)
        compiled(kernels.shares, 8, **one, **plain, FOLD=fold, TILE=8, BLOCK=1024)
    compiled(
        kernels.log_means, 8, **one, **weighted, FOLD=True, NEEDS_GRAD=False, WHOLE_BATCH=False, TILE=2, BLOCK=4096
    )
    compiled(kernels.log_sums, 4, **one, **weighted, FIRST=True, TILE=32, BLOCK=128)
    compiled(kernels.log_sums, 4, **one, **scaled, FIRST=False, TILE=32, BLOCK=128)
    compiled(kernels.shares, 8, **one, **scaled, FOLD=True, TILE=8, BLOCK=1024)
    compiled(kernels.log_means, 4, **one, **scaled, FOLD=True, NEEDS_GRAD=True, WHOLE_BATCH=True, TILE=1, BLOCK=4096)
    compiled(kernels.unit_rows, 4, types={"units": "*fp16"}, TILE=4, BLOCK=512)
    for edges in (-1, 2):
        compiled(kernels.finish_sums, 4, EDGES=edges, PART_BLOCK=64, BLOCK=32)
    compiled(kernels.scale_queries, 4, types={"grads": "*fp32"}, TILE=4, BLOCK=512)
    for kind, how in ((0, plain), (1, plain), (2, weighted)):
        each = ten | how | {"KIND": kind, "FOLD": kind < 2}
        compiled(kernels.log_means, 8, **each, NEEDS_GRAD=True, WHOLE_BATCH=False, TILE=16, BLOCK=512)
    compiled(kernels.log_sums, 4, **ten, **plain, FIRST=True, TILE=16, BLOCK=256)
    compiled(kernels.shares, 8, **ten, **weighted, FOLD=True, TILE=16, BLOCK=512)
    for normal in (True, False):
        for fold in (True, False):
            how = {"NORMALISE": normal, "FOLD": fold, "SCALE_ROWS": not fold, "MULTIPLY": fold}
            compiled(kernels.row_gradients, 4, **how, NEEDS_GRAD=True, TILE=4, BLOCK=512)
    for each, many in ((one | plain, 3), (ten | weighted, 1)):
        how = {name: each[name] for name in ("K", "KIND", "NORMALISE", "EDGES")}
        how |= {"COLUMNS": many, "SEARCH_STEPS": 13, "BLOCK": 64}
        for padded, group in ((1, 16),) if each["K"] == 1 else ((16, 1), (16, 4)):
            tile = {"PADDED_K": padded, "QUERY_GROUP": group}
            compiled(kernels.positive_means, 4, **how, **tile, NEEDS_GRAD=True)
            compiled(kernels.positive_sums, 4, **how, **tile)
            gradients = {"NEEDS_QUERIES": True, "NEEDS_ROWS": True, "types": {"grads": "*fp32", "in_rows": "*bf16"}}
            compiled(kernels.positive_gradients, 4, **how, **tile, **gradients)
    for divided in (True, False):
        compiled(kernels.add_gradients, 4, DIVIDE_POSITIVE=divided, DIVIDE_NEGATIVE=not divided, K=10, BLOCK=1024)
        compiled(kernels.totals, 16, DIVIDE_POSITIVE=divided, DIVIDE_NEGATIVE=not divided, BLOCK=8192)
        compiled(kernels.rescale, 4, DIVIDED=divided, BLOCK=4096)
    compiled(kernels.partial_totals, 8, PART=2**14, BLOCK=4096)
    compiled(kernels.sort_labels, 4, TILE=32, BLOCK=128)
    compiled(kernels.norms_and_columns, 4, LABEL_STRIDE=10, SEARCH_STEPS=13, TILE=4, DIM_BLOCK=512, BLOCK=1024)
    compiled(
        kernels.fused_row_gradients,
        4,
        MULTIPLY=True,
        NORMALISE=True,
        IN_FLOAT32=False,
        TILE=128,
        BLOCK=128,
        QUERY_BLOCK=64,
    )
    compiled(kernels.row_norms, 4, TILE=4, BLOCK=512)
    compiled(kernels.find_columns, 4, LABEL_STRIDE=1, SEARCH_STEPS=13, BLOCK=1024)


if __name__ == "__main__":
    main()
    check_orders()
