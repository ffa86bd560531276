"""Requests whose bodies are arriving: how many there may be, and which one gives way to a new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

MOST_OF_AN_ADDRESS = 128
"""bodies of one client that arrive at the same time"""
MOST = 512
MOST_BYTES = 2**29
"""bytes of all bodies that are not whole yet"""
STEP_BYTES = 2**14
"""bytes of a step: a client that sends fewer makes no progress"""


@dataclass(eq=False)
class Arrival:
    """A body that is not whole yet.

    Args:
        address: the client.
        end: ends its reception.
    """

    address: str
    end: Callable[[], None]
    received: int = 0


class Reception:
    """Bodies that are arriving. One more than allowed ends the one that has made no progress for the longest time.

    A body that arrives takes the place of no search, and any new body comes in: a client that never completes its
    bodies keeps nobody out. Of too many, one of the address that has the most gives way.

    Args:
        most_of_an_address: bodies of one client at the same time.
        most: bodies of all clients.
        most_bytes: bytes of all bodies.
        on_change: called with +1 and -1 for each body that begins and ends.

    Example:
        >>> reception, ended = Reception(most_of_an_address=2), []
        >>> for number in range(3):
        ...     reception.begin("10.0.0.1", lambda number=number: ended.append(number)).address
        '10.0.0.1'
        '10.0.0.1'
        '10.0.0.1'
        >>> ended
        [0]
    """

    def __init__(
        self,
        most_of_an_address: int = MOST_OF_AN_ADDRESS,
        most: int = MOST,
        most_bytes: int = MOST_BYTES,
        on_change: Callable[[int], None] = lambda change: None,
    ) -> None:
        self.most_of_an_address, self.most, self.most_bytes = most_of_an_address, most, most_bytes
        self.bytes, self.on_change = 0, on_change
        self._arrivals: dict[Arrival, None] = {}
        """in the order of their last step"""

    def begin(self, address: str, end: Callable[[], None]) -> Arrival:
        """Let a body in; `end` is called if it must give way."""
        bodies = Counter(arrival.address for arrival in self._arrivals)
        if bodies[address] >= self.most_of_an_address:
            self._end_slowest(address)
        elif len(self._arrivals) >= self.most:
            self._end_slowest(bodies.most_common(1)[0][0])
        arrival = Arrival(address, end)
        self._arrivals[arrival] = None
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
            del self._arrivals[arrival]
            self._arrivals[arrival] = None
        while self.bytes > self.most_bytes and self._arrivals:
            sizes = Counter[str]()
            for each in self._arrivals:
                sizes[each.address] += each.received
            self._end_slowest(sizes.most_common(1)[0][0])

    def finish(self, arrival: Arrival) -> None:
        """Note that a body is whole, or was given up."""
        if arrival in self._arrivals:
            del self._arrivals[arrival]
            self.bytes -= arrival.received
            self.on_change(-1)

    def __len__(self) -> int:
        return len(self._arrivals)

    def _end_slowest(self, address: str) -> None:
        """End the body of an address whose last step is the longest ago."""
        slowest = next(arrival for arrival in self._arrivals if arrival.address == address)
        self.finish(slowest)
        slowest.end()
