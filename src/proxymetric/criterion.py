"""The criterion: an objective in the form that your own training loop calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Never, cast

import numpy as np
import torch
from torch import Tensor, nn

from proxymetric.core.batch_inputs import (
    LabelCheck,
    LengthCheck,
    all_length,
    as_class_numbers,
    check_embeddings,
    one_if_finite,
    refuse_others,
)
from proxymetric.core.can_shard import check_can_shard
from proxymetric.core.capabilities import EstimatesUncertainty, NamesParts, Prefetches, ReportsFigures
from proxymetric.core.class_shards import Shard, check_own, check_part
from proxymetric.core.normalisation import NORMALISATIONS
from proxymetric.core.optimizer_checks import ROW_GROUPS, StepDetector, row_rate, warn_about_untrained
from proxymetric.core.pieces import (
    Batch,
    Boundary,
    Commit,
    Context,
    Objective,
    Outcome,
    Pool,
    Progress,
    Source,
)
from proxymetric.core.pools import pool_from
from proxymetric.core.row_table import RowTable
from proxymetric.core.second_pass import NeedsSecondPass, SecondPass, SecondPassResult
from proxymetric.core.short_repr import call_text
from proxymetric.core.step_encoder import StepEncoder
from proxymetric.core.untraced import TracedProgress, checked_labels, numbered

NEEDS = {
    "encoder": "criterion.bind(encoder) before the first step",
    "images": "criterion(embeddings, labels, images=images)",
    "validation": "criterion.boundary(score=...) after each evaluation",
    "pool": "criterion.boundary(..., pool=...): a function (count) -> (embeddings, labels) of that many random "
    "training images of each class, or the embeddings and labels of all training images",
    "epochs": "steps_per_epoch=... when the criterion is made, or criterion.epoch(i) at the start of each epoch",
}
"""what a method may need beyond embeddings and labels, and how to give it"""

MAX_UNCOMMITTED_PASSES = 64
"""forward passes without a commit after which a warning is given, if no parameter can show that an optimiser has
stepped; gradient accumulation needs fewer passes"""


class Criterion(nn.Module):
    """A loss with its proxies and its memory: call it, step your optimiser, then call `commit`.

    `criterion(embeddings, labels)` returns the loss. The criterion normalises the embeddings as the method requires.
    The memory of the method changes only in `commit`: a skipped step (`discard`) leaves no trace, and several forward
    passes may precede one commit (gradient accumulation). A copy (`copy.deepcopy`, pickle) has the same state and no
    pending changes: those stay with the original.

    Embeddings with NaN or infinity give a loss of NaN and gradients of NaN, so that a step in mixed precision can be
    skipped. Finite embeddings so large that their length overflows are refused.

    Args:
        objective: what is minimised.
        needs: keys of `NEEDS`: what the method needs beyond embeddings and labels.
        steps_per_epoch: optimiser steps in an epoch, at least 1, for methods with a schedule in epochs; None: unknown.
        name: name of the method, for messages; empty: the name of the objective's class.
        arguments: the arguments of the method, for `repr`; None: the objective is shown instead.

    Attributes:
        step: commits so far.
        terms: the named terms of the last loss, detached.
        careful: check at every call for labels outside [0, C), for embeddings whose length overflows (not in a compiled
            criterion, whose loss is NaN then) and for a missing commit. What lies on a GPU is checked without waiting
            for it, labels after the first call: the next call or commit reports it.

    Example:
        >>> import proxymetric as pm
        >>> criterion = pm.method("proxy-anchor", classes=3, dim=2)
        >>> optimizer = torch.optim.AdamW(criterion.param_groups(lr=1e-2))
        >>> loss = criterion(torch.randn(4, 2), torch.tensor([0, 1, 2, 0]))
        >>> loss.backward(); optimizer.step(); criterion.commit()
        >>> criterion.step
        1
        >>> criterion
        Criterion('proxy-anchor', classes=3, dim=2)
    """

    def __init__(
        self,
        objective: Objective,
        *,
        needs: Iterable[str] = (),
        steps_per_epoch: int | None = None,
        name: str = "",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(objective, Objective):
            wanted = "expected a Compare(loss, source) or a Sum of them"
            raise ValueError(f"objective: got {type(objective).__name__}, {wanted}")
        self.objective = objective
        self.name = name or type(objective).__name__
        self.arguments = None if arguments is None else dict(arguments)
        self.needs = frozenset(needs)
        assert self.needs <= NEEDS.keys(), self.needs
        if steps_per_epoch is not None and (steps_per_epoch < 1 or steps_per_epoch != int(steps_per_epoch)):
            raise ValueError(f"steps_per_epoch: got {steps_per_epoch}, expected a whole number of at least 1")
        self.steps_per_epoch = steps_per_epoch
        self.step = 0
        self.terms: dict[str, Tensor] = {}
        self.careful = True
        self._epoch: float | None = None
        self._encoder: list[nn.Module] = []
        """the bound encoder, in a list so that it is not a submodule"""
        self._pending: list[Commit] = []
        self._label_check = LabelCheck()
        self._length_check = LengthCheck()
        self._number = numbered(self)
        self._steps = StepDetector()
        self._walk: _Walk | None = None
        """what a walk over the modules found; None: walk again"""
        self._warned = False
        self._checked_optimizer = False
        self._grouped_parts: frozenset[str] | None = None
        """the parts that the last `param_groups` covered, for the check in `bind`; None: it was not called"""

    @property
    def normalise(self) -> str:
        """How embeddings are normalised before they are compared: "l2" or "ball"."""
        return self.objective.normalise

    def normalised(self, embeddings: Tensor) -> Tensor:
        """Embeddings (B, D), normalised as the method compares them."""
        return NORMALISATIONS[self.normalise](embeddings)

    def second_pass(self, labels: Tensor, rows: slice = slice(None)) -> SecondPass | None:
        """The second forward pass that the method needs for this batch, if any (VPTSP; see `core.second_pass`).

        `Learner` calls this method, runs both passes at once, and calls
        `criterion(embeddings, labels, second_pass=SecondPassResult(request, features))`. Without a result, the method
        runs the encoder itself.

        Args:
            labels: (B,) labels of the whole batch.
            rows: the part of the batch whose images this process holds.

        Returns:
            The request. None in eval mode, without gradients, and unless exactly one source needs a second pass.
        """
        source = self._source_with_second_pass()
        if source is None or not self.training or not torch.is_grad_enabled():
            return None
        return source.second_pass(labels, rows)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | np.ndarray | Sequence[int] | Sequence[Sequence[int]],
        *others: Never,
        images: Tensor | None = None,
        second_pass: SecondPassResult | None = None,
    ) -> Tensor:
        """The loss of a batch, a scalar.

        Args:
            embeddings: (B, D), not normalised.
            labels: (B,) whole numbers in [0, C): a tensor, an array or a list. proxy-anchor also takes several labels
                for each embedding: a mask (B, C) of bool, or whole numbers (B, L), padded with -1.
            *others: refused: there is no place for the output of a miner.
            images: the images of the embeddings, (B, 3, H, W). VPTSP and MoCo need them, and also `bind(encoder)`.
            second_pass: the result of the second pass that `second_pass` requested; the images are not needed then.

        Raises:
            ValueError: an input does not fit the method, or the method needs more than it was given.
            TypeError: a third argument was given without its name.
        """
        refuse_others(others)
        objective = self.objective
        check_embeddings(embeddings, objective.dim)
        classes = as_class_numbers(
            labels, embeddings, several_of=objective.classes if objective.several_labels else None
        )
        trains, traced = self.training and torch.is_grad_enabled(), torch.compiler.is_compiling()
        if self.careful and objective.classes is not None and classes.ndim == 1:
            within = self._label_check.within
            classes = checked_labels(classes, trains, self._number) if traced else within(classes, objective.classes)
        classes = classes.to(embeddings.device, non_blocking=True)
        if trains and "images" in self.needs and images is None and second_pass is None:
            self._raise_missing("images")
        if "encoder" in self.needs and not self._encoder:
            self._raise_missing("encoder")
        unread = cast(Progress, TracedProgress(self, self._current_epoch)) if traced else None
        progress = unread or Progress(self.step, self._current_epoch())
        if "epochs" in self.needs and progress.epoch is None:
            self._raise_missing("epochs")
        if trains and self.careful and not traced:
            self._warn_about_missing_commit(embeddings)
        # The exponents of a loss overflow in half precision: losses compute in float32 or better.
        device_type = embeddings.device.type
        precision = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        encode = StepEncoder(self._encoder[0], precision) if self._encoder else None
        full = embeddings.float() if embeddings.dtype in (torch.half, torch.bfloat16) else embeddings
        length = all_length(full)
        if self.careful and not traced:
            self._length_check.watch(full, length)
        context = Context(Batch(images, classes), full, progress, encode)
        with nullcontext() if precision is None else torch.autocast(device_type, enabled=False):
            outcome = objective(context) if second_pass is None else self._with_second_pass(second_pass, context)
            # One term, the usual case, spares the operators of a stack.
            only = next(iter(outcome.terms.values())) if len(outcome.terms) == 1 else None
            terms = only if only is not None else torch.stack(list(outcome.terms.values()))
            terms = terms * one_if_finite(length)
            loss = terms if only is not None else terms.sum()
        values = terms.detach()
        named = dict(zip(outcome.terms, (values,) if only is not None else values.unbind(), strict=True))
        self.__dict__["terms"] = named  # nn.Module looks into its parameters and buffers first, which takes longer
        if trains:
            self._pending.append(outcome.commit)
        return loss

    def check_labels(self, labels: Tensor, trains: bool) -> Tensor:
        """The checks of a call that torch.compile has compiled (`ChecksLabels`)."""
        assert self.objective.classes is not None
        if trains:
            self._warn_about_missing_commit(labels)
        return self._label_check.within(labels, self.objective.classes)

    def commit(
        self,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        lr: float | None = None,
        network_lr: float | None = None,
        loss_scale: float = 1.0,
        clip: float | None = None,
    ) -> None:
        """Update the memory of the method; call it after `optimizer.step()`.

        Row tables (`RowTable`: class prompts of VPTSP, proxies with touched="batch") are not parameters of an
        optimiser. They step here and need a learning rate. Pass the optimiser that was made from `param_groups`: its
        groups hold the current rates, also under a learning rate scheduler. Or pass the rates themselves. Methods
        without row tables ignore all arguments.

        Args:
            optimizer: an optimiser with the groups of `param_groups`.
            lr: learning rate of row tables that hold proxies; it overrides the optimiser's.
            network_lr: learning rate of row tables that are part of a network; it overrides the optimiser's.
            loss_scale: the gradients of the rows are divided by this factor.
            clip: largest absolute value of a gradient, after the division; None: no limit.

        Raises:
            ValueError: a row table has no learning rate. Nothing has changed then.
        """
        if not self._pending:
            return
        self._label_check.settle()
        self._length_check.settle()
        given_rates = {"proxies": lr, "network": network_lr}
        tables = self._walked().tables
        rates = [row_rate(table.rate, given_rates[table.rate], optimizer) for table in tables]
        if optimizer is not None and not self._checked_optimizer:
            self._checked_optimizer = True
            warn_about_untrained(self, self.name, optimizer)
        for pending_commit in self._pending:
            pending_commit()
        for table, rate in zip(tables, rates, strict=True):
            table.step(rate, loss_scale, clip)
        self._pending.clear()
        self.step += 1

    def prefetch_batch(self, labels: Tensor) -> None:
        """Announce the next batch while the current step runs, so that its rows can be copied to the device early.

        Training gives the same result without this call.

        Args:
            labels: (B,) labels of the next batch.
        """
        for module in self._pieces():
            if isinstance(module, Prefetches):
                module.prefetch_batch(labels)

    def discard(self) -> None:
        """Drop all pending changes: the step is skipped."""
        self._pending.clear()
        for table in self._walked().tables:
            table.discard()

    @property
    def pending(self) -> int:
        """Forward passes since the last commit."""
        return len(self._pending)

    def epoch(self, number: float) -> None:
        """Announce the start of an epoch, for methods with a schedule in epochs.

        Args:
            number: number of the epoch, from 0.
        """
        self._epoch = float(number)

    def bind(self, encoder: nn.Module) -> Criterion:
        """Give the method access to the encoder. The encoder does not become part of this module.

        Some methods make parameters that fit the encoder. Call `bind` first: before `param_groups`, and before state is
        saved or loaded.

        Args:
            encoder: the encoder that will be trained.

        Returns:
            This criterion.

        Raises:
            ValueError: the method has made parameters that are missing from the groups of an earlier `param_groups`.
        """
        self._encoder[:] = [encoder]
        self._walk = None
        self.objective.bind(encoder)
        ungrouped = set() if self._grouped_parts is None else self.parts().keys() - self._grouped_parts
        if ungrouped:
            raise ValueError(
                f"bind: got an encoder after param_groups(...), whose groups lack the parts that bind has created "
                f"({', '.join(sorted(ungrouped))}), expected criterion.bind(encoder) before criterion.param_groups(...)"
            )
        return self

    def shard(self, rank: int, size: int, group: Any = None) -> Criterion:
        """Keep only the proxies of this process's part of the classes. Call it before an optimiser is made.

        Every process must pass the same embeddings and labels: those of all processes. Each process then computes the
        whole loss and the exact gradient of its own proxies. Data parallelism must not average these gradients;
        `sharded` lists the parameters. `pm.method(..., shard=(rank, size))` does the same without the memory for the
        proxies of all classes.

        Args:
            rank: number of this process, from 0.
            size: number of processes; each holds one part of the classes.
            group: process group of torch.distributed; None: all processes.

        Returns:
            This criterion.

        Raises:
            ValueError: the proxies of this method cannot be divided, its loss does not declare `can_shard`
                (`core.pieces.Loss`), or this process has another rank.
        """
        check_own(rank, size, group)
        if self.sharded():
            raise ValueError("shard: got proxies that are divided already, expected a criterion with all of them")
        self._walk = None
        divided = [m for m in self.modules() if isinstance(m, Source) and (m.proxies or m.classes is not None)]
        check_can_shard(self, divided)
        for source in divided:
            assert source.classes is not None
            source.shard(Shard.of(source.classes, rank, size, group))
        if not self.sharded():
            raise ValueError(f"shard: got {self.name}, which has no proxies to divide, expected a method with proxies")
        return self

    def sharded(self) -> dict[str, Shard]:
        """The parameters that are divided among processes by class: name -> the part in this process."""
        shards: dict[str, Shard] = {}
        for path, module in self.named_modules():
            if isinstance(module, Source) and module.part is not None:
                shards |= {f"{path}.{name}": module.part for name in module.proxies}
        return shards

    def boundary(self, score: float | None = None, pool: Pool | tuple[Tensor, Tensor] | None = None) -> None:
        """Tell the method that an evaluation is done; a scheme may start its next problem here.

        Call it once before the first step and after each evaluation.

        Args:
            score: score of held-out classes; higher is better.
            pool: a function (count) -> (embeddings, labels) of `count` random training images of each class, called
                only if needed; or the embeddings and the labels of all training images, two tensors.

        Raises:
            ValueError: a step is pending, or the method needs an argument that is missing.
        """
        if self._pending:
            raise ValueError("boundary: got a pending step, expected commit() or discard() before boundary()")
        if "validation" in self.needs and score is None:
            self._raise_missing("validation")
        if "pool" in self.needs and pool is None:
            self._raise_missing("pool")
        self.objective.boundary(Boundary(score, pool_from(*pool) if isinstance(pool, tuple | list) else pool))

    def figures(self) -> dict[str, float]:
        """Numbers about the memory of the method, by name, for the log and the report."""
        reporting = [module for module in self._pieces() if isinstance(module, ReportsFigures)]
        return {name: value for module in reporting for name, value in module.figures().items()}

    def uncertainty(self, draws: int = 1000) -> Tensor:
        """How uncertain the method is about each training class, (C,) (VCPA, Eq. 30).

        Args:
            draws: random vectors drawn for each proxy, at least 2.

        Raises:
            ValueError: the method has no estimate of its uncertainty.
        """
        for module in self._pieces():
            if isinstance(module, EstimatesUncertainty):
                return module.uncertainty(draws)
        raise ValueError(f"uncertainty: got {self.name}, which does not estimate it, as vcpa does")

    def param_groups(self, lr: float, network_lr: float | None = None) -> list[dict[str, Any]]:
        """Parameter groups for an optimiser.

        The groups are "proxies" and "criterion", the networks of the method. A method with row tables also gets the
        groups "proxy rows" or "network rows". These have no parameters: they only hold the learning rate at which
        `commit(optimizer)` steps the tables.

        Args:
            lr: learning rate of the proxies.
            network_lr: learning rate of the method's networks; None: the default of the optimiser.

        Returns:
            The groups; empty if the method trains nothing.

        Example:
            >>> from proxymetric import method
            >>> groups = method("proxy-anchor", classes=9, dim=2, touched="batch").param_groups(lr=1e-2)
            >>> groups
            [{'params': [], 'lr': 0.01, 'name': 'proxy rows'}]
        """
        self._grouped_parts = frozenset(self.parts())  # not the rates: `commit` reads those from the optimiser
        proxies = [
            getattr(module, name)
            for module in self.modules()
            if isinstance(module, Source)
            for name in module.proxies
            if getattr(module, name).requires_grad
        ]
        proxy_ids = {id(parameter) for parameter in proxies}
        others = [p for p in self.parameters() if p.requires_grad and id(p) not in proxy_ids]
        network_rate = {} if network_lr is None else {"lr": network_lr}
        groups: list[dict[str, Any]] = []
        if proxies:
            groups.append({"params": proxies, "lr": lr, "name": "proxies"})
        if others:
            groups.append({"params": others, "name": "criterion", **network_rate})
        table_kinds = {table.rate for table in self.row_tables()}
        if "proxies" in table_kinds:
            groups.append({"params": [], "lr": lr, "name": ROW_GROUPS["proxies"]})
        if "network" in table_kinds:
            groups.append({"params": [], "name": ROW_GROUPS["network"], **network_rate})
        return groups

    def parts(self) -> dict[str, int]:
        """The number of trained values in each part, row tables included.

        Example:
            >>> from proxymetric import method
            >>> method("soft-triple", classes=3, dim=2, per_class=2).parts()
            {'proxies': 12}
        """
        sizes = [(name, p.numel()) for name, p in self.named_parameters() if p.requires_grad]
        sizes += [(path, m.values.numel()) for path, m in self.named_modules() if isinstance(m, RowTable)]
        counts: dict[str, int] = {}
        for name, size in sizes:
            part = self._part_name(name)
            counts[part] = counts.get(part, 0) + size
        return counts

    def row_tables(self) -> list[RowTable]:
        """The tables that step in `commit`."""
        return [module for module in self.modules() if isinstance(module, RowTable)]

    def get_extra_state(self) -> Tensor:
        """Step and epoch, for `state_dict`."""
        return torch.tensor([self.step, -1.0 if self._epoch is None else self._epoch], dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        """Restore step and epoch, and drop pending changes."""
        step, epoch = state.tolist()
        self.step = int(step)
        self._epoch = None if epoch < 0 else epoch
        self.discard()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Note the classes of this process in the metadata of a state, beside the versions of modules."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None and (classes := self._classes_here()):
            metadata["classes"] = classes

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """Refuse the part of another process, which may have the same shapes.

        Raises:
            ValueError: the state holds the proxies of other classes than this criterion.
        """
        check_part(local_metadata.get("classes"), self._classes_here())
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def _classes_here(self) -> list[int]:
        """The first and the last class in this process, and the number of all; empty if proxies are not divided."""
        part = next(iter(self.sharded().values()), None)
        return [] if part is None else [part.start, part.stop - 1, part.classes]

    def _pieces(self) -> list[nn.Module]:
        """All modules inside this one."""
        return list(self.modules())[1:]

    def _source_with_second_pass(self) -> NeedsSecondPass | None:
        """The source that needs a second pass; None if there is none, or more than one."""
        sources = [m for m in self._pieces() if isinstance(m, NeedsSecondPass) and m.needs_second_pass]
        return sources[0] if len(sources) == 1 else None

    def _with_second_pass(self, result: SecondPassResult, context: Context) -> Outcome:
        """The outcome of the objective, while its source holds the result of the second pass."""
        source = self._source_with_second_pass()
        if source is None:
            return self.objective(context)
        source.receive(result)
        try:
            return self.objective(context)
        finally:
            source.receive(None)

    def _part_name(self, name: str) -> str:
        """The name of the part, in reports, to which the parameter or table of this name belongs."""
        part, module = "what else the method trains", self
        for attribute in name.split("."):
            if isinstance(module, Source):
                part = "proxies" if attribute in module.proxies else part
                part = module.part_names.get(attribute, part) if isinstance(module, NamesParts) else part
            module = getattr(module, attribute)
        return part

    def _walked(self) -> _Walk:
        """The tables and parameters to look at in each step; a walk over all modules costs more than a small loss."""
        if self._walk is None:
            parameters = [p for module in (self, *self._encoder) for p in module.parameters()]
            self._walk = _Walk(self.row_tables(), parameters)
        return self._walk

    def _apply(self, *args: Any, **kwargs: Any) -> Criterion:
        self._walk = None  # a change of the device or the type may replace parameters
        super()._apply(*args, **kwargs)
        return self

    def _current_epoch(self) -> float | None:
        if self._epoch is not None:
            return self._epoch
        return None if self.steps_per_epoch is None else self.step / self.steps_per_epoch

    def _warn_about_missing_commit(self, embeddings: Tensor) -> None:
        stepped = self._steps.stepped(self._walked().parameters, embeddings)
        missing = stepped or (stepped is None and len(self._pending) >= MAX_UNCOMMITTED_PASSES)
        if self._pending and missing and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self.name}: a training step ended, but commit() was not called; "
                "call criterion.commit() after optimizer.step() (or discard() for a skipped step)",
                stacklevel=5,  # skips forward and two calls of nn.Module: the warning names the line of the loop
            )

    def __repr__(self) -> str:
        if self.arguments is None:
            return call_text("Criterion", repr(self.objective))
        return call_text("Criterion", repr(self.name), **self.arguments)

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, without pending changes: they belong to the original."""
        return self.__dict__ | {
            "_pending": [],
            "_walk": None,
            "_label_check": LabelCheck(),
            "_length_check": LengthCheck(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._number = numbered(self)

    def _raise_missing(self, need: str) -> None:
        raise ValueError(f"{need}: got none, expected {NEEDS[need]}; {self.name} needs it")


class _Walk(NamedTuple):
    """What a walk over the modules of a criterion and of its encoder found."""

    tables: list[RowTable]
    parameters: list[nn.Parameter]
