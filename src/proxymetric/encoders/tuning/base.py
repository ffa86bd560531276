"""The base class of tunings: which parameters of a backbone are trained, and what is added to a ViT's blocks."""

from typing import Any, ClassVar

from torch import Tensor, nn


class Tuning(nn.Module):
    """One way to adapt a pre-trained backbone. The head is always trained as well.

    A new tuning is a file and a line in `TUNINGS`. The arguments of its `__init__` after `backbone` are its settings in
    a recipe: each has an annotation and a default, and a name that no other tuning uses, because tunings can be joined.
    A tuning trains its own parameters, which are saved as `tuning.<name>.*`, and the parameters of the backbone for
    which `trains` is true. It may also register forward hooks on modules inside the backbone's blocks.

    Args:
        backbone: the network to adapt.
    """

    part: ClassVar[str] = "backbone"
    """the name under which its parameters are counted"""
    on_blocks: ClassVar[bool] = False
    """whether it needs the blocks of a timm VisionTransformer"""
    alone: ClassVar[str] = ""
    """why it cannot be joined with another tuning; empty if it can"""

    def __init__(self, backbone: Any) -> None:
        super().__init__()

    def trains(self, name: str) -> bool:
        """Whether the parameter `name` of the backbone is trained."""
        return False

    def prompts(self, block: int) -> Tensor | None:
        """Return prompts (n, D) to put before the tokens of block number `block` and to drop after it, or None."""
        return None

    def beside(self, block: int) -> nn.Module | None:
        """Return a module `(x, mlp) -> mlp` that changes what the MLP of block number `block` adds to x, or None."""
        return None


def block_count(argument: str, count: int | None, blocks: int) -> int:
    """Return the checked number of blocks that a tuning changes; None means all `blocks` of the backbone."""
    if count is None:
        return blocks
    if not 1 <= count <= blocks:
        raise ValueError(f"tuning.{argument}: got {count}, expected 1 to {blocks}, the number of the backbone's blocks")
    return count
