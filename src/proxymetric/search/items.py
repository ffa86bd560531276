"""Items of an index, results of a search, and what an index needs of a model."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from proxymetric.search.manifest import Manifest

if TYPE_CHECKING:
    from PIL import Image

M = TypeVar("M")


class HasFingerprint(Protocol):
    """A model, as far as an index needs it to compare it with the model that made its vectors."""

    def fingerprint(self) -> str:
        """Return the sha256 of everything that determines the vectors."""
        ...


class Embedder(Protocol):
    """A model, as far as indexing needs it; `pm.Model` is one."""

    @property
    def dim(self) -> int:
        """The dimensions of its vectors."""
        ...

    def fingerprint(self) -> str:
        """Return the sha256 of everything that determines the vectors."""
        ...

    def parts(
        self, images: Any, *, batch: int, on_image: Callable[[int, Image.Image], None] | None = ...
    ) -> Generator[Any]:
        """Embed image files part by part; `on_image` receives each of them, decoded."""
        ...


class TrainedModel(Embedder, Protocol):
    """A model, as far as building an index needs it; `pm.Model` is one."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of its training classes."""
        ...

    @property
    def nested(self) -> Sequence[int] | None:
        """Dimensions that its vectors were trained to be cut to."""
        ...

    @property
    def source(self) -> Mapping[str, str]:
        """Where it was loaded from, so that `search` and `serve` load it again."""
        ...

    def cut_to(self, dim: int, *, warn: bool = True) -> TrainedModel:
        """Return the same model with its vectors cut to their first dimensions."""
        ...


class FileEmbedder(HasFingerprint, Protocol):
    """A model, as far as image files are embedded by it; `pm.Model` is one."""

    @property
    def dim(self) -> int:
        """The dimensions of its vectors."""
        ...

    def embed(
        self,
        images: Any,
        *,
        errors: str,
        progress: Callable[[int, int], None] | None = ...,
        on_bad: Callable[[str, str], None] | None = ...,
    ) -> Any:
        """Embed images: the vectors and, with errors="skip", the indices of the images that can be read."""
        ...


def loaded(model: M | Callable[[], M]) -> M:
    """Return a model, or call the function that returns it.

    Example:
        >>> loaded("runs/birds")
        Traceback (most recent call last):
        ValueError: model: got 'runs/birds', expected a model, such as pm.load('runs/birds')
    """
    if isinstance(model, str | Path):
        raise ValueError(f"model: got {str(model)!r}, expected a model, such as pm.load({str(model)!r})")
    return model() if callable(model) else model


class Item(NamedTuple):
    """An item of an index."""

    id: str
    label: str | None
    metadata: dict[str, Any]
    row: int
    """its row in `Index.vectors`, until the index changes"""


class Hit(NamedTuple):
    """A result of a search: an item, and its cosine similarity with the query."""

    id: str
    similarity: float
    label: str | None
    metadata: dict[str, Any]
    row: int
    """its row in `Index.vectors`, until the index changes"""


class LabelledItems(Protocol):
    """Items with vectors and labels in a folder, as far as their classes are identified: an index."""

    @property
    def folder(self) -> Path:
        """The folder."""
        ...

    @property
    def manifest(self) -> Manifest:
        """The manifest of what the folder holds."""
        ...

    @property
    def dim(self) -> int:
        """Number D of dimensions of the vectors."""
        ...

    @property
    def vectors(self) -> Tensor:
        """The vectors (N, D)."""
        ...

    @property
    def labels(self) -> list[str | None]:
        """The label of each item; None: it has none."""
        ...

    @property
    def row_numbers(self) -> Tensor | None:
        """(N,) numbers of the items that later changes do not alter; None: it has none."""
        ...

    def vectors_at(self, numbers: Tensor) -> Tensor:
        """Return the vectors (M, D) of such numbers, also of items that were removed."""
        ...

    def __contains__(self, item: object) -> bool: ...

    def __getitem__(self, item: str) -> Item: ...

    def vector(self, item: str) -> Tensor:
        """Return the vector (D,) of an item."""
        ...


@dataclass
class Changed:
    """What `sync` did: numbers of images, and the files that cannot be read."""

    added: int = 0
    updated: int = 0
    deleted: int = 0
    unchanged: int = 0
    continued: int = 0
    """images that an earlier call, which was stopped, had embedded already"""
    bad: dict[str, str] = field(default_factory=dict)
    """ids of files that cannot be read, with the reason"""
    absent: list[str] = field(default_factory=list)
    """files that the metadata names and the index does not have"""
