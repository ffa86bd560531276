"""The simple face of an objective, for people with a training loop of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.core.class_shards import Shard
from proxymetric.core.pieces import NORMALISATIONS, Batch, Boundary, Commit, Context, Objective, Pool, Progress, Source
from proxymetric.core.second_pass import SecondPass, SecondPassResult
from proxymetric.sources.row_table import RowTable

NEEDS = {
    "encoder": "criterion.bind(encoder) before the first step",
    "images": "criterion(embeddings, labels, images=images)",
    "validation": "criterion.boundary(score=...) after each evaluation",
    "pool": "criterion.boundary(..., pool=...): a function (count) -> (embeddings, labels) of that many random "
    "training images of each class, or those two tensors for all of them",
    "epochs": "steps_per_epoch=... when the criterion is made, or criterion.epoch(i) at the start of each epoch",
}
"""what a method may need beyond embeddings and labels, and how to give it"""


MANY = 64
"""forward passes before one commit that nobody accumulates on purpose"""


class Criterion(nn.Module):
    """A loss with everything it owns: call it, step your optimiser, then `commit`.

    `forward(embeddings (B, D), labels (B,)) -> scalar`. Embeddings are normalised here, as the method says. What the
    method remembers changes in `commit` alone: a step that is skipped (`discard`) leaves no trace, and any number of
    forward passes may lie before one commit (gradient accumulation).

    >>> import proxymetric as pm
    >>> criterion = pm.method("proxy-anchor", classes=3, dim=2)
    >>> optimizer = torch.optim.AdamW(criterion.param_groups(lr=1e-2))
    >>> loss = criterion(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
    >>> loss.backward(); optimizer.step(); criterion.commit()
    >>> criterion.step
    1
    """

    def __init__(
        self, objective: Objective, *, needs: Iterable[str] = (), steps_per_epoch: int | None = None, name: str = ""
    ) -> None:
        super().__init__()
        self.objective = objective
        self.name = name or type(objective).__name__
        self.needs = frozenset(needs)
        assert self.needs <= NEEDS.keys(), self.needs
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch: got {steps_per_epoch}, expected a whole number of at least 1")
        self.steps_per_epoch = steps_per_epoch
        self.step = 0
        self.terms: dict[str, Tensor] = {}
        """the named parts of the last loss, detached"""
        self.careful = True
        """at every call look for labels outside [0, C), for which an accelerator is waited, and for a missing commit"""
        self._epoch: float | None = None
        self._encoder: list[nn.Module] = []
        self._pending: list[Commit] = []
        self._versions: tuple[int, ...] = ()
        self._warned = False
        self._grouped: frozenset[str] | None = None
        """the parts there were when `param_groups` was called"""
        self.row_lr: float | None = None
        """the rate of row tables where `commit` is given none: that of `param_groups`"""
        self.network_lr: float | None = None
        """the same for row tables that step at the network's rate"""

    @property
    def normalise(self) -> str:
        """How embeddings are normalised before they are compared: "l2" or "ball"."""
        return self.objective.normalise

    def normalised(self, embeddings: Tensor) -> Tensor:
        """Embeddings as the method compares them."""
        return NORMALISATIONS[self.normalise](embeddings)

    def look(self, labels: Tensor, mine: slice = slice(None)) -> SecondPass | None:
        """The second look that the method wants at this batch's images, None if none; `Learner` takes it.

        Whoever asks hands what came of it to the step: `criterion(embeddings, labels, seen=Seen(look, features))`.
        Without that, the method runs the encoder itself; so it does where several of its sources want a look each.
        """
        asking = [module for module in self.modules() if isinstance(module, Source) and module.looks]
        if len(asking) != 1 or not self.training or not torch.is_grad_enabled():
            return None
        return asking[0].look(labels, mine)

    def forward(
        self, embeddings: Tensor, labels: Tensor, images: Tensor | None = None, seen: SecondPassResult | None = None
    ) -> Tensor:
        """The loss of a batch: embeddings (B, D), labels (B,) in [0, C).

        images: what the embeddings were made of, (B, 3, H, W), as the encoder takes them; a method that needs them
        (VPTSP, MoCo) says so, and wants `bind(encoder)` too. seen: what came of its second look (see `look`).
        """
        self._check(embeddings, labels)
        labels = labels.long()
        keep = self.training and torch.is_grad_enabled()
        if keep and "images" in self.needs and images is None and seen is None:
            self._lacks("images")
        if "encoder" in self.needs and not self._encoder:
            self._lacks("encoder")
        progress = Progress(self.step, self._epoch_now())
        if "epochs" in self.needs and progress.epoch is None:
            self._lacks("epochs")
        if keep and self.careful:
            self._look_for_missing_commit()
        # Exponents of a loss overflow half precision: whatever the encoder computes in, this is float32 or better.
        kind = embeddings.device.type
        precision = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        with torch.autocast(kind, enabled=False):
            full = embeddings.float() if embeddings.dtype in (torch.half, torch.bfloat16) else embeddings
            encode = self._encoder[0] if self._encoder else None
            outcome = self.objective(Context(Batch(images, labels), full, progress, encode, precision, seen))
            loss = outcome.loss
        self.terms = {name: value.detach() for name, value in outcome.terms.items()}
        if keep:
            self._pending.append(outcome.commit)
        return loss

    def commit(
        self,
        lr: float | None = None,
        loss_scale: float = 1.0,
        clip: float | None = None,
        network_lr: float | None = None,
    ) -> None:
        """Apply what is pending since the last commit; call it after `optimizer.step()`.

        Row tables (see `RowTable`) step themselves here: at `lr`, or at `network_lr` where they are part of a network
        (defaults: those given to `param_groups`), with their gradients divided by `loss_scale` and clipped by value at
        `clip`. Methods without them ignore all four.
        """
        if not self._pending:
            return
        rates = {
            "proxies": self.row_lr if lr is None else lr,
            "network": self.network_lr if network_lr is None else network_lr,
        }
        moves = [(table, rates[table.rate]) for table in self.row_tables()]
        for table, rate in moves:
            if rate is None:
                name = "lr" if table.rate == "proxies" else "network_lr"
                raise ValueError(
                    f"{name}: this method's rows step themselves: call param_groups({name}=...) first, "
                    f"or commit({name}=...)"
                )
        for remember in self._pending:
            remember()
        for table, rate in moves:
            assert rate is not None
            table.step(rate, loss_scale, clip)
        self._pending.clear()
        self.step += 1

    def expect(self, labels: Tensor) -> None:
        """Say which labels come next, while the step before is still under way: what they need may travel meanwhile.

        Nothing depends on it but time.
        """
        for module in self.modules():
            if isinstance(module, Source):
                module.expect(labels)

    def discard(self) -> None:
        """Drop what is pending: the step is not taken."""
        self._pending.clear()
        for table in self.row_tables():
            table.discard()

    @property
    def pending(self) -> int:
        """Forward passes since the last commit."""
        return len(self._pending)

    def epoch(self, number: float) -> None:
        """Say that epoch `number` (from 0) begins: drives schedules that count in epochs."""
        self._epoch = float(number)

    def bind(self, encoder: nn.Module) -> Criterion:
        """Meet the encoder; it does not become part of this module.

        Call it first: before `param_groups`, and before state is saved or loaded, since some methods make what they
        train for the encoder they meet.
        """
        self._encoder[:] = [encoder]
        self.objective.bind(encoder)
        made = set() if self._grouped is None else self.parts().keys() - self._grouped
        if made:
            raise ValueError(
                f"bind: {self.name} makes parameters for this encoder ({', '.join(sorted(made))}), and the groups of "
                "param_groups are without them; expected criterion.bind(encoder) before criterion.param_groups(...)"
            )
        return self

    def shard(self, rank: int, size: int, group: Any = None) -> Criterion:
        """Keep the proxies of one part of the classes here; `size` processes have one part each.

        Before an optimiser is made. Every process must see the same embeddings and labels, those of all; it then has
        the whole loss and the whole gradient of its own proxies, so data parallelism must leave them alone
        (`sharded` names them). Methods whose proxies cannot be divided refuse.
        """
        for module in self.modules():
            if isinstance(module, Source) and (module.proxies or module.classes is not None):
                assert module.classes is not None
                module.shard(Shard.of(module.classes, rank, size, group))
        if not self.sharded():
            raise ValueError(f"shard: {self.name} has no proxies to divide among processes")
        return self

    def sharded(self) -> dict[str, Shard]:
        """Names of the parameters that are divided among processes, class after class, and which part is here."""
        found: dict[str, Shard] = {}
        for place, module in self.named_modules():
            part = getattr(module, "part", None)
            if isinstance(module, Source) and part is not None:
                found |= {f"{place}.{name}": part for name in module.proxies}
        return found

    def boundary(self, score: float | None = None, pool: Pool | tuple[Tensor, Tensor] | None = None) -> None:
        """Tell the method how an evaluation went; some schemes turn to their next problem here.

        Call it once before the first step and after each evaluation. score: of held-out classes, higher is better.
        pool: a function (count) -> (embeddings, labels) of `count` random training images of each class, asked only
        when it is needed; or the embeddings and labels of all training images as two tensors.
        """
        if self._pending:
            raise ValueError("boundary: a step is still pending; expected commit() or discard() before it")
        if "validation" in self.needs and score is None:
            self._lacks("validation")
        if "pool" in self.needs and pool is None:
            self._lacks("pool")
        self.objective.boundary(Boundary(score, pool_from(*pool) if isinstance(pool, tuple | list) else pool))

    def figures(self) -> dict[str, float]:
        """What the method's memory looks like now, by name: worth a line in a log."""
        parts = list(self.modules())[1:]
        return {name: value for part in parts for name, value in getattr(part, "figures", dict)().items()}

    def uncertainty(self, draws: int = 1000) -> Tensor:
        """How unsure the method is of each training class, (C,): VCPA, Eq. 30 (`VariationalProxies.uncertainty`)."""
        for module in self.modules():
            ask: Callable[[int], Tensor] | None = getattr(module, "uncertainty", None)
            if ask is not None and module is not self:
                return ask(draws)
        raise ValueError(f"{self.name} does not know how unsure it is of a class; vcpa does")

    def param_groups(self, lr: float, network_lr: float | None = None) -> list[dict[str, Any]]:
        """Groups for an optimiser: `lr` for the proxies, `network_lr` for any network the method owns.

        Without `network_lr` the optimiser's own rate holds for the latter. Row tables are in no group: they step in
        `commit`, at these rates. Those of VPTSP (class prompts) step at `network_lr`: it wants one, here or there.
        """
        self.row_lr, self.network_lr, self._grouped = lr, network_lr, frozenset(self.parts())
        proxies = [
            getattr(module, name)
            for module in self.modules()
            if isinstance(module, Source)
            for name in module.proxies
            if getattr(module, name).requires_grad
        ]
        known = {id(p) for p in proxies}
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in known]
        groups: list[dict[str, Any]] = []
        if proxies:
            groups.append({"params": proxies, "lr": lr, "name": "proxies"})
        if others:
            rate = {} if network_lr is None else {"lr": network_lr}
            groups.append({"params": others, "name": "criterion", **rate})
        return groups

    def parts(self) -> dict[str, int]:
        """How many numbers of each part are trained, those in row tables included.

        >>> from proxymetric import method
        >>> method("soft-triple", classes=3, dim=2, per_class=2).parts()
        {'proxies': 12}
        """
        trained = [(name, p.numel()) for name, p in self.named_parameters() if p.requires_grad]
        trained += [(name, one.values.numel()) for name, one in self.named_modules() if isinstance(one, RowTable)]
        counts: dict[str, int] = {}
        for name, number in trained:
            part = self._part(name)
            counts[part] = counts.get(part, 0) + number
        return counts

    def _part(self, name: str) -> str:
        """What a report calls the parameter or table of that name."""
        found, at = "what else the method trains", self
        for word in name.split("."):
            if isinstance(at, Source):
                found = at.called.get(word, "proxies" if word in at.proxies else found)
            at = getattr(at, word)
        return found

    def row_tables(self) -> list[RowTable]:
        """The tables that step themselves in `commit`."""
        return [module for module in self.modules() if isinstance(module, RowTable)]

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.step, -1.0 if self._epoch is None else self._epoch], dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        step, epoch = state.tolist()
        self.step, self._epoch = int(step), None if epoch < 0 else epoch
        self.discard()

    def _epoch_now(self) -> float | None:
        if self._epoch is not None:
            return self._epoch
        return None if self.steps_per_epoch is None else self.step / self.steps_per_epoch

    def _look_for_missing_commit(self) -> None:
        versions = tuple(p._version for module in (self, *self._encoder) for p in module.parameters())
        # Of a method without parameters nothing is seen to move: then many passes without a commit are the sign.
        forgotten = versions != self._versions if versions else len(self._pending) >= MANY
        if self._pending and forgotten and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name}: it was trained on, but commit() was not called; "
                "call criterion.commit() after optimizer.step() (or discard() for a skipped step)",
                stacklevel=5,  # over forward and the two calls of nn.Module, at the line of the loop
            )
        self._versions = versions

    def _check(self, embeddings: Tensor, labels: Tensor) -> None:
        if embeddings.ndim != 2 or not embeddings.is_floating_point():
            raise ValueError(
                f"embeddings: got shape {tuple(embeddings.shape)} of {embeddings.dtype}, expected floats (batch, dim)"
            )
        if self.objective.dim is not None and embeddings.shape[1] != self.objective.dim:
            raise ValueError(f"embeddings: got {embeddings.shape[1]} dimensions, expected dim={self.objective.dim}")
        if labels.shape != embeddings.shape[:1] or labels.is_floating_point() or labels.dtype == torch.bool:
            raise ValueError(
                f"labels: got shape {tuple(labels.shape)} of {labels.dtype}, "
                f"expected {len(embeddings)} whole numbers, one for each embedding"
            )
        if self.careful and self.objective.classes is not None and len(labels):
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= self.objective.classes:
                wrong = low if low < 0 else high
                raise ValueError(
                    f"labels: got {wrong}, expected 0 to {self.objective.classes - 1} "
                    f"(classes={self.objective.classes})"
                )

    def _lacks(self, need: str) -> None:
        raise ValueError(f"{self.name} needs {need}: {NEEDS[need]}")


def pool_from(embeddings: Tensor, labels: Tensor) -> Pool:
    """A pool that draws from embeddings of all training images, anew at each call."""

    def pool(count: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(len(labels)).to(labels.device)
        order = order[labels[order].argsort(stable=True)]
        of = labels[order]
        first = torch.searchsorted(of, of)
        rows = order[torch.arange(len(of), device=of.device) - first < count]
        return embeddings[rows], labels[rows]

    return pool
