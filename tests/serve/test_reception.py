"""Which body gives way when too many are arriving."""

from __future__ import annotations

import itertools

from proxymetric.serve.reception import HARD_FACTOR, STEP_BYTES, Reception


def reception(seconds: float = 1.0, **limits) -> Reception:
    """One whose clock goes on by some seconds whenever it is read."""
    times = itertools.count()
    return Reception(**limits, clock=lambda: seconds * next(times))


def begin(arrivals: Reception, ended: list[str], name: str, address: str = "a"):
    return arrivals.begin(address, lambda: ended.append(name))


def test_nobody_gives_way_while_all_make_progress():
    """Also of a burst of many: they are ended only above the hard limit."""
    arrivals, ended = reception(0.0, most_of_an_address=2), []
    for number in range(2 * HARD_FACTOR):
        begin(arrivals, ended, str(number))
    assert ended == []
    begin(arrivals, ended, "last")
    assert ended == ["0"]


def test_the_one_without_progress_gives_way():
    arrivals, ended = reception(most_of_an_address=3), []
    first, second, _ = (begin(arrivals, ended, name) for name in ("first", "second", "third"))
    arrivals.receive(first, STEP_BYTES)
    arrivals.receive(second, STEP_BYTES - 1)  # no whole step
    begin(arrivals, ended, "fourth")
    assert ended == ["second"]
    assert arrivals.bytes == STEP_BYTES


def test_one_that_is_whole_makes_room():
    arrivals, ended = reception(most_of_an_address=2), []
    first = begin(arrivals, ended, "first")
    begin(arrivals, ended, "second")
    arrivals.finish(first)
    arrivals.finish(first)
    begin(arrivals, ended, "third")
    assert (ended, len(arrivals)) == ([], 2)


def test_an_address_takes_no_room_from_others():
    arrivals, ended = reception(most_of_an_address=3, most=4), []
    begin(arrivals, ended, "honest", "b")
    for number in range(3):
        begin(arrivals, ended, f"stalled {number}")
    begin(arrivals, ended, "another", "c")
    assert ended == ["stalled 0"]


def test_the_address_with_the_most_bytes_gives_way():
    arrivals, ended = reception(most_bytes=1000), []
    small = begin(arrivals, ended, "small", "b")
    large = begin(arrivals, ended, "large")
    arrivals.receive(small, 100)
    arrivals.receive(large, 800)
    assert ended == []
    arrivals.receive(small, 101)
    assert (ended, arrivals.bytes) == (["large"], 201)
    arrivals.receive(large, 5000)
    assert arrivals.bytes == 201, "what was ended counts no more"


def test_changes_are_told():
    changes = []
    arrivals = reception(most_of_an_address=1, on_change=changes.append)
    begin(arrivals, [], "first")
    arrivals.finish(begin(arrivals, [], "second"))
    assert changes == [1, -1, 1, -1]
