"""What a file of weights says the network must be like, in its own header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

HEADER = "proxymetric"
"""the key of a safetensors file's metadata under which its needs stand, as JSON"""
STRIDES = ("1x1", "3x3")


@dataclass(frozen=True)
class Needs:
    """What a network must be like to run a file's weights; None where the file does not say.

    `backbone`, `stride` and `bn_eps` must agree with the recipe. `mean`, `std` and `img_size` are defaults that a
    recipe may override.

    Args:
        backbone: timm's name of the network.
        stride: where the bottleneck blocks of a ResNet halve the resolution: "3x3" (timm, torchvision) or "1x1" (the
            first version: Caffe, Keras).
        bn_eps: epsilon of BatchNorm.
        mean: of red, green and blue in [0, 1], by which images are normalised.
        std: standard deviation, likewise.
        img_size: side of the images in pixels.

    Example:
        >>> Needs.from_json('{"backbone": "resnet50", "stride": "1x1"}', "r.safetensors").stated()
        {'backbone': 'resnet50', 'stride': '1x1'}
    """

    backbone: str | None = None
    stride: str | None = None
    bn_eps: float | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    img_size: int | None = None

    def stated(self) -> dict[str, Any]:
        """Only what the file says."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def of(file: str | Path) -> Needs:
        """The needs in the header of a safetensors file; a file that cannot be read has none, and fails when loaded."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, "pt") as opened:
                header = (opened.metadata() or {}).get(HEADER)
        except (SafetensorError, OSError):
            return Needs()
        return Needs() if header is None else Needs.from_json(header, str(file))

    @staticmethod
    def from_json(text: str, file: str) -> Needs:
        """The needs that a header's JSON states, every key and value checked."""
        where = f"weights: the header of {file}"
        try:
            stated = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{where} has {HEADER!r} that is not JSON ({error})") from None
        if not isinstance(stated, dict):
            raise ValueError(f"{where}: got {stated!r} under {HEADER!r}, expected a table")
        known = [field.name for field in fields(Needs)]
        for name, value in stated.items():
            if name not in known:
                raise ValueError(f"{where} needs {name!r}, which is not known here; expected one of {', '.join(known)}")
            if (problem := _problem(name, value)) is not None:
                raise ValueError(f"{where}: {name}: got {value!r}, expected {problem}")
        colours = {name: tuple(stated[name]) for name in ("mean", "std") if name in stated}
        return Needs(**{**stated, **colours})

    def check(self, file: str | Path, settings: Mapping[str, Any]) -> None:
        """Refuse settings of an encoder that contradict the file; `settings` may leave `stride` and `bn_eps` open."""
        backbone = str(settings["backbone"])
        if self.backbone is not None and self.backbone.split(".")[0] != backbone.split(".")[0]:
            raise ValueError(
                f"weights: {file} is made for backbone={self.backbone!r}, and the recipe has backbone={backbone!r}; "
                f"expected encoder.backbone={self.backbone!r} (--backbone {self.backbone}) or another file"
            )
        for name, needed in (("stride", self.stride), ("bn_eps", self.bn_eps)):
            asked = settings.get(name)
            if None not in (needed, asked) and needed != asked:
                raise ValueError(
                    f"weights: {file} is made with {name}={needed!r}, and the recipe has {name}={asked!r}; "
                    f"expected encoder.{name}={needed!r}, or leave encoder.{name} out and the file decides"
                )


def _problem(name: str, value: Any) -> str | None:
    """What is expected of a value that is not right; None where it is."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "backbone":
        return None if isinstance(value, str) and value else "a name of timm"
    if name == "stride":
        return None if value in STRIDES else " or ".join(map(repr, STRIDES))
    if name == "bn_eps":
        return None if number and value > 0 else "a number above 0"
    if name == "img_size":
        return None if isinstance(value, int) and number and value > 0 else "a whole number of pixels"
    numbers = isinstance(value, list) and len(value) == 3 and all(isinstance(each, int | float) for each in value)
    least = 0 if name == "mean" else 1e-9
    return None if numbers and all(least <= each <= 1 for each in value) else "three numbers in [0, 1]"
