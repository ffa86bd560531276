"""Makes backbones by name: two of this package, or any of timm with its weights, image size and normalisation."""

import contextlib
import difflib
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxymetric.arguments.signatures import one_of
from proxymetric.encoders.bn_inception import CONVERT, BNInception
from proxymetric.encoders.needs import STRIDES
from proxymetric.encoders.small import SmallConvNet

BUILT_IN = ("small", "bn_inception")
"""names of the backbones that this package defines; all others are timm's"""

ALTERNATIVES = (
    "a file of weights, weights=FILE (--weights FILE on the command line), "
    "or pretrained=False (--set encoder.pretrained=false) to start from random weights"
)
"""what an error expects instead of pretrained=True if no weights can be downloaded"""


class Backbone(NamedTuple):
    """A network without its classifier, and how it expects its images."""

    module: Any
    """a module with timm's `forward_features` and `forward_head`"""
    mean: tuple[float, float, float]
    """mean of red, green and blue in [0, 1]"""
    std: tuple[float, float, float]
    """standard deviation of red, green and blue"""
    interpolation: str
    """how images are resized: "bilinear" or "bicubic" """
    classifiers: tuple[str, ...]
    """names of the classifier modules that a weights file may hold"""
    source: str
    """a short text on where the weights come from"""


def make_backbone(name: str, size: int, pretrained: bool) -> Backbone:
    """Make the backbone called `name` for images of `size` x `size` pixels.

    Args:
        name: "small" (no pre-trained weights, starts random), "bn_inception" (weights from a file only) or any model
            name of timm, with or without a tag.
        size: side of the square images in pixels; a backbone with a fixed input size is built for this size.
        pretrained: load its weights from the model hub or from the hub's local cache.

    Raises:
        ValueError: the name is unknown, the size does not suit the backbone, or the weights are not available.
    """
    if name == "small":
        return Backbone(SmallConvNet(), SmallConvNet.MEAN, SmallConvNet.STD, "bilinear", (), "random")
    if name == "bn_inception":
        if pretrained:
            raise ValueError(
                f"pretrained: got True, but the model hub has no weights of backbone={name!r}; expected "
                f"{ALTERNATIVES}. {CONVERT}"
            )
        return Backbone(BNInception(), BNInception.MEAN, BNInception.STD, "bilinear", ("last_linear",), "random")
    from proxymetric.system import _torchvision  # noqa: F401
    import timm  # isort: skip

    check_name(name)
    preset = timm.get_pretrained_cfg(name, allow_unregistered=False)
    options: dict[str, Any] = {}
    if preset is not None and preset.fixed_input_size and tuple(preset.input_size[1:]) != (size, size):
        options["img_size"] = size
    if pretrained and (preset is None or not preset.has_weights):
        raise ValueError(f"pretrained: got True, but timm has no weights of backbone={name!r}; expected {ALTERNATIVES}")
    tagged_name = name if preset is None or not preset.tag else f"{name.split('.')[0]}.{preset.tag}"
    try:
        with _hub_download(tagged_name) if pretrained else contextlib.nullcontext():
            module: Any = timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
    except (TypeError, AssertionError, RuntimeError) as error:
        raise ValueError(
            f"size: got {size}, expected a size that backbone={name!r} can be built for ({error})"
        ) from error
    preprocessing = timm.data.resolve_model_data_config(module)
    classifiers = module.pretrained_cfg.get("classifier") or ()
    return Backbone(
        module,
        tuple(preprocessing["mean"]),
        tuple(preprocessing["std"]),
        preprocessing["interpolation"] if preprocessing["interpolation"] in ("bilinear", "bicubic") else "bicubic",
        (classifiers,) if isinstance(classifiers, str) else tuple(classifiers),
        f"timm {tagged_name}" if pretrained else "random",
    )


def set_stride(module: Any, stride: str, backbone: str) -> None:
    """Move the stride of a ResNet's stages into the 1x1 or the 3x3 convolution of their first block.

    The two networks have the same tensors and load the same files, but weights trained in one perform worse in the
    other.

    Args:
        module: the network, changed in place.
        stride: "1x1" (the first version: Caffe, Keras) or "3x3" (timm, torchvision).
        backbone: the name of the network in messages.

    Raises:
        ValueError: `stride` is neither of the two, or the network has no plain bottleneck blocks.
    """
    one_of("stride", stride, STRIDES)
    first_blocks = [getattr(module, f"layer{stage}", [None])[0] for stage in (2, 3, 4)]
    for block in first_blocks:
        # Blocks with a blur or a pooling between the convolutions halve the resolution there.
        is_plain = all(hasattr(block, name) for name in ("conv1", "conv2", "conv3")) and not _has_blur(block)
        if not is_plain or {block.conv1.kernel_size, block.conv2.kernel_size} != {(1, 1), (3, 3)}:
            raise ValueError(
                f"stride: got {stride!r} with {backbone!r}, expected a ResNet of plain bottleneck blocks such as "
                "'resnet50', or no encoder.stride"
            )
        halving_stride = max(block.conv1.stride, block.conv2.stride)
        block.conv1.stride = halving_stride if stride == "1x1" else (1, 1)
        block.conv2.stride = halving_stride if stride == "3x3" else (1, 1)


def _has_blur(block: Any) -> bool:
    """Whether the block has an anti-aliasing layer between its convolutions."""
    return not isinstance(getattr(block, "aa", None), torch.nn.Identity | None)


def check_name(name: str) -> None:
    """Refuse a name that is neither one of `BUILT_IN` nor a model of timm.

    Raises:
        ValueError: the name is unknown; the message lists the most similar known names.

    Example:
        >>> check_name("resnet_50")
        Traceback (most recent call last):
        ValueError: backbone: got 'resnet_50', expected small, bn_inception or a model of timm; did you mean ...?...
    """
    if name in BUILT_IN:
        return
    from proxymetric.system import _torchvision  # noqa: F401
    import timm  # isort: skip

    is_known = timm.is_model(name)
    if is_known and ("." not in name or name in timm.list_models(f"{name.split('.')[0]}*", include_tags=True)):
        return
    if is_known:
        untagged_name = name.split(".")[0]
        suggestions = [
            untagged_name,
            *(other for other in timm.list_models(f"{untagged_name}.*", include_tags=True) if "." in other),
        ][:6]
    else:
        names = [*BUILT_IN, *timm.list_models()]
        suggestions = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        suggestions = suggestions or ["small", "resnet50", "vit_small_patch16_224"]
    raise ValueError(
        f"backbone: got {name!r}, expected {', '.join(BUILT_IN)} or a model of timm; did you mean "
        f"{', '.join(suggestions)}? timm.list_models('*resnet*') lists names that contain 'resnet'"
    )


def layout_of(module: Any, features: Any) -> tuple[str, int]:
    """Return the layout of `features`, the output of `forward_features`, and the number of its prefix tokens.

    The layout is a key of `pooling.LAYOUTS`: "map", "map-last" or "tokens". Maps have no prefix tokens.
    """
    if isinstance(features, Tensor) and features.ndim == 4:
        width = module.num_features
        axes = getattr(module, "output_fmt", "NHWC" if features.shape[1] != width == features.shape[3] else "NCHW")
        return ("map-last" if str(axes).endswith("NHWC") else "map"), 0
    if isinstance(features, Tensor) and features.ndim == 3:
        prefix = int(getattr(module, "num_prefix_tokens", 1 if hasattr(module, "cls_token") else 0))
        if features.shape[1] > prefix:
            return "tokens", prefix
    raise ValueError("pooling: got a backbone whose output is neither a map nor patch tokens, expected pooling='auto'")


@contextlib.contextmanager
def _hub_download(tagged_name: str) -> Iterator[None]:
    """Replace the error of a failed download by a short ValueError, without retries if the hub cannot be reached.

    Without a connection, the hub's client is set offline. It then reads only its local cache instead of retrying for a
    minute.
    """
    from huggingface_hub import constants, errors

    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = offline or not _reachable(constants.ENDPOINT)
    try:
        yield
    except (OSError, errors.HfHubHTTPError) as error:
        reason = "the hub cannot be reached" if constants.HF_HUB_OFFLINE else str(error).splitlines()[0]
        raise ValueError(
            f"pretrained: got True, but the weights '{tagged_name}' could not be downloaded ({reason}); expected "
            f"{ALTERNATIVES}"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = offline


def _reachable(address: str, timeout_seconds: float = 5.0) -> bool:
    """Whether a connection to `address` can be opened; True without a test if a proxy makes the connections."""
    if urllib.request.getproxies().keys() & {"https", "http", "all"}:
        return True
    parts = urllib.parse.urlsplit(address)
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname, port), timeout=timeout_seconds).close()
    except OSError:
        return False
    return True


def probe(module: Any, size: int) -> Tensor:
    """Return the output of `forward_features` for one black image, with gradients.

    Raises:
        ValueError: the network cannot run on images of this size.
    """
    parameter = next(module.parameters())
    black_image = torch.zeros(1, 3, size, size, device=parameter.device, dtype=parameter.dtype)
    try:
        return module.forward_features(black_image)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ValueError(f"size: got {size}, expected a size that suits the backbone ({error})") from error
