"""The classes that occur in the batch, found among all classes of the references."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.ops.problem import Problem
from proxymetric.ops.triton.launch import launch
from proxymetric.ops.triton.norms import row_norms, tile_shape

CLASSES_PER_PROGRAM = 1024
QUERIES_PER_PROGRAM = 32
"""queries whose rank a program computes"""


class SortedBatch(NamedTuple):
    """The batch, sorted by class."""

    labels: Tensor
    """(B,) the sorted labels"""
    order: Tensor
    """(B,) the query of each sorted label"""
    columns: Tensor
    """(B,) at the first label of each class: the index of this class among the references, -1 if it is missing; at
    other labels -1"""
    labels32: Tensor
    """(B,) the labels in the order of the batch, in 32 bits"""


def sort_batch(labels: Tensor) -> SortedBatch:
    """Sort the batch by class, without synchronising with the GPU; `find_columns` fills in the columns."""
    count = len(labels)
    sorted_labels, order, columns = (labels.new_empty(count, dtype=torch.int64) for _ in range(3))
    batch = SortedBatch(sorted_labels, order, columns, labels.new_empty(count, dtype=torch.int32))
    launch(
        "sort_labels",
        (-(-count // QUERIES_PER_PROGRAM),),
        4,
        (labels.contiguous(), batch.labels32, batch.labels, batch.order, batch.columns),
        (count,),
        {"TILE": QUERIES_PER_PROGRAM, "BLOCK": 128},
    )
    return batch


def row_norms_and_columns(vectors: Tensor, problem: Problem, batch: SortedBatch) -> Tensor:
    """The length of each row of `vectors`; the same launch fills in `batch.columns`."""
    if not vectors.is_contiguous():
        find_columns(problem, batch)
        return row_norms(vectors)
    classes, constants = _search(problem, batch)
    count, dim = vectors.shape
    tile, block = tile_shape(dim)
    norms, tiles = vectors.new_empty(count, dtype=torch.float32), -(-count // tile)
    launch(
        "norms_and_columns",
        (tiles + -(-classes // CLASSES_PER_PROGRAM),),
        4,
        (vectors, norms, problem.refs.labels, batch.labels, batch.columns),
        (count, dim, classes, len(batch.labels), tiles),
        constants | {"TILE": tile, "DIM_BLOCK": block, "BLOCK": CLASSES_PER_PROGRAM},
    )
    return norms


def find_columns(problem: Problem, batch: SortedBatch) -> None:
    """Fill in `batch.columns`."""
    classes, constants = _search(problem, batch)
    launch(
        "find_columns",
        (-(-classes // CLASSES_PER_PROGRAM),),
        4,
        (problem.refs.labels, batch.labels, batch.columns),
        (classes, len(batch.labels)),
        constants | {"BLOCK": CLASSES_PER_PROGRAM},
    )


def _search(problem: Problem, batch: SortedBatch) -> tuple[int, dict[str, int]]:
    """The number of classes to search, and the constants of the kernel."""
    per_class, labels = problem.refs.per_class or 1, problem.refs.labels
    constants = {"LABEL_STRIDE": per_class * labels.stride(0), "SEARCH_STEPS": len(batch.labels).bit_length()}
    return len(labels) // per_class, constants
