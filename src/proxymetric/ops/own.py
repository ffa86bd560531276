"""The rows that pairs of one class need: of the batch's classes, at most B times K, whatever the number of all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.ops.task import Task

ABSENT = -2
"""the label of a row that stands where the batch has no further class"""
BLOCK = 1024
"""classes that a program looks at"""


class Own(NamedTuple):
    """B K rows of the references, class after class."""

    rows: Tensor
    """(B K,) which ones; where a class is missing, any"""
    labels: Tensor
    """(B K,) their classes, each class once; `ABSENT` where one is missing"""


def own_rows(task: Task, find: Any) -> Own:
    """Look the batch's classes up among all, with the kernel `find`. Nothing here waits for a device."""
    per_class, of_rows = task.refs.per_class or 1, task.refs.labels
    present, classes = task.labels.long().sort().values, len(of_rows) // per_class
    columns, count = torch.full_like(present, -1), len(present)
    find[(-(-classes // BLOCK),)](
        of_rows, present, columns, classes, count,
        STRIDE=per_class * of_rows.stride(0), STEPS=count.bit_length(), BLOCK=BLOCK,
    )  # fmt: skip
    here, counted = columns >= 0, torch.arange(count, device=present.device)
    # Where a class is missing any rows will do; not the same for all, or their gradients would queue for one place.
    columns = columns.where(here, counted % classes)
    rows = columns[:, None] * per_class + torch.arange(per_class, device=present.device)
    labels = present.masked_fill(~here, ABSENT)[:, None].expand(-1, per_class)
    return Own(rows.flatten(), labels.flatten())
