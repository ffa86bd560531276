"""Bytes that a proxy loss takes on the device that holds most classes, part by part."""

from __future__ import annotations

from proxymetric.planning.workload import BYTES, OPTIMIZERS, Workload

FLOAT = 4
"""bytes of an embedding's number, of a similarity and of a sum, whatever type proxies have"""
CHUNK = 2**26
"""similarities of one chunk on an accelerator"""
CPU_CHUNK = 2**20
"""numbers of one chunk on a processor: its rows, and three matrices beside the batch"""
LEAST_ROWS = 256
"""proxies of one chunk, at least"""
OF_A_ROW = 9
"""numbers of each proxy that a reduction has: its label and place, its log-sums and mean weights"""


def memory_of(work: Workload) -> dict[str, int]:
    """Bytes of each part on the fullest device, at the peak of a step; the encoder is none of them.

    - proxies: (R, D), R = ceil(C / devices) K
    - gradient: (R, D); of classes that are touched alone, their rows taken out, with gradient and state
    - optimizer state: 2, 1 or 1/D numbers for each of R D
    - embeddings: (B / devices, D) and their gradient
    - gathered embeddings: (B, D) and their gradient, where there are several devices
    - similarities: what the implementation holds beside all that, see `similarities`

    >>> parts = memory_of(Workload(classes=5_000_000, dim=512, batch=4096, devices=8))
    >>> parts["proxies"], parts["optimizer state"], parts["gathered embeddings"]
    (1280000000, 2560000000, 16777216)
    """
    numbers, size = work.rows * work.dim, BYTES[work.dtype]
    own = -(-work.batch // work.devices)
    steps = 0 if work.touched == "all" else 8 * work.rows  # a row that moves at times counts its own
    return {
        "proxies": numbers * size,
        "gradient": _gradient(work),
        "optimizer state": _state(work, work.rows) + steps,
        "embeddings": 2 * own * work.dim * FLOAT,
        "gathered embeddings": 2 * work.batch * work.dim * FLOAT if work.devices > 1 else 0,
        "similarities": similarities(work),
    }


def state_numbers(work: Workload) -> float:
    """Numbers of optimiser state for each number of a proxy.

    >>> state_numbers(Workload(10, 64, 4, optimizer="rowwise-adagrad"))
    0.015625
    """
    numbers = OPTIMIZERS[work.optimizer]
    return 1 / work.dim if numbers is None else numbers


def _state(work: Workload, rows: int) -> int:
    numbers = OPTIMIZERS[work.optimizer]
    return rows * (1 if numbers is None else numbers * work.dim) * BYTES[work.dtype]


def _gradient(work: Workload) -> int:
    size = work.compared * work.dim * BYTES[work.dtype]
    return size if work.touched == "all" else 2 * size + _state(work, work.compared)


def chunk(work: Workload) -> int:
    """Proxies that are compared at once where not all are: whole classes, of so many that products are large.

    >>> chunk(Workload(classes=10**6, dim=64, batch=4096)), chunk(Workload(classes=100, dim=64, batch=4096))
    (16384, 100)
    """
    rows = CPU_CHUNK // (work.dim + 3 * work.batch) if work.on_cpu else CHUNK // work.batch
    columns = max(1, max(LEAST_ROWS, rows) // work.per_class)
    return min(work.columns, columns) * work.per_class


def similarities(work: Workload) -> int:
    """Bytes that an implementation takes beside proxies, embeddings and their gradients, at most.

    plain: 7 matrices (B, R), or 4 and as many (B, C) where K proxies make one similarity, with normalised proxies
    (R, D); or, where D is large beside B, 4 matrices (R, D) of the way back through normalising. chunked: 4 matrices
    (B, n) of a chunk's n proxies, 5 where K make one; rows (n, D) twice in float32 where proxies are not; over the
    batch the gradients of the batch's own classes apart, and two of the embeddings; over the classes all similarities
    (B, R), if the budget of 1 GiB allows. triton: at most what chunked takes, until it is measured. All: label and
    sums of each proxy.

    >>> similarities(Workload(classes=1000, dim=64, batch=32, implementation="plain"))
    1188000
    >>> similarities(Workload(classes=10**6, dim=64, batch=4096)) == 4 * (4 * 2**26 + 9 * 10**6 + 3 * 4096 * 64)
    True
    """
    several = work.kind.grouped and work.per_class > 1
    numbers = OF_A_ROW * work.compared
    if work.implementation == "plain":
        pairs = work.batch * (4 * work.compared + 4 * work.columns if several else 7 * work.compared)
        return FLOAT * (numbers + max(pairs + work.compared * work.dim, 4 * work.compared * work.dim))
    rows = chunk(work)
    numbers += (5 if several else 4) * rows * work.batch
    if BYTES[work.dtype] != FLOAT:
        numbers += 2 * rows * work.dim
    if work.kind.over == "batch":
        numbers += (min(work.batch, work.shard) * work.per_class + 2 * work.batch) * work.dim
    elif work.cached:
        numbers += work.batch * work.compared
    return FLOAT * numbers
