"""Requests whose bodies are arriving: how many there may be, and which one gives way to a new one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MOST_OF_AN_ADDRESS, MOST = 128, 512
"""bodies of one client, and of all, that may arrive while some of them stand still"""
HARD_FACTOR = 8
"""so many times as many may arrive while all make progress"""
MOST_BYTES = 2**29
"""bytes of all bodies that are not whole yet"""
STEP_BYTES = 2**14
"""bytes of a step: a client that sends fewer makes no progress"""
STILL_SECONDS = 1.0
"""time without a step after which a body stands still"""


@dataclass(eq=False)
class Arrival:
    """A body that is not whole yet.

    Args:
        address: the client.
        end: ends its reception.
        step_time: when it made its last step.
    """

    address: str
    end: Callable[[], None]
    step_time: float
    received: int = 0


class Reception:
    """Bodies that are arriving. If there are too many, the one that has stood still for the longest time is ended.

    A body that arrives takes the place of no search, and any new body comes in: a client that never completes its
    bodies keeps nobody out. Of too many, one of the address that has the most gives way.

    Args:
        most_of_an_address: bodies of one client, while some of them stand still.
        most: bodies of all clients, while some of them stand still.
        most_bytes: bytes of all bodies.
        on_change: called with +1 and -1 for each body that begins and ends.
        clock: the time in seconds.

    Example:
        >>> times, ended = iter(range(9)), []
        >>> reception = Reception(most_of_an_address=2, clock=lambda: float(next(times)))
        >>> arrivals = [reception.begin("10.0.0.1", lambda number=number: ended.append(number)) for number in range(3)]
        >>> ended
        [0]
    """

    def __init__(
        self,
        most_of_an_address: int = MOST_OF_AN_ADDRESS,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        on_change: Callable[[int], None] = lambda change: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_of_an_address, self.most, self.most_bytes = most_of_an_address, most, most_bytes
        self.bytes, self.on_change, self.clock = 0, on_change, clock
        self._arrivals: dict[Arrival, None] = {}
        """in the order of their last step"""
        self._counts = Counter[str]()

    def begin(self, address: str, end: Callable[[], None]) -> Arrival:
        """Let a body in; `end` is called if it must give way."""
        now = self.clock()
        self._make_room(address, self._counts[address], self.most_of_an_address, now)
        if len(self._arrivals) >= self.most:
            self._make_room(self._counts.most_common(1)[0][0], len(self._arrivals), self.most, now)
        arrival = Arrival(address, end, now)
        self._arrivals[arrival] = None
        self._counts[address] += 1
        self.on_change(+1)
        return arrival

    def receive(self, arrival: Arrival, size: int) -> None:
        """Note that bytes have arrived."""
        if arrival not in self._arrivals:
            return
        before = arrival.received
        arrival.received += size
        self.bytes += size
        if arrival.received // STEP_BYTES > before // STEP_BYTES:
            arrival.step_time = self.clock()
            del self._arrivals[arrival]
            self._arrivals[arrival] = None
        while self.bytes > self.most_bytes and self._arrivals:
            sizes = Counter[str]()
            for each in self._arrivals:
                sizes[each.address] += each.received
            self._end(self._slowest(sizes.most_common(1)[0][0]))

    def finish(self, arrival: Arrival) -> None:
        """Note that a body is whole, or was given up."""
        if arrival in self._arrivals:
            del self._arrivals[arrival]
            self.bytes -= arrival.received
            self._counts[arrival.address] -= 1
            if not self._counts[arrival.address]:
                del self._counts[arrival.address]
            self.on_change(-1)

    def __len__(self) -> int:
        return len(self._arrivals)

    def _make_room(self, address: str, count: int, most: int, now: float) -> None:
        """End the slowest body of an address if it stands still, or if even bodies that make progress are too many."""
        if count < most:
            return
        slowest = self._slowest(address)
        if now - slowest.step_time >= STILL_SECONDS or count >= HARD_FACTOR * most:
            self._end(slowest)

    def _slowest(self, address: str) -> Arrival:
        """The body of an address whose last step is the longest ago."""
        return next(arrival for arrival in self._arrivals if arrival.address == address)

    def _end(self, arrival: Arrival) -> None:
        self.finish(arrival)
        arrival.end()
