"""Counters of the service in the format of Prometheus, summed over its processes."""

from __future__ import annotations

import logging
import os
from io import FileIO
from pathlib import Path

import numpy as np

ROUTES = (
    "search", "identify", "write", "items", "rows", "thumbnails", "map", "info", "page", "healthz", "metrics",
    "openapi", "other",
)  # fmt: skip
STATUSES = (200, 304, 400, 401, 403, 404, 405, 408, 413, 415, 421, 422, 429, 500, 503, 504, 507)
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""upper bounds of the histogram of the duration of searches, in seconds"""
FOLDER_VARIABLE = "PROXYMETRIC_SERVE_COUNTERS"
"""environment variable with the folder where the processes of the service keep their counters"""
_REQUESTS = len(ROUTES) * (len(STATUSES) + 1)
_REST = 6
_SIZE = _REQUESTS + len(BUCKETS) + 1 + _REST
log = logging.getLogger("proxymetric.serve")


class Counters:
    """Counters of one process, in memory and in a file that the other processes read; without a folder only in memory.

    The file is written, not mapped: where a full disk has no room for a page of a mapped file, the system kills the
    process. A file that cannot be written is tried again with the next change, and says so once in the log.

    Args:
        folder: where the processes keep their counters; None: only this process counts.

    Example:
        >>> counters = Counters()
        >>> counters.answered("search", 200, seconds=0.02)
        >>> print(counters.text(items=7).splitlines()[2])
        proxymetric_requests_total{route="search",status="200"} 1
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)
        self._name = f"{os.getpid()}.counters"
        self._file: FileIO | None = None
        self._is_saved = True
        self._values = np.zeros(_SIZE)
        self._requests = self._values[:_REQUESTS].reshape(len(ROUTES), -1)
        self._buckets = self._values[_REQUESTS : _REQUESTS + len(BUCKETS) + 1]
        self._rest = self._values[-_REST:]
        self._save()

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer; for searches that succeed, also their duration."""
        column = STATUSES.index(status) if status in STATUSES else len(STATUSES)
        self._requests[ROUTES.index(route), column] += 1
        if route == "search" and status == 200:
            self._buckets[np.searchsorted(BUCKETS, seconds)] += 1
            self._rest[0] += seconds
        self._save()

    def batched(self, size: int) -> None:
        """Count a batch of searches."""
        self._rest[1] += 1
        self._rest[2] += size
        self._save()

    def pending(self, change: int) -> int:
        """Change the number of searches that wait or run in this process, and return it."""
        self._rest[3] += change
        self._save()
        return int(self._rest[3])

    def receiving(self, change: int) -> None:
        """Change the number of bodies that are arriving in this process."""
        self._rest[4] += change
        self._save()

    def pending_writes(self, change: int) -> int:
        """Change the number of writes that wait or run in this process, and return it."""
        self._rest[5] += change
        self._save()
        return int(self._rest[5])

    def text(self, items: int) -> str:
        """Return all counters, summed over the processes, in the text format of Prometheus.

        Args:
            items: number of items in the index.
        """
        total = self._values.copy()
        if self.folder is not None:
            others = [np.fromfile(file) for file in self.folder.glob("*.counters") if file.name != self._name]
            total += np.sum([values for values in others if len(values) == _SIZE], axis=0)
        requests = total[:_REQUESTS].reshape(len(ROUTES), -1)
        lines = _head("requests_total", "counter", "Answers by route and status.")
        for row, route in enumerate(ROUTES):
            for column, status in enumerate((*map(str, STATUSES), "other")):
                if requests[row, column]:
                    lines.append(
                        f'proxymetric_requests_total{{route="{route}",status="{status}"}} {requests[row, column]:.0f}'
                    )
        rest = total[-_REST:]
        counts = total[_REQUESTS : _REQUESTS + len(BUCKETS) + 1].cumsum()
        lines += _head("search_seconds", "histogram", "Duration of searches that succeeded.")
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), counts):
            lines.append(f'proxymetric_search_seconds_bucket{{le="{bound}"}} {count:.0f}')
        lines += [
            f"proxymetric_search_seconds_sum {rest[0]:.6f}",
            f"proxymetric_search_seconds_count {counts[-1]:.0f}",
        ]
        lines += [
            *_head("batches_total", "counter", "Batches of searches."),
            f"proxymetric_batches_total {rest[1]:.0f}",
        ]
        lines += _head("batched_searches_total", "counter", "Searches in batches.")
        lines += [f"proxymetric_batched_searches_total {rest[2]:.0f}"]
        lines += _head("pending_searches", "gauge", "Searches that wait or run.")
        lines += [f"proxymetric_pending_searches {rest[3]:.0f}"]
        lines += _head("pending_writes", "gauge", "Writes that wait or run.")
        lines += [f"proxymetric_pending_writes {rest[5]:.0f}"]
        lines += _head("receiving_bodies", "gauge", "Requests whose bodies are arriving; they count as no search yet.")
        lines += [f"proxymetric_receiving_bodies {rest[4]:.0f}"]
        lines += [*_head("index_items", "gauge", "Items in the index."), f"proxymetric_index_items {items}"]
        return "\n".join(lines) + "\n"

    def _save(self) -> None:
        """Write all counters to the file of this process."""
        if self.folder is None:
            return
        try:
            if self._file is None:
                self._file = FileIO(self.folder / self._name, "w")
            self._file.seek(0)
            self._file.write(self._values.tobytes())
            self._is_saved = True
        except OSError as error:
            if self._is_saved:
                log.warning(
                    "counters: could not save %s: %s; until it can be written, /metrics of the other processes lacks "
                    "what this one counts",
                    self.folder / self._name,
                    error.strerror or error,
                )
            self._is_saved = False


def _head(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP proxymetric_{name} {text}", f"# TYPE proxymetric_{name} {kind}"]
