"""One worker process of a study: `python -m proxymetric.studies.worker` does the jobs of a study one after another.

The worker reads one job per line (a JSON object) from standard input, and writes events to standard output. The output
of a run goes to the log of that run. At SIGTERM or at the end of its input, the worker saves, sends an event and exits.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxymetric.system.clock import Work

if TYPE_CHECKING:
    from proxymetric.runs.result import Result

TICK_SECONDS = 1.0
"""shortest time between two events "tick" """
LOG_SECONDS = 30.0
"""shortest time between two lines of the log about work other than training, such as features"""
GRACE_SECONDS = 60.0
"""time to save a run after the study has exited"""


class _Stopped(BaseException):
    """SIGTERM outside of a training loop; a training loop handles the signal itself."""


def _on_term(number: int, frame: object) -> None:
    raise _Stopped


class _EventWatcher:
    """The watcher of a run: it sends events to the study and prints messages to the log."""

    def __init__(self, send: Callable[..., None]) -> None:
        self.send, self.last_tick, self.last_line = send, 0.0, 0.0
        self.under_way = Work("", 0, 0.0)

    def say(self, text: str) -> None:
        print(text, flush=True)

    def work(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self.under_way.what or done < self.under_way.first:
            self.under_way, self.last_line = Work(what, done, now), now
        facts = self.under_way.facts(done, total, now)
        if now - self.last_line >= LOG_SECONDS:
            self.last_line = now
            print(f"{what}: {done} of {total}, {facts}", flush=True)
        if now - self.last_tick >= TICK_SECONDS:
            self.last_tick = now
            self.send(event="tick", what=what, done=done, total=total, facts=facts)

    def tick(self, tick: Any) -> None:
        if time.monotonic() - self.last_tick >= TICK_SECONDS:
            self.last_tick = time.monotonic()
            self.send(
                event="tick", step=tick.step, steps=tick.steps, epoch=tick.epoch, epochs=tick.epochs,
                images_per_second=tick.images_per_second, seconds_left=tick.seconds_left,
            )  # fmt: skip

    def evaluated(
        self, epoch: float, scores: dict[str, float], best: bool, scored_on: str = "held-out classes"
    ) -> None:
        words = "  ".join(f"{name} {100 * value:.1f}" for name, value in scores.items())
        print(f"epoch {round(epoch, 2)}, {scored_on}: {words}{'  best' if best else ''}", flush=True)
        self.send(event="evaluated", epoch=epoch, scores=scores, best=best)

    def close(self) -> None: ...


def train(job: dict[str, Any], watcher: _EventWatcher) -> Result:
    """Train one run, or resume it, and return its result."""
    from proxymetric.runs import train as whole_run

    folder, settings = Path(job["out"]), dict(job["settings"])
    resumed = (folder / "run.json").is_file()
    if resumed:
        settings.pop("encoder.weights", None)  # run.json has the weights; the file may have moved since
    run = whole_run.train(
        recipe=job["recipe"], settings=settings, out=folder, resume=resumed, report=False,
        score_test=job["score_test"], watcher=watcher,
    )  # fmt: skip
    return run.result


def write_embeddings(folder: Path, file: Path) -> None:
    """Write the test embeddings of a run's chosen model: `vectors` (N, D) in half precision and `labels` (N,)."""
    import torch

    from proxymetric.data import EvalFeed
    from proxymetric.models.load import load
    from proxymetric.runs.evaluation_set import evaluation_set
    from proxymetric.system.files import replacing
    from proxymetric.system.tensor_files import write_tensors

    images, description = evaluation_set(folder)
    model = load(folder)
    from_files = images.arrays is None
    feed = EvalFeed(
        images,
        model.view,
        cache="memory" if from_files else "none",
        workers=min(8, os.cpu_count() or 1) if from_files else 0,
    )
    squares, labels = [], []
    for batch in feed:
        assert batch.images is not None
        squares.append(batch.images)
        labels.append(batch.labels)
    vectors = model.embed(torch.cat(squares), batch=256)
    with replacing(file) as temporary:
        metadata = {"classes": json.dumps(images.classes), "run": folder.name, "images": description}
        write_tensors(temporary, {"vectors": vectors.half(), "labels": torch.cat(labels)}, metadata)


def train_and_report(job: dict[str, Any], send: Callable[..., None]) -> bool:
    """Train one run and send an event that says how it ended.

    Returns:
        Whether the worker takes another job.
    """
    from proxymetric.training.trainer import Interrupted

    start, earlier_images = time.perf_counter(), trained_images(Path(job["out"]))

    def spent() -> dict[str, Any]:
        """The time and the training images of this process."""
        images = max(0, trained_images(Path(job["out"])) - earlier_images)
        return {"seconds": round(time.perf_counter() - start, 2), "images": images}

    try:
        result = train(job, _EventWatcher(send))
        send(
            event="finished", **spent(), scores=result.scores, images_per_second=result.images_per_second,
            whole_seconds=result.seconds, gpu=result.machine.get("gpu"),
        )  # fmt: skip
    except (Interrupted, _Stopped, KeyboardInterrupt):
        send(event="stopped", **spent())
        return False
    except (ValueError, OSError) as error:  # the message is enough; no traceback
        print(error, flush=True)
        send(event="failed", **spent(), error=str(error))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        send(event="failed", **spent(), error=f"{type(error).__name__}: {error}")
    finally:
        _tidy()
    return True


def embed(job: dict[str, Any], send: Callable[..., None]) -> bool:
    """Write the embeddings of a finished run; a failure is reported and does not fail the run.

    Returns:
        Whether the worker takes another job.
    """
    try:
        write_embeddings(Path(job["out"]), Path(job["file"]))
        send(event="embedded")
    except (_Stopped, KeyboardInterrupt):
        send(event="stopped", seconds=0.0, images=0)
        return False
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        send(event="not embedded", error=f"{type(error).__name__}: {error}")
    finally:
        _tidy()
    return True


def trained_images(folder: Path) -> int:
    """The number of images that a run was trained on until its last checkpoint, those of its refit included."""
    from proxymetric.system.tensor_files import read_header

    headers = [read_header(each / "last.safetensors") for each in (folder, folder / "refit")]
    try:
        return sum(int(json.loads(header["state"])["images"]) for header in headers if "state" in header)
    except (ValueError, TypeError, KeyError):
        return 0  # a damaged checkpoint, which the run refuses with a sentence


def _tidy() -> None:
    """Free the memory of the last run before the next one starts."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _lines(handle: int) -> Iterator[bytes]:
    """The lines read from a file descriptor, until its end."""
    partial_line = b""
    while content := os.read(handle, 2**16):
        *lines, partial_line = (partial_line + content).split(b"\n")
        yield from lines


def main() -> None:
    """Do jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study handles Ctrl-C
    signal.signal(signal.SIGTERM, _on_term)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Not `sys.stdin`: a thread that reads it holds its lock, and forked data loaders would wait for that lock forever.
    job_input = os.dup(0)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)

    def send(**event: Any) -> None:
        try:
            answers.write(json.dumps(event) + "\n")
            answers.flush()
        except OSError:  # the study has exited
            pass

    jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen() -> None:
        for line in _lines(job_input):
            jobs.put(json.loads(line))
        jobs.put(None)
        time.sleep(0.5)  # an idle worker exits within this time
        # The study has exited: save the run and exit.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        import proxymetric.training  # noqa: F401 - so that the time of the first run does not include this import
        from proxymetric.data.decoded_cache import keep_decoded

        send(event="ready")
        with keep_decoded(int(os.environ.get("PROXYMETRIC_KEEP", 2**33))):
            while (job := jobs.get()) is not None:
                output = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                if not (train_and_report if job["kind"] == "train" else embed)(job, send):
                    break
    except _Stopped:
        send(event="stopped", seconds=0.0, images=0)
    answers.flush()
    os._exit(0)  # threads of libraries must not keep the process alive


if __name__ == "__main__":
    main()
