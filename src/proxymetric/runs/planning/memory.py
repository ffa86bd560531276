"""The memory of a proxy loss on the device that holds the most classes, part by part."""

from __future__ import annotations

from proxymetric.runs.planning.workload import BYTES, OPTIMIZERS, Workload

FLOAT32_BYTES = 4
"""bytes of a float32 number: embeddings, similarities and sums are float32 for every type of the proxies"""
PAIRS_PER_GPU_CHUNK = 2**26
"""similarities of one chunk on a GPU, for both chunked and triton"""
NUMBERS_PER_CPU_CHUNK = 2**20
"""numbers of one chunk on a CPU: n rows of D numbers and three (n, B) matrices"""
MIN_ROWS_PER_CHUNK = 256
"""the smallest number of proxies in a chunk of chunked, unless there are fewer in all"""
TRITON_ROW_MULTIPLE = 64
"""the number of proxies in a chunk of triton is a multiple of this number"""
NUMBERS_PER_ROW = 9
"""numbers that a reduction holds for each proxy: label, position, log-sums and mean weights"""
NUMBERS_PER_TRITON_ROW = 5
"""the same for triton: label, length, log-sum and mean weight"""
MAX_FUSED_BATCH = 1024
"""the largest batch for which triton does not write a float32 product of bfloat16 matrices"""
RUNNING_SUM_NUMBERS = 2**20
"""the size limit of triton's running sums over the classes, in numbers"""
WORKSPACE_BYTES = 2**26
"""approximate bytes of the workspace of the matrix library (cuBLAS) on a large GPU"""


def memory_of(work: Workload) -> dict[str, int]:
    """Bytes of each part on the device with the most classes, at the peak of a step, without the encoder.

    Returns:
        A dictionary from the name of a part to its bytes. The parts are:

        - proxies: (R, D), where R = ceil(C / devices) K.
        - gradient: (R, D); if `touched` is not "all", a copy of the compared proxies with gradient and optimiser state.
        - optimizer state: 2, 1 or 1/D numbers for each of the R D numbers of the proxies.
        - embeddings: (B / devices, D) and their gradient.
        - gathered embeddings: (B, D) and their gradient, if there are several devices.
        - similarities: what the implementation holds in addition to the parts above, see `similarities`.
        - optimizer step: on a CPU, where Adam is not fused, two (R, D) for the square roots of its second moments.

    Example:
        >>> parts = memory_of(Workload(classes=5_000_000, dim=512, batch=4096, devices=8))
        >>> parts["proxies"], parts["optimizer state"], parts["gathered embeddings"]
        (1280000000, 2560000000, 16777216)
    """
    numbers, size = work.rows * work.dim, BYTES[work.dtype]
    device_batch = -(-work.batch // work.devices)
    step_counters = 0 if work.touched == "all" else 8 * work.rows  # each row has its own step counter
    return {
        "proxies": numbers * size,
        "gradient": _gradient(work),
        "optimizer state": _state(work, work.rows) + step_counters,
        "embeddings": 2 * device_batch * work.dim * FLOAT32_BYTES,
        "gathered embeddings": 2 * work.batch * work.dim * FLOAT32_BYTES if work.devices > 1 else 0,
        "similarities": similarities(work),
        "optimizer step": 2 * numbers * size if work.on_cpu and _is_adam_of_torch(work) else 0,
    }


def _is_adam_of_torch(work: Workload) -> bool:
    """Whether Adam or AdamW of torch steps the proxies, and not the table of rows itself."""
    return work.touched == "all" and work.optimizer in ("adam", "adamw")


def state_numbers(work: Workload) -> float:
    """Numbers of optimiser state for each number of a proxy.

    Example:
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
    """The number of proxies in a chunk of chunked or triton: all K proxies of a whole number of classes.

    Example:
        >>> chunk(Workload(classes=10**6, dim=64, batch=4096)), chunk(Workload(classes=100, dim=64, batch=4096))
        (16384, 100)
    """
    return min(work.columns, max(1, _rows(work) // work.per_class)) * work.per_class


def _rows(work: Workload) -> int:
    """The number of proxies in a chunk if there are enough proxies, before rounding to whole classes."""
    if work.implementation == "triton":
        pairs = PAIRS_PER_GPU_CHUNK * (2 if work.half_width else 1)
        return min(
            max(1, pairs // work.batch // TRITON_ROW_MULTIPLE) * TRITON_ROW_MULTIPLE,
            (2**31 - 1) // max(work.batch, work.dim),
        )
    return max(
        MIN_ROWS_PER_CHUNK,
        NUMBERS_PER_CPU_CHUNK // (work.dim + 3 * work.batch) if work.on_cpu else PAIRS_PER_GPU_CHUNK // work.batch,
    )


def similarities(work: Workload) -> int:
    """The most bytes that an implementation holds in addition to proxies, embeddings and their gradients.

    Every implementation holds the label and the sums of each proxy. In addition:

    - plain: seven (B, R) matrices, or four (B, R) and four (B, C) matrices if the K proxies of a class are combined
      into one similarity; and the normalised proxies (R, D). If D is large compared with B, the peak is in the
      backward pass of the normalisation instead, with two (R, D) matrices.
    - chunked, with n proxies in a chunk: four (B, n) matrices, or five if the K proxies of a class are combined; two
      (n, D) matrices in float32 if the proxies are not float32. A loss that sums over the batch also holds the
      gradients of the proxies of the batch's classes and two gradients of the embeddings. A loss that sums over the
      classes also holds all similarities (B, R) if 1 GiB is enough for them.
    - triton: see `_triton_bytes`.

    Example:
        >>> similarities(Workload(classes=1000, dim=64, batch=32, implementation="plain"))
        1188000
        >>> work = Workload(classes=10**6, dim=64, batch=4096, implementation="chunked")
        >>> similarities(work) == 4 * (4 * 2**26 + 9 * 10**6 + 3 * 4096 * 64)
        True
    """
    if work.implementation == "triton":
        return _triton_bytes(work)
    numbers = NUMBERS_PER_ROW * work.compared
    if work.implementation == "plain":
        pairs = work.batch * (4 * work.compared + 4 * work.columns if work.several else 7 * work.compared)
        return FLOAT32_BYTES * (numbers + max(pairs + work.compared * work.dim, 2 * work.compared * work.dim))
    rows = chunk(work)
    numbers += (5 if work.several else 4) * rows * work.batch
    if BYTES[work.dtype] != FLOAT32_BYTES:
        numbers += 2 * rows * work.dim
    if work.kind.over == "batch":
        numbers += (min(work.batch, work.shard) * work.per_class + 2 * work.batch) * work.dim
    elif work.cached:
        numbers += work.batch * work.compared
    return FLOAT32_BYTES * numbers


def _triton_bytes(work: Workload) -> int:
    """The most bytes that triton holds in addition to proxies, embeddings and their gradients.

    With n proxies in a chunk, these are:

    - the similarities (n, B) in float32, and their shares of the sums (n, B) in the type of the products;
    - an (n, D) product in float32 if the products are bfloat16 and the batch is larger than `MAX_FUSED_BATCH`;
    - the gradients of the B K proxies of the batch's classes, and two gradients of the embeddings;
    - for a loss that sums over the classes: copies of these proxies and of the embeddings, a third gradient of the
      embeddings, the running sums and, if the budget allows it, all similarities (B, R). The similarities of a chunk
      are then those of the batch's proxies only;
    - the workspace of the matrix library.

    In half width, the similarities have 16 bits, the shares overwrite them unless they are kept, there is no float32
    product, and a chunk of normalised proxies (n, D) is held; if similarities are kept, only before the shares.
    """
    size, rows, batch_rows = BYTES[work.dtype], chunk(work), work.batch * work.per_class
    similarity_rows, share_rows = rows, rows
    float32_numbers = NUMBERS_PER_TRITON_ROW * work.compared + (batch_rows + 2 * work.batch) * work.dim
    product_numbers = 0
    if work.kind.over == "classes":
        positive_rows = min(_rows(work), batch_rows)
        share_rows = max(positive_rows, rows)
        similarity_rows = positive_rows if work.cached else share_rows
        float32_numbers += RUNNING_SUM_NUMBERS + work.batch * work.dim
        product_numbers += (batch_rows + work.batch) * work.dim
    if work.half_width:
        product_numbers += work.batch * work.dim + rows * work.batch
        product_numbers += work.batch * work.compared if work.cached else rows * work.dim
        return FLOAT32_BYTES * float32_numbers + size * product_numbers + WORKSPACE_BYTES
    if work.cached:
        float32_numbers += work.batch * work.compared
    if size != FLOAT32_BYTES and not (work.dtype == "bfloat16" and work.batch <= MAX_FUSED_BATCH):
        float32_numbers += rows * work.dim
    float32_numbers += similarity_rows * work.batch
    product_numbers += share_rows * work.batch
    return FLOAT32_BYTES * float32_numbers + size * product_numbers + WORKSPACE_BYTES
