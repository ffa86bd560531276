"""A timm VisionTransformer run block by block, with prompts before its tokens and adapters beside its MLPs."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from proxymetric.encoders.tuning import Joined

Prompts = Sequence[Tensor | None]
"""(B, n_i, D) for each block i; None or a missing entry: no prompts there"""


def is_vit(module: Any) -> bool:
    """Whether `module` is a timm VisionTransformer (ViT, DeiT, DINO, MAE, CLIP) that runs its blocks as others do."""
    if not type(module).__module__.startswith("timm."):
        return False
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(module, VisionTransformer) and type(module).forward_features is VisionTransformer.forward_features


def forward_features(
    vit: Any,
    images: Tensor,
    tuning: Joined,
    prompts: Prompts | None = None,
    shared: bool = False,
    checkpointing: bool = False,
) -> Tensor:
    """The tokens (B, T, D) behind the ViT's final norm, of normalised images; timm's own where nothing is added."""
    return last_tokens(vit, first_tokens(vit, images), tuning, prompts, shared, checkpointing)


def first_tokens(vit: Any, images: Tensor) -> Tensor:
    """The tokens (B, T, D) before the first block: class, distillation and register tokens, then patches."""
    return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))


def last_tokens(
    vit: Any,
    tokens: Tensor,
    tuning: Joined,
    prompts: Prompts | None = None,
    shared: bool = False,
    checkpointing: bool = False,
) -> Tensor:
    """Run `tokens` (B, T, D) through all blocks and the final norm.

    Args:
        vit: the VisionTransformer whose blocks are run.
        tokens: what `first_tokens` gave, also repeated or joined along B.
        tuning: what is put before, into and beside the blocks.
        prompts: instead of the tuning's own; gradients flow to them.
        shared: `prompts` stand behind the tuning's own.
        checkpointing: keep the tokens between blocks alone for the backward pass, and compute the rest again there.
    """
    given = () if prompts is None else _checked(prompts, tokens, len(vit.blocks))
    for i, block in enumerate(vit.blocks):
        front = tuning.prompts(i) if prompts is None or shared else []
        front = [own.expand(len(tokens), -1, -1) for own in front]
        if i < len(given) and (extra := given[i]) is not None:
            front.append(extra)
        beside = tuning.beside(i)
        if checkpointing and torch.is_grad_enabled():
            tokens = checkpoint(run_block, block, tokens, front, beside, use_reentrant=False)
        else:
            tokens = run_block(block, tokens, front, beside)
    return vit.norm(tokens)


def run_block(block: Any, tokens: Tensor, front: list[Tensor], beside: list[nn.Module]) -> Tensor:
    """One block with the tokens `front` before `tokens` (B, T, D), dropped afterwards, and modules `beside` its MLP."""
    length = tokens.shape[1]
    if front:
        tokens = torch.cat([*front, tokens], 1)
    if beside:
        x = tokens + block.drop_path1(block.ls1(block.attn(block.norm1(tokens))))
        mlp = block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
        for module in beside:
            mlp = module(x, mlp)
        tokens = x + mlp
    else:
        tokens = block(tokens)
    return tokens[:, -length:] if front else tokens


def _checked(prompts: Prompts, tokens: Tensor, blocks: int) -> Prompts:
    """Refuse prompts that do not suit the tokens."""
    if isinstance(prompts, Tensor) or len(prompts) > blocks:
        got = f"a tensor {tuple(prompts.shape)}" if isinstance(prompts, Tensor) else f"{len(prompts)} of them"
        raise ValueError(
            f"prompts: got {got}; a sequence of at most {blocks} is wanted, one tensor or None for each block"
        )
    batch, _, width = tokens.shape
    for i, own in enumerate(prompts):
        if own is not None and (own.ndim != 3 or own.shape[0] != batch or own.shape[2] != width):
            raise ValueError(f"prompts[{i}] has shape {tuple(own.shape)}; ({batch}, n, {width}) is wanted")
    return prompts
