"""A timm VisionTransformer run block by block, with prompts before its tokens and adapters beside its MLPs.

Prompts are fresh at each block, and what a block makes of them is dropped: they are keys and values for the others and
ask nothing themselves. So only norm and projection see them, and where the last block has prompts, only the tokens that
are pooled are computed in it. The result is that of running the whole block.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from proxymetric.core.second_pass import ClassPrompts
from proxymetric.encoders.low_memory import activated, added, has_hooks, in_parts, normed, short
from proxymetric.encoders.tuning import ComposedTuning

Prompts = Sequence[Tensor | None]
"""(B, n_i, D) for each block i; None or a missing entry: no prompts there"""


class Tower(NamedTuple):
    """One way to see the images of a batch."""

    prompts: Prompts | ClassPrompts | None = None
    """instead of the tuning's own; gradients flow to them"""
    shared: bool = False
    """`prompts` stand behind the tuning's own"""


def is_vit(module: Any) -> bool:
    """Whether `module` is a timm VisionTransformer (ViT, DeiT, DINO, MAE, CLIP) that runs its blocks as others do."""
    if not type(module).__module__.startswith("timm."):
        return False
    from timm.models.vision_transformer import VisionTransformer

    return isinstance(module, VisionTransformer) and type(module).forward_features is VisionTransformer.forward_features


def pooled_tokens(vit: Any) -> int | None:
    """How many of the first tokens the ViT's own pooling looks at; None: at all of them."""
    from timm.models.vision_transformer import VisionTransformer

    heads = ("forward_head", "pool")
    own = all(getattr(type(vit), name, None) is getattr(VisionTransformer, name, None) for name in heads)
    return 1 if own and vit.global_pool == "token" and vit.attn_pool is None else None


def first_tokens(vit: Any, images: Tensor) -> Tensor:
    """The tokens (B, T, D) before the first block: class, distillation and register tokens, then patches."""
    return vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(images))))


def last_tokens(
    vit: Any,
    tokens: Tensor,
    tuning: ComposedTuning,
    towers: Sequence[Tower] = (Tower(),),
    wanted: int | None = None,
    checkpointing: bool | str = False,
) -> Tensor:
    """Run `tokens` (B, T, D) through all blocks and the final norm, in one pass for all towers: (towers B, T, D).

    Args:
        vit: the VisionTransformer whose blocks are run.
        tokens: what `first_tokens` gave.
        tuning: what is put before, into and beside the blocks.
        towers: the prompts of each; the result has the rows of the first tower, then those of the second.
        expected: only so many of the first tokens need be right; the others may be missing. None: all.
        checkpointing: True: keep the tokens between blocks alone for the backward pass, and compute the rest again
            there; "mlp": do so with the hidden layer of each MLP.
    """
    towers = [_checked(tower, tokens, len(vit.blocks)) for tower in towers]
    size, last, plain = tokens.shape[0], len(vit.blocks) - 1, has_plain_blocks(vit)
    again, whole = checkpointing == "mlp", checkpointing is True and torch.is_grad_enabled()
    # torch marks what is to be computed again, but not the insides of a function with a backward pass of its own.
    kind = None if whole else short(tokens)
    if len(towers) > 1:  # not `repeat`, which a compiler does not do again and keeps
        tokens = tokens.expand(len(towers), *tokens.shape).flatten(0, 1)
    for i, block in enumerate(vit.blocks):
        fronts = [_front(tower, tuning, i, size) for tower in towers]
        given = (tokens, fronts, tuning.beside(i), plain, wanted if i == last else None, again, kind)
        # Training in several processes may have something to do before and after: it puts its own in this place.
        run = getattr(block, "run", None) or partial(run_block, block)
        tokens = checkpoint(run, *given, use_reentrant=False) if whole else run(*given)
    return vit.norm(tokens)


def run_block(
    block: Any,
    tokens: Tensor,
    fronts: list[Tensor | None],
    beside: list[nn.Module],
    plain: bool,
    wanted: int | None = None,
    again: bool = False,
    kind: torch.dtype | None = None,
) -> Tensor:
    """One block of `tokens` (towers B, T, D).

    Args:
        block: of a timm VisionTransformer.
        tokens: the rows of all towers.
        fronts: for each tower the tokens (B, n, D) before its own, or None; they are not in the result.
        beside: modules that change what the MLP adds.
        plain: block and attention are timm's plain ones, so that tokens can be keys without being queries.
        expected: the result may be that of so many of the first tokens alone.
        again: the hidden layer of the MLP is not kept for the backward pass but computed once more.
        kind: of 16 bits, in which a compiled step computes; norms and GELUs keep less then. None: the modules are run.
    """
    if all(front is None for front in fronts):
        if not (beside or again or (plain and kind)):
            return block(tokens)
        x, seen = tokens, block.attn(normed(block.norm1, tokens, kind))
    elif not plain:
        parts = []
        for front, part in zip(fronts, _divided(tokens, len(fronts)), strict=True):
            joined = part if front is None else torch.cat([front, part], 1)
            parts.append(run_block(block, joined, [None], beside, plain, kind=kind)[:, -part.shape[1] :])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    else:
        fronts = [None if front is None else normed(block.norm1, front, kind) for front in fronts]
        x = tokens[:, :wanted]
        seen = _attend(block.attn, normed(block.norm1, tokens, kind), fronts, x.shape[1])
    change = block.drop_path1(block.ls1(seen))
    if not again or not torch.is_grad_enabled():
        return _after(block, x, change, beside, kind)
    if in_parts(block.norm2, x, change):
        return checkpoint(_after, block, x, change, beside, None, use_reentrant=False)
    x = x + change
    return x + checkpoint(_mlp, block, x, None, beside, kind, use_reentrant=False)


def _after(block: Any, x: Tensor, change: Tensor, beside: list[nn.Module], kind: torch.dtype | None) -> Tensor:
    """The rest of a block, whose attention adds `change` to tokens `x`."""
    x, seen = added(block.norm2, x, change, kind)
    return x + _mlp(block, x, seen, beside, kind)


def _mlp(block: Any, x: Tensor, seen: Tensor | None, beside: list[nn.Module], kind: torch.dtype | None) -> Tensor:
    """What the MLP adds to `x`; seen: `x` behind the norm, where it has been there already."""
    seen = normed(block.norm2, x, kind) if seen is None else seen
    mlp = block.drop_path2(block.ls2(_hidden(block.mlp, seen, kind)))
    for module in beside:
        mlp = module(x, mlp)
    return mlp


def _hidden(mlp: Any, x: Tensor, kind: torch.dtype | None) -> Tensor:
    """`mlp(x)`."""
    from timm.layers import Mlp

    if type(mlp) is not Mlp or kind is None or has_hooks(mlp):
        return mlp(x)
    return mlp.drop2(mlp.fc2(mlp.norm(mlp.drop1(activated(mlp.act, mlp.fc1(x), kind)))))


def has_plain_blocks(vit: Any) -> bool:
    """Whether blocks and attention are timm's plain ones, so that tokens can be keys without being queries."""
    from timm.models.vision_transformer import Attention, Block

    return all(
        type(block).forward is Block.forward
        and type(block.attn) is Attention
        and block.attn.fused_attn
        and not has_hooks(block.attn)
        for block in vit.blocks
    )


def _attend(attn: Any, tokens: Tensor, fronts: list[Tensor | None], asking: int) -> Tensor:
    """Attention of the first `asking` of normed `tokens` (towers B, T, D) to all of them and those in front.

    The rows of all towers go through one projection, whatever the number of prompts in front; only the attention
    itself is taken tower by tower.
    """
    rows = [
        part if front is None else torch.cat([front, part], 1)
        for front, part in zip(fronts, _divided(tokens, len(fronts)), strict=True)
    ]
    flat = rows[0].flatten(0, 1) if len(rows) == 1 else torch.cat([part.flatten(0, 1) for part in rows])
    q, k, v = _projected(attn.qkv, tokens[:, :asking], flat)
    sizes = [part.shape[0] * part.shape[1] for part in rows]
    split = [[each] if len(rows) == 1 else each.split(sizes) for each in (k, v)]
    seen = []
    for part, *found in zip(rows, _divided(q, len(rows)), *split, strict=True):
        by_head = (each.view(part.shape[0], -1, attn.num_heads, attn.head_dim) for each in found)
        asked, keys, values = (each.transpose(1, 2) for each in by_head)
        dropped = attn.attn_drop.p if attn.training else 0.0
        heads = scaled_dot_product_attention(attn.q_norm(asked), attn.k_norm(keys), values, dropout_p=dropped)
        seen.append(heads.transpose(1, 2).flatten(2))
    x = seen[0] if len(seen) == 1 else torch.cat(seen)
    if getattr(attn, "norm", None) is not None:
        x = attn.norm(x)
    if getattr(attn, "gate", None) is not None:
        x = x * attn.gate(tokens[:, :asking]).sigmoid()
    return attn.proj_drop(attn.proj(x))


def _divided(rows: Tensor, towers: int) -> Sequence[Tensor]:
    """The rows of each tower."""
    return [rows] if towers == 1 else rows.chunk(towers)


def _projected(qkv: Any, asking: Tensor, rows: Tensor) -> list[Tensor]:
    """Queries of `asking` (..., D), keys and values of `rows` (N, D).

    Three products instead of one of three times the width: their gradients need not be put together first.
    """
    if has_hooks(qkv):  # LoRA's hook adds to all three
        return [qkv(asking).chunk(3, -1)[0], *qkv(rows).chunk(3, -1)[1:]]
    biases = [None] * 3 if qkv.bias is None else qkv.bias.chunk(3)
    parts = zip((asking, rows, rows), qkv.weight.chunk(3), biases, strict=True)
    return [linear(x, weight, bias) for x, weight, bias in parts]


def _front(tower: Tower, tuning: ComposedTuning, block: int, size: int) -> Tensor | None:
    """What stands before the tokens of a tower in one block, (B, n, D); None: nothing."""
    own = tuning.prompts(block) if tower.prompts is None or tower.shared else []
    found = [prompts.expand(size, -1, -1) for prompts in own]
    assert not isinstance(tower.prompts, ClassPrompts)
    if tower.prompts is not None and block < len(tower.prompts) and (extra := tower.prompts[block]) is not None:
        found.append(extra)
    return (found[0] if len(found) == 1 else torch.cat(found, 1)) if found else None


def _checked(tower: Tower, tokens: Tensor, blocks: int) -> Tower:
    """The tower with prompts block by block; they are refused where they do not suit the tokens."""
    prompts = tower.prompts
    if prompts is None:
        return tower
    if isinstance(prompts, ClassPrompts):
        prompts = prompts.of_blocks()
    if isinstance(prompts, Tensor) or len(prompts) > blocks:
        got = f"a tensor {tuple(prompts.shape)}" if isinstance(prompts, Tensor) else f"{len(prompts)} of them"
        raise ValueError(
            f"prompts: got {got}; a sequence of at most {blocks} is expected, one tensor or None for each block"
        )
    batch, _, width = tokens.shape
    for i, own in enumerate(prompts):
        if own is not None and (own.ndim != 3 or own.shape[0] != batch or own.shape[2] != width):
            raise ValueError(f"prompts[{i}] has shape {tuple(own.shape)}; ({batch}, n, {width}) is expected")
    return Tower(prompts, tower.shared)
