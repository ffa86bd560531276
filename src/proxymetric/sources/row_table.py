"""A table of which a step touches a few rows, and which steps itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STATE: dict[str, dict[str, str]] = {
    "adamw": {"average": "row", "square": "row"},
    "adam": {"average": "row", "square": "row"},
    "sgd": {"average": "row"},
    "rowwise-adagrad": {"square": "number"},
}
"""optimiser -> what it remembers of each row: as much as the row is, or one number"""


class RowTable(nn.Module):
    """(N, ...) trained rows with their optimiser state, of which one step reads and moves only a few.

    `take(index)` hands out the rows as a leaf that collects a gradient; `step(lr)` moves exactly those rows. A row that
    was not taken is neither moved nor decayed, and Adam's step count is kept per row. It is no parameter: an optimiser
    never sees it, and a checkpoint holds all of it.

    optimizer: "adamw", "adam", "sgd", or "rowwise-adagrad", which keeps one number for a row instead of two for each of
    its numbers: `G += mean(g^2)`, `row -= lr g / (sqrt G + eps)`. betas, eps, weight_decay, momentum: as in
    torch.optim. rate: that of a run at which it steps, "proxies" or "network". host: the table and its state stay in
    host memory wherever the module is sent (its floats still follow a change of type); the rows taken travel to
    `device`, step there, and come back, so that an accelerator holds those of one batch only.

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
    ) -> None:
        super().__init__()
        if rate not in ("proxies", "network"):
            raise ValueError(f"rate: got {rate!r}, expected 'proxies' or 'network'")
        self.rate, self.host = rate, host
        self.register_buffer("values", values.detach().clone(memory_format=torch.contiguous_format))
        self.register_buffer("average", values.new_empty(0))
        self.register_buffer("square", values.new_empty(0))
        self.register_buffer("steps", torch.zeros(len(values), dtype=torch.int64))
        self.eps = eps
        self.follow(optimizer, betas, weight_decay, momentum)
        self._taken: list[tuple[Tensor, Tensor]] = []
        self._apart: list[Tensor] = []
        """of those, the ones of which other processes have gradients too"""
        self._state: dict[str, Tensor] = {}
        """the optimiser state of the rows that are about to move"""
        self._state_of: Tensor | None = None
        self._late: dict[str, tuple[Tensor, Tensor]] = {}
        """rows on their way from an accelerator to this table in host memory, each with its index"""
        self._sent: torch.cuda.Event | None = None
        self._ahead: tuple[Tensor, Tensor] | None = None
        """rows that somebody is about to take, and which they are"""

    def follow(self, optimizer: str, betas: tuple[float, float], weight_decay: float, momentum: float) -> None:
        """Step as this optimiser would: a trainer calls it with the run's own. The state of another one is dropped."""
        if optimizer not in STATE:
            raise ValueError(f"optimizer: got {optimizer!r}, expected one of {', '.join(STATE)}")
        self.optimizer, self.betas = optimizer, betas
        self.weight_decay, self.momentum = weight_decay, momentum
        for name in ("average", "square"):
            width = STATE[optimizer].get(name)
            shape = (0,) if width is None else self.values.shape if width == "row" else (len(self.values), *self._ones)
            if getattr(self, name).shape != shape:
                setattr(self, name, self.values.new_zeros(shape))

    @property
    def _ones(self) -> tuple[int, ...]:
        return (1,) * (self.values.ndim - 1)

    def take(self, index: Tensor, device: torch.device | None = None, apart: bool = False) -> Tensor:
        """The rows of `index`, distinct numbers from 0 to N - 1, on `device`; with gradients, remembered until `step`.

        apart: of several processes, each uses the same rows for samples of its own, so that their gradients are to be
        averaged, as those of parameters are.
        """
        index, device = index.to(self.values.device), device or self.values.device
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[1].device == device and torch.equal(ahead[0], index):
            rows = ahead[1]
        else:
            self._settle("values")
            rows = self._out(self.values, index, device)
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_()
            self._taken.append((index, rows))
            if apart and torch.distributed.is_available() and torch.distributed.is_initialized():
                self._apart.append(rows)
        return rows

    def expect(self, index: Tensor, device: torch.device) -> None:
        """Send the rows that will be taken next to `device`, while that is busy with the step before.

        A step that moves some of them changes these there, too. Who takes others than were expected waits for them.
        """
        if self.host:
            self._settle("values")
            index = index.to(self.values.device)
            self._ahead = index, self._out(self.values, index, device)

    def leaves(self) -> list[Tensor]:
        """What was handed out since the last step, every row once; `.grad` may be unscaled or clipped in place."""
        for rows in self._apart:
            if rows.grad is None:
                continue
            torch.distributed.all_reduce(rows.grad)
            rows.grad /= torch.distributed.get_world_size()
        self._apart.clear()
        taken = [(index, rows) for index, rows in self._taken if rows.grad is not None]
        if len(taken) > 1:
            index, place = torch.cat([index for index, _ in taken]).unique(return_inverse=True)
            grads = torch.cat([rows.grad for _, rows in taken if rows.grad is not None])
            self._settle("values")
            rows = self._out(self.values, index, grads.device).requires_grad_()
            rows.grad = torch.zeros_like(rows).index_add_(0, place.to(grads.device), grads.to(rows.dtype))
            taken = [(index, rows)]
        self._taken = taken
        for index, rows in taken:
            # Asked for now: a trainer comes here while an accelerator is still busy with the backward pass.
            if self._state_of is rows:
                break
            self._settle()
            kept = STATE[self.optimizer]
            self._state = {name: self._out(getattr(self, name), index, rows.device) for name in kept}
            self._state_of = rows
        return [rows for _, rows in taken]

    def discard(self) -> None:
        """Forget the rows handed out: the step is not taken."""
        self._taken.clear()
        self._apart.clear()
        self._state, self._state_of = {}, None

    @torch.no_grad()
    def step(self, lr: float, loss_scale: float = 1.0, clip: float | None = None) -> None:
        """Move the rows taken since the last step; rows taken more than once move once, by their summed gradient."""
        self.leaves()
        taken = self._taken
        self._taken = []
        if not taken:
            return
        ((index, leaf),) = taken
        assert leaf.grad is not None
        grad = leaf.grad / loss_scale
        place = grad.device
        if clip is not None:
            grad.clamp_(-clip, clip)
        rows, state = leaf.detach(), self._state
        self._state, self._state_of = {}, None
        steps = self.steps[index] + 1
        if self.optimizer != "adamw":
            grad = grad + self.weight_decay * rows
        if self.optimizer == "sgd":
            state["average"] = self.momentum * state["average"] + grad
            rows = rows - lr * state["average"]
        elif self.optimizer == "rowwise-adagrad":
            state["square"] = state["square"] + grad.square().flatten(1).mean(1).view(-1, *self._ones)
            rows = rows - lr * grad / (state["square"].sqrt() + self.eps)
        else:
            mean, spread = self.betas
            shape = (-1, *self._ones)
            if self.optimizer == "adamw":
                rows = rows * (1 - lr * self.weight_decay)
            state["average"] = mean * state["average"] + (1 - mean) * grad
            state["square"] = spread * state["square"] + (1 - spread) * grad.square()
            # In float64: 1 - 0.999^1 keeps only four digits in float32.
            powers = torch.stack([1 - decay ** steps.double() for decay in (mean, spread)]).to(rows.dtype)
            first, second = self._out(powers, torch.arange(2, device=powers.device), place).view(2, *shape)
            rows = rows - lr * (state["average"] / first) / ((state["square"] / second).sqrt() + self.eps)
        self.steps[index] = steps
        self._correct(index, rows)
        for name, moved in {"values": rows, **state}.items():
            self._put(name, index, moved)
        if self._late:
            self._sent = torch.cuda.current_stream(place).record_event()

    def _correct(self, index: Tensor, rows: Tensor) -> None:
        """Of the rows that are expected, those that have just moved."""
        if self._ahead is None:
            return
        expected, ahead = self._ahead
        both = (expected[:, None] == index).nonzero()
        if not len(both):
            return
        there, here = self._out(both.T, torch.arange(2), rows.device)
        ahead.index_copy_(0, there.to(ahead.device), rows[here].to(ahead))

    def _put(self, name: str, index: Tensor, rows: Tensor) -> None:
        """Write rows back; from an accelerator to the host they are only sent, and written when they are asked for."""
        table = getattr(self, name)
        if table.device.type != "cpu":
            table[index] = rows.to(table.device)
            return
        if rows.device.type != "cuda":
            _write(table, index, rows.cpu())
            return
        self._settle(name)
        staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True, device="cpu")
        self._late[name] = (index, staged.copy_(rows, non_blocking=True))

    def _settle(self, *names: str) -> None:
        """Have what was sent to the tables of these names, or to all, arrive there."""
        for name in names or tuple(self._late):
            if name in self._late:
                assert self._sent is not None
                self._sent.synchronize()
                index, staged = self._late.pop(name)
                _write(getattr(self, name), index, staged)
        if not self._late:
            self._sent = None

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        self._ahead = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy."""
        self._settle()
        return self.__dict__ | {"_ahead": None}

    @staticmethod
    def _out(table: Tensor, index: Tensor, device: torch.device) -> Tensor:
        """A copy of these rows on `device`; from the host to an accelerator without waiting for it."""
        if table.device.type != "cpu":
            return table[index].to(device)
        shape, pinned = (len(index), *table.shape[1:]), device.type == "cuda"
        staged = torch.empty(shape, dtype=table.dtype, pin_memory=pinned, device="cpu")
        _read(table, index, staged)
        return staged.to(device, non_blocking=pinned)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RowTable:
        """What `.to`, `.cuda` and `.double` go through; of a table in host memory only the type changes."""
        self._settle()
        self._ahead = None
        if not self.host:
            return super()._apply(fn, recurse)
        return super()._apply(lambda tensor: tensor.to(fn(tensor[:0]).dtype), recurse)


# In host memory one thread copies rows, not all of torch's. Those of a batch are a few megabytes: to call the threads
# together takes longer than to copy, some milliseconds each time where somebody else has work for the processors, too.


def _read(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """`rows = table[index]`."""
    array, places = _array(table), _checked(table, index)
    np.take(array, places, axis=0, out=_array(rows), mode="clip")  # "raise" would go through another copy


def _write(table: Tensor, index: Tensor, rows: Tensor) -> None:
    """`table[index] = rows`."""
    _array(table)[_checked(table, index)] = _array(rows.to(table.dtype))


def _checked(table: Tensor, index: Tensor) -> np.ndarray:
    places = index.numpy()
    if places.ndim != 1 or places.dtype.kind != "i":
        raise IndexError(f"index: got {index.dtype} of shape {tuple(index.shape)}, expected whole numbers (n,)")
    if len(places) and not 0 <= places.min() <= places.max() < len(table):
        raise IndexError(f"index: got rows {places.min()} to {places.max()} of a table that has {len(table)}")
    return places


def _array(tensor: Tensor) -> np.ndarray:
    """The same memory; NumPy has no bfloat16, and a copy need not know what it copies."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
