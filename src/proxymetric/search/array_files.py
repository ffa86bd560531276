"""Arrays in files of NumPy, read by several threads."""

from __future__ import annotations

import threading
import tokenize
from pathlib import Path
from typing import Literal

import numpy as np

_one_at_a_time = threading.Lock()


def load_array(file: Path, mmap_mode: Literal["c", "r"] | None = None) -> np.ndarray:
    """`np.load` that several threads may call: the threads of a service open an index while it changes.

    NumPy reads the head of a file with Python's parser, and Python 3.11 counts the depth of syntax trees for all
    threads together: two threads at a time got "SystemError: AST constructor recursion depth mismatch".

    Args:
        file: a file of one array.
        mmap_mode: as in `np.load`.

    Raises:
        ValueError: the file is not an array, or it holds Python objects.
        EOFError: the file is empty.
        OSError: the file cannot be read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.save(Path(folder) / "a.npy", np.arange(3)); load_array(Path(folder) / "a.npy")
        array([0, 1, 2])
    """
    with _one_at_a_time:
        try:
            array: np.ndarray = np.load(file, mmap_mode=mmap_mode)
        except (tokenize.TokenError, SyntaxError) as error:  # of a damaged head
            raise ValueError(f"its head is damaged: {error}") from None
    return array
