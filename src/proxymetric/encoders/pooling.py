"""Pooling of a backbone's map or tokens to one vector per image."""

import torch
from torch import Tensor, nn

POOLINGS = ("auto", "avg", "max", "avg+max", "gem")
"""names of the poolings; "auto" is the backbone's own pooling, which this module does not implement"""

LAYOUTS: dict[str, tuple[int, ...]] = {"map": (2, 3), "map-last": (1, 2), "tokens": (1,)}
"""the dimensions that are pooled over in maps (B, F, H, W), maps (B, H, W, F) and tokens (B, N, F)"""

MIN_GEM_INPUT = 1e-6
"""inputs of "gem" are clamped to at least this value"""


class Pooling(nn.Module):
    """Reduces the values x_1 .. x_N of every feature, one for each position, to one number.

    - `avg`: `1/N sum x_n`; `max`: `max x_n`; `avg+max`: their sum
    - `gem`: `(1/N sum max(x_n, 1e-6)^p)^(1/p)`; p = 1 is the average of the positive parts, p -> infinity the maximum

    Args:
        name: avg, max, avg+max or gem.
        layout: map, map-last or tokens.
        prefix: number of tokens before the first patch token (class and register tokens); they are not pooled.
        gem_p: p > 0 of gem, usually 3.
        learn_p: train p.

    Example:
        >>> Pooling("gem", gem_p=3.0)(torch.tensor([[[[1.0, 2.0]]]]))  # ((1 + 8) / 2) ** (1 / 3)
        tensor([[1.6510]])
    """

    p: Tensor

    def __init__(
        self, name: str, layout: str = "map", prefix: int = 0, gem_p: float = 3.0, learn_p: bool = False
    ) -> None:
        super().__init__()
        assert name in POOLINGS[1:], name
        self.name, self.layout, self.prefix = name, layout, prefix
        self.places = LAYOUTS[layout]
        if name == "gem" and learn_p:
            self.p = nn.Parameter(torch.tensor(float(gem_p)))
        elif name == "gem":
            self.register_buffer("p", torch.tensor(float(gem_p)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (B, F) of a map or of tokens."""
        if self.layout == "tokens":
            x = x[:, self.prefix :]
        if self.name == "avg":
            return x.mean(self.places)
        if self.name == "max":
            return x.amax(self.places)
        if self.name == "avg+max":
            return x.mean(self.places) + x.amax(self.places)
        return self._gem(x)

    def _gem(self, x: Tensor) -> Tensor:
        # Powers overflow float16, and float32 for large p: compute in float32, relative to the maximum. The result
        # does not depend on the divisor, so the divisor needs no gradient.
        x = x.clamp(min=MIN_GEM_INPUT).to(torch.promote_types(x.dtype, torch.float32))
        maxima = x.detach().amax(self.places, keepdim=True)
        with torch.autocast(x.device.type, enabled=False):
            mean = (x / maxima).pow(self.p).mean(self.places, keepdim=True).pow(1 / self.p)
        return (maxima * mean).squeeze(self.places)

    def extra_repr(self) -> str:
        return f"{self.name}, layout={self.layout}, prefix={self.prefix}"
