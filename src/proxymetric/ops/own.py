"""The batch's classes among all: what pairs of one class need, whatever the number of all classes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from proxymetric.ops.launches import launch
from proxymetric.ops.task import Task

ABSENT = -2
"""the label of a row that stands where the batch has no further class"""
BLOCK = 1024
"""classes that a program looks at"""


class Present(NamedTuple):
    """The batch, sorted by class."""

    labels: Tensor
    """(B,) in order"""
    order: Tensor
    """(B,) whose they are"""
    columns: Tensor
    """(B,) where the first label of a kind stands, which class it is among the references'; -1 elsewhere, or if none"""


class Own(NamedTuple):
    """B K rows of the references, class after class."""

    rows: Tensor
    """(B K,) which ones; where a class is missing, any"""
    labels: Tensor
    """(B K,) their classes, each class once; `ABSENT` where one is missing"""


def present(task: Task) -> Present:
    """Look the batch's classes up among all. Nothing here waits for a device."""
    per_class, of_rows = task.refs.per_class or 1, task.refs.labels
    labels, order = task.labels.long().sort()
    columns, count, classes = torch.full_like(labels, -1), len(labels), len(of_rows) // per_class
    launch(
        "find", (-(-classes // BLOCK),), 4, (of_rows, labels, columns), (classes, count),
        {"STRIDE": per_class * of_rows.stride(0), "STEPS": count.bit_length(), "BLOCK": BLOCK},
    )  # fmt: skip
    return Present(labels, order, columns)


def own_rows(task: Task) -> Own:
    """The rows of the batch's classes."""
    per_class, found = task.refs.per_class or 1, present(task)
    count = len(found.labels)
    own = Own(*found.labels.new_empty(2, count * per_class))
    launch(
        "place", (-(-count * per_class // BLOCK),), 4, (found.columns, found.labels, *own),
        (len(task.refs.labels) // per_class, count), {"ABSENT": ABSENT, "K": per_class, "BLOCK": BLOCK},
    )  # fmt: skip
    return own
