"""What a criterion notices about the optimiser: whether it has stepped, and which parameters it does not hold."""

from __future__ import annotations

import warnings
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MAX_NODES = 256
"""nodes of an autograd graph that are searched for a parameter"""

ROW_GROUPS = {"proxies": "proxy rows", "network": "network rows"}
"""`RowTable.rate` -> name of the parameter group that holds the learning rate of such tables"""


class StepDetector:
    """Tells whether parameters have changed between two forward passes; it never waits for a GPU.

    An optimiser changes parameters in place, which raises their version counter. Besides the given parameters, the
    detector watches one parameter of the network that computed the embeddings: the nearest one in their autograd graph.

    Example:
        >>> net = torch.nn.Linear(2, 2)
        >>> detector, optimizer = StepDetector(), torch.optim.SGD(net.parameters(), lr=0.1)
        >>> loss = net(torch.ones(1, 2)).sum(); detector.stepped([], loss)
        >>> loss.backward(); optimizer.step()
        >>> detector.stepped([], net(torch.ones(1, 2)))
        True
        >>> detector.stepped([], net(torch.ones(1, 2)))
        False
    """

    def __init__(self) -> None:
        self._versions: tuple[int, ...] = ()
        self._leaf: weakref.ref[Tensor] | None = None
        self._leaf_version = 0

    def stepped(self, parameters: Iterable[Tensor], embeddings: Tensor) -> bool | None:
        """Whether a parameter has changed since the last call.

        Args:
            parameters: the parameters to watch, in the same order at each call.
            embeddings: (B, D), with their autograd graph.

        Returns:
            True or False; None if there was nothing to compare, as in the first call or if the embeddings depend on no
            parameter.
        """
        versions, old_versions = tuple(parameter._version for parameter in parameters), self._versions
        self._versions = versions
        leaf, leaf_version = None if self._leaf is None else self._leaf(), self._leaf_version
        nearest = nearest_leaf(embeddings)
        self._watch(nearest)
        if (old_versions and versions != old_versions) or (leaf is not None and leaf._version != leaf_version):
            return True
        # If the embeddings are a leaf, their unchanged version proves nothing: the next batch may be another tensor.
        is_known = old_versions or (leaf is not None and leaf is nearest and leaf is not embeddings)
        return False if is_known else None

    def _watch(self, leaf: Tensor | None) -> None:
        self._leaf = None if leaf is None else weakref.ref(leaf)
        self._leaf_version = 0 if leaf is None else leaf._version

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which watches nothing yet because it will be used with other parameters."""
        return vars(StepDetector())


def nearest_leaf(tensor: Tensor) -> Tensor | None:
    """A leaf with gradient that a tensor was computed from: the first one that a search of its graph finds.

    Args:
        tensor: any tensor.

    Returns:
        The leaf, or the tensor itself if it is a leaf; None if the tensor needs no gradient or no leaf is near.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> nearest_leaf(3 * x + 1) is x, nearest_leaf(torch.ones(2))
        (True, None)
    """
    if not tensor.requires_grad or torch.compiler.is_compiling():
        return None
    if tensor.grad_fn is None:
        return tensor
    queue: deque[Any] = deque([tensor.grad_fn])
    for _ in range(MAX_NODES):
        if not queue:
            break
        node = queue.popleft()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            return variable
        queue.extend(function for function, _ in node.next_functions if function is not None)
    return None


def warn_about_untrained(module: nn.Module, name: str, optimizer: torch.optim.Optimizer) -> None:
    """Warn if an optimiser does not hold a parameter of a module that needs a gradient.

    Args:
        module: the module.
        name: how the warning calls it.
        optimizer: the optimiser that should train its parameters.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    untrained = [key for key, each in module.named_parameters() if each.requires_grad and id(each) not in held]
    if untrained:
        warnings.warn(
            f"{name}: the optimizer does not hold {untrained[0]}, so it does not train; expected an optimizer of the "
            "network and of criterion.param_groups(lr=...)",
            stacklevel=3,
        )


def row_rate(kind: str, given: float | None, optimizer: torch.optim.Optimizer | None) -> float:
    """The learning rate of row tables: the given one, or that of the optimiser's group.

    Args:
        kind: a key of `ROW_GROUPS`.
        given: the argument `lr` or `network_lr` of `commit`.
        optimizer: the argument of `commit`.

    Raises:
        ValueError: there is none.
    """
    if given is not None:
        return given
    argument = "lr" if kind == "proxies" else "network_lr"
    groups = [] if optimizer is None else optimizer.param_groups
    rates = [group["lr"] for group in groups if group.get("name") == ROW_GROUPS[kind]]
    if len(rates) != 1:
        count = f"an optimizer with {len(rates)} groups {ROW_GROUPS[kind]!r}"
        raise ValueError(
            f"{argument}: got none and {'no optimizer' if optimizer is None else count}, expected "
            "criterion.commit(optimizer) with an optimizer made from criterion.param_groups(...), "
            f"or criterion.commit({argument}=...)"
        )
    return float(rates[0])
