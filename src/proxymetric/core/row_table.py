"""A table of trained rows of which each step reads and moves a few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.arguments.signatures import one_of
from proxymetric.core.host_rows import copy_rows, write_host_rows
from proxymetric.core.row_optimizers import RowOptimizer


class RowTable(nn.Module):
    """(N, ...) trained rows with their optimiser state, of which one step reads and moves only a few.

    `take(index)` returns rows as a leaf tensor that collects a gradient; `step(lr)` moves exactly these rows. Rows that
    were not taken are neither moved nor decayed. Adam's step count is kept per row. The table is not a parameter: no
    optimiser sees it, and `state_dict` holds all of it.

    The arithmetic of the optimisers is in `row_optimizers`; this class selects rows, moves them between host memory and
    the device, and averages their gradients over processes.

    Args:
        values: (N, ...) the first values.
        optimizer: "adamw", "adam", "sgd", or "rowwise-adagrad", which keeps one number per row instead of two per
            value: `G += mean(g^2)`, `row -= lr g / (sqrt G + eps)`.
        betas: as in torch.optim.
        eps: as in torch.optim.
        weight_decay: as in torch.optim.
        momentum: as in torch.optim.
        rate: which learning rate of a run applies: "proxies" or "network".
        host: True: the table and its state stay in host memory when the module is moved to a device (a change of dtype
            still applies). Rows that are taken are copied to the device, step there, and are copied back, so that the
            device holds the rows of one batch only.
        undo: True: the table declares what a step changes (`DeclaresChanges`), so that a trainer can launch the next
            step before it knows that this one is finite. The trainer then copies the whole table before each step: for
            small tables on the device.
        copy: False: `values` become the table, so that a large one is in memory once; nobody else may use them then.

    Example:
        >>> table = RowTable(torch.zeros(4, 2), optimizer="sgd", momentum=0.0)
        >>> table.take(torch.tensor([1, 3])).sum().backward()
        >>> table.step(lr=0.5)
        >>> table.values.T
        tensor([[ 0.0000, -0.5000,  0.0000, -0.5000],
                [ 0.0000, -0.5000,  0.0000, -0.5000]])
    """

    values: Tensor
    average: Tensor
    square: Tensor
    steps: Tensor

    def __init__(
        self,
        values: Tensor,
        optimizer: str = "adamw",
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.9,
        rate: str = "proxies",
        host: bool = False,
        undo: bool = False,
        copy: bool = True,
    ) -> None:
        super().__init__()
        one_of("rate", rate, ("proxies", "network"))
        self.rate = rate
        self.host = host
        self.eps = eps
        values = values.detach()
        self.register_buffer(
            "values", values.clone(memory_format=torch.contiguous_format) if copy else values.contiguous()
        )
        self.register_buffer("average", values.new_empty(0))
        self.register_buffer("square", values.new_empty(0))
        self.register_buffer("steps", torch.zeros(len(values), dtype=torch.int64))
        if undo:
            self.changed_by_commit = ("values", "average", "square", "steps")
        self.follow(optimizer, betas, weight_decay, momentum)
        self._taken: list[tuple[Tensor, Tensor]] = []
        """index and leaf of each `take` since the last step"""
        self._unaveraged: list[Tensor] = []
        """leaves whose gradients must be averaged over processes"""
        self._state: dict[str, Tensor] = {}
        """the optimiser state of the rows that the next step moves, on their device"""
        self._state_leaf: Tensor | None = None
        """the leaf that `_state` belongs to"""
        self._arriving: dict[str, tuple[Tensor, Tensor]] = {}
        """rows that are being copied from a GPU to host memory: name of the tensor -> index and pinned rows"""
        self._sent: torch.cuda.Event | None = None
        """recorded after the last copy to host memory"""
        self._prefetched: tuple[Tensor, Tensor] | None = None
        """index and rows of the next `take`, copied in advance"""

    def follow(self, optimizer: str, betas: tuple[float, float], weight_decay: float, momentum: float) -> None:
        """Use another optimiser; a trainer passes that of the run. State that does not fit the new optimiser is reset.

        Args:
            optimizer: "adamw", "adam", "sgd" or "rowwise-adagrad".
            betas: as in torch.optim.
            weight_decay: as in torch.optim.
            momentum: as in torch.optim.
        """
        before: RowOptimizer | None = getattr(self, "optimizer", None)
        self.optimizer = RowOptimizer(optimizer, betas, self.eps, weight_decay, momentum)
        self.optimizer.check()
        if before is not None and before.state_names == self.optimizer.state_names:
            return
        self.steps.zero_()
        for name in ("average", "square"):
            setattr(self, name, self.values.new_zeros(self.optimizer.state_shape(name, self.values.shape)))

    def take(self, index: Tensor, device: torch.device | None = None, per_process: bool = False) -> Tensor:
        """Rows as a leaf tensor. In training, the table keeps the leaf until the next `step` or `discard`.

        Args:
            index: (n,) distinct row numbers.
            device: of the rows; None: that of the table.
            per_process: True: each process uses the same rows for its own samples, so that the gradients of the rows
                must be averaged over processes, like those of parameters.

        Returns:
            (n, ...) rows.
        """
        # A copy to a GPU that the host waits for would wait for all earlier steps.
        index = index.to(self.values.device, non_blocking=self.values.is_cuda)
        device = device or self.values.device
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[1].device == device and torch.equal(prefetched[0], index):
            rows = prefetched[1]
        else:
            self._finish_copies("values")
            rows = copy_rows(self.values, index, device)
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            self._taken.append((index, rows))
            if per_process and torch.distributed.is_available() and torch.distributed.is_initialized():
                self._unaveraged.append(rows)
        return rows

    def prefetch(self, index: Tensor, device: torch.device) -> None:
        """Copy the rows of the next `take` to the device while it is busy with the current step.

        If the current step moves some of them, the copies are updated. If the next `take` asks for other rows, the
        copies are dropped.

        Args:
            index: (n,) distinct row numbers.
            device: of the rows.
        """
        if self.host:
            self._finish_copies("values")
            index = index.to(self.values.device)
            self._prefetched = index, copy_rows(self.values, index, device)

    def leaves(self) -> list[Tensor]:
        """The leaves with gradients since the last step, merged so that every row occurs once.

        A trainer may unscale or clip `.grad` in place.
        """
        for rows in self._unaveraged:
            if rows.grad is None:
                continue
            torch.distributed.all_reduce(rows.grad)
            rows.grad /= torch.distributed.get_world_size()
        self._unaveraged.clear()
        taken = [(index, rows) for index, rows in self._taken if rows.grad is not None]
        if len(taken) > 1:
            index, place = torch.cat([index for index, _ in taken]).unique(return_inverse=True)
            gradients = torch.cat([rows.grad for _, rows in taken if rows.grad is not None])
            self._finish_copies("values")
            rows = copy_rows(self.values, index, gradients.device).requires_grad_()
            rows.grad = torch.zeros_like(rows).index_add_(0, place.to(gradients.device), gradients.to(rows.dtype))
            taken = [(index, rows)]
        self._taken = taken
        for index, rows in taken:
            # Copy the state now: a trainer calls this method while the GPU is still busy with the backward pass.
            if self._state_leaf is rows:
                break
            self._finish_copies()
            names = self.optimizer.state_names
            self._state = {name: copy_rows(getattr(self, name), index, rows.device) for name in names}
            self._state_leaf = rows
        return [rows for _, rows in taken]

    def discard(self) -> None:
        """Forget the rows that were taken: the step is skipped."""
        self._taken.clear()
        self._unaveraged.clear()
        self._state, self._state_leaf = {}, None

    @torch.no_grad()
    def step(self, lr: float, loss_scale: float = 1.0, clip: float | None = None) -> None:
        """Move the rows taken since the last step; a row that was taken twice moves once, by its summed gradient.

        Args:
            lr: learning rate.
            loss_scale: the gradients are divided by this factor.
            clip: largest absolute value of a gradient, after the division; None: no limit.
        """
        self.leaves()
        taken, self._taken = self._taken, []
        if not taken:
            return
        ((index, leaf),) = taken
        assert leaf.grad is not None
        gradients = leaf.grad / loss_scale
        if clip is not None:
            gradients.clamp_(-clip, clip)
        state, self._state, self._state_leaf = self._state, {}, None
        steps = self.steps[index] + 1
        rows, state = self.optimizer.stepped(leaf.detach(), gradients, state, steps, lr)
        self.steps[index] = steps
        self._update_prefetched(index, rows)
        for name, new_rows in {"values": rows, **state}.items():
            self._store(name, index, new_rows)
        if self._arriving:
            self._sent = torch.cuda.current_stream(gradients.device).record_event()

    def _update_prefetched(self, index: Tensor, rows: Tensor) -> None:
        """Overwrite those prefetched rows that have just moved."""
        if self._prefetched is None:
            return
        prefetched_index, prefetched_rows = self._prefetched
        matches = (prefetched_index[:, None] == index).nonzero()
        if not len(matches):
            return
        targets, origins = copy_rows(matches.T, torch.arange(2), rows.device)
        prefetched_rows.index_copy_(0, targets.to(prefetched_rows.device), rows[origins].to(prefetched_rows))

    def _store(self, name: str, index: Tensor, rows: Tensor) -> None:
        """Write rows back; from a GPU to host memory the copy only starts, and `_finish_copies` completes it."""
        table = getattr(self, name)
        if table.device.type != "cpu":
            table[index] = rows.to(table.device)
            return
        if rows.device.type != "cuda":
            write_host_rows(table, index, rows.cpu())
            return
        self._finish_copies(name)
        staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True, device="cpu")
        self._arriving[name] = (index, staged.copy_(rows, non_blocking=True))

    def _finish_copies(self, *names: str) -> None:
        """Wait for the rows that are being copied to the tensors of these names, or to all, and write them."""
        for name in names or tuple(self._arriving):
            if name in self._arriving:
                assert self._sent is not None
                self._sent.synchronize()
                index, staged = self._arriving.pop(name)
                write_host_rows(getattr(self, name), index, staged)
        if not self._arriving:
            self._sent = None

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._finish_copies()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._finish_copies()
        self._prefetched = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """The attributes for a copy, without the prefetched rows and the rows that the next step would move."""
        self._finish_copies()
        reset: dict[str, Any] = {
            "_taken": [],
            "_unaveraged": [],
            "_state": {},
            "_state_leaf": None,
            "_prefetched": None,
        }
        return self.__dict__ | reset

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowTable:
        """Called by `.to`, `.cuda` and `.double`; for a table in host memory, only the dtype changes."""
        self._finish_copies()
        self._prefetched = None
        if not self.host:
            return super()._apply(fn, recurse)
        return super()._apply(lambda tensor: tensor.to(fn(tensor[:0]).dtype), recurse)
