"""Faults of the machine, in words: the cause, and the way out; of several processes, one says them."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from proxymetric.system.files import DISK_FULL, NotSaved, is_disk_full

TRAINING_VERB = "train"
RESUME = "; --resume continues a run from its last checkpoint"
MEMORY_SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory")
SHARED_MEMORY_SIGNS = (
    "out of shared memory",
    "unable to allocate shared memory",
    "unable to write to file </torch",
    "unable to mmap",
    "Bus error",
)
DESCRIPTOR_SIGNS = ("Too many open files", "ancdata", "unable to open shared memory object")
LOST_PROCESS_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
)
"""what gloo and NCCL say when a process of the group has gone"""
SAID = "proxymetric.said"
"""the file in torchrun's folder that lists what was said"""
KILLED_WORKER = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\) (is killed by signal: \w+|exited unexpectedly)"
)


def sentence(error: BaseException, verb: str = "") -> str | None:
    """Describe an error that the machine caused.

    Args:
        error: the error.
        verb: the verb of the command line; for verbs that train, the sentence says how to continue.

    Returns:
        The sentence; None for an error that is a defect of the program.

    Example:
        >>> sentence(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "train")
        'memory: got too little for this run, expected a smaller --batch or --size; --resume continues a run from its
        last checkpoint'
        >>> sentence(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [::1]:4242"))
        'processes: another process of the group has gone, so that this one cannot go on'
        >>> sentence(RuntimeError("shapes do not fit")) is None
        True
    """
    resume = RESUME if verb == TRAINING_VERB else ""
    # Other verbs have no --set, and start none of these processes unless they train.
    no_workers = f", or none of these processes: --set data.workers=0{resume}" if verb in ("", TRAINING_VERB) else ""
    text, number = str(error), getattr(error, "errno", None)
    filename = getattr(error, "filename", None)
    if number == errno.EMFILE or any(sign in text for sign in DESCRIPTOR_SIGNS):
        return (
            "file descriptors: got too few for the processes that read images, expected more (ulimit -n 4096)"
            f"{no_workers}"
        )
    if any(sign in text for sign in SHARED_MEMORY_SIGNS) or _is_semaphore(error):
        return f"shared memory (/dev/shm): got too little for the processes that read images, expected more{no_workers}"
    if is_disk_full(error) and not isinstance(error, NotSaved | ValueError):
        place = filename or _open_file(error) or "the output"
        return f"could not save {place}: {DISK_FULL}; expected free space for it{resume}"
    if isinstance(error, RuntimeError) and any(sign in text for sign in LOST_PROCESS_SIGNS):
        return f"processes: another process of the group has gone, so that this one cannot go on{resume}"
    if match := KILLED_WORKER.search(text):
        return (
            f"workers: process {match[1].strip()}, which reads images, was killed or ended, most likely because memory "
            f"ran out; expected fewer of these processes: --set data.workers=0{resume}"
        )
    if isinstance(error, MemoryError) or number == errno.ENOMEM or any(sign in text for sign in MEMORY_SIGNS):
        return f"memory: got too little for this run, expected a smaller --batch or --size{resume}"
    if isinstance(error, OSError) and error.strerror:
        return f"{filename}: {error.strerror}" if filename else error.strerror
    return text if isinstance(error, ValueError | OSError) else None


def _is_semaphore(error: BaseException) -> bool:
    """Whether a full /dev/shm had no room for a semaphore of processes: neither that error nor that of a write to a
    full disk names a file, so that the place in the program tells them apart."""
    modules = [str(frame.f_globals.get("__name__")) for frame in _frames(error)]
    return getattr(error, "errno", None) == errno.ENOSPC and "multiprocessing.synchronize" in modules


def _open_file(error: BaseException) -> str | None:
    """The name of the file that was written when an error arose: an error of a write does not name it."""
    for frame in reversed(_frames(error)):
        for value in frame.f_locals.values():
            name, mode = getattr(value, "name", None), str(getattr(value, "mode", ""))
            if isinstance(value, io.IOBase) and isinstance(name, str) and mode not in ("r", "rb"):
                return name
    return None


def _frames(error: BaseException) -> list[FrameType]:
    return [frame for frame, _ in traceback.walk_tb(error.__traceback__)]


@contextlib.contextmanager
def said_once(sentence: str, each_start: bool, stream: TextIO | None = None) -> Iterator[bool]:
    """Let one of the processes that torchrun started on this machine print a sentence that several of them have.

    Processes that print to the same place share a list of what was said, which lies in torchrun's folder for this
    command. The list is locked while a process prints: the others wait, and if that process is killed before it has
    printed, another one prints. A sentence that only one process has is always printed.

    Args:
        sentence: what is to be printed.
        each_start: print it again after torchrun has started the processes again.
        stream: where it is printed; None means the error stream.

    Yields:
        Whether to print it; True without torchrun.

    Example:
        >>> with said_once("memory: got too little", each_start=True) as is_first:
        ...     is_first
        True
    """
    with contextlib.ExitStack() as opened:
        try:
            import fcntl

            error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])  # COMMAND/attempt_0/LOCAL_RANK/error.json
            start, command = error_file.parents[1].name, error_file.parents[2]
            if start != f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}":
                raise FileNotFoundError(error_file)
            place = os.fstat((stream or sys.stderr).fileno())
            record = opened.enter_context(open(command / SAID, "ab+", buffering=0))
            fcntl.flock(record, fcntl.LOCK_EX)
            # Also a process that is forked meanwhile, such as one that reads images, holds the lock until it ends.
            opened.callback(fcntl.flock, record, fcntl.LOCK_UN)
            record.seek(0)
            words = [place.st_dev, place.st_ino, start if each_start else "", sentence]
            line = json.dumps(words).encode() + b"\n"
            is_first = line not in record.readlines()
        except (ImportError, KeyError, IndexError, OSError, ValueError):
            yield True  # without torchrun, or without a place or locks for the list
            return
        yield is_first
        if is_first:
            with contextlib.suppress(OSError):
                record.write(line)


def quiet_loaders() -> None:
    """Hide errors from the deletion of a data loader that failed in its constructor: that failure is reported."""
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "DataLoaderIter.__del__" not in getattr(unraisable.object, "__qualname__", ""):
            previous_hook(unraisable)

    sys.unraisablehook = hook
