"""The requirements that the header of a weights file states for the network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from proxymetric.arguments.signatures import one_of
from proxymetric.system.signals import interrupt_after

HEADER = "proxymetric"
"""the metadata key of a safetensors file that holds the requirements as JSON"""
STRIDES = ("1x1", "3x3")
"""the convolutions in which a ResNet's bottleneck blocks can halve the resolution"""


@dataclass(frozen=True)
class Needs:
    """The settings that a network needs for the weights of a file; None for a setting that the file does not state.

    `backbone`, `stride` and `bn_eps` must agree with the recipe. `mean`, `std` and `img_size` are defaults that a
    recipe may override.

    Args:
        backbone: timm's name of the network.
        stride: where the bottleneck blocks of a ResNet halve the resolution: "3x3" (timm, torchvision) or "1x1" (the
            first version: Caffe, Keras).
        bn_eps: epsilon of BatchNorm.
        mean: mean of red, green and blue in [0, 1] for the normalisation of images.
        std: standard deviation of red, green and blue for the same normalisation.
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
        """Return only the requirements that the file states."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def of(file: str | Path) -> Needs:
        """Return the needs in the header of a safetensors file; empty needs for a file that cannot be read.

        Loading the weights of an unreadable file fails later with a message.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with interrupt_after(), safe_open(file, "pt") as tensors:
                header = (tensors.metadata() or {}).get(HEADER)
        except (SafetensorError, OSError):
            return Needs()
        return Needs() if header is None else Needs.from_json(header, str(file))

    @staticmethod
    def from_json(text: str, file: str) -> Needs:
        """Return the needs that the JSON text of a header states.

        Raises:
            ValueError: a key is unknown or a value is out of range.
        """
        subject = f"weights: the header of {file}"
        try:
            requirements = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{subject}: got {text!r} under {HEADER!r}, expected JSON ({error})") from None
        if not isinstance(requirements, dict):
            raise ValueError(f"{subject}: got {requirements!r} under {HEADER!r}, expected a JSON object")
        known = [field.name for field in fields(Needs)]
        for name, value in requirements.items():
            one_of(subject, name, known)
            if (expectation := _unmet_expectation(name, value)) is not None:
                raise ValueError(f"{subject}: {name}: got {value!r}, expected {expectation}")
        channel_values = {name: tuple(requirements[name]) for name in ("mean", "std") if name in requirements}
        return Needs(**{**requirements, **channel_values})

    def check(self, file: str | Path, settings: Mapping[str, Any]) -> None:
        """Refuse settings of an encoder that contradict the file.

        Args:
            file: the weights file, for messages.
            settings: `backbone` and, optionally, `stride` and `bn_eps`, which may be None.

        Raises:
            ValueError: a setting contradicts the file.
        """
        backbone = str(settings["backbone"])
        if self.backbone is not None and self.backbone.split(".")[0] != backbone.split(".")[0]:
            raise ValueError(
                f"weights: got {file}, which was made for backbone={self.backbone!r}, but the recipe has "
                f"backbone={backbone!r}; expected encoder.backbone={self.backbone!r} (--backbone {self.backbone}) or "
                "another file"
            )
        for name, required_value in (("stride", self.stride), ("bn_eps", self.bn_eps)):
            setting = settings.get(name)
            if None not in (required_value, setting) and required_value != setting:
                raise ValueError(
                    f"weights: got {file}, which was made with {name}={required_value!r}, but the recipe has "
                    f"{name}={setting!r}; expected encoder.{name}={required_value!r}, or no encoder.{name}, so that "
                    "the file's value is used"
                )


def _unmet_expectation(name: str, value: Any) -> str | None:
    """Return None if `value` is valid for the setting `name`, else a description of the valid values."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "backbone":
        return None if isinstance(value, str) and value else "the name of a timm model"
    if name == "stride":
        return None if value in STRIDES else " or ".join(map(repr, STRIDES))
    if name == "bn_eps":
        return None if is_number and value > 0 else "a number above 0"
    if name == "img_size":
        return None if isinstance(value, int) and is_number and value > 0 else "a whole number of pixels"
    three_numbers = (
        isinstance(value, list) and len(value) == 3 and all(isinstance(number, int | float) for number in value)
    )
    minimum, interval = (0, "[0, 1]") if name == "mean" else (1e-9, "(0, 1]")
    return None if three_numbers and all(minimum <= number <= 1 for number in value) else f"three numbers in {interval}"
