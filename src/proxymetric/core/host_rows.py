"""Reading and writing rows of a table in host memory.

One thread copies the rows, through NumPy. The rows of a batch are a few megabytes, and waking all threads of torch
takes longer than copying them: several milliseconds each time if other programs also use the CPU.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def copy_rows(table: Tensor, index: Tensor, device: torch.device) -> Tensor:
    """A copy of rows on `device`; a copy from host memory does not synchronise with the GPU.

    Args:
        table: (N, ...).
        index: (n,) row numbers, on the device of the table.
        device: of the copy.

    Returns:
        (n, ...) rows.

    Raises:
        IndexError: the index is not a list of row numbers, or the table does not have these rows.

    Example:
        >>> copy_rows(torch.eye(3), torch.tensor([2]), torch.device("cpu"))
        tensor([[0., 0., 1.]])
    """
    if table.device.type != "cpu":
        return table[index].to(device)
    shape = (len(index), *table.shape[1:])
    pinned = device.type == "cuda"
    staged = torch.empty(shape, dtype=table.dtype, pin_memory=pinned, device="cpu")
    # mode="clip" because "raise" would make another copy; `_row_numbers` has checked the range.
    np.take(_array(table), _row_numbers(table, index), axis=0, out=_array(staged), mode="clip")
    return staged.to(device, non_blocking=pinned)


def write_host_rows(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """`table[index] = rows`, all in host memory.

    Args:
        table: (N, ...), changed in place.
        index: (n,) row numbers.
        rows: (n, ...).

    Raises:
        IndexError: as in `copy_rows`.
    """
    _array(table)[_row_numbers(table, index)] = _array(rows.to(table.dtype))


def _row_numbers(table: Tensor, index: Tensor) -> np.ndarray:
    """The index as an array, checked."""
    numbers = index.numpy()
    if numbers.ndim != 1 or numbers.dtype.kind != "i":
        raise IndexError(f"index: got {index.dtype} of shape {tuple(index.shape)}, expected whole numbers (n,)")
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(table):
        raise IndexError(f"index: got rows {numbers.min()} to {numbers.max()}, expected rows 0 to {len(table) - 1}")
    return numbers


def _array(tensor: Tensor) -> np.ndarray:
    """An array that shares the tensor's memory. NumPy has no bfloat16; int16 copies the same bytes."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
