"""The memory of a proxy loss on the device that holds the most classes, part by part."""

from __future__ import annotations

from proxymetric.planning.workload import BYTES, OPTIMIZERS, Workload

FLOAT = 4
"""bytes of a number of an embedding, a similarity or a sum, whatever the type of the proxies"""
CHUNK = 2**26
"""similarities of one chunk on an accelerator, whether chunked or triton"""
CPU_CHUNK = 2**20
"""numbers of one chunk on a CPU: its rows, and three matrices of rows by queries"""
LEAST_ROWS = 256
"""the smallest number of proxies in a chunk"""
STEP = 64
"""the proxies of a chunk of triton are a multiple of it"""
OF_A_ROW = 9
"""numbers that a reduction holds for each proxy: label, position, log-sums and mean weights"""
OF_A_FUSED_ROW = 5
"""the same for triton: label, length, log-sum and mean weight"""
SHALLOW = 1024
"""embeddings up to which triton writes no float32 product of bfloat16 matrices"""
SUMS = 2**20
"""the most running sums over the classes that triton holds"""
WORKSPACE = 2**26
"""bytes, approximately, of the workspace of the matrix library on a large GPU"""


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
    steps = 0 if work.touched == "all" else 8 * work.rows  # each row has its own step counter
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
    return min(work.columns, max(1, _rows(work) // work.per_class)) * work.per_class


def _rows(work: Workload) -> int:
    """Proxies of a chunk, were there enough of them."""
    if work.implementation == "triton":
        return min(max(1, CHUNK // work.batch // STEP) * STEP, (2**31 - 1) // max(work.batch, work.dim))
    return max(LEAST_ROWS, CPU_CHUNK // (work.dim + 3 * work.batch) if work.on_cpu else CHUNK // work.batch)


def similarities(work: Workload) -> int:
    """Bytes that an implementation takes beside proxies, embeddings and their gradients, at most.

    plain: 7 matrices (B, R), or 4 and as many (B, C) where K proxies make one similarity, with normalised proxies
    (R, D); or, where D is large beside B, 4 matrices (R, D) of the way back through normalising. chunked: 4 matrices
    (B, n) of a chunk's n proxies, 5 where K make one; rows (n, D) twice in float32 where proxies are not; over the
    batch the gradients of the batch's own classes apart, and two of the embeddings; over the classes all similarities
    (B, R), if the budget of 1 GiB allows. triton: see `_fused`. All: label and sums of each proxy.

    >>> similarities(Workload(classes=1000, dim=64, batch=32, implementation="plain"))
    1188000
    >>> work = Workload(classes=10**6, dim=64, batch=4096, implementation="chunked")
    >>> similarities(work) == 4 * (4 * 2**26 + 9 * 10**6 + 3 * 4096 * 64)
    True
    """
    if work.implementation == "triton":
        return _fused(work)
    numbers = OF_A_ROW * work.compared
    if work.implementation == "plain":
        pairs = work.batch * (4 * work.compared + 4 * work.columns if work.several else 7 * work.compared)
        return FLOAT * (numbers + max(pairs + work.compared * work.dim, 4 * work.compared * work.dim))
    rows = chunk(work)
    numbers += (5 if work.several else 4) * rows * work.batch
    if BYTES[work.dtype] != FLOAT:
        numbers += 2 * rows * work.dim
    if work.kind.over == "batch":
        numbers += (min(work.batch, work.shard) * work.per_class + 2 * work.batch) * work.dim
    elif work.cached:
        numbers += work.batch * work.compared
    return FLOAT * numbers


def _fused(work: Workload) -> int:
    """Bytes that triton takes: as `similarities`.

    Of a chunk's n proxies the similarities (n, B) in float32, and their shares in the type of the products; where that
    is narrower, a product (n, D) in float32, but for small batches of bfloat16. The gradients of the batch's own B K
    rows, and two of the embeddings. Over the classes these rows and the embeddings once more, a third gradient, the
    running sums, and all similarities (B, R) if the budget allows: a chunk's are then those of the batch's own rows
    alone. And the library's workspace.
    """
    size, rows, own = BYTES[work.dtype], chunk(work), work.batch * work.per_class
    seen, shared = rows, rows
    wide, narrow = OF_A_FUSED_ROW * work.compared + (own + 2 * work.batch) * work.dim, 0
    if work.kind.over == "classes":
        mine = min(_rows(work), own)
        seen, shared = mine if work.cached else max(mine, rows), max(mine, rows)
        wide += SUMS + work.batch * work.dim + (work.batch * work.compared if work.cached else 0)
        narrow += (own + work.batch) * work.dim
    if size != FLOAT and not (work.dtype == "bfloat16" and work.batch <= SHALLOW):
        wide += rows * work.dim
    return FLOAT * (wide + seen * work.batch) + size * (narrow + shared * work.batch) + WORKSPACE
