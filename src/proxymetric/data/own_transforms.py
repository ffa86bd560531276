"""Transforms of your own for the training views: named as "module:function", or given from Python."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from proxymetric.arguments.own_code import find_function
from proxymetric.data.decoding import as_rgb

GIVEN = "python:"
"""start of the names of transforms that were given from Python, not by module and function"""

_given: dict[str, Callable[[Any], Any]] = {}


def name_of(transform: Callable[[Any], Any]) -> str:
    """Remember a transform and return the name that stands for it in a recipe.

    The name contains a digest of what the transform prints, so that another pipeline has another name.

    Example:
        >>> name_of(as_rgb)
        'python:proxymetric.data.decoding.as_rgb'
    """
    if not callable(transform):
        raise ValueError(
            f"transform: got {transform!r}, expected a function of an image, such as a pipeline of torchvision, or "
            "'module:function'"
        )
    function = getattr(transform, "__qualname__", None)
    if function is not None:
        name = f"{GIVEN}{transform.__module__}.{function}"
    else:
        digest = hashlib.sha256(_without_addresses(repr(transform)).encode()).hexdigest()[:8]
        name = f"{GIVEN}{type(transform).__name__}-{digest}"
    _given[name] = transform
    return name


def _without_addresses(text: str) -> str:
    """Return the text of an object without its places in memory, which change from run to run."""
    return " at ".join(part.partition(">")[2] if part.startswith("0x") else part for part in text.split(" at "))


def find_transform(name: str, size: int) -> Callable[[Any], Any]:
    """Return the transform that a name stands for.

    Args:
        name: "module:function", where the function takes the side of the images in pixels and returns a transform. The
            module is in the working directory or installed. Or a name from `name_of`.
        size: side of the images in pixels.

    Raises:
        ValueError: there is no such module or function, or it returns no transform.

    Example:
        >>> find_transform("proxymetric.data.views:EvalVew", 32)
        Traceback (most recent call last):
        ValueError: view.transform: got 'proxymetric.data.views:EvalVew', but proxymetric.data.views has no function
        'EvalVew'; did you mean 'EvalView'?
        >>> find_transform("proxymetric.data.views:EvalView", 32)(Image.new("RGB", (40, 40))).shape
        torch.Size([3, 32, 32])
    """
    if name.startswith(GIVEN):
        if name not in _given:
            raise ValueError(
                f"view.transform: got {name!r}, which was given from Python; expected the same transform again: "
                "proxymetric.train(..., transform=...)"
            )
        return _given[name]
    from proxymetric.system import _torchvision  # noqa: F401  the module may import torchvision

    function = find_function("view.transform", name, "my_views:augment")
    function_name = name.partition(":")[2]
    try:
        transform = function(size)
    except Exception as error:
        raise ValueError(
            f"view.transform: got {name!r}, but {function_name}({size}) failed with {type(error).__name__}: {error}; "
            "expected a function of the side of the images that returns a transform"
        ) from error
    if not callable(transform):
        raise ValueError(
            f"view.transform: got {name!r}, but {function_name}({size}) returns {type(transform).__name__}, expected a "
            "function that returns a transform of an image"
        )
    return transform


def apply_transform(transform: Callable[[Any], Any], image: Image.Image, size: int, seed: int) -> Tensor:
    """Apply a transform with random numbers from a seed: the same seed gives the same pixels.

    Args:
        transform: takes a PIL image and returns a PIL image, an array or a tensor.
        image: an RGB image.
        size: side of the result in pixels.
        seed: seed of the generators of torch, NumPy and Python; all three are put back afterwards.

    Returns:
        (3, size, size) uint8.

    Raises:
        ValueError: the transform returns something else than a square of this size.

    Example:
        >>> from torchvision.transforms import RandomCrop
        >>> apply_transform(RandomCrop(8), Image.new("RGB", (20, 20), "red"), 8, 0)[:, 0, 0].tolist()
        [255, 0, 0]
    """
    with _seeded(seed):
        result = transform(image)
    if isinstance(result, Image.Image):
        pixels = torch.from_numpy(np.array(as_rgb(result))).permute(2, 0, 1)
    elif isinstance(result, torch.Tensor):
        pixels = result.as_subclass(torch.Tensor)
    else:
        raise ValueError(f"view.transform: returned {type(result).__name__}, expected a PIL image or a tensor")
    if pixels.shape != (3, size, size):
        raise ValueError(
            f"view.transform: returned the shape {tuple(pixels.shape)}, expected (3, {size}, {size}): three colours "
            f"and view.size={size}"
        )
    if pixels.dtype == torch.uint8:
        return pixels.contiguous()
    if not pixels.is_floating_point():
        raise ValueError(f"view.transform: returned {pixels.dtype}, expected uint8, or floats in 0..1")
    # Interpolation may overshoot a little; values of a normalised image lie far outside.
    if not (float(pixels.min()) >= -0.1 and float(pixels.max()) <= 1.1):
        raise ValueError(
            f"view.transform: returned values in {float(pixels.min()):.2f}..{float(pixels.max()):.2f}, expected uint8, "
            "or floats in 0..1; leave out the normalisation, which the encoder does itself"
        )
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).contiguous()


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of this process for a while, and put them back."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = np.random.get_state()  # noqa: NPY002 - transforms of others draw from the global generator
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed the GPU too, in the middle of a training
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)
