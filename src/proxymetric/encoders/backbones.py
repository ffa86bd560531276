"""Backbones by name: our own two, and the bridge to timm's with their weights, image size and normalisation."""

import contextlib
import difflib
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.encoders.bn_inception import CONVERT, BNInception
from proxymetric.encoders.needs import STRIDES
from proxymetric.encoders.small import SmallConvNet

OWN = ("small", "bn_inception")
"""Names of backbones that are not timm's."""

WAYS_OUT = (
    "Give a file of weights, weights=FILE (--weights FILE on the command line), "
    "or start from random weights, pretrained=False (--set encoder.pretrained=false)"
)


class Backbone(NamedTuple):
    """A network without its classifier, and what it wants its images to be like."""

    module: Any
    """an nn.Module with timm's `forward_features` and `forward_head`"""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str
    classifiers: tuple[str, ...]
    """names of the classifier modules that files of its weights may hold"""
    source: str
    """where its weights come from, in words"""


def make_backbone(name: str, size: int, pretrained: bool) -> Backbone:
    """The backbone called `name` for images of `size` x `size`.

    Args:
        name: "small" (which has no pre-trained weights and starts random), "bn_inception" (whose weights come from a
            file) or any name of timm, with or without a tag.
        size: side of the square images in pixels; a backbone with a fixed input size is built for it.
        pretrained: fetch its weights from the model hub, or take them from the hub's local cache.
    """
    if name == "small":
        return Backbone(SmallConvNet(), SmallConvNet.MEAN, SmallConvNet.STD, "bilinear", (), "random")
    if name == "bn_inception":
        if pretrained:
            raise ValueError(
                f"pretrained=True, but the model hub has no weights of backbone={name!r}. {WAYS_OUT}. {CONVERT}"
            )
        return Backbone(BNInception(), BNInception.MEAN, BNInception.STD, "bilinear", ("last_linear",), "random")
    from proxymetric import _torchvision  # noqa: F401
    import timm  # isort: skip

    check_name(name)
    preset = timm.get_pretrained_cfg(name, allow_unregistered=False)
    options: dict[str, Any] = {}
    if preset is not None and preset.fixed_input_size and tuple(preset.input_size[1:]) != (size, size):
        options["img_size"] = size
    if pretrained and (preset is None or not preset.has_weights):
        raise ValueError(f"pretrained=True, but there are no pre-trained weights of backbone={name!r}. {WAYS_OUT}")
    tagged = name if preset is None or not preset.tag else f"{name.split('.')[0]}.{preset.tag}"
    try:
        with _short_of_patience(tagged) if pretrained else contextlib.nullcontext():
            module: Any = timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    except (TypeError, AssertionError, RuntimeError) as error:
        raise ValueError(f"backbone={name!r} cannot be built for size={size}: {error}") from error
    wants = timm.data.resolve_model_data_config(module)
    classifiers = module.pretrained_cfg.get("classifier") or ()
    return Backbone(
        module,
        tuple(wants["mean"]),
        tuple(wants["std"]),
        wants["interpolation"] if wants["interpolation"] in ("bilinear", "bicubic") else "bicubic",
        (classifiers,) if isinstance(classifiers, str) else tuple(classifiers),
        f"timm {tagged}" if pretrained else "random",
    )


def set_stride(module: Any, stride: str, backbone: str) -> None:
    """Put the stride of a ResNet's stages into the first 1x1 or the 3x3 convolution of their first block.

    The two networks have the same tensors and take the same files, but weights trained in one run worse in the other.

    Args:
        module: the network, changed in place.
        stride: "1x1" (the first version: Caffe, Keras) or "3x3" (timm, torchvision).
        backbone: how messages call it.
    """
    if stride not in STRIDES:
        raise ValueError(f"stride: got {stride!r}, expected {' or '.join(map(repr, STRIDES))}")
    firsts = [getattr(module, f"layer{stage}", [None])[0] for stage in (2, 3, 4)]
    for block in firsts:
        # Blocks with a blur or a pooling between the convolutions halve the resolution there.
        plain = all(hasattr(block, name) for name in ("conv1", "conv2", "conv3")) and not _does_more(block)
        if not plain or {block.conv1.kernel_size, block.conv2.kernel_size} != {(1, 1), (3, 3)}:
            raise ValueError(
                f"stride: got {stride!r}, but {backbone!r} is no ResNet of plain bottleneck blocks such as 'resnet50'; "
                "leave encoder.stride out"
            )
        halving = max(block.conv1.stride, block.conv2.stride)
        block.conv1.stride, block.conv2.stride = (halving, (1, 1)) if stride == "1x1" else ((1, 1), halving)


def _does_more(block: Any) -> bool:
    return not isinstance(getattr(block, "aa", None), torch.nn.Identity | None)


def check_name(name: str) -> None:
    """Refuse a name that is neither one of `OWN` nor timm's, naming the nearest right ones.

    >>> check_name("resnet_50")
    Traceback (most recent call last):
    ValueError: backbone='resnet_50' is not known; the nearest: resnet50, ...
    """
    if name in OWN:
        return
    from proxymetric import _torchvision  # noqa: F401
    import timm  # isort: skip

    known = timm.is_model(name)
    if known and ("." not in name or name in timm.list_models(f"{name.split('.')[0]}*", include_tags=True)):
        return
    if known:
        plain = name.split(".")[0]
        near = [plain, *(other for other in timm.list_models(f"{plain}.*", include_tags=True) if "." in other)][:6]
    else:
        names = [*OWN, *timm.list_models()]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or ["small", "resnet50", "vit_small_patch16_224"]
    raise ValueError(
        f"backbone={name!r} is not known; the nearest: {', '.join(near)}. "
        "timm.list_models('*resnet*') lists the names of a kind"
    )


def layout_of(module: Any, features: Any) -> tuple[str, int]:
    """How `forward_features` lays out its places: ("map", 0), ("map-last", 0) or ("tokens", prefix tokens)."""
    if isinstance(features, Tensor) and features.ndim == 4:
        width = module.num_features
        last = getattr(module, "output_fmt", "NHWC" if features.shape[1] != width == features.shape[3] else "NCHW")
        return ("map-last" if str(last).endswith("NHWC") else "map"), 0
    if isinstance(features, Tensor) and features.ndim == 3:
        prefix = int(getattr(module, "num_prefix_tokens", 1 if hasattr(module, "cls_token") else 0))
        if features.shape[1] > prefix:
            return "tokens", prefix
    raise ValueError("only pooling='auto' suits this backbone: it hands out neither a map nor tokens of places")


@contextlib.contextmanager
def _short_of_patience(tagged: str) -> Iterator[None]:
    """Turn failures to fetch into one sentence, and do not retry for a minute where the hub cannot be reached at all.

    Without a connection the hub's client is told so: it then looks into its local cache only.
    """
    from huggingface_hub import constants, errors

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or not _reachable(constants.ENDPOINT)
    try:
        yield
    except (OSError, errors.HfHubHTTPError) as error:
        why = "the hub cannot be reached" if constants.HF_HUB_OFFLINE else str(error).splitlines()[0]
        raise ValueError(f"the weights '{tagged}' could not be fetched ({why}). {WAYS_OUT}") from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _reachable(address: str, patience: float = 5.0) -> bool:
    """Whether a connection to `address` can be opened; taken for granted behind a proxy, which finds it itself."""
    if urllib.request.getproxies().keys() & {"https", "http", "all"}:
        return True
    parts = urllib.parse.urlsplit(address)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname, port), timeout=patience).close()
    except OSError:
        return False
    return True


def probe(module: Any, size: int) -> Tensor:
    """What `forward_features` gives for one black image, with gradients; ValueError if the size does not suit."""
    first = next(module.parameters())
    black = torch.zeros(1, 3, size, size, device=first.device, dtype=first.dtype)
    try:
        return module.forward_features(black)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(f"size={size} does not suit the backbone: {error}") from error
