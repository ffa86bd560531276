"""Workloads: the size of a proxy loss, and the devices that share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from proxymetric.arguments.checks import whole_number
from proxymetric.arguments.signatures import did_you_mean, one_of


class Kind(NamedTuple):
    """What the loss of a method sums over, as its catalogue row states."""

    over: str
    """"batch": for each class over the batch; "classes": for each query over the classes"""
    grouped: bool = False
    """whether the K proxies of a class are combined into one similarity"""
    several: bool = True
    """whether a class may have several proxies"""


def planned_methods() -> list[str]:
    """The methods of the catalogue whose memory and time can be planned: those whose row has `sums_over`.

    Example:
        >>> "proxy-anchor" in planned_methods(), "triplet" in planned_methods()
        (True, False)
    """
    from proxymetric.papers import CATALOGUE

    return [name for name, method in CATALOGUE.items() if method.about.sums_over is not None]


def kind_of(method: str) -> Kind:
    """What the loss of a method sums over.

    Args:
        method: a name of the catalogue.

    Raises:
        ValueError: there is no such method, or its row has no `sums_over`.

    Example:
        >>> kind_of("mpa")
        Kind(over='batch', grouped=True, several=True)
    """
    from proxymetric.papers import lookup, options

    row = lookup(method).about
    if row.sums_over is None:
        raise ValueError(f"method: got {method!r}, which {row.no_plan}; expected one of {', '.join(planned_methods())}")
    return Kind(row.sums_over, row.grouped, "per_class" in options(method))


BYTES = {"float32": 4, "bfloat16": 2}
"""dtype of the proxies -> bytes of one number of the proxies, of their gradient and of the optimiser's state"""
OPTIMIZERS: dict[str, int | None] = {"adamw": 2, "adam": 2, "sgd": 1, "rowwise-adagrad": None}
"""numbers of optimiser state for each number of a proxy; None: one number for each proxy"""
IMPLEMENTATIONS = ("plain", "chunked", "triton")
TOUCHED = ("all", "batch")

MIN_HALF_WIDTH_PAIRS = 2**22
"""pairs from which triton stores the similarities of bfloat16 vectors in 16 bits"""
BUDGET_BYTES = 2**30
"""bytes of similarities that may be kept from the forward to the backward pass; larger ones are recomputed"""


@dataclass(frozen=True)
class Workload:
    """A proxy loss and the devices that share it: B queries, C classes, K proxies per class, D dimensions.

    Args:
        classes: C, at least 1.
        dim: D, at least 1.
        batch: B of all devices together, at least `devices`.
        devices: from 1 to `classes`; each holds the proxies of at most ceil(C / devices) classes.
        per_class: K, at least 1.
        method: one of `planned_methods()`.
        dtype: type of the proxies, "float32" or "bfloat16".
        optimizer: optimiser of the proxies, "adamw", "adam", "sgd" (with momentum) or "rowwise-adagrad".
        implementation: "plain", "chunked" or "triton"; "auto" is what the library chooses for many pairs: triton on a
            GPU and chunked on a CPU.
        touched: the classes that a batch is compared with. "all": all classes; "batch": the classes of the batch only;
            a number in (0, 1): the classes of the batch and this share of all classes, drawn at random. The last two
            are other losses, and need one device.
        on_cpu: whether the device is a CPU, where chunks are smaller.

    Example:
        >>> work = Workload(classes=1_000_001, dim=512, batch=4096, devices=8, per_class=2)
        >>> work.shard, work.rows, work.implementation
        (125001, 250002, 'triton')
    """

    classes: int
    dim: int
    batch: int
    devices: int = 1
    per_class: int = 1
    method: str = "proxy-anchor"
    dtype: str = "float32"
    optimizer: str = "adamw"
    implementation: str = "auto"
    touched: str | float = "all"
    on_cpu: bool = False

    def __post_init__(self) -> None:
        whole_number(
            1, classes=self.classes, dim=self.dim, batch=self.batch, devices=self.devices, per_class=self.per_class
        )
        kind_of(self.method)
        one_of("dtype", self.dtype, BYTES)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("implementation", self.implementation, ("auto", *IMPLEMENTATIONS))
        if self.implementation == "auto":
            object.__setattr__(self, "implementation", "chunked" if self.on_cpu else "triton")
        is_known = self.touched in TOUCHED if isinstance(self.touched, str) else 0 < self.touched < 1
        if not is_known:
            raise ValueError(
                f"touched: got {self.touched!r}, expected 'all', 'batch' or a number above 0 and below 1"
                f"{did_you_mean(str(self.touched), TOUCHED)}"
            )
        if self.touched != "all" and self.devices > 1:
            raise ValueError(
                f"devices: got {self.devices} with touched={self.touched}, expected 1, or touched=all: "
                "with other values the proxies cannot be divided among devices"
            )
        if self.per_class > 1 and not self.kind.several:
            raise ValueError(f"per_class: got {self.per_class}, expected 1: {self.method} has one proxy for each class")
        if self.devices > self.classes:
            raise ValueError(
                f"devices: got {self.devices}, expected at most one device for each of the {self.classes} classes"
            )
        if self.devices > self.batch:
            raise ValueError(
                f"batch: got {self.batch}, expected at least one embedding for each of the {self.devices} devices: "
                "it is the batch of all devices together"
            )

    @property
    def kind(self) -> Kind:
        """What the loss of the method sums over."""
        return kind_of(self.method)

    @property
    def several(self) -> bool:
        """Whether several proxies of a class are combined into one similarity."""
        return self.kind.grouped and self.per_class > 1

    @property
    def products(self) -> str:
        """The type of the matrix products: that of the proxies with triton, otherwise float32."""
        return self.dtype if self.implementation == "triton" else "float32"

    @property
    def shard(self) -> int:
        """The number of classes on the device with the most classes: ceil(C / devices)."""
        return -(-self.classes // self.devices)

    @property
    def rows(self) -> int:
        """The number of proxies on the device with the most classes: `shard * K`."""
        return self.shard * self.per_class

    @property
    def columns(self) -> int:
        """The number of classes on the device with the most classes that a batch is compared with, see `touched`."""
        if self.touched == "all":
            return self.shard
        drawn_classes = 0 if isinstance(self.touched, str) else round(self.touched * self.classes)
        return min(self.shard, self.batch + drawn_classes)

    @property
    def compared(self) -> int:
        """The number of proxies on the device with the most classes that a batch is compared with: `columns * K`."""
        return self.columns * self.per_class

    @property
    def cached(self) -> bool:
        """Whether the (B, compared) similarities are kept for the backward pass, which saves a matrix product.

        The backward pass of a loss that sums over the batch does not need them. Of the losses that sum over the
        classes, `plain` always keeps them; the other implementations keep them if they fit into `BUDGET_BYTES`.
        """
        if self.kind.over == "batch":
            return False
        size = 2 if self.half_width else 4
        return self.implementation == "plain" or size * self.batch * self.compared <= BUDGET_BYTES

    @property
    def half_width(self) -> bool:
        """Whether similarities are stored in 16 bits: those of many bfloat16 vectors, with triton."""
        many = self.batch * self.compared >= MIN_HALF_WIDTH_PAIRS
        return self.implementation == "triton" and self.dtype == "bfloat16" and many
