"""Reads images in threads while the network works on the images before them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def read_ahead(read: Callable[[Item], Result], items: Iterable[Item], threads: int, ahead: int) -> Iterator[Result]:
    """Yield `read(item)` for each item, in order; threads read the next items meanwhile.

    Threads are enough for image files: Pillow releases the GIL while it decodes and resizes. An error of `read` is
    raised where its result would be yielded. If the iterator is closed early, items that no thread has begun are not
    read.

    Args:
        read: called in a thread, for several items at once if there are several threads.
        items: what to read; consumed in this thread, `ahead` items early.
        threads: number of threads, at least 1.
        ahead: items that are read before they are asked for, at least 1.

    Example:
        >>> list(read_ahead(str.upper, "abc", threads=2, ahead=2))
        ['A', 'B', 'C']
    """
    remaining = iter(items)
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="read-ahead")
    try:
        waiting: deque[Future[Result]] = deque(pool.submit(read, item) for item in islice(remaining, ahead))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(read, item) for item in islice(remaining, 1))
            yield result
    finally:
        pool.shutdown(cancel_futures=True)
