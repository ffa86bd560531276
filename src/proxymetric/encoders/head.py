"""The head of an encoder: maps pooled features to vectors, perhaps after dividing them by their length."""

from __future__ import annotations

from torch import Tensor, nn

from proxymetric.core.normalisation import unit


class UnitLength(nn.Module):
    """``f / ||f||``, row by row, in float32 or better.

    Example:
        >>> import torch
        >>> UnitLength()(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    def forward(self, features: Tensor) -> Tensor:
        """The features (B, F), each of length 1; zeros stay zeros."""
        return unit(features.float() if features.dtype.itemsize < 4 else features)


def make_head(
    name: str, width: int, dim: int, layer_norm: bool = False, init: str = "kaiming", normalise_features: bool = False
) -> nn.Module:
    """Make the head of an encoder; the arguments are those of `encoders.build`.

    Args:
        name: "linear" or "none".
        width: number F of features.
        dim: number D of dimensions of the vectors.
        layer_norm: put a LayerNorm before the linear layer.
        init: "kaiming" or "xavier".
        normalise_features: divide the features by their length first.

    Example:
        >>> make_head("linear", 4, 2, normalise_features=True)
        Sequential(
          (0): UnitLength()
          (1): Linear(in_features=4, out_features=2, bias=True)
        )
    """
    if name == "none":
        return nn.Identity()
    linear = nn.Linear(width, dim)
    if init == "xavier":
        nn.init.xavier_uniform_(linear.weight)
    else:
        nn.init.kaiming_normal_(linear.weight, mode="fan_out")
    nn.init.zeros_(linear.bias)
    before: list[nn.Module] = [UnitLength()] if normalise_features else []
    before += [nn.LayerNorm(width)] if layer_norm else []
    return nn.Sequential(*before, linear) if before else linear


def linear_layer(head: nn.Module) -> nn.Linear:
    """The linear layer of a head that `make_head` made with the name "linear"."""
    last = head[-1] if isinstance(head, nn.Sequential) else head
    assert isinstance(last, nn.Linear), head
    return last


def with_linear_layer(head: nn.Module, weight: Tensor, bias: Tensor) -> nn.Module:
    """A head with another linear layer, perhaps of another number of dimensions.

    Args:
        head: a head with a linear layer.
        weight: (D, F).
        bias: (D,).
    """
    earlier = linear_layer(head).weight
    # Random weights would move the seed of all that follows.
    linear = nn.utils.skip_init(nn.Linear, weight.shape[1], weight.shape[0], device=earlier.device, dtype=earlier.dtype)
    linear.weight.data.copy_(weight)
    linear.bias.data.copy_(bias)
    return nn.Sequential(*list(head)[:-1], linear) if isinstance(head, nn.Sequential) else linear
