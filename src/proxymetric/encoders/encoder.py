"""Images -> vectors: a backbone, a pooling and a head, built from names and numbers."""

import difflib
import hashlib
import json
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.core.second_pass import ClassPrompts
from proxymetric.encoders.backbones import Backbone, layout_of, make_backbone, probe, set_stride
from proxymetric.encoders.needs import Needs
from proxymetric.encoders.pooling import POOLINGS, Pooling
from proxymetric.encoders.tuning import TUNINGS, ComposedTuning, complete_tuning, compose_tuning
from proxymetric.encoders.vit import Prompts, Tower, first_tokens, has_plain_blocks, is_vit, last_tokens, pooled_tokens
from proxymetric.encoders.weights import WeightReport, load_backbone

HEADS = ("linear", "none")
HEAD_INITS = ("kaiming", "xavier")
SHAPES_FEATURES = ("backbone", "size", "pooling", "gem_p", "bn_eps", "stride")


class Encoder(nn.Module):
    """`head(features(images))`: images (B, 3, S, S) -> vectors (B, dim), not normalised to unit length.

    Images are uint8 in 0..255 or floats in [0, 1]; the encoder normalises them itself by the backbone's mean and
    standard deviation. These two are persistent buffers, saved with the weights: a later timm that changes its mind
    about a backbone's normalisation does not change a saved encoder.

    Made by `build`. Attributes: `backbone`, `pooling` (None: the backbone's own), `head` and `tuning` modules; `width`,
    the number F of features; `dim`; `size`; `interpolation`, how the backbone wants its images resized, for the views;
    `config`, JSON-able, with which `build(**config)` makes the same module with random weights; `source`, where the
    weights came from, in words; `report`, what of a weights file matched (None without a file); `classifiers`, names
    of the classifier modules that a weights file may hold.
    """

    backbone: Any
    tuning: ComposedTuning
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: Backbone,
        pooling: Pooling | None,
        head: nn.Module,
        tuning: ComposedTuning,
        width: int,
        config: dict[str, Any],
    ) -> None:
        super().__init__()
        self.backbone, self.pooling, self.head, self.tuning = backbone.module, pooling, head, tuning
        self.is_vit = is_vit(backbone.module)
        self.width, self.config = width, config
        self.dim, self.size = int(config["dim"]), int(config["size"])
        self.interpolation, self.source = backbone.interpolation, backbone.source
        self.classifiers = backbone.classifiers
        self.report: WeightReport | None = None
        self._compiled: Callable[..., Tensor] | None = None
        self.register_buffer("mean", torch.tensor(backbone.mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(backbone.std).view(3, 1, 1))
        self._holds_norms = bool(config["freeze_bn"]) or not tuning.everything
        self._learnable = {
            name: part for name, p in self._feature_parameters() if p.requires_grad and (part := self._part(name))
        }
        if config["freeze_bn"]:
            for name, _ in self._norms():
                self._learnable.pop(f"backbone.{name}.weight", None)
                self._learnable.pop(f"backbone.{name}.bias", None)
        self.set_backbone_trainable(True)

    def forward(self, images: Tensor) -> Tensor:
        """Vectors (B, dim) of `images` (B, 3, S, S)."""
        return self.head(self.features(images))

    def features(self, images: Tensor, prompts: Prompts | None = None, shared: bool = False) -> Tensor:
        """The pooled features (B, F) of `images`: what the head sees.

        Args:
            images: (B, 3, S, S).
            prompts: tokens (B, n_i, D) for each block i of a ViT, or None there, in this pass instead of the tuning's
                own; gradients flow to them.
            shared: `prompts` stand behind the tuning's own instead.
        """
        return self._seen(images, Tower(prompts, shared))[0]

    def features_twice(
        self, images: Tensor, prompts: Prompts | ClassPrompts, shared: bool = False
    ) -> tuple[Tensor, Tensor]:
        """`features(images)` and `features(images, prompts, shared)`, in one pass through the blocks of a ViT."""
        first, second = self._seen(images, Tower(), Tower(prompts, shared))
        return first, second

    def _seen(self, images: Tensor, *towers: Tower) -> tuple[Tensor, ...]:
        if not self.is_vit and (len(towers) > 1 or towers[0].prompts is not None):
            raise ValueError(f"prompts: a ViT is expected for them; this backbone is a {type(self.backbone).__name__}")
        compiled = self._compiled if self.training and torch.is_grad_enabled() else None
        found = (compiled or self._pooled)(images, towers)
        # What is exported has batches of any size: nothing may be asked of it that a number would answer.
        return (found,) if len(towers) == 1 else found.chunk(len(towers))

    def _pooled(self, images: Tensor, towers: tuple[Tower, ...]) -> Tensor:
        """The features (towers B, F) of images, those of the first tower first."""
        # Normalised in here, so that nobody outside holds the result while the blocks of a ViT run.
        if not self.is_vit:
            return self.pool(self.backbone.forward_features(self.normalise(images)))
        wanted = pooled_tokens(self.backbone) if self.pooling is None else None
        tokens = first_tokens(self.backbone, self.normalise(images))
        return self.pool(last_tokens(self.backbone, tokens, self.tuning, towers, wanted, self.config["checkpointing"]))

    def compile_steps(self, recorded: bool = False) -> None:
        """Have `torch.compile` make the training steps of the backbone: slow at first, then faster, with less memory.

        Evaluation and use stay as they are. Under autocast, a ViT keeps less for the backward pass (`lean`). recorded:
        a step's kernels are recorded once (CUDA graphs) and then started together, which pays where starting them takes
        longer than they run; gradients must be gone before the next forward pass.
        """
        # torch counts what it compiled by code object and gives up after a few: each encoder has one of its own.
        own = types.FunctionType(Encoder._pooled.__code__.replace(), globals())
        self._compiled = torch.compile(types.MethodType(own, self), mode="reduce-overhead" if recorded else None)

    def __getstate__(self) -> dict[str, Any]:
        """For a copy: what is compiled runs the weights of this one."""
        return {**self.__dict__, "_compiled": None}

    def pool(self, places: Tensor) -> Tensor:
        """The features (B, F) of the backbone's last map or tokens."""
        if self.pooling is not None:
            return self.pooling(places)
        return self.backbone.forward_head(places, pre_logits=True)

    def normalise(self, images: Tensor) -> Tensor:
        """`(x - mean) / std`, x in [0, 1]; uint8 is divided by 255."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images have shape {tuple(images.shape)}; (B, 3, H, W) is expected")
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        elif not images.is_floating_point():
            raise ValueError(f"images are {images.dtype}; uint8 in 0..255 or floats in [0, 1] are expected")
        return (images.to(self.mean.dtype) - self.mean) / self.std

    def train(self, mode: bool = True) -> "Encoder":
        """Training mode; the backbone's BatchNorm stays as in evaluation with `freeze_bn` or a tuning but "full"."""
        super().train(mode)
        if self._holds_norms:
            for _, norm in self._norms():
                norm.eval()
        return self

    def set_backbone_trainable(self, trainable: bool) -> None:
        """Give backbone, tuning and pooling gradients, or none: for a head that warms up first.

        What the tuning or `freeze_bn` holds still never gets any. Only gradients are meant: BatchNorm that is not
        frozen keeps following the batches in training mode.
        """
        for name, parameter in self._feature_parameters():
            parameter.requires_grad_(trainable and name in self._learnable)

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters of the head, trainable or not."""
        return list(self.head.parameters())

    def backbone_parameters(self) -> list[nn.Parameter]:
        """The parameters that make the features (backbone, tuning, and p of a learned GeM), trainable or not."""
        return [parameter for _, parameter in self._feature_parameters()]

    def part_of(self, name: str) -> str | None:
        """What counts call the part that the parameter `name` belongs to; None if it is never trained."""
        return "head" if name.startswith("head.") else self._learnable.get(name)

    def fingerprint(self) -> str:
        """sha256 of all that makes the features: weights and statistics of backbone and pooling, size, normalisation.

        The head does not count: encoders that differ in nothing else share their cached features.
        """
        digest = hashlib.sha256(json.dumps({key: self.config[key] for key in SHAPES_FEATURES}).encode())
        if self.tuning.on_blocks:
            digest.update(json.dumps(self.config["tuning"]).encode())
        for name, value in sorted(self.state_dict().items()):
            if name.startswith("head.") or name.endswith("num_batches_tracked"):
                continue
            value = value.detach().cpu().contiguous()
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def _feature_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.named_parameters() if not name.startswith("head."))

    def _part(self, name: str) -> str | None:
        """What counts call the part that the parameter `name` belongs to; None if the tuning holds it still."""
        where, _, rest = name.partition(".")
        if where == "tuning":
            return self.tuning.part(rest)
        return "pooling" if where == "pooling" else self.tuning.trainer(rest)

    def _norms(self) -> Iterator[tuple[str, nn.Module]]:
        return (
            (name, m) for name, m in self.backbone.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        )


def build(
    backbone: str = "resnet50",
    dim: int | None = 512,
    size: int = 224,
    pooling: str = "auto",
    gem_p: float = 3.0,
    learn_p: bool = False,
    layer_norm: bool = False,
    head: str = "linear",
    freeze_bn: bool = False,
    bn_eps: float | None = None,
    pretrained: bool = True,
    weights: str | Path | None = None,
    tuning: str | dict[str, Any] = "full",
    head_init: str = "kaiming",
    checkpointing: bool | str = False,
    mean: tuple[float, float, float] | None = None,
    std: tuple[float, float, float] | None = None,
    stride: str | None = None,
) -> Encoder:
    """An encoder from names and numbers.

    What the header of a weights file says of the network (`encoders.needs`) is applied: `stride`, `bn_eps`, `mean` and
    `std` that are left out here are the file's; a file made for another `backbone`, `stride` or `bn_eps` is refused.

    Args:
        backbone: "small" (a four-stage convolutional net for 32 x 32 pictures), "bn_inception" (weights from a file
            only) or any name of timm.
        dim: D of the vectors; with head="none" None or the backbone's own width.
        size: side of the images in pixels.
        pooling: "auto" (the backbone's own), "avg", "max", "avg+max" or "gem", of the last map or the patch tokens.
        gem_p: exponent p > 0 of "gem".
        learn_p: p is trained too ("gem" only).
        layer_norm: LayerNorm before the linear head.
        head: "linear" or "none" (the features are the vectors).
        freeze_bn: BatchNorm of the backbone keeps its statistics, scale and shift while training.
        bn_eps: epsilon of the backbone's BatchNorm where weights were made with another than timm's.
        pretrained: weights from the model hub, unless `weights` is given; "small" has none and starts random.
        weights: a safetensors file of the backbone's weights with timm's names ("bn_inception": its port's).
        tuning: what of the backbone is trained: "full", "linear" (nothing), "bitfit" (biases), or for ViTs "vpt",
            "adapter", "lora", also joined: "vpt+bitfit". With arguments, which are those of the classes in
            `encoders.tuning`: {"name": "vpt+bitfit", "prompts": 10}.
        head_init: weights of the head: "kaiming" (normal, by fan out) or "xavier" (uniform; VPTSP's). Its bias is 0.
        checkpointing: ViTs only: keep little more than the tokens between blocks for the backward pass, and compute the
            rest again there; "mlp": only the hidden layer of each MLP, the largest part, is computed again. The result
            is the same.
        mean, std: of red, green and blue in [0, 1], by which images are normalised, where weights were made with others
            than timm names for this backbone.
        stride: where the bottleneck blocks of a ResNet halve the resolution: "3x3" (timm's, the default) or "1x1" (the
            first version of the network, whose weights come from Caffe or Keras).

    >>> encoder = build("small", dim=64, size=32, pooling="gem")
    >>> encoder(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
    torch.Size([2, 64])
    """
    _choice("pooling", pooling, POOLINGS)
    _choice("head", head, HEADS)
    _choice("head_init", head_init, HEAD_INITS)
    tuning = complete_tuning(tuning, TUNINGS)
    if size < 1:
        raise ValueError(f"size={size}; the side of the images in pixels is expected")
    if not gem_p > 0:
        raise ValueError(f"gem_p={gem_p}; a number above 0 is expected, 3 is usual")
    if learn_p and pooling != "gem":
        raise ValueError(f"learn_p=True has no meaning with pooling={pooling!r}; pooling='gem' is expected")
    if layer_norm and head == "none":
        raise ValueError("layer_norm=True stands before a linear head; head='linear' is expected, got head='none'")
    if head_init != "kaiming" and head == "none":
        raise ValueError(f"head_init={head_init!r} is for a linear head; head='linear' is expected, got head='none'")
    if bn_eps is not None and not bn_eps > 0:
        raise ValueError(f"bn_eps={bn_eps}; a number above 0 or None is expected")

    needs = Needs() if weights is None else Needs.of(weights)
    if weights is not None:
        needs.check(weights, {"backbone": backbone, "stride": stride, "bn_eps": bn_eps})
    stride, bn_eps = stride or needs.stride, needs.bn_eps if bn_eps is None else bn_eps
    mean, std = mean or needs.mean, std or needs.std
    base = make_backbone(backbone, size, pretrained and weights is None)
    if stride is not None:
        set_stride(base.module, stride, backbone)
    base = base._replace(mean=_colours("mean", mean, base.mean), std=_colours("std", std, base.std))
    if bn_eps is not None:
        for module in base.module.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eps = bn_eps
    if checkpointing not in (False, True, "mlp"):
        raise ValueError(f"checkpointing={checkpointing!r}; True, False or 'mlp' is expected")
    if checkpointing and not is_vit(base.module):
        raise ValueError(
            f"checkpointing={checkpointing} runs a timm VisionTransformer block by block, and {backbone!r} is a "
            f"{type(base.module).__name__}; checkpointing=False is expected"
        )
    if checkpointing == "mlp" and not has_plain_blocks(base.module):
        kind = type(base.module.blocks[0]).__name__
        raise ValueError(f"checkpointing='mlp' needs blocks of attention, then MLP, not {kind}; True suits it")
    pool, width = _pool(base.module, size, pooling, gem_p, learn_p)
    if head == "none" and dim not in (None, width):
        raise ValueError(
            f"dim={dim}, but with head='none' the vectors are the {width} features of {backbone!r}: "
            f"dim=None or {width} is expected"
        )
    if head == "linear" and (dim is None or dim < 1):
        raise ValueError(f"dim={dim}; with head='linear' the number of dimensions of the vectors is expected")
    dim = width if dim is None else dim
    config = {
        "backbone": backbone, "dim": dim, "size": size, "pooling": pooling, "gem_p": gem_p, "learn_p": learn_p,
        "layer_norm": layer_norm, "head": head, "freeze_bn": freeze_bn, "bn_eps": bn_eps,
        "pretrained": False, "weights": None, "tuning": tuning, "head_init": head_init, "checkpointing": checkpointing,
        "mean": mean, "std": std, "stride": stride,
    }  # fmt: skip
    # The head is drawn first: with one seed it starts alike whatever the tuning.
    top = _head(head, width, dim, layer_norm, head_init)
    encoder = Encoder(base, pool, top, compose_tuning(tuning, base.module, TUNINGS, is_vit(base.module)), width, config)
    if weights is not None:
        load_weights(encoder, weights)
    return encoder.train()


def _colours(
    name: str, asked: tuple[float, float, float] | None, own: tuple[float, float, float]
) -> tuple[float, float, float]:
    """The three numbers asked for, or the backbone's own."""
    if asked is None:
        return own
    if len(asked) != 3 or not all(0 <= value <= 1 for value in asked) or (name == "std" and not all(asked)):
        raise ValueError(f"{name}={tuple(asked)}; three numbers in [0, 1] are expected, above 0 for std")
    red, green, blue = asked
    return red, green, blue


def load_weights(encoder: Encoder, file: str | Path) -> WeightReport:
    """Take the backbone's weights from a safetensors file with timm's names; pooling and head stay as they are.

    Floats of any size are cast up and a classifier in the file is left out. The file of another backbone raises a
    ValueError that names the first keys that do not fit, and changes nothing; so does a file whose header asks for
    another network (`encoders.needs`). The report of what matched is returned and kept as `encoder.report`.
    """
    needs, config = Needs.of(file), encoder.config
    built = {
        "backbone": config["backbone"],
        "stride": config.get("stride") or "3x3",
        "bn_eps": config["bn_eps"],
    }
    needs.check(file, built)
    report = load_backbone(encoder.backbone, file, config["backbone"], encoder.classifiers)
    used = {**built, "mean": config["mean"], "std": config["std"], "img_size": encoder.size}
    stated = {name: value for name, value in needs.stated().items() if name != "backbone"}
    applied = {name: value for name, value in stated.items() if used[name] == value}
    overridden = {name: (value, used[name]) for name, value in stated.items() if name not in applied}
    encoder.report = replace(report, applied=applied, overridden=overridden)
    encoder.source = f"file {Path(file).name}"
    return encoder.report


def parameter_counts(encoder: nn.Module) -> dict[str, int]:
    """How many parameters are trained, and how many there are.

    >>> parameter_counts(build("small", dim=8, size=32))["total"]
    390952
    """
    parameters = list(encoder.parameters())
    return {
        "trained": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        "total": sum(parameter.numel() for parameter in parameters),
    }


def tuned_parameters(encoder: Encoder) -> dict[str, int]:
    """Count the trained parameters of each part: "head", the `part` of each tuning, and "pooling".

    A warm-up that freezes some of them for a while does not change the counts. Parts without parameters are left out.

    >>> tuned_parameters(build("small", dim=8, size=32, tuning="bitfit"))  # the biases of its BatchNorm
    {'head': 2056, 'biases': 480}
    """
    counts = dict.fromkeys(("head", *(tuning.part for tuning in encoder.tuning.parts()), "pooling"), 0)
    for name, parameter in encoder.named_parameters():
        if (part := encoder.part_of(name)) is not None:
            counts[part] += parameter.numel()
    return {part: count for part, count in counts.items() if count}


def _pool(module: Any, size: int, name: str, gem_p: float, learn_p: bool) -> tuple[Pooling | None, int]:
    """The pooling and the width F of what it gives, by one black image in evaluation mode."""
    module.eval()
    if name == "auto":
        with torch.no_grad():
            return None, module.forward_head(probe(module, size), pre_logits=True).shape[1]
    features = probe(module, size)
    pool = Pooling(name, *layout_of(module, features), gem_p, learn_p)
    pooled = pool(features)
    # What only the backbone's own pooling would use (a norm or layer behind it) must not count as trained.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter, used in zip(parameters, torch.autograd.grad(pooled.sum(), parameters, allow_unused=True)):
        parameter.requires_grad_(used is not None)
    return pool, pooled.shape[1]


def _head(name: str, width: int, dim: int, layer_norm: bool, init: str) -> nn.Module:
    if name == "none":
        return nn.Identity()
    linear = nn.Linear(width, dim)
    if init == "xavier":
        nn.init.xavier_uniform_(linear.weight)
    else:
        nn.init.kaiming_normal_(linear.weight, mode="fan_out")
    nn.init.zeros_(linear.bias)
    return nn.Sequential(nn.LayerNorm(width), linear) if layer_norm else linear


def _choice(argument: str, got: str, known: tuple[str, ...]) -> None:
    if got not in known:
        near = difflib.get_close_matches(str(got), known, n=1, cutoff=0.3)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"{argument}={got!r}{hint}; one of {', '.join(known)} is expected")
