"""A vision transformer with prompts, adapters and low-rank layers in plain NumPy, written from the papers' text.

Loops over images, heads and tokens, in float64. Weights have timm's names: `patch_embed.proj.weight`, `cls_token`,
`pos_embed`, `blocks.0.norm1.weight`, `blocks.0.attn.qkv.weight`, `blocks.0.mlp.fc1.weight`, `norm.weight`.
Legend: T tokens, D width, d bottleneck, r rank, n prompts.

- ViT: Dosovitskiy et al. 2020. Each block: x + attention(norm(x)), then x + mlp(norm(x)).
- prompts: Jia et al. 2022, VPT-deep, `[x'_cls, x'_1, .., [ ]] = BLK([t_1 .. t_n, x_cls, x_1, ..])` (Eq. 1 of VPTSP):
  the outputs at the positions of the prompts are dropped, and the next block has its own prompts.
- adapter: Chen et al. 2022 (AdaptFormer): `s * (relu(x W_down) W_up)`, parallel to the MLP or after it.
- low rank: Hu et al. 2021: `W x + alpha / r * B A x`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
EPS = 1e-6
"""of timm's ViT"""


@dataclass
class Bottleneck:
    """One block's adapter; the norms are pairs (scale, shift) of a LayerNorm with eps 1e-5, or None."""

    down: Array  # (d, D)
    down_bias: Array  # (d,)
    up: Array  # (D, d)
    up_bias: Array  # (D,)
    scale: float = 1.0
    position: str = "parallel"
    pre: tuple[Array, Array] | None = None
    post: tuple[Array, Array] | None = None

    def change(self, token: Array) -> Array:
        """The vector that the adapter adds for one token."""
        x = token if self.pre is None else normed(token, *self.pre, eps=1e-5)
        hidden = [max(0.0, float(row @ x + shift)) for row, shift in zip(self.down, self.down_bias)]
        out = self.scale * (self.up @ np.array(hidden) + self.up_bias)
        return out if self.post is None else normed(out, *self.post, eps=1e-5)


@dataclass
class Delta:
    """The change of one layer's weight: alpha / r * B A."""

    a: Array  # (r, in)
    b: Array  # (out, r)
    alpha: float

    def added(self, token: Array) -> Array:
        return self.alpha / len(self.a) * (self.b @ (self.a @ token))


def normed(token: Array, scale: Array, shift: Array, eps: float = EPS) -> Array:
    """LayerNorm of one token."""
    centred = token - sum(token) / len(token)
    return centred / math.sqrt(float(sum(centred**2)) / len(token) + eps) * scale + shift


def gelu(x: float) -> float:
    return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))


def attended(tokens: list[Array], weights: Weights, heads: int, qkv: Delta | None, proj: Delta | None) -> list[Array]:
    """Multi-head self-attention, one query at a time; `weights` are those of `attn.`"""
    width = len(tokens[0])
    per_head = width // heads
    rows = []
    for token in tokens:
        row = weights["qkv.weight"] @ token + weights["qkv.bias"]
        rows.append(row if qkv is None else row + qkv.added(token))
    out = []
    for query in rows:
        parts = []
        for head in range(heads):
            at = slice(head * per_head, (head + 1) * per_head)
            q = query[:width][at]
            scores = [float(q @ key[width : 2 * width][at]) / math.sqrt(per_head) for key in rows]
            top = max(scores)
            powers = [math.exp(score - top) for score in scores]
            parts.append(sum(p / sum(powers) * value[2 * width :][at] for p, value in zip(powers, rows)))
        joined = np.concatenate(parts)
        done = weights["proj.weight"] @ joined + weights["proj.bias"]
        out.append(done if proj is None else done + proj.added(joined))
    return out


def perceived(token: Array, weights: Weights) -> Array:
    """The MLP of one token; `weights` are those of `mlp.`"""
    hidden = np.array([gelu(h) for h in weights["fc1.weight"] @ token + weights["fc1.bias"]])
    return weights["fc2.weight"] @ hidden + weights["fc2.bias"]


def block(
    tokens: list[Array],
    weights: Weights,
    heads: int,
    adapter: Bottleneck | None = None,
    qkv: Delta | None = None,
    proj: Delta | None = None,
) -> list[Array]:
    """One block; `weights` are those of `blocks.0.`"""
    first = [normed(token, weights["norm1.weight"], weights["norm1.bias"]) for token in tokens]
    mixed = attended(first, under(weights, "attn."), heads, qkv, proj)
    out = []
    for token, change in zip(tokens, mixed):
        x = token + change
        mlp = perceived(normed(x, weights["norm2.weight"], weights["norm2.bias"]), under(weights, "mlp."))
        if adapter is not None and adapter.position == "parallel":
            mlp = mlp + adapter.change(x)
        elif adapter is not None:
            mlp = mlp + adapter.change(mlp)
        out.append(x + mlp)
    return out


def patches(image: Array, weights: Weights) -> list[Array]:
    """The embedded patches of an image (3, S, S), row by row."""
    kernel, shift = weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"]
    side = kernel.shape[-1]
    tokens = []
    for top in range(0, image.shape[1], side):
        for left in range(0, image.shape[2], side):
            piece = image[:, top : top + side, left : left + side]
            tokens.append(np.array([float((filter_ * piece).sum()) for filter_ in kernel]) + shift)
    return tokens


def vit(
    images: Array,
    weights: Weights,
    heads: int,
    prompts: Sequence[Array | None] = (),
    adapters: Sequence[Bottleneck | None] = (),
    qkv: Sequence[Delta | None] = (),
    proj: Sequence[Delta | None] = (),
) -> Array:
    """All tokens (B, T, D) after the final norm: class token, then patches.

    prompts: of each block, (n, D), the same for all images, or (B, n, D); None or a missing entry: no prompts there.
    adapters, qkv, proj: of each block likewise.
    """
    depth = len({name.split(".")[1] for name in weights if name.startswith("blocks.")})
    out = []
    for number, image in enumerate(images):
        tokens = [weights["cls_token"][0, 0], *patches(image, weights)]
        tokens = [token + place for token, place in zip(tokens, weights["pos_embed"][0], strict=True)]
        for i in range(depth):
            given = _at(prompts, i)
            own = [] if given is None else list(given if given.ndim == 2 else given[number])
            own_weights = under(weights, f"blocks.{i}.")
            tokens = block([*own, *tokens], own_weights, heads, _at(adapters, i), _at(qkv, i), _at(proj, i))
            tokens = tokens[len(own) :]
        out.append([normed(token, weights["norm.weight"], weights["norm.bias"]) for token in tokens])
    return np.array(out)


def under(weights: Weights, prefix: str) -> dict[str, Array]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _at(items: Sequence[Any], i: int) -> Any:
    return items[i] if i < len(items) else None
