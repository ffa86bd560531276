"""Runs a timm VisionTransformer block by block, with prompts before its tokens and adapters at its MLPs.

Each block has its own prompts, and its outputs for the prompts are dropped. Prompts are therefore keys and values but
never queries: only the first norm and the projection to keys and values process them. If the last block has prompts, it
computes only the tokens that are pooled. The result is the same as if whole blocks were run.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from proxymetric.core.second_pass import ClassPrompts
from proxymetric.encoders.low_memory import (
    activated,
    add_and_norm,
    compiled_16_bit_dtype,
    has_hooks,
    keeps_summands,
    normed,
)
from proxymetric.encoders.tuning import ComposedTuning

Prompts = Sequence[Tensor | None]
"""prompts (B, n_i, D) for each block i; a block with None, or without an entry, has no prompts"""


class Tower(NamedTuple):
    """The prompts of one pass over the images of a batch."""

    prompts: Prompts | ClassPrompts | None = None
    """prompts that replace those of the tuning; gradients flow to them. None: the tuning's prompts"""
    shared: bool = False
    """append `prompts` to the tuning's prompts instead of replacing them"""


def is_vit(module: Any) -> bool:
    """Whether `module` is a timm VisionTransformer (ViT, DeiT, DINO, MAE, CLIP) with timm's own `forward_features`."""
    if not type(module).__module__.startswith("timm."):
        return False
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(module, VisionTransformer) and type(module).forward_features is VisionTransformer.forward_features


def pooled_tokens(vit: Any) -> int | None:
    """Return how many of the first tokens the ViT's own pooling reads; None: all of them."""
    from timm.models.vision_transformer import VisionTransformer

    methods = ("forward_head", "pool")
    is_inherited = all(getattr(type(vit), name, None) is getattr(VisionTransformer, name, None) for name in methods)
    return 1 if is_inherited and vit.global_pool == "token" and vit.attn_pool is None else None


def first_tokens(vit: Any, images: Tensor) -> Tensor:
    """Return the tokens (B, T, D) before the first block: class, distillation and register tokens, then patches."""
    return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))


def last_tokens(
    vit: Any,
    tokens: Tensor,
    tuning: ComposedTuning,
    towers: Sequence[Tower] = (Tower(),),
    needed: int | None = None,
    checkpointing: bool | str = False,
) -> Tensor:
    """Run `tokens` through all blocks and the final norm, in one pass for all towers.

    Args:
        vit: the VisionTransformer whose blocks are run.
        tokens: (B, T, D), the result of `first_tokens`.
        tuning: adds prompts before the tokens, and modules that change the outputs of the MLPs.
        towers: the prompts of each pass.
        needed: how many of the first tokens the caller reads; the result may lack the others. None: all of them.
        checkpointing: True keeps only the tokens between blocks for the backward pass and recomputes the rest there;
            "mlp" recomputes only the hidden layer of each MLP.

    Returns:
        (towers B, T, D): all rows of the first tower, then those of the second.
    """
    towers = [_checked_tower(tower, tokens, len(vit.blocks)) for tower in towers]
    batch = tokens.shape[0]
    last_block = len(vit.blocks) - 1
    plain = has_plain_blocks(vit)
    recompute_mlp = checkpointing == "mlp"
    recompute_block = checkpointing is True and torch.is_grad_enabled()
    # torch cannot mark tensors inside a custom autograd function to be recomputed, so no such function is used then.
    dtype = None if recompute_block else compiled_16_bit_dtype(tokens)
    if len(towers) > 1:  # not `repeat`: a compiler would keep its result instead of recomputing it
        tokens = tokens.expand(len(towers), *tokens.shape).flatten(0, 1)
    for i, block in enumerate(vit.blocks):
        fronts = [_front(tower, tuning, i, batch) for tower in towers]
        arguments = (tokens, fronts, tuning.beside(i), plain, needed if i == last_block else None, recompute_mlp, dtype)
        # With FSDP, `training.parallel` sets `run`, which gathers the block's parameters, runs it and frees them.
        run = getattr(block, "run", None) or partial(run_block, block)
        tokens = checkpoint(run, *arguments, use_reentrant=False) if recompute_block else run(*arguments)
    return vit.norm(tokens)


def run_block(
    block: Any,
    tokens: Tensor,
    fronts: list[Tensor | None],
    mlp_modules: list[nn.Module],
    plain: bool,
    needed: int | None = None,
    recompute_mlp: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Run one block of a timm VisionTransformer.

    Args:
        block: the block.
        tokens: (towers B, T, D), the rows of all towers.
        fronts: for each tower, the prompts (B, n, D) before its tokens, or None; they are not in the result.
        mlp_modules: modules `(x, mlp) -> mlp` that change the output of the MLP.
        plain: whether `has_plain_blocks` is true, so that prompts can be keys without being queries.
        needed: how many of the first tokens the caller reads; the result may lack the others. None: all of them.
        recompute_mlp: recompute the hidden layer of the MLP in the backward pass instead of keeping it.
        dtype: the 16-bit type of a compiled step, in which norms and GELUs keep less for the backward pass; None calls
            the modules themselves.

    Returns:
        (towers B, T, D), or only the first `needed` tokens.
    """
    if all(front is None for front in fronts):
        if not (mlp_modules or recompute_mlp or (plain and dtype)):
            return block(tokens)
        x = tokens
        attention = block.attn(normed(block.norm1, tokens, dtype))
    elif not plain:
        parts = []
        for front, part in zip(fronts, _towers_of(tokens, len(fronts)), strict=True):
            all_tokens = part if front is None else torch.cat([front, part], 1)
            parts.append(run_block(block, all_tokens, [None], mlp_modules, plain, dtype=dtype)[:, -part.shape[1] :])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    else:
        fronts = [None if front is None else normed(block.norm1, front, dtype) for front in fronts]
        x = tokens[:, :needed]
        attention = _attend(block.attn, normed(block.norm1, tokens, dtype), fronts, x.shape[1])
    change = block.drop_path1(block.ls1(attention))
    if not recompute_mlp or not torch.is_grad_enabled():
        return _second_half(block, x, change, mlp_modules, dtype)
    if keeps_summands(block.norm2, x, change):
        return checkpoint(_second_half, block, x, change, mlp_modules, None, use_reentrant=False)
    x = x + change
    return x + checkpoint(_mlp, block, x, None, mlp_modules, dtype, use_reentrant=False)


def _second_half(
    block: Any, x: Tensor, change: Tensor, mlp_modules: list[nn.Module], dtype: torch.dtype | None
) -> Tensor:
    """Return the output of a block whose attention adds `change` to its tokens `x`."""
    x, normed_x = add_and_norm(block.norm2, x, change, dtype)
    return x + _mlp(block, x, normed_x, mlp_modules, dtype)


def _mlp(
    block: Any, x: Tensor, normed_x: Tensor | None, mlp_modules: list[nn.Module], dtype: torch.dtype | None
) -> Tensor:
    """Return what the MLP adds to `x`; `normed_x` is `norm2(x)` if the caller has computed it."""
    normed_x = normed(block.norm2, x, dtype) if normed_x is None else normed_x
    mlp = block.drop_path2(block.ls2(_run_mlp(block.mlp, normed_x, dtype)))
    for module in mlp_modules:
        mlp = module(x, mlp)
    return mlp


def _run_mlp(mlp: Any, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `mlp(x)`, with a GELU that keeps less if `dtype` is a 16-bit type."""
    from timm.layers import Mlp

    if type(mlp) is not Mlp or dtype is None or has_hooks(mlp):
        return mlp(x)
    return mlp.drop2(mlp.fc2(mlp.norm(mlp.drop1(activated(mlp.act, mlp.fc1(x), dtype)))))


def has_plain_blocks(vit: Any) -> bool:
    """Whether blocks and attention are timm's own and have no hooks, so that prompts can be keys but not queries."""
    from timm.models.vision_transformer import Attention, Block

    return all(
        type(block).forward is Block.forward
        and type(block.attn) is Attention
        and block.attn.fused_attn
        and not has_hooks(block.attn)
        for block in vit.blocks
    )


def _attend(attn: Any, tokens: Tensor, fronts: list[Tensor | None], queries: int) -> Tensor:
    """Return the attention of the first `queries` tokens to all tokens and to the prompts in front of them.

    The rows of all towers go through one projection, even where towers differ in their number of prompts; only the
    attention itself is computed tower by tower.

    Args:
        attn: timm's attention.
        tokens: (towers B, T, D), normed.
        fronts: for each tower, the normed prompts (B, n, D), or None.
        queries: how many of the first tokens are queries.
    """
    rows = [
        part if front is None else torch.cat([front, part], 1)
        for front, part in zip(fronts, _towers_of(tokens, len(fronts)), strict=True)
    ]
    flat_rows = rows[0].flatten(0, 1) if len(rows) == 1 else torch.cat([part.flatten(0, 1) for part in rows])
    q, k, v = _project(attn.qkv, tokens[:, :queries], flat_rows)
    sizes = [part.shape[0] * part.shape[1] for part in rows]
    keys_and_values = [[tensor] if len(rows) == 1 else tensor.split(sizes) for tensor in (k, v)]
    outputs = []
    for part, *projections in zip(rows, _towers_of(q, len(rows)), *keys_and_values, strict=True):
        by_head = (tensor.view(part.shape[0], -1, attn.num_heads, attn.head_dim) for tensor in projections)
        query, key, value = (tensor.transpose(1, 2) for tensor in by_head)
        dropout = attn.attn_drop.p if attn.training else 0.0
        heads = scaled_dot_product_attention(attn.q_norm(query), attn.k_norm(key), value, dropout_p=dropout)
        outputs.append(heads.transpose(1, 2).flatten(2))
    x = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if getattr(attn, "norm", None) is not None:
        x = attn.norm(x)
    if getattr(attn, "gate", None) is not None:
        x = x * attn.gate(tokens[:, :queries]).sigmoid()
    return attn.proj_drop(attn.proj(x))


def _towers_of(rows: Tensor, towers: int) -> Sequence[Tensor]:
    """Split `rows` into the rows of each tower."""
    return [rows] if towers == 1 else rows.chunk(towers)


def _project(qkv: Any, query_tokens: Tensor, rows: Tensor) -> list[Tensor]:
    """Return the queries of `query_tokens` (..., D), and the keys and values of `rows` (N, D).

    Three matrix products replace one that is three times as wide, so that their gradients need not be concatenated.
    """
    if has_hooks(qkv):  # LoRA's hook changes queries, keys and values
        return [qkv(query_tokens).chunk(3, -1)[0], *qkv(rows).chunk(3, -1)[1:]]
    biases = [None] * 3 if qkv.bias is None else qkv.bias.chunk(3)
    parts = zip((query_tokens, rows, rows), qkv.weight.chunk(3), biases, strict=True)
    return [linear(x, weight, bias) for x, weight, bias in parts]


def _front(tower: Tower, tuning: ComposedTuning, block: int, batch: int) -> Tensor | None:
    """Return the prompts (B, n, D) before the tokens of a tower in one block; None: there are none."""
    tuning_prompts = tuning.prompts(block) if tower.prompts is None or tower.shared else []
    prompts = [tokens.expand(batch, -1, -1) for tokens in tuning_prompts]
    assert not isinstance(tower.prompts, ClassPrompts)
    if tower.prompts is not None and block < len(tower.prompts) and (tower_prompts := tower.prompts[block]) is not None:
        prompts.append(tower_prompts)
    return (prompts[0] if len(prompts) == 1 else torch.cat(prompts, 1)) if prompts else None


def _checked_tower(tower: Tower, tokens: Tensor, blocks: int) -> Tower:
    """Return the tower with its prompts block by block; refuse prompts that do not fit the tokens."""
    prompts = tower.prompts
    if prompts is None:
        return tower
    if isinstance(prompts, ClassPrompts):
        prompts = prompts.of_blocks()
    if isinstance(prompts, Tensor) or len(prompts) > blocks:
        kind = f"a tensor of shape {tuple(prompts.shape)}" if isinstance(prompts, Tensor) else f"{len(prompts)} entries"
        raise ValueError(f"prompts: got {kind}, expected at most {blocks} entries, a tensor or None for each block")
    batch, _, width = tokens.shape
    for i, entry in enumerate(prompts):
        if entry is not None and (entry.ndim != 3 or entry.shape[0] != batch or entry.shape[2] != width):
            raise ValueError(f"prompts[{i}]: got shape {tuple(entry.shape)}, expected ({batch}, n, {width})")
    return Tower(prompts, tower.shared)
