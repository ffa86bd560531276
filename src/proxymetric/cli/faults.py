"""Faults of the machine, in words: the cause, and the way out."""

from __future__ import annotations

import errno
import re
import sys
from typing import Any

TRAINING_VERBS = ("train", "mlrc")
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
    resume = RESUME if verb in TRAINING_VERBS else ""
    text, number = str(error), getattr(error, "errno", None)
    filename = getattr(error, "filename", None)
    if number == errno.EMFILE or any(sign in text for sign in DESCRIPTOR_SIGNS):
        return (
            "file descriptors: got too few for the processes that read images, expected more (ulimit -n 4096), or "
            f"none of these processes: --set data.workers=0{resume}"
        )
    if any(sign in text for sign in SHARED_MEMORY_SIGNS) or (number == errno.ENOSPC and filename is None):
        return (
            "shared memory (/dev/shm): got too little for the processes that read images, expected more, or none of "
            f"these processes: --set data.workers=0{resume}"
        )
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


def quiet_loaders() -> None:
    """Hide errors from the deletion of a data loader that failed in its constructor: that failure is reported."""
    previous_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if "DataLoaderIter.__del__" not in getattr(unraisable.object, "__qualname__", ""):
            previous_hook(unraisable)

    sys.unraisablehook = hook
