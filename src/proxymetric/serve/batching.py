"""Requests that arrive while others are computed are computed together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Task = TypeVar("Task")
Answer = TypeVar("Answer")


class Batcher(Generic[Task, Answer]):
    """Hands tasks to a function in batches, one batch at a time.

    A task that arrives when nothing is computed starts at once. Tasks that arrive meanwhile form the next batch. So
    batches grow with the load, and nobody waits for a batch to fill.

    Args:
        work: computes a batch in a thread; its answer for a task may be an exception, which is raised for that task.
        most: the largest number of tasks in a batch.
        on_batch: called with the size of each batch.

    Example:
        >>> async def squares() -> list[int]:
        ...     async with Batcher(lambda numbers: [n * n for n in numbers], most=8) as batcher:
        ...         return await asyncio.gather(*(batcher(n) for n in range(4)))
        >>> asyncio.run(squares())
        [0, 1, 4, 9]
    """

    def __init__(
        self,
        work: Callable[[list[Task]], Sequence[Answer | Exception]],
        most: int,
        on_batch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.work, self.most, self.on_batch = work, most, on_batch
        self._tasks: asyncio.Queue[tuple[Task, asyncio.Future[Answer]]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._loop: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Batcher[Task, Answer]:
        self._loop = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._loop is not None
        self._loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._loop
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def __call__(self, task: Task) -> Answer:
        """Compute a task; a caller that is cancelled while it waits costs nothing."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._tasks.put_nowait((task, answer))
        return await answer

    async def _run(self) -> None:
        while True:
            batch = [await self._tasks.get()]
            while len(batch) < self.most and not self._tasks.empty():
                batch.append(self._tasks.get_nowait())
            batch = [entry for entry in batch if not entry[1].cancelled()]
            if not batch:
                continue
            self.on_batch(len(batch))
            answers: Sequence[Answer | Exception]
            try:
                tasks = [task for task, _ in batch]
                answers = await asyncio.get_running_loop().run_in_executor(self._thread, self.work, tasks)
            except Exception as error:
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.cancelled():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
