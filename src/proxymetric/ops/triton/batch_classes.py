"""The batch's classes among all: what pairs of one class need, whatever the number of all classes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.ops.problem import Problem
from proxymetric.ops.triton.launch import launch
from proxymetric.ops.triton.norms import by_tiles, lengths

ABSENT = -2
"""the label of a row that stands where the batch has no further class"""
BLOCK = 1024
"""classes that a program looks at"""
TILE = 32
"""queries that a program finds the place of"""


class Present(NamedTuple):
    """The batch, sorted by class."""

    labels: Tensor
    """(B,) in order"""
    order: Tensor
    """(B,) whose they are"""
    columns: Tensor
    """(B,) where the first label of a kind stands, which class it is among the references'; -1 elsewhere, or if none"""
    narrow: Tensor
    """(B,) the labels as the batch has them, in 32 bits"""


class Own(NamedTuple):
    """B K rows of the references, class after class."""

    rows: Tensor
    """(B K,) which ones; where a class is missing, any"""
    labels: Tensor
    """(B K,) their classes, each class once; `ABSENT` where one is missing"""


def arranged(labels: Tensor) -> Present:
    """The batch; which classes it has is still to be found. Nothing here waits for a device."""
    count = len(labels)
    kept, order, columns = (labels.new_empty(count, dtype=torch.int64) for _ in range(3))
    found = Present(kept, order, columns, labels.new_empty(count, dtype=torch.int32))
    launch(
        "arrange", (-(-count // TILE),), 4,
        (labels.contiguous(), found.narrow, found.labels, found.order, found.columns), (count,),
        {"TILE": TILE, "BLOCK": 128},
    )  # fmt: skip
    return found


def measured(vectors: Tensor, task: Problem, at: Present) -> Tensor:
    """The lengths of all rows; on the way, look the batch's classes up among all."""
    if not vectors.is_contiguous():
        find(task, at)
        return lengths(vectors)
    classes, how = _search(task, at)
    count, dim, tile, block = by_tiles(vectors)
    found, tiles = vectors.new_empty(count, dtype=torch.float32), -(-count // tile)
    launch(
        "measure_and_find", (tiles + -(-classes // BLOCK),), 4,
        (vectors, found, task.refs.labels, at.labels, at.columns), (count, dim, classes, len(at.labels), tiles),
        how | {"TILE": tile, "DIMS": block, "BLOCK": BLOCK},
    )  # fmt: skip
    return found


def find(task: Problem, at: Present) -> None:
    """Look the batch's classes up among all."""
    classes, how = _search(task, at)
    launch(
        "find", (-(-classes // BLOCK),), 4, (task.refs.labels, at.labels, at.columns), (classes, len(at.labels)),
        how | {"BLOCK": BLOCK},
    )  # fmt: skip


def _search(task: Problem, at: Present) -> tuple[int, dict[str, int]]:
    """Among how many, and how."""
    per_class, of_rows = task.refs.per_class or 1, task.refs.labels
    how = {"STRIDE": per_class * of_rows.stride(0), "STEPS": len(at.labels).bit_length()}
    return len(of_rows) // per_class, how


def own_rows(task: Problem, found: Present) -> Own:
    """The rows of the batch's classes."""
    find(task, found)
    per_class, count = task.refs.per_class or 1, len(found.labels)
    own = Own(*found.labels.new_empty(2, count * per_class))
    launch(
        "place", (-(-count * per_class // BLOCK),), 4, (found.columns, found.labels, *own),
        (len(task.refs.labels) // per_class, count), {"ABSENT": ABSENT, "K": per_class, "BLOCK": BLOCK},
    )  # fmt: skip
    return own
