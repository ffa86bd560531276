"""The worker processes of a study, and the events that they send."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ENDED = "the worker"
"""how the report on a process that has ended begins"""
TAIL_LINES = 12
"""lines of a log that an error shows"""


class Worker:
    """A process that runs one job after another.

    Args:
        number: identifies the worker.
        folder: the folder for the log of its output while it has no job.
        events: receives `(worker, event)` for each event of the worker, and `{"event": "gone"}` when the process ends.
        environment: the environment variables of the process.
        lock: descriptor of the lock file, which the process keeps open until it ends.
    """

    def __init__(
        self,
        number: int,
        folder: Path,
        events: queue.SimpleQueue[tuple[Worker, dict[str, Any]]],
        environment: dict[str, str],
        lock: int,
    ) -> None:
        self.number, self.events = number, events
        self.ready = False
        self.task: Any = None
        """the run that the worker works on; None if it is idle"""
        self.kind = ""
        self.data = ""
        """the data set whose decoded images the worker has in memory"""
        self.job_start = time.monotonic()
        self.tick: dict[str, Any] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"worker-{number}.log"
        with open(self.log, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "proxymetric.studies.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                env=environment,
                pass_fds=(lock,),
                start_new_session=True,  # Ctrl-C reaches only the study, which stops its workers
            )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put((self, json.loads(line)))
        self.process.wait()
        self.events.put((self, {"event": "gone"}))

    def give(self, kind: str, task: Any, job: dict[str, Any]) -> None:
        """Start a job."""
        self.kind, self.task, self.data, self.tick = kind, task, task.cell.data, {}
        self.job_start, self.log = time.monotonic(), Path(job["log"])
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # a process that has ended sends the event "gone"
            self.process.stdin.write(json.dumps({"kind": kind, **job}) + "\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        """Ask the process to save and exit."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process."""
        if self.process.poll() is None:
            self.process.kill()

    def dismiss(self) -> None:
        """Let an idle process exit: close its input."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()

    def exit_report(self) -> str:
        """How the process ended, and the last lines of its log."""
        code = self.process.returncode
        report = f"{ENDED} exited with code {code}"
        if code is not None and code < 0:
            report = f"{ENDED} was ended by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                report += " (out of memory, or killed by a user)"
        last_lines = tail(self.log)
        return f"{report}\n{last_lines}" if last_lines else report


def tail(file: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a text file.

    >>> tail(Path("nowhere"))
    ''
    """
    if not file.is_file():
        return ""
    with open(file, "rb") as text:
        text.seek(max(0, file.stat().st_size - 200 * lines))
        return "\n".join(text.read().decode(errors="replace").splitlines()[-lines:])


def worker_environment(jobs: int, extra: dict[str, str]) -> dict[str, str]:
    """The environment variables of workers: path of the package, share of the cores, share of the memory."""
    home = str(Path(__file__).resolve().parents[2])
    paths = [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    defaults = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "PROXYMETRIC_KEEP": str(memory // (2 * jobs)),
    }
    return {
        **defaults,
        **os.environ,
        **extra,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
    }
