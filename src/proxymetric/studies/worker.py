"""One worker process of a study: `python -m proxymetric.studies.worker` trains what it is told, one run after another.

It reads one JSON object a line from its standard input, a run each, and answers with events on its standard output.
What a run prints goes to the run's own log. SIGTERM, or the end of its input, makes it save, answer and exit.
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

if TYPE_CHECKING:
    from proxymetric.runs.result import Result

TICK_SECONDS = 1.0
GRACE_SECONDS = 60.0


class _Stopped(BaseException):
    """SIGTERM while no training loop was there to take it."""


def _on_term(number: int, frame: object) -> None:
    raise _Stopped


class _Teller:
    """The watcher of a run: events for the study, sentences for the log."""

    def __init__(self, send: Callable[..., None]) -> None:
        self.send, self.said = send, 0.0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def work(self, what: str, done: int, total: int) -> None: ...

    def tick(self, tick: Any) -> None:
        if time.monotonic() - self.said >= TICK_SECONDS:
            self.said = time.monotonic()
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


def train(job: dict[str, Any], watcher: _Teller) -> Result:
    """Do one run, or the rest of it; its result."""
    from proxymetric.runs import train as whole_run

    folder, settings = Path(job["out"]), dict(job["settings"])
    begun = (folder / "run.json").is_file()
    if begun:
        settings.pop("encoder.weights", None)  # as it was begun; the file may lie elsewhere by now
    run = whole_run.train(
        recipe=job["recipe"], settings=settings, out=folder, resume=begun, report=False, watcher=watcher
    )
    return run.result


def write_embeddings(folder: Path, file: Path) -> None:
    """The test embeddings of a run's chosen model: `vectors` (N, D) in half precision and `labels` (N,)."""
    import torch

    from proxymetric.data import EvalFeed
    from proxymetric.files import replacing
    from proxymetric.models.load import load
    from proxymetric.runs.evaluation_set import evaluation_set
    from proxymetric.tensor_files import write_tensors

    images, words = evaluation_set(folder)
    model = load(folder)
    files = images.arrays is None
    feed = EvalFeed(
        images, model.view, cache="memory" if files else "none", workers=min(8, os.cpu_count() or 1) if files else 0
    )
    squares, labels = [], []
    for batch in feed:
        assert batch.images is not None
        squares.append(batch.images)
        labels.append(batch.labels)
    vectors = model.embed(torch.cat(squares), batch=256)
    with replacing(file) as temporary:
        about = {"classes": json.dumps(images.classes), "run": folder.name, "images": words}
        write_tensors(temporary, {"vectors": vectors.half(), "labels": torch.cat(labels)}, about)


def do(job: dict[str, Any], send: Callable[..., None]) -> bool:
    """Do one job and tell how it ended; whether another may follow."""
    from proxymetric.training import Interrupted

    began = time.perf_counter()

    def seconds() -> float:
        return round(time.perf_counter() - began, 2)

    try:
        result = train(job, _Teller(send))
        send(
            event="finished", seconds=seconds(), scores=result.scores,
            images_per_second=result.images_per_second, whole_seconds=result.seconds,
            gpu=result.machine.get("gpu"), images=_images(result),
        )  # fmt: skip
    except (Interrupted, _Stopped, KeyboardInterrupt):
        send(event="stopped", seconds=seconds())
        return False
    except (ValueError, OSError) as error:  # a sentence for people
        print(error, flush=True)
        send(event="failed", seconds=seconds(), error=str(error))
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        send(event="failed", seconds=seconds(), error=f"{type(error).__name__}: {error}")
    finally:
        _tidy()
    return True


def embed(job: dict[str, Any], send: Callable[..., None]) -> bool:
    """Write the embeddings of a finished run; a failure here is told and fails nothing."""
    try:
        write_embeddings(Path(job["out"]), Path(job["file"]))
        send(event="embedded")
    except (_Stopped, KeyboardInterrupt):
        send(event="stopped", seconds=0.0)
        return False
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        send(event="not embedded", error=f"{type(error).__name__}: {error}")
    finally:
        _tidy()
    return True


def _images(result: Result) -> int:
    """Images that training has seen, counted by batches."""
    options = result.recipe["train"]
    return int(result.steps * options["batch"] * options["accumulate"])


def _tidy() -> None:
    """Give back what the last run held, before the next one begins."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _lines(handle: int) -> Iterator[bytes]:
    """The lines that come in through a file descriptor, until its end."""
    rest = b""
    while content := os.read(handle, 2**16):
        *whole, rest = (rest + content).split(b"\n")
        yield from whole


def main() -> None:
    """Take jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the study decides
    signal.signal(signal.SIGTERM, _on_term)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # A thread that waits in `sys.stdin` holds its lock, and processes forked to read images would wait for it forever.
    told = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)

    def send(**event: Any) -> None:
        try:
            answers.write(json.dumps(event) + "\n")
            answers.flush()
        except OSError:  # nobody listens any more
            pass

    jobs: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def listen() -> None:
        for line in _lines(told):
            jobs.put(json.loads(line))
        jobs.put(None)
        time.sleep(0.5)  # an idle worker has left by now
        # The study has gone: save what there is, and leave.
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=listen, daemon=True).start()
    try:
        import proxymetric.training  # noqa: F401 - before the first run's clock
        from proxymetric.data.decoded_cache import keep_decoded

        send(event="ready")
        with keep_decoded(int(os.environ.get("PROXYMETRIC_KEEP", 2**33))):
            while (job := jobs.get()) is not None:
                output = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(output, 1)
                os.dup2(output, 2)
                os.close(output)
                if not (do if job["kind"] == "train" else embed)(job, send):
                    break
    except _Stopped:
        send(event="stopped", seconds=0.0)
    answers.flush()
    os._exit(0)  # threads of libraries must not hold the process


if __name__ == "__main__":
    main()
