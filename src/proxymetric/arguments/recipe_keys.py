"""The dotted keys of a recipe, such as `train.lr`: of trackers, of `--set`, and of the comparison of two recipes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EVERYDAY_NAMES = {
    "data.validation": ("held-out", "hold-out", "holdout", "val", "valid", "val-split"),
    "data.workers": ("num-workers",),
    "encoder.backbone": ("model",),
    "encoder.dim": ("embedding-dim", "embedding-size"),
    "train.batch": ("batch-size", "bs"),
    "train.epochs": ("num-epochs",),
    "train.lr": ("learning-rate",),
    "view.size": ("image-size", "img-size", "input-size"),
}
"""key -> what other programs call it, with - for _"""


def flat_keys(tables: Mapping[str, Any], deep: bool = False) -> dict[str, Any]:
    """Return the values of tables by their dotted keys.

    Args:
        tables: the tables of a recipe, and its keys outside of tables.
        deep: whether tables inside of tables are flattened too; if not, they are values.

    Example:
        >>> tables = {"seed": 1, "loss": {"base": {"method": "mpa"}}}
        >>> flat_keys(tables), flat_keys(tables, deep=True)
        ({'seed': 1, 'loss.base': {'method': 'mpa'}}, {'seed': 1, 'loss.base.method': 'mpa'})
    """
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            inner = flat_keys(value, deep) if deep else value
            flat |= {f"{name}.{key}": item for key, item in inner.items()}
        else:
            flat[name] = value
    return flat


def everyday_hint(key: str) -> str:
    """Suggest the key of a recipe that other programs give the name `key`, as the end of an error message.

    Example:
        >>> everyday_hint("learning_rate"), everyday_hint("margn")
        ("; did you mean 'train.lr'?", '')
    """
    name = key.lower().replace("_", "-")
    return next((f"; did you mean {home!r}?" for home, others in EVERYDAY_NAMES.items() if name in others), "")
