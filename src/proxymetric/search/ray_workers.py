"""Blocks as tasks of a Ray cluster (needs the extra `ray`); those of a lost machine go to others."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from proxymetric.search.image_blocks import Block, BlockDone, Description, done_before, make_block
from proxymetric.search.items import TrainedModel, loaded

RETRIES = 5
"""times that a block is given to another worker when its worker or machine is lost"""
LEAST_WAITING = 64
"""blocks that wait in the cluster or are embedded there at one time; twice the workers, if that is more"""
SECONDS_TO_ANSWER = 5.0
"""time in which the address of a cluster must take a connection; Ray itself waits for minutes"""
DEFAULT_PORTS = {"": 6379, "ray": 10001}
"""scheme of an address -> the port that Ray listens at"""
SILENT_ROUND = 60.0
"""seconds without a finished block after which the machines of the cluster are counted"""


class RayWorkers:
    """The workers of a Ray cluster; as a context, they are connected inside it.

    Each worker loads the model once. It has as many threads as this process (`OMP_NUM_THREADS` sets them), because the
    last bits of a vector depend on their number.

    Args:
        address: "auto", "local" or an address, see `embed_blocks`.
        model: a function that returns the model; it is called by the workers.
        dim: the first dimensions of the vectors that are kept; None: all.
        gpus: GPUs of a worker; None: 1 if a machine has one.
        tell: called with each sentence about the work.

    Raises:
        ValueError: ray is not installed, the address is wrong or does not answer, or no machine has enough GPUs.
    """

    def __init__(
        self,
        address: str,
        model: TrainedModel | Callable[[], TrainedModel],
        dim: int | None,
        gpus: int | None,
        tell: Callable[[str], None],
    ) -> None:
        if not callable(model):
            raise ValueError(
                f"model: got {model!r} with ray, expected a function that each worker calls, such as "
                "partial(pm.load, '/shared/runs/birds')"
            )
        if importlib.util.find_spec("ray") is None:
            raise ValueError("ray: ray is not installed; expected the extra `ray`: pip install 'proxymetric[ray]'")
        _check_address(address)
        self.address, self.dim, self.gpus, self.tell = address, dim, gpus, tell
        self._load = model
        self._open = contextlib.ExitStack()

    def __enter__(self) -> RayWorkers:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        from ray import cloudpickle

        with contextlib.ExitStack() as opened:
            if not ray.is_initialized():
                self._connect(ray)
                opened.callback(ray.shutdown)
            # Ray writes the log of a machine that it has lost where the results belong.
            opened.enter_context(contextlib.redirect_stdout(sys.stderr))
            self._resources = self._needs(ray)
            self._pickled = cloudpickle.dumps(self._load)
            self._open = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def _connect(self, ray: Any) -> None:
        self.tell(f"connecting to Ray ({self.address})")
        settings = {"include_dashboard": False} if self.address == "local" else {}
        try:
            ray.init(address=self.address, logging_level="ERROR", log_to_driver=False, **settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _no_answer(self.address, error) from None

    def describe(self) -> Description:
        """Load the model in a worker, and describe it."""
        import ray

        task = self._task(_describe).remote(self._pickled, self.dim)
        return self._result(ray, task, "the model")

    def make(self, blocks: Sequence[Block], on_images: Callable[[int], None]) -> Iterator[tuple[Block, BlockDone]]:
        """Embed blocks, in any order.

        Args:
            blocks: the blocks.
            on_images: called with the number of images that are done.
        """
        import ray

        make, running, remaining, done = self._task(_make), dict[Any, Block](), iter(blocks), 0
        most, machines = max(LEAST_WAITING, 2 * self._slots(ray)), len(_machines(ray))
        while True:
            while len(running) < most and (block := next(remaining, None)) is not None:
                running[make.remote(self._pickled, self.dim, block, self._threads)] = block
            if not running:
                return
            ready, _ = ray.wait(list(running), num_returns=1, timeout=SILENT_ROUND)
            if not ready and not self._slots(ray):
                self.tell(f"no machine of the cluster can embed at present: {len(running)} blocks wait")
            if (now := len(_machines(ray))) != machines:
                self.tell(
                    f"the cluster has {now} machine{'' if now == 1 else 's'} now; blocks of a lost one go to others"
                )
                machines = now
            for task in ready:
                block = running.pop(task)
                result = self._result(ray, task, str(block))
                done += len(block.photos)
                on_images(done)
                yield block, result

    def _task(self, function: Callable[..., Any]) -> Any:
        """A function as a task of the cluster; its process is kept, and with it the model."""
        import ray

        return ray.remote(**self._resources, max_retries=RETRIES, max_calls=0)(function)

    def _needs(self, ray: Any) -> dict[str, float]:
        """What a worker needs of a machine."""
        machines = _machines(ray)
        most_gpus = max((machine.get("GPU", 0) for machine in machines), default=0)
        gpus = int(most_gpus > 0) if self.gpus is None else self.gpus
        fitting = [machine for machine in machines if machine.get("GPU", 0) >= gpus]
        if gpus > most_gpus:
            raise ValueError(f"gpus: got {gpus} for a worker, expected at most {most_gpus:g}, the GPUs of a machine")
        most_cpus = max((machine.get("CPU", 0) for machine in fitting), default=0)
        self._threads = min(torch.get_num_threads(), max(1, int(most_cpus)))
        count = sum(1 for machine in machines)
        self.tell(
            f"{count} machine{'' if count == 1 else 's'}; a worker has {self._threads} thread"
            f"{'' if self._threads == 1 else 's'}{f' and {gpus} GPU' if gpus else ''}"
        )
        return {"num_cpus": self._threads, "num_gpus": gpus}

    def _slots(self, ray: Any) -> int:
        """The number of workers that the machines have room for."""
        needs = {"CPU": self._resources["num_cpus"], "GPU": self._resources["num_gpus"]}
        return sum(
            min(int(machine.get(name, 0) // number) for name, number in needs.items() if number)
            for machine in _machines(ray)
        )

    def _result(self, ray: Any, task: Any, what: str) -> Any:
        try:
            return ray.get(task)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ValueError | OSError):
                raise cause from None
            raise RuntimeError(f"ray: {what} failed in a worker: {_reason(cause or error)}") from None
        except ray.exceptions.RayError as error:
            raise RuntimeError(
                f"ray: {what} was given up after {RETRIES + 1} workers were lost: {_reason(error)}"
            ) from None


_EXPECTED = "; expected 'auto' for a cluster that runs here, 'local' to start one, or the address of a cluster"


def _check_address(address: str) -> None:
    """Refuse an address that nothing answers at: Ray would try for minutes."""
    if address in ("auto", "local"):
        return
    scheme, _, rest = address.rpartition("://")
    host, _, port = rest.partition(":")
    if scheme not in DEFAULT_PORTS or not host or (port and not port.isdecimal()):
        raise ValueError(f"ray: got {address!r}{_EXPECTED}, such as 10.0.0.1:6379 or ray://10.0.0.1:10001")
    try:
        socket.create_connection((host, int(port or DEFAULT_PORTS[scheme])), timeout=SECONDS_TO_ANSWER).close()
    except (OSError, OverflowError) as error:
        raise _no_answer(address, error) from None


def _no_answer(address: str, error: Exception) -> ValueError:
    return ValueError(f"ray: got {address}, which does not answer ({_reason(error)}){_EXPECTED}")


def _machines(ray: Any) -> list[dict[str, float]]:
    """What the machines have that are alive."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _reason(error: BaseException) -> str:
    reason = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return reason.splitlines()[0]


def _describe(pickled: bytes, dim: int | None) -> Description:
    """In a worker: load the model and describe it."""
    return _model(pickled, dim)[1]


def _make(pickled: bytes, dim: int | None, block: Block, threads: int) -> BlockDone:
    """In a worker: embed a block, unless a worker has written it that was lost before it could say so."""
    for place in (block.file.parent, Path(str(block.facts.photos))):
        if not place.is_dir():
            raise ValueError(
                f"{place}: is no folder on {socket.gethostname()}; expected a folder that all machines share"
            )
    earlier = done_before(block, lambda sentence: None)
    if earlier is not None:
        return earlier
    model, description = _model(pickled, dim)
    if description.fingerprint != block.facts.model:
        raise ValueError(
            f"model: got the model {description.fingerprint[:12]} on {socket.gethostname()}, expected "
            f"{block.facts.model[:12]} on every machine of the cluster"
        )
    torch.set_num_threads(threads)
    return make_block(block, model)


@functools.lru_cache(maxsize=1)
def _model(pickled: bytes, dim: int | None) -> tuple[TrainedModel, Description]:
    """The model of a worker process, which loads it once."""
    from ray import cloudpickle

    whole: TrainedModel = loaded(cloudpickle.loads(pickled))
    model = whole if dim is None else whole.cut_to(dim, warn=False)
    return model, Description.of(model)
