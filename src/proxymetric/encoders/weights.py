"""Read a backbone's weights from a safetensors file, and say what matched."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl", ".pickle", ".tar")
CLASSIFIERS = ("fc", "head", "head_dist", "classifier", "last_linear")
COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class WeightReport:
    """What of a weights file found its place in a backbone; `str()` is a short text for people.

    >>> print(WeightReport("r.safetensors", "resnet18", matched=["conv1.weight"], missing=["bn1.weight", "bn1.bias"]))
    r.safetensors: 1 tensor of 3 of 'resnet18' matched
      missing in the file (2): bn1.weight, bn1.bias
    """

    file: str
    backbone: str
    matched: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """in the backbone, not in the file"""
    unexpected: list[str] = field(default_factory=list)
    """in the file, not in the backbone; loaded nowhere"""
    mismatched: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """shape in the file, shape in the backbone"""
    dropped: list[str] = field(default_factory=list)
    """the file's classifier, which an embedding does not need"""
    resized: list[str] = field(default_factory=list)
    """position embeddings brought to another image size"""
    deeper: list[str] = field(default_factory=list)
    """those of `unexpected` that continue a row of the backbone's own blocks: the file is of a larger relative"""
    applied: dict[str, Any] = field(default_factory=dict)
    """what the file's header says of the network, and the network is so"""
    overridden: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """what the header says, and what the recipe has instead"""

    @property
    def fits(self) -> bool:
        """Every tensor of the backbone has its value, and the file is not that of a larger relative."""
        return not (self.missing or self.mismatched or self.deeper)

    def __str__(self) -> str:
        wanted = len(self.matched) + len(self.missing) + len(self.mismatched)
        plural = "" if len(self.matched) == 1 else "s"
        lines = [f"{self.file}: {len(self.matched)} tensor{plural} of {wanted} of '{self.backbone}' matched"]
        shapes = [f"{key} {tuple(got)} instead of {tuple(want)}" for key, (got, want) in self.mismatched.items()]
        for what, keys in (
            ("missing in the file", self.missing),
            ("of another shape", shapes),
            ("not part of the backbone", self.unexpected),
            ("classifier left out", self.dropped),
            ("position embeddings resized", self.resized),
        ):
            if keys:
                lines.append(f"  {what} ({len(keys)}): {_few(keys)}")
        if self.applied:
            said = ", ".join(f"{name} {_plain(value)}" for name, value in self.applied.items())
            lines.append(f"  applied from its header: {said}")
        for name, (stated, used) in self.overridden.items():
            lines.append(f"  {name} is {_plain(used)} as asked, where its header says {_plain(stated)}")
        return "\n".join(lines)


def read_tensors(file: str | Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, floating ones as float32. Pickles are refused unread: they can run code."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(file)
    convert = (
        "Convert it once, where you trust it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "
        "'FILE.safetensors')"
    )
    if path.suffix.lower() in PICKLES:
        raise ValueError(
            f"weights={str(file)!r} is a pickle, which could run code; a .safetensors file is expected. {convert}"
        )
    if not path.is_file():
        raise ValueError(f"weights={str(file)!r}: no such file; the path of a .safetensors file is expected")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"weights={str(file)!r} is not a readable safetensors file ({error}). {convert}") from None
    return {key: value.float() if value.is_floating_point() else value for key, value in tensors.items()}


def load_backbone(
    backbone: nn.Module, file: str | Path, name: str = "backbone", classifiers: Iterable[str] = ()
) -> WeightReport:
    """Load `file` into `backbone`; all of its tensors must be found, in the right shape.

    Args:
        backbone: the module to fill, changed in place only if everything fits.
        file: a safetensors file with timm's names, of any float type; a classifier in it is left out.
        name: how messages call the backbone.
        classifiers: names of the backbone's own classifier modules, beside the usual ones (fc, head, classifier ...).

    Returns:
        What matched. A file of another backbone raises ValueError with the first keys that do not fit.
    """
    tensors, own = read_tensors(file), backbone.state_dict()
    heads = tuple(f"{classifier}." for classifier in {*classifiers, *CLASSIFIERS})
    dropped = [key for key in tensors if key not in own and key.startswith(heads)]
    tensors = {key: value for key, value in tensors.items() if key not in set(dropped)}
    resized = _resize_positions(backbone, tensors)
    for key, value in tensors.items():
        # Files of the first PyTorch versions, which BN-Inception's descend from, hold BatchNorm's vectors as (1, C).
        if key in own and own[key].ndim == 1 and value.shape == (1, *own[key].shape):
            tensors[key] = value[0]

    matched = [key for key, value in own.items() if key in tensors and tensors[key].shape == value.shape]
    unexpected = [key for key in tensors if key not in own and not key.endswith(COUNTER)]
    kinds = {_kind(key) for key in own}
    report = WeightReport(
        file=str(file),
        backbone=name,
        matched=matched,
        missing=[key for key in own if key not in tensors and not key.endswith(COUNTER)],
        unexpected=unexpected,
        mismatched={
            key: (tuple(tensors[key].shape), tuple(value.shape))
            for key, value in own.items()
            if key in tensors and tensors[key].shape != value.shape
        },
        dropped=dropped,
        resized=resized,
        deeper=[key for key in unexpected if _kind(key) in kinds],
    )
    if not report.fits:
        raise ValueError(_refusal(report, tensors))
    backbone.load_state_dict({key: tensors[key] for key in matched}, strict=False)
    return report


def looks_like(tensors: dict[str, Tensor]) -> str | None:
    """What kind of model these tensors seem to belong to, in words; None if no pattern is known.

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
        return f"a ResNet-{2 + per_block * sum(depths)} or a relative, blocks {depths}"
    for key, kind in (
        ("layers.0.blocks.0.attn.relative_position_bias_table", "a Swin transformer"),
        ("stages.0.blocks.0.conv_dw.weight", "a ConvNeXt"),
        ("conv_stem.weight", "an EfficientNet or MobileNet"),
        ("stages.0.0.weight", "the small net of this package"),
        ("inception_3a_1x1.weight", "a BN-Inception"),
    ):
        if key in tensors:
            return kind
    return None


def _refusal(report: WeightReport, tensors: dict[str, Tensor]) -> str:
    kind = looks_like(tensors)
    guess = f"; the file looks like {kind}" if kind else ""
    if report.deeper and not (report.missing or report.mismatched):
        return (
            f"weights={report.file!r} hold more blocks than backbone={report.backbone!r} has: "
            f"{_few(report.deeper)}{guess}. Name the backbone that the file was made for"
        )
    return f"weights={report.file!r} do not fit backbone={report.backbone!r}{guess}.\n{report}"


def _resize_positions(backbone: nn.Module, tensors: dict[str, Tensor]) -> list[str]:
    """Bring a ViT's position embeddings of another image size to this one's grid, as timm does for hub weights."""
    own, given = getattr(backbone, "pos_embed", None), tensors.get("pos_embed")
    grid = getattr(getattr(backbone, "patch_embed", None), "grid_size", None)
    if own is None or given is None or grid is None or own.ndim != 3 or given.ndim != 3 or own.shape == given.shape:
        return []
    prefix = own.shape[1] - grid[0] * grid[1]
    side = round((given.shape[1] - prefix) ** 0.5)
    if prefix < 0 or own.shape[2] != given.shape[2] or side < 1 or side * side != given.shape[1] - prefix:
        return []
    from timm.layers import resample_abs_pos_embed

    tensors["pos_embed"] = resample_abs_pos_embed(given, new_size=list(grid), num_prefix_tokens=prefix)
    return [f"pos_embed {side} x {side} to {grid[0]} x {grid[1]}"]


def _kind(key: str) -> str:
    return re.sub(r"\d+", "#", key)


def _plain(value: Any) -> str:
    return " ".join(map(_plain, value)) if isinstance(value, tuple | list) else f"{value}"


def _few(keys: list[str], most: int = 4) -> str:
    return ", ".join(keys[:most]) + (f" ... and {len(keys) - most} more" if len(keys) > most else "")
