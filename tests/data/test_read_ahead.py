"""Reading ahead: the order of results, what is read early, errors, and the end of the threads."""

from __future__ import annotations

import threading
import time

import pytest

from proxymetric.data.read_ahead import read_ahead


@pytest.mark.parametrize(("threads", "ahead"), [(1, 1), (1, 3), (3, 2), (4, 40)])
def test_results_come_in_order_whatever_finishes_first(threads, ahead):
    def read(i: int) -> int:
        time.sleep(0.002 * (i % 3 == 0))
        return 10 * i

    assert list(read_ahead(read, range(25), threads, ahead)) == [10 * i for i in range(25)]


def test_items_are_read_while_the_reader_of_the_results_works():
    begun = [threading.Event() for _ in range(6)]
    results = read_ahead(lambda i: begun[i].set(), range(6), threads=1, ahead=2)
    next(results)
    # Item 0 has been yielded; the thread reads items 1 and 2 although nobody has asked for them.
    assert begun[1].wait(10)
    assert begun[2].wait(10)
    assert not any(event.is_set() for event in begun[3:])
    results.close()


def test_reading_runs_in_as_many_threads_as_asked_for():
    together = threading.Barrier(3, timeout=10)
    assert sorted(read_ahead(lambda i: together.wait(), range(3), threads=3, ahead=3)) == [0, 1, 2]


def test_an_error_is_raised_in_its_place():
    def read(i: int) -> int:
        if i == 2:
            raise OSError("item 2")
        return i

    results = read_ahead(read, range(5), threads=2, ahead=4)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(OSError, match="item 2"):
        next(results)


def test_closing_ends_the_threads_and_leaves_the_other_items():
    seen: list[int] = []

    def read(i: int) -> None:
        seen.append(i)
        time.sleep(0.02)

    results = read_ahead(read, range(200), threads=1, ahead=100)
    next(results)
    results.close()
    assert len(seen) < 100
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-ahead")]


def test_no_items_give_no_results():
    assert list(read_ahead(str, [], threads=2, ahead=3)) == []
