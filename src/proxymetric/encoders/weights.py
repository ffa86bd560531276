"""Reads a backbone's weights from a safetensors file and reports which tensors matched."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from proxymetric.system.signals import interrupt_after

PICKLE_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle", ".tar")
CONVERT = (
    "If you trust the file, convert it once: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
    "'FILE.safetensors')"
)
CLASSIFIERS = ("fc", "head", "head_dist", "classifier", "last_linear")
COUNTER = "num_batches_tracked"
"""BatchNorm's counter of batches, which a file may lack"""


@dataclass(frozen=True)
class WeightReport:
    """Which tensors of a weights file matched those of a backbone; `str()` gives a short text for people.

    Example:
        >>> missing = ["bn1.weight", "bn1.bias"]
        >>> print(WeightReport("r.safetensors", "resnet18", matched=["conv1.weight"], missing=missing))
        r.safetensors: 1 of 3 tensors of 'resnet18' matched
          missing in the file (2): bn1.weight, bn1.bias
    """

    file: str
    """path of the file"""
    backbone: str
    """name of the backbone"""
    matched: list[str] = field(default_factory=list)
    """names of the tensors that were loaded"""
    missing: list[str] = field(default_factory=list)
    """names in the backbone that the file does not have"""
    unexpected: list[str] = field(default_factory=list)
    """names in the file that the backbone does not have; they are not loaded"""
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """for each name, its shape in the file and its shape in the backbone"""
    dropped: list[str] = field(default_factory=list)
    """names of the file's classifier, which is not loaded"""
    resized: list[str] = field(default_factory=list)
    """position embeddings that were resampled to another image size"""
    deeper: list[str] = field(default_factory=list)
    """the names in `unexpected` that belong to further blocks: the file was made for a deeper network"""
    applied: dict[str, Any] = field(default_factory=dict)
    """settings in the file's header that the network was built with"""
    overridden: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """for each setting that the recipe overrides, the value in the header and the value used"""

    @property
    def fits(self) -> bool:
        """Whether every tensor of the backbone is loaded and the file was not made for a deeper network."""
        return not (self.missing or self.mismatched or self.deeper)

    def __str__(self) -> str:
        total = len(self.matched) + len(self.missing) + len(self.mismatched)
        lines = [f"{self.file}: {len(self.matched)} of {total} tensors of '{self.backbone}' matched"]
        shapes = [
            f"{key} {tuple(got)} instead of {tuple(expected)}" for key, (got, expected) in self.mismatched.items()
        ]
        for label, keys in (
            ("missing in the file", self.missing),
            ("of another shape", shapes),
            ("not part of the backbone", self.unexpected),
            ("classifier left out", self.dropped),
            ("position embeddings resized", self.resized),
        ):
            if keys:
                lines.append(f"  {label} ({len(keys)}): {_shorten(keys)}")
        if self.applied:
            settings = ", ".join(f"{name} {_as_text(value)}" for name, value in self.applied.items())
            lines.append(f"  applied from its header: {settings}")
        for name, (header_value, used_value) in self.overridden.items():
            lines.append(
                f"  {name} is {_as_text(used_value)} from the recipe; the header says {_as_text(header_value)}"
            )
        return "\n".join(lines)


def check_weights_file(file: str | Path) -> Path:
    """Check that a weights file exists and is not a pickle, without reading it.

    Returns:
        The path of the file.

    Raises:
        ValueError: the file is missing, a folder or a pickle. A pickle is not opened, because it can run code.
    """
    path = Path(file)
    if path.is_dir():
        files = sorted(each.name for each in path.glob("*.safetensors"))
        hint = f"; did you mean {str(path / files[0])!r}?" if files else ""
        raise ValueError(f"weights: got {str(file)!r}, a folder; expected the path of a .safetensors file{hint}")
    if path.suffix.lower() in PICKLE_SUFFIXES:
        raise ValueError(
            f"weights: got {str(file)!r}, a pickle, which can run code; expected a .safetensors file. {CONVERT}"
        )
    if not path.is_file():
        raise ValueError(f"weights: got {str(file)!r}, which does not exist; expected the path of a .safetensors file")
    return path


def read_tensors(file: str | Path) -> dict[str, Tensor]:
    """Return all tensors of a safetensors file; floating-point tensors are converted to float32.

    Raises:
        ValueError: the file is missing, damaged, or a pickle. A pickle is not opened, because it can run code.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = check_weights_file(file)
    try:
        with interrupt_after():
            tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"weights: got {str(file)!r}, expected a readable safetensors file ({error}). {CONVERT}"
        ) from None
    return {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}


def load_backbone(
    backbone: nn.Module, file: str | Path, name: str = "backbone", classifiers: Iterable[str] = ()
) -> WeightReport:
    """Load `file` into `backbone`; the file must have every tensor of the backbone in the right shape.

    Args:
        backbone: the module, changed in place only if every tensor fits.
        file: a safetensors file with timm's names, of any float type; its classifier is left out.
        name: the name of the backbone in messages.
        classifiers: further names of classifier modules in the file, in addition to the usual ones (fc, head ...).

    Returns:
        Which tensors matched.

    Raises:
        ValueError: the file belongs to another backbone; the message names the first keys that do not fit.
    """
    tensors = read_tensors(file)
    state = backbone.state_dict()
    heads = tuple(f"{classifier}." for classifier in {*classifiers, *CLASSIFIERS})
    dropped = [key for key in tensors if key not in state and key.startswith(heads)]
    tensors = {key: value for key, value in tensors.items() if key not in set(dropped)}
    resized = _resize_positions(backbone, tensors)
    for key, value in tensors.items():
        # Files of the first PyTorch versions, such as BN-Inception's, hold BatchNorm's vectors with shape (1, C).
        if key in state and state[key].ndim == 1 and value.shape == (1, *state[key].shape):
            tensors[key] = value[0]

    matched = [key for key, value in state.items() if key in tensors and tensors[key].shape == value.shape]
    unexpected = [key for key in tensors if key not in state and not key.endswith(COUNTER)]
    patterns = {_pattern(key) for key in state}
    report = WeightReport(
        file=str(file),
        backbone=name,
        matched=matched,
        missing=[key for key in state if key not in tensors and not key.endswith(COUNTER)],
        unexpected=unexpected,
        mismatched={
            key: (tuple(tensors[key].shape), tuple(value.shape))
            for key, value in state.items()
            if key in tensors and tensors[key].shape != value.shape
        },
        dropped=dropped,
        resized=resized,
        deeper=[key for key in unexpected if _pattern(key) in patterns],
    )
    if not report.fits:
        raise ValueError(_refusal(report, tensors))
    backbone.load_state_dict({key: tensors[key] for key in matched}, strict=False)
    return report


def looks_like(tensors: dict[str, Tensor]) -> str | None:
    """Describe the kind of network that the tensors seem to belong to; None if it is not recognised.

    Example:
        >>> import torch
        >>> patches, qkv = torch.zeros(192, 3, 16, 16), torch.zeros(576, 192)
        >>> looks_like({"patch_embed.proj.weight": patches, "blocks.0.attn.qkv.weight": qkv})
        'a ViT of width 192, depth 1 and patch size 16'
    """

    def blocks(prefix: str) -> int:
        return len({key.split(".")[prefix.count(".")] for key in tensors if key.startswith(prefix)})

    if "blocks.0.attn.qkv.weight" in tensors and "patch_embed.proj.weight" in tensors:
        width, _, _, patch = tensors["patch_embed.proj.weight"].shape
        return f"a ViT of width {width}, depth {blocks('blocks.')} and patch size {patch}"
    if "layer1.0.conv1.weight" in tensors:
        depths = [blocks(f"layer{stage}.") for stage in (1, 2, 3, 4)]
        per_block = 3 if "layer1.0.conv3.weight" in tensors else 2
        return f"a ResNet-{2 + per_block * sum(depths)} or a similar network with {depths} blocks"
    for key, kind in (
        ("layers.0.blocks.0.attn.relative_position_bias_table", "a Swin transformer"),
        ("stages.0.blocks.0.conv_dw.weight", "a ConvNeXt"),
        ("conv_stem.weight", "an EfficientNet or MobileNet"),
        ("stages.0.0.weight", "the small network of this package"),
        ("inception_3a_1x1.weight", "a BN-Inception"),
    ):
        if key in tensors:
            return kind
    return None


def _refusal(report: WeightReport, tensors: dict[str, Tensor]) -> str:
    """Return the error message for a file that does not fit."""
    kind = looks_like(tensors)
    guess = f"; the file looks like {kind}" if kind else ""
    if report.deeper and not (report.missing or report.mismatched):
        return (
            f"weights: got {report.file!r}, which has more blocks than backbone={report.backbone!r} has: "
            f"{_shorten(report.deeper)}{guess}; expected the backbone that the file was made for"
        )
    return (
        f"weights: got {report.file!r}, whose tensors do not fit backbone={report.backbone!r}{guess}; "
        f"expected the backbone that the file was made for.\n{report}"
    )


def _resize_positions(backbone: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """Resample position embeddings of another image size to the grid of a ViT, as timm does for hub weights."""
    target = getattr(backbone, "pos_embed", None)
    stored = tensors.get("pos_embed")
    grid = getattr(getattr(backbone, "patch_embed", None), "grid_size", None)
    if target is None or stored is None or grid is None:
        return []
    if target.ndim != 3 or stored.ndim != 3 or target.shape == stored.shape:
        return []
    prefix = target.shape[1] - grid[0] * grid[1]
    side = round((stored.shape[1] - prefix) ** 0.5)
    if prefix < 0 or target.shape[2] != stored.shape[2] or side < 1 or side * side != stored.shape[1] - prefix:
        return []
    from timm.layers import resample_abs_pos_embed

    tensors["pos_embed"] = resample_abs_pos_embed(stored, new_size=list(grid), num_prefix_tokens=prefix)
    return [f"pos_embed {side} x {side} to {grid[0]} x {grid[1]}"]


def _pattern(key: str) -> str:
    """Return `key` with every number replaced by "#"."""
    return re.sub(r"\d+", "#", key)


def _as_text(value: Any) -> str:
    """Return a number, or several numbers separated by spaces, as text."""
    return " ".join(map(_as_text, value)) if isinstance(value, tuple | list) else f"{value}"


def _shorten(keys: list[str], count: int = 4) -> str:
    """Join the first `count` keys and add the number of the others."""
    return ", ".join(keys[:count]) + (f" ... and {len(keys) - count} more" if len(keys) > count else "")
