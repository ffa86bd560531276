"""Compile the kernels for a GPU that need not be there: the interpreter runs what a compiler refuses. A script."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from proxymetric.ops import kernels

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {"labels": "*i64", "of_queries": "*i32", "W": "*bf16", "rows": "*bf16", "scaled": "*bf16", "values": "*bf16"}
POINTERS |= dict.fromkeys(("classes", "present", "columns"), "*i64")
NUMBERS = {"n": "i32", "C": "i32", "B": "i32", "D": "i32", "size": "i64"} | dict.fromkeys(
    ("slope", "offset", "gamma", "least", "lift"), "fp32"
)


def compiled(kernel: Any, warps: int, **constants: Any) -> None:
    names = kernel.arg_names
    kinds = {name: NUMBERS.get(name) or POINTERS.get(name, "*fp32") for name in names if name not in constants}
    signature = {name: kinds.get(name, "constexpr") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    made = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    assert made.asm["cubin"], kernel


def main() -> None:
    one, ten = {"K": 1, "KIND": 0, "OWN": False, "STRIDE": 1}, {"K": 10, "KIND": 0, "OWN": True, "STRIDE": 10}
    plain, weighted = {"NORMAL": True, "EDGES": -1}, {"NORMAL": False, "EDGES": 2}
    compiled(kernels.log_means, 8, **one, **plain, WANTED=True, ONE=True, TILE=2, BLOCK=4096)
    compiled(kernels.log_means, 8, **one, **weighted, WANTED=False, ONE=False, TILE=2, BLOCK=4096)
    compiled(kernels.log_sums, 4, **one, **weighted, TILE=32, BLOCK=128)
    compiled(kernels.shares, 8, **one, **plain, TILE=8, BLOCK=1024)
    for kind, how in ((0, plain), (1, plain), (2, weighted)):
        compiled(kernels.log_means, 8, **(ten | {"KIND": kind}), **how, WANTED=True, ONE=False, TILE=16, BLOCK=512)
    compiled(kernels.log_sums, 4, **ten, **plain, TILE=16, BLOCK=256)
    compiled(kernels.shares, 8, **ten, **weighted, TILE=16, BLOCK=512)
    for normal in (True, False):
        compiled(kernels.finish, 4, SCALED=True, WANTED=True, NORMAL=normal, TILE=4, BLOCK=512)
    compiled(kernels.find, 4, STRIDE=1, STEPS=13, BLOCK=1024)
    compiled(kernels.rescale, 4, BLOCK=4096)


if __name__ == "__main__":
    main()
