"""The encoder: a backbone, a pooling and a head that map images to vectors, and `build`, which makes one."""

import hashlib
import json
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxymetric.arguments.signatures import one_of
from proxymetric.core.second_pass import ClassPrompts
from proxymetric.encoders.backbones import Backbone, layout_of, make_backbone, probe, set_stride
from proxymetric.encoders.conv_gradients import speed_up_gradients
from proxymetric.encoders.head import make_head, with_linear_layer
from proxymetric.encoders.needs import Needs
from proxymetric.encoders.pooling import POOLINGS, Pooling
from proxymetric.encoders.tuning import TUNINGS, ComposedTuning, complete_tuning, compose_tuning
from proxymetric.encoders.vit import Prompts, Tower, first_tokens, has_plain_blocks, is_vit, last_tokens, pooled_tokens
from proxymetric.encoders.weights import WeightReport, load_backbone

HEADS = ("linear", "none")
HEAD_INITS = ("kaiming", "xavier")
FROZEN_BATCH_NORM = ("none", "statistics", "all")
"""values of `freeze_bn`: what of BatchNorm stays fixed in training"""
FEATURE_SETTINGS = ("backbone", "size", "pooling", "gem_p", "bn_eps", "stride")
"""keys of `Encoder.config` that change the features"""


class Encoder(nn.Module):
    """Maps images (B, 3, S, S) to vectors (B, dim): `head(features(images))`, not normalised to unit length.

    Images are uint8 in 0..255 or floats in [0, 1]. The encoder normalises them with the backbone's mean and standard
    deviation, which are persistent buffers and are saved with the weights. A later version of timm that changes a
    backbone's normalisation therefore does not change a saved encoder.

    Use `build` to make an encoder.

    Args:
        backbone: the network without its classifier, and how it expects its images.
        pooling: reduces the last map or the tokens to features; None uses the backbone's own pooling.
        head: maps features (B, F) to vectors (B, dim).
        tuning: chooses which parameters of the backbone are trained, and adds parameters to it.
        width: number F of features.
        config: the arguments of `build`.

    Attributes:
        backbone: the network, a module.
        pooling: the pooling module, or None.
        head: the head module.
        tuning: the tuning module.
        width: number F of features.
        dim: number D of dimensions of the vectors.
        size: side of the images in pixels.
        interpolation: how images are resized for this backbone, "bilinear" or "bicubic".
        config: a dictionary of JSON values; `build(**config)` makes the same module with random weights.
        source: a short text on where the weights come from.
        report: which tensors of a weights file matched; None without a file.
        classifiers: names of the classifier modules that a weights file may hold.
        is_vit: whether the backbone is a timm VisionTransformer that runs block by block.
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
        self.backbone = backbone.module
        self.pooling = pooling
        self.head = head
        self.tuning = tuning
        self.is_vit = is_vit(backbone.module)
        self.width = width
        self.config = config
        self.dim = int(config["dim"])
        self.size = int(config["size"])
        self.interpolation = backbone.interpolation
        self.source = backbone.source
        self.classifiers = backbone.classifiers
        self.report: WeightReport | None = None
        self._compiled: Callable[..., Tensor] | None = None
        self.register_buffer("mean", torch.tensor(backbone.mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(backbone.std).view(3, 1, 1))
        fixed = frozen_batch_norm(config["freeze_bn"])
        self._freezes_statistics = fixed != "none" or not tuning.everything
        self._learnable = {
            name: part for name, p in self._feature_parameters() if p.requires_grad and (part := self._part(name))
        }
        if fixed == "all":
            for name, _ in self._batch_norms():
                self._learnable.pop(f"backbone.{name}.weight", None)
                self._learnable.pop(f"backbone.{name}.bias", None)
        self.set_backbone_trainable(True)

    def forward(self, images: Tensor) -> Tensor:
        """Return the vectors (B, dim) of `images` (B, 3, S, S)."""
        return self.head(self.features(images))

    def features(self, images: Tensor, prompts: Prompts | None = None, shared: bool = False) -> Tensor:
        """Return the pooled features (B, F) of `images`, which are the input of the head.

        Args:
            images: (B, 3, S, S).
            prompts: for each block i of a ViT, tokens (B, n_i, D) or None. They replace the tuning's prompts in this
                pass, and gradients flow to them.
            shared: append `prompts` to the tuning's prompts instead of replacing them.
        """
        return self._tower_features(images, Tower(prompts, shared))[0]

    def features_twice(
        self, images: Tensor, prompts: Prompts | ClassPrompts, shared: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return `features(images)` and `features(images, prompts, shared)` from one pass through a ViT's blocks."""
        first, second = self._tower_features(images, Tower(), Tower(prompts, shared))
        return first, second

    def _tower_features(self, images: Tensor, *towers: Tower) -> tuple[Tensor, ...]:
        """Return the features (B, F) of each tower."""
        if not self.is_vit and (len(towers) > 1 or towers[0].prompts is not None):
            raise ValueError(f"prompts: got prompts for a {type(self.backbone).__name__}, expected a ViT as backbone")
        compiled = self._compiled if self.training and self._backbone_trainable and torch.is_grad_enabled() else None
        features = (compiled or self._pooled)(images, towers)
        # An exported program has no fixed batch size, so this code must not depend on the number of rows.
        return (features,) if len(towers) == 1 else features.chunk(len(towers))

    def _pooled(self, images: Tensor, towers: tuple[Tower, ...]) -> Tensor:
        """Return the features (towers B, F): all rows of the first tower, then those of the second."""
        # The images are normalised here, so that no caller keeps the result alive while the blocks of a ViT run.
        if not self.is_vit:
            return self.pool(self.backbone.forward_features(self.normalise(images)))
        needed_tokens = pooled_tokens(self.backbone) if self.pooling is None else None
        tokens = first_tokens(self.backbone, self.normalise(images))
        return self.pool(
            last_tokens(self.backbone, tokens, self.tuning, towers, needed_tokens, self.config["checkpointing"])
        )

    def compile_steps(self, recorded: bool = False) -> None:
        """Compile the backbone's training steps with `torch.compile`: the first steps are slow, later ones faster.

        Compiled steps also need less memory: under autocast, a ViT keeps less for the backward pass
        (`encoders.low_memory`). Evaluation and inference are not compiled, nor are steps with a frozen backbone: torch
        2.11 does not notice that parameters start to train, and would give them no gradient.

        Args:
            recorded: record the kernels of a step once as a CUDA graph and launch them together. This is faster if
                launching the kernels takes longer than running them. Gradients must be freed before the next forward
                pass.
        """
        # torch.compile counts compilations per code object and gives up after a few: each encoder gets its own copy.
        function = types.FunctionType(Encoder._pooled.__code__.replace(), globals())
        self._compiled = torch.compile(types.MethodType(function, self), mode="reduce-overhead" if recorded else None)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the compiled step out of a copy: it would run with the weights of the original."""
        return {**self.__dict__, "_compiled": None}

    def pool(self, places: Tensor) -> Tensor:
        """Return the features (B, F) of the backbone's last map or tokens."""
        if self.pooling is not None:
            return self.pooling(places)
        return self.backbone.forward_head(places, pre_logits=True)

    @torch.no_grad()
    def add_maximum(self) -> bool:
        """Pool by average + maximum ("avg+max") if the backbone's own pooling is the average of its last map.

        Pre-trained features are better so, frozen or trained (the studies cub-frozen-pooling and defaults). Encoders
        with another pooling, transformers, and networks that do more than average (ConvNeXt normalises, too) do not
        change.

        Returns:
            Whether the pooling changed.

        Example:
            >>> encoder = build("small", dim=64, size=32)
            >>> encoder.add_maximum(), encoder.config["pooling"]
            (True, 'avg+max')
        """
        if self.pooling is not None or is_vit(self.backbone):
            return False
        size, training = self.config["size"], self.training
        ramp = torch.linspace(-1, 1, 3 * size * size, device=self.mean.device, dtype=self.mean.dtype)
        self.backbone.eval()
        places = self.backbone.forward_features(ramp.view(1, 3, size, size))
        pooled_features = self.backbone.forward_head(places, pre_logits=True)
        self.train(training)
        if places.ndim != 4 or layout_of(self.backbone, places)[0] != "map":
            return False
        average = places.mean((2, 3))
        if pooled_features.shape != average.shape or not torch.allclose(pooled_features, average, rtol=1e-3, atol=1e-6):
            return False
        self.pooling, self.config["pooling"] = Pooling("avg+max"), "avg+max"
        return True

    def set_head(self, weight: Tensor, bias: Tensor) -> None:
        """Replace the linear layer of the head; the number of dimensions may change.

        Args:
            weight: (D, F).
            bias: (D,).
        """
        self.head = with_linear_layer(self.head, weight, bias)
        self.dim = self.config["dim"] = len(weight)

    def normalise(self, images: Tensor) -> Tensor:
        """Return `(x - mean) / std` with x in [0, 1]; uint8 images are divided by 255 first."""
        if images.ndim != 4 or images.shape[1] != 3:
            raise ValueError(f"images: got shape {tuple(images.shape)}, expected (B, 3, H, W)")
        if images.dtype == torch.uint8:
            images = images.to(self.mean.dtype) / 255
        elif not images.is_floating_point():
            raise ValueError(f"images: got {images.dtype}, expected uint8 in 0..255 or floats in [0, 1]")
        return (images.to(self.mean.dtype) - self.mean) / self.std

    def place(self, images: Tensor) -> Tensor:
        """Return images that are to be embedded on the device of the encoder, in the layout for fast convolutions.

        The shape stays (B, 3, S, S). In memory, the channels of a pixel lie beside each other ("channels last"); the
        outputs of convolutions keep this layout. A ViT has a single convolution.
        """
        return images.to(self.mean.device).contiguous(memory_format=torch.channels_last)

    def train(self, mode: bool = True) -> "Encoder":
        """Set training mode; BatchNorm with fixed statistics stays in evaluation mode.

        They are fixed with `freeze_bn` other than "none", and with any tuning but "full".
        """
        super().train(mode)
        if self._freezes_statistics:
            for _, norm in self._batch_norms():
                norm.eval()
        return self

    def set_backbone_trainable(self, trainable: bool) -> None:
        """Turn the gradients of backbone, tuning and pooling on or off, for example while only the head warms up.

        Parameters that the tuning or `freeze_bn` freezes never get a gradient. This method changes gradients only:
        BatchNorm that is not frozen still updates its statistics in training mode.
        """
        self._backbone_trainable = trainable
        for name, parameter in self._feature_parameters():
            parameter.requires_grad_(trainable and name in self._learnable)

    def head_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the head, trainable or not."""
        return list(self.head.parameters())

    def backbone_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of backbone and tuning, and p of a learned GeM, trainable or not."""
        return [parameter for _, parameter in self._feature_parameters()]

    def part_of(self, name: str) -> str | None:
        """Return the part that the parameter `name` is counted under; None if it is never trained."""
        return "head" if name.startswith("head.") else self._learnable.get(name)

    def fingerprint(self) -> str:
        """Return the sha256 of everything that determines the features: weights, statistics, image size, normalisation.

        The head is left out, so encoders that differ only in the head share their cached features.
        """
        digest = hashlib.sha256(json.dumps({key: self.config[key] for key in FEATURE_SETTINGS}).encode())
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
        """Return the part that the parameter `name` is counted under; None if the tuning freezes it."""
        module, _, rest = name.partition(".")
        if module == "tuning":
            return self.tuning.part(rest)
        return "pooling" if module == "pooling" else self.tuning.trainer(rest)

    def _batch_norms(self) -> Iterator[tuple[str, nn.Module]]:
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
    freeze_bn: bool | str = False,
    bn_eps: float | None = None,
    pretrained: bool = True,
    weights: str | Path | None = None,
    tuning: str | dict[str, Any] = "full",
    head_init: str = "kaiming",
    checkpointing: bool | str = False,
    mean: tuple[float, float, float] | None = None,
    std: tuple[float, float, float] | None = None,
    stride: str | None = None,
    normalise_features: bool = False,
) -> Encoder:
    """Build an encoder from names and numbers.

    The header of a weights file may describe the network (`encoders.needs`). `stride`, `bn_eps`, `mean` and `std` that
    are not given here are taken from the header; a file made for another `backbone`, `stride` or `bn_eps` is refused.

    Args:
        backbone: "small" (a four-stage convolutional network for 32 x 32 images), "bn_inception" (weights from a file
            only) or any model name of timm.
        dim: number D of dimensions of the vectors; with head="none", None or the backbone's width.
        size: side of the images in pixels, at least 1.
        pooling: how the last map or the patch tokens are pooled: "auto" (the backbone's own pooling; `train` adds the
            maximum to the average of a pre-trained or frozen network, `Encoder.add_maximum`), "avg", "max", "avg+max"
            or "gem".
        gem_p: exponent p > 0 of "gem".
        learn_p: train p as well ("gem" only).
        layer_norm: put a LayerNorm before the linear head.
        head: "linear" or "none" (the features are the vectors).
        freeze_bn: what stays fixed of the backbone's BatchNorm in training: "none"; "statistics" (the running mean and
            variance; scale and shift are trained once the warm-up is over, as in the released code of Proxy-Anchor);
            or "all" of it. False is "none", true is "all". A recipe of a pre-trained network has "all" by default.
        bn_eps: epsilon > 0 of the backbone's BatchNorm, for weights that were trained with another epsilon than timm's.
        pretrained: load weights from the model hub, unless `weights` is given; "small" has none and starts random.
        weights: a safetensors file of the backbone's weights under timm's names ("bn_inception": under the names of the
            usual PyTorch port).
        tuning: which parameters of the backbone are trained: "full", "linear" (none), "bitfit" (biases), or for ViTs
            "vpt", "adapter" and "lora". Names can be joined: "vpt+bitfit". A dictionary also gives arguments of the
            classes in `encoders.tuning`: {"name": "vpt+bitfit", "prompts": 10}.
        head_init: how the head's weights are initialised: "kaiming" (normal, by fan out) or "xavier" (uniform, as in
            VPTSP). The bias starts at 0.
        checkpointing: ViTs only. True keeps little more than the tokens between blocks for the backward pass and
            recomputes the rest there; "mlp" recomputes only the hidden layer of each MLP, the largest part. The result
            is the same.
        mean: mean of red, green and blue in [0, 1] for the normalisation of images; None: the backbone's own.
        std: standard deviation of red, green and blue in (0, 1]; None: the backbone's own.
        stride: where the bottleneck blocks of a ResNet halve the resolution: "3x3" (timm's, the default) or "1x1" (the
            first version of the network, whose weights come from Caffe or Keras).
        normalise_features: divide the features by their length before the linear head. Closed forms always do, and so
            does training that starts from one.

    Returns:
        The encoder, in training mode.

    Raises:
        ValueError: an argument is out of range, does not suit the backbone, or contradicts the weights file.

    Example:
        >>> encoder = build("small", dim=64, size=32, pooling="gem")
        >>> encoder(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape
        torch.Size([2, 64])
    """
    one_of("pooling", pooling, POOLINGS)
    one_of("head", head, HEADS)
    one_of("head_init", head_init, HEAD_INITS)
    frozen_batch_norm(freeze_bn)
    tuning = complete_tuning(tuning, TUNINGS)
    if size < 1:
        raise ValueError(f"size: got {size}, expected the side of the images in pixels, at least 1")
    if not gem_p > 0:
        raise ValueError(f"gem_p: got {gem_p}, expected a number above 0, usually 3")
    if learn_p and pooling != "gem":
        raise ValueError(f"learn_p: got True with pooling={pooling!r}, expected pooling='gem'")
    for name, value in {"layer_norm": layer_norm, "normalise_features": normalise_features}.items():
        if value and head == "none":
            raise ValueError(f"{name}: got True with head='none', expected head='linear'")
    if head_init != "kaiming" and head == "none":
        raise ValueError(f"head_init: got {head_init!r} with head='none', expected head='linear'")
    if bn_eps is not None and not bn_eps > 0:
        raise ValueError(f"bn_eps: got {bn_eps}, expected a number above 0 or None")

    needs = Needs() if weights is None else Needs.of(weights)
    if weights is not None:
        needs.check(weights, {"backbone": backbone, "stride": stride, "bn_eps": bn_eps})
    stride = stride or needs.stride
    bn_eps = needs.bn_eps if bn_eps is None else bn_eps
    mean = mean or needs.mean
    std = std or needs.std
    base = make_backbone(backbone, size, pretrained and weights is None)
    speed_up_gradients(base.module)
    if stride is not None:
        set_stride(base.module, stride, backbone)
    base = base._replace(mean=_rgb("mean", mean, base.mean), std=_rgb("std", std, base.std))
    if bn_eps is not None:
        for module in base.module.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eps = bn_eps
    if checkpointing not in (False, True, "mlp"):
        raise ValueError(f"checkpointing: got {checkpointing!r}, expected True, False or 'mlp'")
    if checkpointing and not is_vit(base.module):
        raise ValueError(
            f"checkpointing: got {checkpointing!r} with {backbone!r}, a {type(base.module).__name__}, expected False; "
            "only a timm VisionTransformer runs block by block"
        )
    if checkpointing == "mlp" and not has_plain_blocks(base.module):
        kind = type(base.module.blocks[0]).__name__
        raise ValueError(f"checkpointing: got 'mlp' with blocks of type {kind}, expected True")
    pool, width = _pool(base.module, size, pooling, gem_p, learn_p)
    if head == "none" and dim not in (None, width):
        raise ValueError(
            f"dim: got {dim} with head='none', expected None or {width}; the vectors are then the {width} features of "
            f"{backbone!r}"
        )
    if head == "linear" and (dim is None or dim < 1):
        raise ValueError(f"dim: got {dim} with head='linear', expected at least 1")
    dim = width if dim is None else dim
    config = {
        "backbone": backbone,
        "dim": dim,
        "size": size,
        "pooling": pooling,
        "gem_p": gem_p,
        "learn_p": learn_p,
        "layer_norm": layer_norm,
        "head": head,
        "freeze_bn": freeze_bn,
        "bn_eps": bn_eps,
        "pretrained": False,
        "weights": None,
        "tuning": tuning,
        "head_init": head_init,
        "checkpointing": checkpointing,
        "mean": mean,
        "std": std,
        "stride": stride,
        "normalise_features": normalise_features,
    }
    # The head is initialised before the tuning, so that a seed gives the same head with every tuning.
    head_module = make_head(head, width, dim, layer_norm, head_init, normalise_features)
    tuning_module = compose_tuning(tuning, base.module, TUNINGS, is_vit(base.module))
    encoder = Encoder(base, pool, head_module, tuning_module, width, config)
    if weights is not None:
        load_weights(encoder, weights)
    return encoder.train()


def frozen_batch_norm(freeze_bn: bool | str) -> str:
    """Check `freeze_bn` and return which of `FROZEN_BATCH_NORM` it means.

    Raises:
        ValueError: the value is unknown.

    Example:
        >>> frozen_batch_norm(True), frozen_batch_norm("statistics")
        ('all', 'statistics')
    """
    if isinstance(freeze_bn, bool):
        return "all" if freeze_bn else "none"
    one_of("freeze_bn", freeze_bn, FROZEN_BATCH_NORM)
    return freeze_bn


def _rgb(
    argument: str, values: tuple[float, float, float] | None, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    """Return the three checked `values`, or `default` if `values` is None."""
    if values is None:
        return default
    if len(values) != 3 or not all(0 <= value <= 1 for value in values) or (argument == "std" and not all(values)):
        interval = "(0, 1]" if argument == "std" else "[0, 1]"
        raise ValueError(f"{argument}: got {tuple(values)}, expected three numbers in {interval}")
    red, green, blue = values
    return red, green, blue


def load_weights(encoder: Encoder, file: str | Path) -> WeightReport:
    """Load the backbone's weights from a safetensors file with timm's names; pooling and head do not change.

    Floats of any precision are converted to float32, and a classifier in the file is left out.

    Args:
        encoder: the encoder, changed in place only if every tensor fits.
        file: the safetensors file.

    Returns:
        Which tensors matched; also kept as `encoder.report`.

    Raises:
        ValueError: the file belongs to another backbone (the message names the first keys that do not fit), or its
            header describes another network (`encoders.needs`).
    """
    needs = Needs.of(file)
    config = encoder.config
    built_settings = {
        "backbone": config["backbone"],
        "stride": config.get("stride") or "3x3",
        "bn_eps": config["bn_eps"],
    }
    needs.check(file, built_settings)
    report = load_backbone(encoder.backbone, file, config["backbone"], encoder.classifiers)
    used_settings = {**built_settings, "mean": config["mean"], "std": config["std"], "img_size": encoder.size}
    settings = {name: value for name, value in needs.stated().items() if name != "backbone"}
    applied = {name: value for name, value in settings.items() if used_settings[name] == value}
    overridden = {name: (value, used_settings[name]) for name, value in settings.items() if name not in applied}
    encoder.report = replace(report, applied=applied, overridden=overridden)
    encoder.source = f"file {Path(file).name}"
    return encoder.report


def parameter_counts(encoder: nn.Module) -> dict[str, int]:
    """Count the parameters of `encoder` that are trained ("trained") and all of them ("total").

    Example:
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

    The counts include parameters that a warm-up freezes for some epochs. Parts without parameters are left out.

    Example:
        >>> tuned_parameters(build("small", dim=8, size=32, tuning="bitfit"))  # the biases of its BatchNorm
        {'head': 2056, 'biases': 480}
    """
    counts = dict.fromkeys(("head", *(tuning.part for tuning in encoder.tuning.parts()), "pooling"), 0)
    for name, parameter in encoder.named_parameters():
        if (part := encoder.part_of(name)) is not None:
            counts[part] += parameter.numel()
    return {part: count for part, count in counts.items() if count}


def _pool(module: Any, size: int, name: str, gem_p: float, learn_p: bool) -> tuple[Pooling | None, int]:
    """Return the pooling and its number F of features, found by running one black image in evaluation mode."""
    module.eval()
    if name == "auto":
        with torch.no_grad():
            return None, module.forward_head(probe(module, size), pre_logits=True).shape[1]
    features = probe(module, size)
    pool = Pooling(name, *layout_of(module, features), gem_p, learn_p)
    pooled = pool(features)
    # A norm or layer that only the backbone's own pooling uses must not count as trained.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(pooled.sum(), parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients):
        parameter.requires_grad_(gradient is not None)
    return pool, pooled.shape[1]
