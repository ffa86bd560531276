"""Share one GPU among several processes, through NVIDIA's Multi-Process Service (MPS) where it works."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

CONTROL = "nvidia-cuda-mps-control"
PROBE = "import torch; torch.zeros(8, device='cuda').sum().item()"


@contextlib.contextmanager
def shared_gpu(jobs: int, say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Yield the environment variables for processes that share the GPU; stop the service at the end.

    The pipes and logs of the service are in a temporary folder. The service is not started for a single process,
    without CUDA, if it is not installed, or if it is running already. If a test program fails with the service, the
    processes take turns on the GPU.

    Args:
        jobs: the number of processes.
        say: receives a message: whether the service was started, or why not.

    Example:
        >>> with shared_gpu(1, print) as environment:
        ...     environment
        {}
    """
    control = shutil.which(CONTROL)
    if jobs < 2 or control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ or not _has_cuda():
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        folders = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in folders.values():
            os.mkdir(path)
        environment = {**os.environ, **folders}
        if not _works([control, "-d"], environment):
            say(f"{CONTROL} did not start: the runs take turns on the GPU")
            yield {}
            return
        try:
            if _works([sys.executable, "-c", PROBE], environment):
                say("the runs share the GPU through NVIDIA's Multi-Process Service")
            else:
                say(f"{CONTROL} starts, but a test program fails with it: the runs take turns on the GPU")
                folders = {}
            yield folders
        finally:
            _works([control], environment, "quit\n")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _works(command: list[str], environment: dict[str, str], text: str = "") -> bool:
    null = subprocess.DEVNULL  # not a pipe: the service would keep it open
    try:
        process = subprocess.run(command, env=environment, input=text, text=True, stdout=null, stderr=null, timeout=120)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0
