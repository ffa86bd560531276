"""A trained encoder as a model: it turns images into vectors."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from proxymetric.core.normalisation import NORMALISATIONS, cut
from proxymetric.system.precision import full_precision

if TYPE_CHECKING:
    from PIL import Image

    from proxymetric.data import BadImage, ImageSet
    from proxymetric.encoders import Encoder
    from proxymetric.features.cache import FeatureCache

MAX_READING_THREADS = 16


class Part(NamedTuple):
    """Some of the images that are embedded, in their order."""

    rows: list[int]
    """the index of each vector's image"""
    vectors: Tensor
    """(N, D) float32 on the CPU"""
    bad: dict[int, BadImage]
    """the images that cannot be read, by their index"""
    done: int
    """the number of images up to the end of this part"""


class Model:
    """A trained encoder with the names of its training classes.

    Args:
        encoder: the encoder; it is set to evaluation mode.
        normalise: how vectors are normalised, a key of `core.pieces.NORMALISATIONS`.
        classes: the names of the training classes, by label.
        view: the arguments of `EvalView`, which resizes and crops the images.
        nested: dimensions that the vectors were trained to be cut to (`losses.Nested`); None: they were not.
        pretrained: the backbone is as it was before training, so that its features of images are kept on disk
            (`features.cache`) and computed once.

    Example:
        >>> from proxymetric.encoders import build
        >>> Model(build("small", dim=8), normalise="l2", classes=["cat", "dog"], view={"size": 16, "resize": 16})
        Model('small', dim=8, tuning='full', size=..., ... parameters, 2 training classes)
        >>> import proxymetric as pm
        >>> model = pm.load("runs/demo")                           # doctest: +SKIP
        >>> model.embed(["a.jpg", "b.jpg"]).shape                  # doctest: +SKIP
        torch.Size([2, 128])
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        normalise: str,
        classes: Sequence[str],
        view: dict[str, Any],
        nested: Sequence[int] | None = None,
        pretrained: bool = False,
    ) -> None:
        from proxymetric.data.views import EvalView

        self.encoder = encoder.eval()
        self.normalise = normalise
        self.classes = list(classes)
        self.view = EvalView(**view)
        self.nested = None if nested is None else list(nested)
        self._pretrained = _state(self.encoder) if pretrained else None
        """the state of the pre-trained backbone; None for a trained one"""
        self._keys: dict[str, str] = {}
        """for each device on which features were asked for, their key"""
        self._cut_dim: int | None = None
        """dimensions that vectors are cut to; None: they are not cut"""
        self.source: dict[str, str] = {}
        """where `load` found it: `run`, `which` and, where they were given, `weights`; empty for another model"""

    @property
    def dim(self) -> int:
        """The number of dimensions of the vectors."""
        return self.encoder.dim if self._cut_dim is None else self._cut_dim

    def cut_to(self, dim: int, *, warn: bool = True) -> Model:
        """The same model with its vectors cut to their first dimensions and normalised again; it shares the encoder.

        Args:
            dim: dimensions that stay.
            warn: whether a warning says that the vectors were not trained to be cut.

        Returns:
            The model. Its fingerprint differs from that of the whole model.

        Raises:
            ValueError: the model is nested and was not trained for this dimension, or has fewer dimensions.

        Example:
            >>> from proxymetric.encoders import build
            >>> view = {"size": 16, "resize": 16}
            >>> model = Model(build("small", dim=8), normalise="l2", classes=[], view=view, nested=[2, 8])
            >>> model.cut_to(2).dim
            2
            >>> model.cut_to(4)
            Traceback (most recent call last):
            ValueError: dim: got 4, expected one of 2, 8, the dimensions that this model was trained for
        """
        if self.nested is not None:
            if dim not in self.nested or dim > self.dim:
                sizes = ", ".join(str(size) for size in self.nested if size <= self.dim)
                raise ValueError(
                    f"dim: got {dim!r}, expected one of {sizes}, the dimensions that this model was trained for"
                )
        elif not isinstance(dim, int) or isinstance(dim, bool) or not 1 <= dim <= self.dim:
            raise ValueError(f"dim: got {dim!r}, expected a whole number from 1 to {self.dim}")
        elif dim < self.dim and warn:
            warnings.warn(
                f"dim: got {dim} for a model whose vectors were not trained to be cut; expected a model that was "
                "trained with nested=[...] (train --nested), whose cut vectors find more",
                stacklevel=2,
            )
        twin = copy.copy(self)
        twin._cut_dim = None if dim == self.encoder.dim else dim
        return twin

    def fingerprint(self) -> str:
        """Return the sha256 of everything that determines the vectors: weights, normalisation, view, cut."""
        digest = hashlib.sha256(repr((self.normalise, vars(self.view))).encode())
        if self._cut_dim is not None:
            digest.update(f"cut to {self._cut_dim}".encode())
        for name, value in self.encoder.state_dict().items():
            digest.update(name.encode())
            digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def __repr__(self) -> str:
        config, count = self.encoder.config, sum(p.numel() for p in self.encoder.parameters())
        return (
            f"Model({config['backbone']!r}, dim={self.dim}, tuning={config['tuning']!r}, size={self.encoder.size}, "
            f"{count:,} parameters, {len(self.classes)} training classes)"
        )

    @property
    def pretrained(self) -> bool:
        """Whether the backbone is as it was before training; False once its weights have changed."""
        return self._pretrained is not None and self._pretrained == _state(self.encoder)

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        return next(self.encoder.parameters()).device

    @overload
    def embed(
        self,
        images: Any,
        *,
        batch: int = ...,
        errors: Literal["raise"] = ...,
        dim: int | None = ...,
        progress: Callable[[int, int], None] | None = ...,
        on_bad: Callable[[str, str], None] | None = ...,
    ) -> Tensor: ...
    @overload
    def embed(
        self,
        images: Any,
        *,
        batch: int = ...,
        errors: str,
        dim: int | None = ...,
        progress: Callable[[int, int], None] | None = ...,
        on_bad: Callable[[str, str], None] | None = ...,
    ) -> Any: ...

    def embed(
        self,
        images: Iterable[str | Path | Image.Image] | Tensor | ImageSet,
        *,
        batch: int = 64,
        errors: str = "raise",
        dim: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        on_bad: Callable[[str, str], None] | None = None,
    ) -> Tensor | tuple[Tensor, list[int]]:
        """Embed images. Threads read the files of the next batch while the network embeds a batch.

        Args:
            images: paths, PIL images, an `ImageSet`, or a tensor (N, 3, H, W), uint8 or float in [0, 1]. A tensor is
                neither resized nor cropped.
            batch: number of images in a forward pass.
            errors: "raise" raises an error for a file that cannot be read as an image; "skip" leaves the file out.
            dim: the first dimensions that stay, see `cut_to`; None: all.
            progress: called with the number of images that are done and the total number of images.
            on_bad: called for each file that errors="skip" leaves out, with its path and the reason.

        Returns:
            Vectors (N, dim), float32 on the CPU, normalised as in training. With errors="skip", a pair: the vectors,
            and the index of each vector's image.

        Raises:
            ValueError: an argument is wrong, an image cannot be read (`BadImage`), or a vector is not finite.
        """
        if dim is not None:
            return self.cut_to(dim).embed(images, batch=batch, errors=errors, progress=progress, on_bad=on_bad)
        if errors not in ("raise", "skip"):
            raise ValueError(f"errors: got {errors!r}, expected 'raise' or 'skip'")
        if batch < 1:
            raise ValueError(f"batch: got {batch}, expected at least 1")
        if isinstance(images, str | Path) or hasattr(images, "convert"):
            raise ValueError("images: got a single image, expected a list of paths or images: embed([image])")
        if isinstance(images, Tensor):
            _check_pixels(images)
        elif not isinstance(images, Sized):
            images = list(images)  # such as a generator of paths
        vectors, indices = [torch.empty(0, self.dim)], list[int]()
        if progress is not None and len(images):
            progress(0, len(images))  # the first batch may take long
        with contextlib.closing(self.parts(images, batch=batch)) as parts:
            for part in parts:
                for error in part.bad.values():
                    if errors == "raise":
                        raise error
                    if on_bad is not None:
                        on_bad(error.path, error.reason)
                vectors.append(part.vectors)
                indices += part.rows
                if progress is not None:
                    progress(part.done, len(images))
        embedded = torch.cat(vectors)
        return embedded if errors == "raise" else (embedded, indices)

    def parts(
        self,
        images: Sequence[str | Path | Image.Image] | Tensor | ImageSet,
        *,
        batch: int = 64,
        on_image: Callable[[int, Image.Image], None] | None = None,
    ) -> Generator[Part]:
        """Embed images part by part, in their order; see `embed`.

        The features of a pre-trained backbone are computed once for each image, and then taken from the disk: such an
        image is not even read again.

        Args:
            images: as for `embed`.
            batch: number of images in a part.
            on_image: called in a reading thread with the index of each readable image and the image itself, decoded,
                upright and RGB. All images are read for it.
        """
        if isinstance(images, Tensor):
            for start in range(0, len(images), batch):
                rows = list(range(start, min(start + batch, len(images))))
                yield Part(rows, self._vectors(self._features(images[start : start + batch])), {}, rows[-1] + 1)
            return
        cache = self._cache(images)
        with contextlib.ExitStack() as stack:
            if cache is not None:
                stack.enter_context(cache)
            contents = stack.enter_context(contextlib.closing(self._read(images, batch, cache, on_image)))
            for start in range(0, len(images), batch):
                items = dict(enumerate(islice(contents, batch), start))
                bad = {row: item for row, item in items.items() if isinstance(item, Exception)}
                readable = {row: item for row, item in items.items() if not isinstance(item, Exception)}
                vectors = self._vectors(self._merged(readable, cache)) if readable else torch.empty(0, self.dim)
                yield Part(list(readable), vectors, bad, start + len(items))

    def _cache(self, images: Any) -> FeatureCache | None:
        """The features of images that are on disk; None for a trained backbone, and for images in memory."""
        if not self.pretrained or not (hasattr(images, "read") or _are_files(images)):
            return None
        from proxymetric.features.cache import FeatureCache, feature_key

        device = str(self.device)
        if device not in self._keys:
            self._keys[device] = feature_key(self.encoder, self.view)
        return FeatureCache(self._keys[device], images)

    def _merged(self, contents: dict[int, Tensor], cache: FeatureCache | None) -> Tensor:
        """The features of readable images: those that are known, and those of squares, which are computed."""
        squares = {row: item for row, item in contents.items() if item.ndim == 3}
        if not squares:
            return torch.stack(list(contents.values())).to(self.encoder.mean)
        if cache is None:
            return self._features(torch.stack(list(squares.values())))
        with full_precision(self.device.type):
            computed = self._features(torch.stack(list(squares.values())))
        cache.add(list(squares), computed)
        if len(squares) == len(contents):
            return computed
        rows = dict(zip(squares, computed, strict=True))
        return torch.stack([rows[row] if row in rows else item.to(computed) for row, item in contents.items()])

    @torch.inference_mode()
    def _features(self, pixels: Tensor) -> Tensor:
        return self.encoder.features(self.encoder.place(pixels))

    @torch.inference_mode()
    def _vectors(self, features: Tensor) -> Tensor:
        """The vectors of features (N, F), on the CPU."""
        raw = self.encoder.head(features).float()
        vectors = cut(NORMALISATIONS[self.normalise](raw), self.dim, self.normalise).cpu()
        if not vectors.isfinite().all():
            raise ValueError(
                "model: got vectors that are not finite (NaN or infinite), expected finite numbers; its weights are "
                "damaged, or its training diverged: train again with a lower learning rate"
            )
        return vectors

    def _read(
        self, images: Any, batch: int, cache: FeatureCache | None, on_image: Callable[[int, Image.Image], None] | None
    ) -> Generator[Tensor | BadImage]:
        """Yield for each image, in order, what is needed of it.

        This is its features (F,), if they are known; the square (3, S, S) that the view cuts from it; or the error for
        an image that cannot be read.
        """
        from proxymetric.data import BadImage, upright
        from proxymetric.data.read_ahead import read_ahead

        def read(i: int) -> Tensor | BadImage:
            features = None if cache is None else cache.get(i)
            if features is not None and on_image is None:
                return features
            try:
                image = images.read(i) if hasattr(images, "read") else upright(images[i], f"images[{i}]")
                square = self.view(image) if features is None else features
            except BadImage as error:
                return error
            if on_image is not None:
                on_image(i, image)
            return square

        if _are_files(images):
            threads = min(MAX_READING_THREADS, os.cpu_count() or 1)
            yield from read_ahead(read, range(len(images)), threads, ahead=batch)
        else:
            # A PIL image may occur twice, and two threads must not load it at the same time.
            yield from map(read, range(len(images)))


def _are_files(images: Any) -> bool:
    """Whether all images are files, which threads can read independently."""
    if hasattr(images, "read"):
        return getattr(images, "paths", None) is not None
    return isinstance(images, list | tuple) and all(isinstance(image, str | Path) for image in images)


def _state(encoder: Encoder) -> list[int]:
    """A number for each tensor that makes the features, which grows when the tensor is changed in place."""
    tensors = encoder.state_dict(keep_vars=True).items()
    return [0 if value.is_inference() else value._version for name, value in tensors if not name.startswith("head.")]


def _check_pixels(images: Tensor) -> None:
    """Refuse a tensor that is not a batch of images, or whose pixels were normalised: the encoder normalises them."""
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images: got a tensor of shape {tuple(images.shape)}, expected (N, 3, H, W)")
    if images.is_floating_point() and len(images):
        low, high = images.min().item(), images.max().item()
        if not -0.25 <= low <= high <= 1.25:  # resized images may exceed [0, 1] a little
            raise ValueError(f"images: got floats from {low:.3g} to {high:.3g}, expected floats in [0, 1], or uint8")
