"""A pre-trained backbone as a model: what finds similar images before anything was trained."""

from __future__ import annotations

from pathlib import Path

import torch

from proxymetric.arguments.checks import SIZE, SMALL_SIZE
from proxymetric.encoders import build, check_weights_file
from proxymetric.encoders.backbones import check_name
from proxymetric.encoders.needs import Needs
from proxymetric.models.model import Model
from proxymetric.models.place import BACKBONE, Pretrained, place_of

ON_CPU, ON_GPU = "vit_small_patch14_dinov2.lvd142m", "vit_base_patch14_dinov2.lvd142m"
"""the backbones that are taken where none is named: their features were trained to be compared (Oquab et al. 2023);
the small one embeds some images a second on a CPU"""
WITHOUT_HUB = ("bn_inception", "small")
"""backbones whose weights only a file has"""


def pretrained_place(
    backbone: str | None = None, weights: str | Path | None = None, device: str | torch.device | None = None
) -> Pretrained:
    """Choose the pre-trained backbone: the one that is named, else that of the weights file, else a default.

    Args:
        backbone: its name; None: the one that the header of the weights file names, or without a file `ON_CPU` or
            `ON_GPU`.
        weights: a safetensors file with its weights; None: those of the model hub.
        device: where it will compute; None or "auto" means a GPU if there is one.

    Raises:
        ValueError: the name is unknown, the file does not exist or says no backbone, or it was made for another one.

    Example:
        >>> pretrained_place(device="cpu").name
        'vit_small_patch14_dinov2.lvd142m'
        >>> pretrained_place("resnet50").text
        'backbone:resnet50'
    """
    from proxymetric.system.device import pick_device

    if weights is not None:
        needs = Needs.of(check_weights_file(weights))
        if backbone is None and needs.backbone is None:
            raise ValueError(
                f"weights: got {weights}, whose header does not say which backbone it was made for; expected its name, "
                "too: --backbone NAME, such as resnet50 or vit_small_patch16_224"
            )
        if backbone and needs.backbone and needs.backbone.split(".")[0] != backbone.split(".")[0]:
            raise ValueError(
                f"weights: got {weights}, which was made for {needs.backbone}, with --backbone {backbone}; expected no "
                "--backbone, or another file"
            )
        backbone = backbone or needs.backbone
    if backbone is None:
        backbone = ON_CPU if pick_device(str(device or "auto")).type == "cpu" else ON_GPU
    check_name(backbone)
    place = place_of(BACKBONE + backbone)
    assert isinstance(place, Pretrained)
    return place


def load_pretrained(backbone: str, weights: str | Path | None, device: torch.device) -> Model:
    """Load a backbone with the weights of its pre-training, as `train --frozen` does.

    Vectors are its pooled features, of length 1. A network that averages its last map adds the maximum to it, which
    finds more without training, too (the study cub-frozen-pooling).

    Args:
        backbone: a name of timm, or one of this package.
        weights: a safetensors file with its weights; None: those of the model hub, or of its cache on this machine.
        device: where the model computes.

    Raises:
        ValueError: the name is unknown, or its weights cannot be had or do not fit.
    """
    check_name(backbone)
    if weights is None and backbone in WITHOUT_HUB:
        raise ValueError(
            f"weights: got none for {backbone!r}, whose weights the model hub does not have; expected "
            "--weights FILE.safetensors, or another backbone"
        )
    size = (None if weights is None else Needs.of(weights).img_size) or (SMALL_SIZE if backbone == "small" else SIZE)
    try:
        encoder = build(backbone, dim=None, size=size, head="none", weights=weights, tuning="linear")
    except ValueError as error:
        if weights is not None or not str(error).startswith("pretrained: "):
            raise
        reason = str(error).split("; expected")[0].removeprefix("pretrained: got True, but ")
        raise ValueError(
            f"weights: got none, and {reason}; expected a connection to the Hugging Face hub, or "
            "--weights FILE.safetensors with weights of timm (and --backbone NAME, if its header has no name)"
        ) from error
    encoder.add_maximum()
    return Model(encoder.to(device), normalise="l2", classes=[], view={"size": size}, pretrained=True)
