"""Compile the kernels for a GPU that need not be there: the interpreter runs what a compiler refuses. A script."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from proxymetric.ops.triton import kernels

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"labels": "*i64", "of_queries": "*i32", "W": "*bf16", "rows": "*bf16", "scaled": "*bf16", "values": "*bf16"}
POINTERS |= dict.fromkeys(("classes", "present", "order", "columns"), "*i64")
POINTERS |= dict.fromkeys(("queries", "vectors", "grads"), "*bf16") | {"narrow": "*i32"}
NUMBERS = dict.fromkeys(("n", "m", "C", "B", "D", "R", "blocks", "tiles"), "i32") | {"size": "i64"}
NUMBERS |= dict.fromkeys(("slope", "offset", "steep", "least", "lift", "times", "over"), "fp32")


def compiled(kernel: Any, warps: int, **constants: Any) -> Any:
    names = kernel.arg_names
    kinds = {name: NUMBERS.get(name) or POINTERS.get(name, "*fp32") for name in names if name not in constants}
    signature = {name: kinds.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    assert made.asm["cubin"], kernel
    if kernel is not kernels.back_rows:
        assert "dot" not in made.asm["ttgir"], f"{kernel}: sums were made a product of matrices, in less than float32"
    return made


def orders(made: Any) -> set[str]:
    """Which threads hold what where rows of a column are summed up, and so in which order they are."""
    text = made.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.+)$", text, re.M))
    reduced = r'"tt.reduce"\(\S+\) <\{axis = 0 : i32\}> \(\{(.*?)\}\) : \(tensor<(\d+)x\w+, (#\w+)>'
    return {layouts[at] for body, rows, at in re.findall(reduced, text, re.S) if "addf" in body and rows != "1"}


def alike() -> None:
    """The way there and back sum the rows of a column up alike: to the last bit, which a large scale multiplies."""
    for per_class, tile in ((3, 4), (10, 16), (20, 32)):
        for block in (8, 32, 4096 // tile):
            how = {"K": per_class, "KIND": 0, "OWN": False, "STRIDE": per_class, "NORMAL": True, "TILE": tile}
            how |= {"EDGES": -1, "FULL": block > 8}
            there = compiled(kernels.log_sums, 4, **how, BLOCK=block)
            back = compiled(kernels.shares, 4, **how, FOLD=True, BLOCK=block)
            assert len(orders(there) | orders(back)) == 1, (per_class, block, orders(there), orders(back))
            both = compiled(kernels.log_means, 8, **how, FOLD=True, WANTED=True, ONE=False, BLOCK=2 * block)
            assert len(orders(both)) == 1, (per_class, block, orders(both))
            # What a thread adds to the numbers of others must be rounded as they are.
            ptx = there.asm["ptx"]
            sent = set(re.findall(r"shfl\.sync\.bfly\.b32\s+(%\w+)", ptx))
            assert sent or block > 8, "threads no longer add up: look at another size"
            assert not any(into in sent for into in re.findall(r"fma\.rn\.f32\s+.*, (%\w+);", ptx))


def main() -> None:
    one, ten = {"K": 1, "KIND": 0, "OWN": False, "STRIDE": 1}, {"K": 10, "KIND": 0, "OWN": True, "STRIDE": 10}
    plain, weighted = {"NORMAL": True, "EDGES": -1, "FULL": True}, {"NORMAL": False, "EDGES": 2, "FULL": False}
    for fold in (True, False):
        compiled(kernels.log_means, 8, **one, **plain, FOLD=fold, WANTED=True, ONE=True, TILE=1, BLOCK=4096)
        compiled(kernels.shares, 8, **one, **plain, FOLD=fold, TILE=8, BLOCK=1024)
    compiled(kernels.log_means, 8, **one, **weighted, FOLD=True, WANTED=False, ONE=False, TILE=2, BLOCK=4096)
    compiled(kernels.log_sums, 4, **one, **weighted, TILE=32, BLOCK=128)
    for kind, how in ((0, plain), (1, plain), (2, weighted)):
        each = ten | how | {"KIND": kind, "FOLD": kind < 2}
        compiled(kernels.log_means, 8, **each, WANTED=True, ONE=False, TILE=16, BLOCK=512)
    compiled(kernels.log_sums, 4, **ten, **plain, TILE=16, BLOCK=256)
    compiled(kernels.shares, 8, **ten, **weighted, FOLD=True, TILE=16, BLOCK=512)
    for normal in (True, False):
        for fold in (True, False):
            how = {"NORMAL": normal, "FOLD": fold, "SCALED": not fold, "BY": fold}
            compiled(kernels.finish, 4, **how, WANTED=True, TILE=4, BLOCK=512)
    for each, many in ((one | plain, 3), (ten | weighted, 1)):
        how = {name: each[name] for name in ("K", "KIND", "NORMAL", "EDGES")} | {"M": many, "WANTED": True, "STEPS": 13}
        for padded, group in ((1, 16),) if each["K"] == 1 else ((16, 1), (16, 4)):
            compiled(kernels.own_means, 4, **how, KP=padded, GROUP=group, BLOCK=64)
    for divided in (True, False):
        compiled(kernels.add, 4, UP=divided, DOWN=not divided, K=10, BLOCK=1024)
        compiled(kernels.total, 16, UP=divided, DOWN=not divided, BLOCK=8192)
        compiled(kernels.rescale, 4, DIVIDED=divided, BLOCK=4096)
    compiled(kernels.total_parts, 8, MANY=2**14, BLOCK=4096)
    compiled(kernels.arrange, 4, TILE=32, BLOCK=128)
    compiled(kernels.measure_and_find, 4, STRIDE=10, STEPS=13, TILE=4, DIMS=512, BLOCK=1024)
    compiled(kernels.back_rows, 4, BY=True, NORMAL=True, WIDE=False, TILE=128, BLOCK=128, DEPTH=64)
    compiled(kernels.measure, 4, TILE=4, BLOCK=512)
    compiled(kernels.place, 4, ABSENT=-2, K=10, BLOCK=1024)
    compiled(kernels.find, 4, STRIDE=1, STEPS=13, BLOCK=1024)


if __name__ == "__main__":
    main()
    alike()
