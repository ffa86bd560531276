"""What a tuning is: which weights of a backbone it trains, and what it puts between and beside the ViT's blocks."""

from typing import Any, ClassVar

from torch import Tensor, nn


class Tuning(nn.Module):
    """One way to adapt a pre-trained backbone; the head is always trained beside it.

    A new one is a file and a line in `TUNINGS`. Its arguments are those of its `__init__` behind `backbone`, all with
    defaults and annotated; their names must differ from those of the others, since tunings can be joined. What it
    learns are its own parameters, saved as `tuning.<name>.*`, and those of the backbone that it `trains`.
    """

    part: ClassVar[str] = "backbone"
    """what its parameters are called in counts"""
    on_blocks: ClassVar[bool] = False
    """it needs the blocks of a timm VisionTransformer"""
    alone: ClassVar[str] = ""
    """why it cannot be joined with another, if so"""

    def __init__(self, backbone: Any) -> None:
        super().__init__()

    def trains(self, name: str) -> bool:
        """Whether the backbone's own parameter `name` is trained."""
        return False

    def prompts(self, block: int) -> Tensor | None:
        """Tokens (n, D) that stand before all others in block number `block`, and are dropped behind it."""
        return None

    def beside(self, block: int) -> nn.Module | None:
        """A module `(x, mlp) -> mlp` that changes what the MLP of block number `block` adds to its input x."""
        return None


def upto(name: str, asked: int | None, blocks: int) -> int:
    """A number of blocks, from the first on; None: all of them."""
    if asked is None:
        return blocks
    if not 1 <= asked <= blocks:
        raise ValueError(f"{name}={asked}; the backbone has {blocks} blocks, 1 to {blocks} of them are expected")
    return asked
