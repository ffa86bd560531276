"""What a request goes through: its images are decoded, embedded in batches, searched for, or committed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from proxymetric.data.decoding import BadImage
from proxymetric.data.image_bytes import TooManyPixels
from proxymetric.search.folder_sync import thumbnail_of
from proxymetric.serve.batching import Batcher
from proxymetric.serve.bodies import shortened
from proxymetric.serve.counters import Counters
from proxymetric.serve.decoders import Decoders, Stopped
from proxymetric.serve.errors import Refused
from proxymetric.serve.searcher import Found, Images, Question, Searcher, UnknownItem
from proxymetric.serve.settings import Settings
from proxymetric.serve.writing import Write, Writer, Written

DECODERS = min(4, os.cpu_count() or 1)
"""images that are decoded at the same time, each in a process: it may need some bytes for each of `max_pixels`"""
MOST_WRITTEN_AT_ONCE = 4
"""images of writes that are decoded or embedded at the same time, so that searches find room between them"""
LONGEST_SENTENCE = 1_000
"""letters of an error about what a request has said"""
Task = TypeVar("Task")
Result = TypeVar("Result")


class Pipeline:
    """The parts of the service that compute, behind coroutines that answer or refuse.

    Args:
        settings: the index and the limits.
        counters: what counts batches.

    Raises:
        ValueError: the index or its model cannot be opened, or it shall be changed and cannot be.
    """

    def __init__(self, settings: Settings, counters: Counters) -> None:
        self.settings = settings
        self._decoders = Decoders(DECODERS, settings.max_pixels, settings.decode_seconds)
        self._decoders.warm_up()  # while the model is loaded
        try:
            self.searcher = Searcher(settings.index, settings.run, settings.device)
            if settings.write_token and not os.access(settings.index, os.W_OK):
                raise ValueError(f"index: got {settings.index}, where nothing can be written; expected one that can be")
        except BaseException:
            self._decoders.close()
            raise
        self._searches: Batcher[Question, Found] = Batcher(self.searcher.answer, settings.max_batch, counters.batched)
        writer = Writer(self.searcher, settings.write_seconds)
        self._writes: Batcher[Write, Written] = Batcher(writer, settings.max_batch)
        self._threads = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")
        self._room = asyncio.Semaphore(MOST_WRITTEN_AT_ONCE)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute, and follow the index on disk, until the block ends."""
        keeping_up = asyncio.create_task(self.searcher.keep_up())
        async with self._searches, self._writes:
            yield
        keeping_up.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping_up
        self._decoders.close()
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def ask(self, question: Question) -> Found:
        """Answer a question."""
        return await self._answer(self._searches, question, "search")

    async def write(self, write: Write) -> Written:
        """Change the index; the disk has the change when this returns."""
        return await self._answer(self._writes, write, "write")

    async def images(self, contents: Sequence[bytes]) -> Images:
        """Decode image files, and cut them for the model."""

        def decode() -> Images:
            return self.searcher.cut([self._decoders.decode(content) for content in contents])

        async with _refusing():
            return await asyncio.get_running_loop().run_in_executor(self._threads, decode)

    async def embedded(self, content: bytes) -> tuple[Found, bytes]:
        """Embed an image file that will be an item; return its vector and its thumbnail."""

        def decode() -> tuple[Images, bytes]:
            image = self._decoders.decode(content)
            return self.searcher.cut([image]), thumbnail_of(image)

        async with self._room:
            async with _refusing():
                images, thumbnail = await asyncio.get_running_loop().run_in_executor(self._threads, decode)
            return await self.ask(Question(images)), thumbnail

    async def _answer(self, batcher: Batcher[Task, Result], task: Task, name: str) -> Result:
        try:
            async with asyncio.timeout(self.settings.seconds):
                return await batcher(task)
        except TimeoutError:
            seconds = f"{self.settings.seconds:g} s"
            raise Refused(504, f"{name}: got no answer within {seconds}, expected one") from None
        except UnknownItem as error:
            raise Refused(404, str(error)) from None
        except ValueError as error:
            raise Refused(422, shortened(str(error), LONGEST_SENTENCE)) from None


@contextlib.asynccontextmanager
async def _refusing() -> AsyncIterator[None]:
    """Refuse what cannot be decoded."""
    try:
        yield
    except Stopped:
        raise Refused(503, "service: is stopping, expected one that runs") from None
    except TooManyPixels as error:
        raise Refused(413, str(error), "too_many_pixels") from None
    except BadImage as error:
        raise Refused(422, str(error), "bad_image") from None
