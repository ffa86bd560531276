"""Methods that compute the head of an encoder in closed form (Hatch et al. 2006, Fisher 1936): no step trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxymetric.closed_forms import Form
from proxymetric.core.pieces import Context, Objective, Outcome

UNTRAINED = "untrained"
"""the method that keeps the features as they are"""
AUTO = "auto"
"""the shrinkage that is chosen on classes that the head was not fitted on"""


class ClosedForm(Objective):
    """A head in closed form in the place of an objective: `train` fits it and takes no step.

    Args:
        form: makes the closed form from a shrinkage and a number of principal directions.
        shrinkage: of the form; "auto" or None: `train` chooses it.
        classes: number of training classes, C.
        dim: width of the embeddings, D.

    Example:
        >>> from proxymetric.closed_forms import Whitening
        >>> ClosedForm(Whitening, 0.3, classes=4, dim=2).form(0.3, 2)
        Whitening(shrinkage=0.3, principal=2)
    """

    def __init__(
        self, form: Callable[[float, int | None], Form], shrinkage: float | str | None, classes: int, dim: int
    ) -> None:
        super().__init__()
        if isinstance(shrinkage, str) and shrinkage != AUTO:
            raise ValueError(f"shrinkage: got {shrinkage!r}, expected a number or 'auto'")
        if isinstance(shrinkage, int | float):
            form(shrinkage, None)  # refuses a shrinkage that is out of range
        self.form, self.shrinkage, self.classes, self.dim = form, shrinkage, classes, dim

    def forward(self, ctx: Context) -> Outcome:
        """Refuse: there is nothing to minimise."""
        raise ValueError(
            "method: got a closed form, which is computed from all features at once; expected a method that steps "
            "train, or `proxymetric train --method whitening`"
        )


def imply_settings(method: str, protocol: str, tables: dict[str, dict[str, Any]]) -> None:
    """Fill in what a method in closed form, or a start from one, implies for the other keys of a recipe.

    Args:
        method: the name of a method.
        protocol: of the recipe.
        tables: its tables by name; they are changed.

    Raises:
        ValueError: a key contradicts it.

    Example:
        >>> tables = {"encoder": {}, "train": {}, "loss": {}}
        >>> imply_settings("whitening", "held-out", tables)
        >>> tables["train"], tables["encoder"]["normalise_features"]
        ({'frozen': True, 'refit': True}, True)
    """
    from proxymetric.papers import CLOSED_FORMS

    if method in CLOSED_FORMS:
        _imply_training(method, protocol, tables)
    if method in CLOSED_FORMS or tables["train"].get("start") not in (None, "none"):
        _imply_encoder(method, tables)
    if tables["train"].get("whiten") is True:
        _check_whitening(tables)


def _imply_training(method: str, protocol: str, tables: dict[str, dict[str, Any]]) -> None:
    """Fill in what a method in closed form implies: frozen features, and a fit on all classes at the end.

    Raises:
        ValueError: a key contradicts it.
    """
    train, nested = tables["train"], tables["loss"].get("nested")
    contradictions = {
        "train.frozen": train.get("frozen") is False and (False, "true: its head is computed from frozen features"),
        "train.start": train.get("start") not in (None, "none") and (train.get("start"), "none: no step follows"),
        "train.whiten": train.get("whiten") is True and (True, "false: there is no trained head"),
        "loss.nested": nested not in (None, "none") and (nested, "none: its vectors are not trained to be cut"),
    }
    for key, contradiction in contradictions.items():
        if contradiction:
            value, reason = contradiction
            raise ValueError(f"{key}: got {value!r} with method {method!r}, which nothing trains; expected {reason}")
    train["frozen"] = True
    if protocol == "held-out" and method != UNTRAINED:
        train.setdefault("refit", True)


def _imply_encoder(method: str, tables: dict[str, dict[str, Any]]) -> None:
    """Normalise the features before a head that a closed form computes.

    Raises:
        ValueError: a key of the encoder does not allow such a head.
    """
    encoder, name = tables["encoder"], f"train.start={tables['train'].get('start')!r}"
    name = name if tables["train"].get("start") else f"method {method!r}"
    for key, needed in {"head": "linear", "layer_norm": False, "normalise_features": method != UNTRAINED}.items():
        if encoder.setdefault(key, needed) != needed:
            raise ValueError(
                f"encoder.{key}: got {encoder[key]!r} with {name}, expected {needed!r}: a closed form is a linear head "
                "on features of length 1"
            )


def _check_whitening(tables: dict[str, dict[str, Any]]) -> None:
    """Refuse a whitening at the end where the trained head is no linear layer of its own."""
    obstacles = {
        "encoder.head='none'": tables["encoder"].get("head") == "none",
        "loss.nested, whose first dimensions it would mix": tables["loss"].get("nested") not in (None, "none"),
        "train.parallel='fsdp'": tables["train"].get("parallel") == "fsdp",
    }
    for obstacle, is_there in obstacles.items():
        if is_there:
            raise ValueError(f"train.whiten: got True with {obstacle}; expected false")
