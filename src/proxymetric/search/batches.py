"""New items for an index, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from proxymetric.search.conditions import CLASS_COLUMN, is_text


class Batch(NamedTuple):
    """New items for an index."""

    ids: list[str]
    vectors: np.ndarray
    """(N, D) float32 of unit length"""
    labels: list[str | None]
    metadata: list[str]
    """JSON objects"""
    stamps: list[str]
    thumbnails: list[bytes | None]


def new_items(
    dim: int,
    ids: Sequence[str],
    vectors: Tensor | np.ndarray,
    labels: Sequence[str | None] | None,
    metadata: Sequence[Mapping[str, Any]] | None,
    thumbnails: Sequence[bytes | None] | None,
) -> Batch:
    """Check new items and return them as a batch.

    Raises:
        ValueError: an argument is wrong.
    """
    ids, vectors = list(ids), torch.as_tensor(vectors)
    for item in ids:
        if not isinstance(item, str) or not item or not item.isprintable():
            raise ValueError(f"ids: got {item!r}, expected text of printable characters")
    if len(set(ids)) < len(ids):
        double = next(item for item in ids if ids.count(item) > 1)
        raise ValueError(f"ids: got {double!r} twice, expected different ids")
    if vectors.shape != (len(ids), dim):
        raise ValueError(
            f"vectors: got a tensor of shape {tuple(vectors.shape)}, expected ({len(ids)}, {dim}): one for each id"
        )
    if not vectors.isfinite().all():
        raise ValueError("vectors: got numbers that are not finite (NaN or infinite), expected finite numbers")
    for name, values in (("labels", labels), ("metadata", metadata), ("thumbnails", thumbnails)):
        if values is not None and len(values) != len(ids):
            raise ValueError(f"{name}: got {len(values)} for {len(ids)} ids, expected one for each")
    return Batch(
        ids,
        unit_rows(vectors),
        [None] * len(ids) if labels is None else [_label(label) for label in labels],
        [as_metadata(content) for content in (metadata or [{}] * len(ids))],
        [""] * len(ids),
        [None] * len(ids) if thumbnails is None else [_thumbnail(content) for content in thumbnails],
    )


def _label(label: str | None) -> str | None:
    if label is not None and not (isinstance(label, str) and is_text(label)):
        raise ValueError(f"labels: got {label!r}, expected None, or text that UTF-8 can encode, without NUL")
    return label


def _thumbnail(content: bytes | None) -> bytes | None:
    if content is not None and not isinstance(content, bytes):
        raise ValueError(f"thumbnails: got a {type(content).__name__}, expected bytes (a JPEG file) or None")
    return content


def unit_rows(vectors: Tensor) -> np.ndarray:
    """Return vectors of unit length as float32; a vector of zeros stays as it is."""
    values = vectors.detach().cpu().double()
    lengths = values.norm(dim=1, keepdim=True)
    return (values / lengths.clamp_min(torch.finfo(torch.float64).tiny)).float().contiguous().numpy()


def check_column(name: object, argument: str = "metadata") -> None:
    """Refuse a name that a metadata column cannot have.

    Args:
        name: the name.
        argument: name of the argument or file, for the error.

    Raises:
        ValueError: it is no printable text, has a sign of a condition, or is `class`.
    """
    if name == CLASS_COLUMN:
        raise ValueError(f"{argument}: got the column 'class', which is the label of an item; expected another name")
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or set('"\\<>=!') & set(name):
        raise ValueError(
            f"{argument}: got the column {name!r}, expected printable text without quotation marks, backslashes and "
            "the signs < > = !"
        )


def as_metadata(content: Mapping[str, Any] | None) -> str:
    """Return the JSON of an item's metadata.

    Raises:
        ValueError: a key or a value cannot be stored.

    Example:
        >>> as_metadata({"price": 3, "shop": "Ulm", "tags": ["red", "new"]})
        '{"price": 3, "shop": "Ulm", "tags": ["red", "new"]}'
    """
    for key, value in (content or {}).items():
        check_column(key)
        words = value if isinstance(value, list) else [value]
        if isinstance(value, list) and not all(isinstance(word, str) for word in value):
            raise ValueError(f"metadata: got {key}={value!r}, expected a list of words")
        if not all(isinstance(word, str | int | float | bool | None) for word in words):
            raise ValueError(f"metadata: got {key}={value!r}, expected text, a number, a bool, None or a list of words")
        if any(isinstance(word, str) and not is_text(word) for word in words):
            raise ValueError(f"metadata: got {key}={value!r}, expected text that UTF-8 can encode, without NUL")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ValueError(f"metadata: got {key}={value}, expected a whole number of at most 64 bits, or text")
    try:
        return json.dumps(dict(content or {}), ensure_ascii=False, sort_keys=True, allow_nan=False)
    except ValueError:
        raise ValueError(f"metadata: got {content!r}, expected finite numbers") from None
