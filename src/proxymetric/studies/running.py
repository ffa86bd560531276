"""Run a study: distribute its runs to workers, watch the time limit, and record the status of each run."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from proxymetric.studies.choice import best_run
from proxymetric.studies.folder import RunStatus, StudyFolder, is_over, local_settings
from proxymetric.studies.pool import Worker, tail, worker_environment
from proxymetric.studies.ranges import Group, in_words
from proxymetric.studies.reporting import Reporter
from proxymetric.studies.results import write_archive
from proxymetric.studies.scores import HELD_OUT
from proxymetric.studies.sharing import shared_gpu
from proxymetric.studies.spec import LABELS, Study, Task
from proxymetric.system.clock import clock

STOP_SECONDS = 60.0
"""time for workers to save before they are killed"""
POLL_SECONDS = 0.2


@dataclass
class Outcome:
    """How a session of a study ended. `unfinished` are the runs that neither finished nor failed."""

    finished: list[Task] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unfinished: list[Task] = field(default_factory=list)
    interrupted: bool = False


class Session:
    """One session of a study: it starts workers, gives them runs, and ends them.

    Args:
        book: the folder of the study, locked.
        tasks: the runs that are not done, in order.
        statuses: the status of every run of the study.
        identities: name of a data set -> hash of its content.
        jobs: the number of runs at the same time.
        root: the folder of data and weights.
        minutes: time after which runs save and stop; None: no limit.
        reporter: shows the progress.
        on_gpu: whether the runs use a GPU; `card_minutes` then counts its time.
        archive: file that holds all results so far after each run; None: no archive.
        overwrite: repeat the runs of a search whose best draw is another one by now.
    """

    def __init__(
        self,
        book: StudyFolder,
        tasks: list[Task],
        statuses: dict[str, RunStatus],
        identities: dict[str, str],
        jobs: int,
        root: Path | None,
        minutes: float | None,
        reporter: Reporter,
        on_gpu: bool = False,
        archive: Path | None = None,
        overwrite: bool = False,
    ) -> None:
        self.archive, self.overwrite = archive, overwrite
        self.book, self.statuses, self.identities, self.root = book, statuses, identities, root
        self.study: Study = book.study
        self.jobs, self.reporter, self.on_gpu = jobs, reporter, on_gpu
        self.todo, self.embeds = list(tasks), self._missing_embeddings()
        self.total, self.outcome = len(tasks), Outcome()
        self.events: queue.SimpleQueue[tuple[Worker, dict[str, Any]]] = queue.SimpleQueue()
        self.workers: list[Worker] = []
        self.started_workers = 0
        self.start_time = time.monotonic()
        self.deadline = None if minutes is None else self.start_time + 60 * minutes
        self.budget = None if minutes is None else 60 * minutes
        self.stop_time: float | None = None
        """time at which the workers were asked to stop"""
        self.failed_starts = 0
        """workers that ended before they were ready"""
        self.stop_signals = 0
        """signals that asked the study to stop"""
        self.record: dict[str, Any] = {
            "started": datetime.now(UTC).isoformat(timespec="milliseconds"), "jobs": jobs, "finished": 0, "failed": 0,
            "minutes": 0.0, "card_minutes": 0.0, "busy_minutes": 0.0, "images": 0,
        }  # fmt: skip

    def run(self, lock: int) -> Outcome:
        """Do the runs until all are done, the time is over, or a signal arrives.

        Args:
            lock: descriptor of the lock file, which the workers inherit.
        """
        self.book.state["sessions"].append(self.record)
        with self._signals(), shared_gpu(min(self.jobs, max(1, len(self.todo))), self.reporter.say) as shared:
            self.environment, self.lock = worker_environment(self.jobs, shared), lock
            for group in dict.fromkeys(self.study.group(task.cell) for task in self.todo if task.waits):
                self._choose(group)
            try:
                while self._continues():
                    self._hand_out()
                    self._listen()
            finally:
                self._end_workers()
                self._account()
                self.reporter.close()
        self.outcome.unfinished += self.todo
        return self.outcome

    def _end_workers(self) -> None:
        """Let the workers exit; kill those that do not."""
        for worker in self.workers:
            worker.dismiss()
        for worker in self.workers:
            try:
                worker.process.wait(10 if worker.task is None else 0.1)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.process.wait()

    # Choose the next job

    def _continues(self) -> bool:
        now = time.monotonic()
        if self.stop_signals and not self.outcome.interrupted:
            self.outcome.interrupted = True
            self.reporter.say("stopping: the current runs save (press Ctrl-C again to stop at once)")
            self._stop()
        if self.deadline is not None and now >= self.deadline and self.stop_time is None:
            self.reporter.say("the time is over: the current runs save and stop")
            self._stop()
        if self.stop_signals > 1 or (self.stop_time is not None and now - self.stop_time > STOP_SECONDS):
            for worker in self.workers:
                worker.kill()
        busy = any(worker.task is not None for worker in self.workers)
        if self.stop_time is None and not busy and not self.embeds and self._next(None) is None:
            return False
        return bool(self.workers) or self.stop_time is None

    def _stop(self) -> None:
        self.stop_time = time.monotonic()
        for worker in self.workers:
            worker.stop()

    def _hand_out(self) -> None:
        if self.stop_time is not None:
            return
        if self.failed_starts > 2:
            log = self.book.folder / "logs" / "worker-1.log"
            count = self.failed_starts
            raise OSError(f"workers: got {count} that ended before they were ready, expected none; {log}: {tail(log)}")
        busy = sum(worker.task is not None for worker in self.workers)
        needed = min(self.jobs, busy + len(self.todo) + len(self.embeds))
        while len(self.workers) < needed:
            self.started_workers += 1
            folder = self.book.folder / "logs"
            self.workers.append(Worker(self.started_workers, folder, self.events, self.environment, self.lock))
        for worker in self.workers:
            if worker.ready and worker.task is None:
                self._give(worker)

    def _give(self, worker: Worker) -> None:
        if self.embeds:
            task = self.embeds.pop(0)
            file = str(self.book.vectors(task))
            worker.give("embed", task, {"out": str(self.book.run(task)), "file": file, "log": self._log(task)})
            return
        chosen = self._next(worker)
        if chosen is None:
            return
        self.todo.remove(chosen)
        restart = self.statuses[chosen.name].status == "changed"
        self.book.begin(chosen, self.identities.get(chosen.cell.data), restart)
        self.book.note(chosen, status="running", error=None, worker=worker.process.pid)
        resumed = not restart and (self.book.run(chosen) / "last.safetensors").is_file()
        self.reporter.say(f"started   {chosen.name}{' (resumed)' if resumed else ''}")
        job = {
            "recipe": None if chosen.recipe is None else str(chosen.recipe),
            "settings": local_settings(chosen, self.root),
            "out": str(self.book.run(chosen)), "log": self._log(chosen), "score_test": chosen.draw is None,
        }  # fmt: skip
        worker.give("train", chosen, job)

    def _log(self, task: Task) -> str:
        file = self.book.log(task)
        file.parent.mkdir(parents=True, exist_ok=True)
        return str(file)

    def _next(self, worker: Worker | None) -> Task | None:
        """The first run that fits into the time left; a run of its seed whose images the worker holds goes first."""
        estimates, searching = self._estimates(), self._searching()
        fitting = [
            task
            for task in self.todo
            if not task.waits and self.study.group(task.cell) not in searching and self._fits(estimates[task.name])
        ]
        if not fitting:
            return None
        decoded = [t for t in fitting if worker and t.seed == fitting[0].seed and t.cell.data == worker.data]
        return decoded[0] if decoded else fitting[0]

    def _searching(self) -> set[Group]:
        """The searches with draws that are still to do or running."""
        running = (worker.task for worker in self.workers if worker.task is not None and worker.kind == "train")
        return {group for task in (*self.todo, *running) if (group := self.study.group_of_draw(task)) is not None}

    def _choose(self, group: Group | None) -> None:
        """Give the runs of a search their numbers if its draws are done."""
        runs = [run for run in self.todo if self.study.group(run.cell) == group]
        if group is None or group in self._searching():
            return
        self.book.resolve(self.statuses)
        self.study = self.book.study
        best = self.study.chosen.get(group)
        if best is None:
            self._no_best_draw(group, runs)
            return
        score = f"{best.metric} {100 * abs(best.score or 0.0):.1f} ({HELD_OUT})"
        self.reporter.say(f"searched  {best.row}: the best draw is {best.run}, {score}: {in_words(best.values)}")
        self.todo = self.book.current(self.todo)
        for run in self.book.current(runs):
            status = self.statuses[run.name] = self.book.status(run, self.identities.get(run.cell.data))
            if status.status == "done":
                self.todo.remove(run)
            elif status.status == "changed" and not self.overwrite:
                reason = (
                    f"out: got a run with the numbers of another draw ({status.reason}); expected those of the best "
                    "draw: --overwrite repeats it"
                )
                self._give_up(run, reason)

    def _no_best_draw(self, group: Group, runs: list[Task]) -> None:
        """Give up the runs of a search if no draw has a score; if a draw was killed, another session does it again."""
        draws = [draw for draw in self.study.draws() if self.study.group_of_draw(draw) == group]
        if all(is_over(draw, self.statuses[draw.name]) for draw in draws):
            error = self.statuses[draws[0].name].reason.partition("\n")[0]
            for run in runs:
                self._give_up(
                    run,
                    f"search: got no draw of {group[0]} with a score ({error}), expected ranges with which it trains",
                )

    def _give_up(self, run: Task, error: str) -> None:
        """Record that a run cannot be done."""
        self.todo.remove(run)
        self.outcome.failed[run.name] = error

    def _fits(self, estimate: float | None) -> bool:
        if self.deadline is None or self.budget is None:
            return True
        left = self.deadline - time.monotonic()
        if left <= 0:
            return False
        # A run that is longer than a whole session would never start; it runs in parts, one in each session.
        return estimate is None or estimate <= left or estimate > self.budget

    def _estimates(self) -> dict[str, float | None]:
        return self.book.estimates([*self.study.draws(), *self.study.tasks()], self.statuses)

    # Events of the workers

    def _listen(self) -> None:
        try:
            worker, event = self.events.get(timeout=POLL_SECONDS)
        except queue.Empty:
            self._show_status()
            return
        handle = getattr(self, f"_on_{event['event'].replace(' ', '_')}")
        handle(worker, event)
        self._show_status()

    def _on_ready(self, worker: Worker, event: dict[str, Any]) -> None:
        worker.ready = True

    def _on_tick(self, worker: Worker, event: dict[str, Any]) -> None:
        worker.tick = event

    def _on_evaluated(self, worker: Worker, event: dict[str, Any]) -> None:
        worker.tick = {**worker.tick, "scores": event["scores"]}

    def _on_finished(self, worker: Worker, event: dict[str, Any]) -> None:
        task, worker.task = worker.task, None
        self.statuses[task.name] = self.book.status(task, self.identities.get(task.cell.data))
        self.record["finished"] += 1
        self.record["busy_minutes"] += event["seconds"] / 60
        self.record["images"] += event["images"]
        self.record["gpu"] = event["gpu"]
        self.outcome.finished.append(task)
        self.book.note(
            task, status="done", seconds=event["whole_seconds"], spent=0.0,
            wall=round(self.book.seconds_spent(task) + event["seconds"], 1),
            images_per_second=event["images_per_second"], scores=event["scores"],
        )  # fmt: skip
        self.embeds += [other for other in self._missing_embeddings() if other.cell == task.cell]
        scores = "  ".join(f"{m} {100 * event['scores'][m]:.1f}" for m in self.study.metrics if m in event["scores"])
        result = self.statuses[task.name].result
        label = f" ({LABELS['papers']})" if task.cell.protocol == "papers" else ""
        if result is not None and result.evaluated_on == "validation":
            label = f" ({HELD_OUT})"
        self.reporter.say(f"finished  {task.name}: {scores}{label}, {event['seconds']:.0f} s; {self._summary()}")
        if task.draw is not None:
            self.book.drop_checkpoints(task)
        self._choose(self.study.group_of_draw(task))
        self._account()
        self._hand_out()  # the worker need not wait for the archive
        self._update_archive()

    def _on_failed(self, worker: Worker, event: dict[str, Any]) -> None:
        task, worker.task = worker.task, None
        self.record["images"] += event["images"]
        self._failed(task, event["error"], event["seconds"])

    def _on_stopped(self, worker: Worker, event: dict[str, Any]) -> None:
        task, worker.task = worker.task, None
        if task is None or worker.kind == "embed":
            return
        self.record["busy_minutes"] += event["seconds"] / 60
        self.record["images"] += event["images"]
        self.book.note(task, status="stopped", spent=round(self.book.seconds_spent(task) + event["seconds"], 1))
        self.outcome.unfinished.append(task)
        self.reporter.say(f"stopped   {task.name}: saved, can be resumed")

    def _on_embedded(self, worker: Worker, event: dict[str, Any]) -> None:
        task, worker.task = worker.task, None
        best = best_run(self.study, task.cell, self.statuses)
        for other in self.study.tasks():
            if best is not None and other.cell == task.cell and other.name != best.name:
                self.book.vectors(other).unlink(missing_ok=True)
        self._update_archive()

    def _on_not_embedded(self, worker: Worker, event: dict[str, Any]) -> None:
        task, worker.task = worker.task, None
        self.reporter.say(f"no embeddings of {task.name}: {event['error']}")

    def _on_gone(self, worker: Worker, event: dict[str, Any]) -> None:
        self.workers.remove(worker)
        self.failed_starts += not worker.ready
        task, worker.task = worker.task, None
        if task is None or worker.kind == "embed":
            return
        seconds = time.monotonic() - worker.job_start
        if self.stop_time is not None:
            self.book.note(task, status="stopped", spent=round(self.book.seconds_spent(task) + seconds, 1))
            self.outcome.unfinished.append(task)
            self.reporter.say(f"stopped   {task.name}: killed, can be resumed from its last checkpoint")
        else:
            self._failed(task, worker.exit_report(), seconds)

    def _failed(self, task: Task, error: str, seconds: float) -> None:
        self.record["failed"] += 1
        self.record["busy_minutes"] += seconds / 60
        self.statuses[task.name] = RunStatus("failed", error)
        self.book.note(task, status="failed", error=error, spent=round(self.book.seconds_spent(task) + seconds, 1))
        if is_over(task, self.statuses[task.name]):
            self.reporter.say(f"failed    {task.name}, which counts as a draw without a score: {error}")
        else:
            self.outcome.failed[task.name] = error
            self.reporter.say(f"failed    {task.name}: {error}")
        self._choose(self.study.group_of_draw(task))
        self._account()

    # Progress and records

    def _missing_embeddings(self) -> list[Task]:
        """The best run of each row of the tables, where the study asks for embeddings and they are not written yet."""
        cells = [cell for cell in self.study.cells() if cell.protocol in self.study.embeddings]
        best = [best_run(self.study, cell, self.statuses) for cell in cells]
        return [
            task for task in best
            if task is not None and not self.book.vectors(task).is_file()
            and (self.book.run(task) / "last.safetensors").is_file()
        ]  # fmt: skip

    def _summary(self) -> str:
        done = len(self.outcome.finished)
        seconds_left = self._seconds_left()
        return f"{done} of {self.total} done" + ("" if seconds_left is None else f", about {clock(seconds_left)} left")

    def _seconds_left(self) -> float | None:
        estimates, now, total = self._estimates(), time.monotonic(), 0.0
        running = [worker for worker in self.workers if worker.task is not None and worker.kind == "train"]
        for task in (*self.todo, *(worker.task for worker in running)):
            estimate = estimates[task.name]
            if estimate is None:
                return None
            total += estimate
        total -= sum(min(now - worker.job_start, estimates[worker.task.name] or 0.0) for worker in running)
        return total / min(self.jobs, max(1, len(self.todo) + len(running)))

    def _show_status(self) -> None:
        now = time.monotonic()
        running = [
            {"run": worker.task.name, "kind": worker.kind, "seconds": now - worker.job_start, **worker.tick}
            for worker in self.workers
            if worker.task is not None
        ]
        self.reporter.status(running, self._summary())

    def _account(self) -> None:
        seconds = time.monotonic() - self.start_time
        record = self.record
        record["minutes"] = round(seconds / 60, 3)
        record["card_minutes"] = record["minutes"] if self.on_gpu else 0.0
        record["busy_minutes"] = round(record["busy_minutes"], 3)
        record["images_per_second"] = round(record["images"] / seconds, 1)
        record["runs_per_hour"] = round(3600 * record["finished"] / seconds, 2)
        sessions = self.book.state["sessions"]
        self.book.state["total"] = {
            name: round(sum(session[name] for session in sessions), 3)
            for name in ("minutes", "card_minutes", "busy_minutes", "finished", "failed", "images")
        }
        self.book.save()

    def _update_archive(self) -> None:
        """Write what is done so far, so that a machine that is lost later costs only the runs under way."""
        if self.archive is None:
            return
        try:
            write_archive(self.book, self.statuses, self.archive)
        except OSError as error:  # the runs matter more; the command writes the archive once more at its end
            self.reporter.say(f"{self.archive}: not written now ({error.strerror})")

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM stop the study; a second Ctrl-C kills its workers."""

        def stop(number: int, frame: object) -> None:
            self.stop_signals += number == signal.SIGINT or self.stop_signals == 0

        previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
