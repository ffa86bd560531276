"""What the commits of a criterion change: copied before a commit, restored if the step turns out not to be finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from proxymetric.core.capabilities import DeclaresChanges
from proxymetric.criterion import Criterion

MAX_SNAPSHOT_BYTES = 256 * 2**20
"""bytes of one copy of the tensors; the steps of a method with a larger memory wait for the device"""


class CommittedState:
    """The tensors and the Python attributes that commits change.

    Tensors are looked up at each call, so that a commit may also replace a buffer by another one of the same shape.

    Args:
        places: modules and the names of their tensors and attributes.

    Example:
        >>> from proxymetric.sources import Queue
        >>> queue = Queue(size=2, dim=3)
        >>> state = CommittedState([(queue, "vectors"), (queue, "_seen")])
        >>> [value.shape for value in state.tensors()], state.attributes(), state.bytes
        ([torch.Size([2, 3])], [0], 24)
    """

    def __init__(self, places: Iterable[tuple[nn.Module, str]] = ()) -> None:
        self._tensor_places: list[tuple[nn.Module, str]] = []
        self._attribute_places: list[tuple[nn.Module, str]] = []
        for module, name in places:
            is_tensor = isinstance(getattr(module, name), Tensor)
            (self._tensor_places if is_tensor else self._attribute_places).append((module, name))

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(value.numel() * value.element_size() for value in self.tensors())

    def tensors(self) -> list[Tensor]:
        """The tensors, not copied."""
        return [getattr(module, name) for module, name in self._tensor_places]

    def attributes(self) -> list[Any]:
        """The values of the Python attributes."""
        return [getattr(module, name) for module, name in self._attribute_places]

    def set_attributes(self, values: list[Any]) -> None:
        """Restore the Python attributes.

        Args:
            values: what `attributes` has returned.
        """
        for (module, name), value in zip(self._attribute_places, values, strict=True):
            setattr(module, name, value)


def committed_state(criterion: Criterion, trained: list[Tensor]) -> CommittedState | None:
    """What the commits of a criterion change.

    A module whose saved state are parameters of the optimiser keeps no memory. Any other module must declare what its
    commit changes (`DeclaresChanges`).

    Args:
        criterion: the criterion.
        trained: the parameters of the optimiser.

    Returns:
        The state; without tensors for a method without a memory. None if a module declares nothing, or if the tensors
        have more than `MAX_SNAPSHOT_BYTES`: then a commit cannot be undone.

    Example:
        >>> from proxymetric import method
        >>> for name in ("proxy-anchor", "xbm", "moco"):
        ...     criterion = method(name, classes=3, dim=2).bind(nn.Linear(2, 2))
        ...     state = committed_state(criterion, [p for p in criterion.parameters() if p.requires_grad])
        ...     print(name, state if state is None else state.bytes)
        proxy-anchor 0
        xbm 65536
        moco None
    """
    ids = {id(parameter) for parameter in trained}
    moved = {name for name, parameter in criterion.named_parameters() if id(parameter) in ids}
    for key in criterion.state_dict().keys() - moved - {"_extra_state"}:
        module = criterion.get_submodule(key.rpartition(".")[0])
        if not isinstance(module, DeclaresChanges):
            return None
    declaring = [module for module in criterion.modules() if isinstance(module, DeclaresChanges)]
    state = CommittedState((module, name) for module in declaring for name in module.changed_by_commit)
    return state if state.bytes <= MAX_SNAPSHOT_BYTES else None
