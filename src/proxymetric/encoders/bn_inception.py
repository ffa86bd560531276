"""BN-Inception, the backbone that metric-learning papers compare with and that timm does not have.

Inception with batch normalisation (Ioffe & Szegedy, "Batch Normalization", 2015, appendix), in the form of the Caffe
model whose weights are in use: convolutions keep their bias, and the two blocks that halve the map have no 1x1 branch.
Modules are named as in the usual PyTorch port, so that its weights load with their own names.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVERT = (
    "The usual port's file bn_inception-52deb4733.pth holds them; convert it once, where you trust it: "
    "tensors = torch.load('bn_inception-52deb4733.pth', weights_only=True); "
    "safetensors.torch.save_file(tensors, 'bn_inception.safetensors')"
)
"""Where weights come from: the hub that timm uses has none."""


class Block(NamedTuple):
    """Channels of one Inception block's branches, which stand side by side on the same map."""

    one: int
    """of the 1x1 branch; 0: none, and the block halves the map"""
    three: tuple[int, int]
    """of 1x1 -> 3x3"""
    double: tuple[int, int]
    """of 1x1 -> 3x3 -> 3x3"""
    pool: str
    """"avg" or "max", 3x3"""
    project: int
    """of the 1x1 behind the pooling; 0: none"""


BLOCKS = {
    "3a": Block(64, (64, 64), (64, 96), "avg", 32),
    "3b": Block(64, (64, 96), (64, 96), "avg", 64),
    "3c": Block(0, (128, 160), (64, 96), "max", 0),
    "4a": Block(224, (64, 96), (96, 128), "avg", 128),
    "4b": Block(192, (96, 128), (96, 128), "avg", 128),
    "4c": Block(160, (128, 160), (128, 160), "avg", 128),
    "4d": Block(96, (128, 192), (160, 192), "avg", 128),
    "4e": Block(0, (128, 192), (192, 256), "max", 0),
    "5a": Block(352, (192, 320), (160, 224), "avg", 128),
    "5b": Block(352, (192, 320), (192, 224), "max", 128),
}


class BNInception(nn.Module):
    """Images (B, 3, S, S) -> map (B, 1024, S/32, S/32), averaged to (B, 1024).

    The weights want BGR in 0..255 less (104, 117, 128). Here images come as RGB, like every other backbone's: `MEAN`
    and `STD` are those numbers for RGB in [0, 1], and the channels are turned round inside.

    Sizes that suit leave both halving blocks an even map: 32 k - 1 .. 32 k + 6, such as 224, 227, 256 and 448.

    >>> net = BNInception().eval()
    >>> net.forward_features(torch.zeros(1, 3, 227, 227)).shape
    torch.Size([1, 1024, 7, 7])
    """

    MEAN = (128 / 255, 117 / 255, 104 / 255)
    STD = (1 / 255, 1 / 255, 1 / 255)

    def __init__(self) -> None:
        super().__init__()
        self._unit("conv1_7x7_s2", 3, 64, 7, stride=2)
        self._unit("conv2_3x3_reduce", 64, 64, 1)
        self._unit("conv2_3x3", 64, 192, 3)
        width = 192
        for name, block in BLOCKS.items():
            width = self._block(f"inception_{name}", width, block)
        self.num_features = width

    def _unit(self, name: str, before: int, after: int, side: int, stride: int = 1) -> None:
        """A convolution called `name` and its normalisation `name_bn`."""
        conv = nn.Conv2d(before, after, side, stride, padding=side // 2)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        assert conv.bias is not None
        nn.init.zeros_(conv.bias)
        self.add_module(name, conv)
        self.add_module(f"{name}_bn", nn.BatchNorm2d(after))

    def _block(self, name: str, width: int, block: Block) -> int:
        """Make the units of `block` on a map of `width` channels; how many channels come out."""
        stride = 1 if block.one else 2
        if block.one:
            self._unit(f"{name}_1x1", width, block.one, 1)
        self._unit(f"{name}_3x3_reduce", width, block.three[0], 1)
        self._unit(f"{name}_3x3", *block.three, 3, stride)
        self._unit(f"{name}_double_3x3_reduce", width, block.double[0], 1)
        self._unit(f"{name}_double_3x3_1", *block.double, 3)
        self._unit(f"{name}_double_3x3_2", block.double[1], block.double[1], 3, stride)
        if block.project:
            self._unit(f"{name}_pool_proj", width, block.project, 1)
        return block.one + block.three[1] + block.double[1] + (block.project or width)

    def _run(self, x: Tensor, *names: str) -> Tensor:
        for name in names:
            x = F.relu(getattr(self, f"{name}_bn")(getattr(self, name)(x)), inplace=True)
        return x

    def _branches(self, x: Tensor, name: str, block: Block) -> Tensor:
        three = self._run(x, f"{name}_3x3_reduce", f"{name}_3x3")
        double = self._run(x, *(f"{name}_double_3x3_{part}" for part in ("reduce", "1", "2")))
        if not block.one:
            if x.shape[2] % 2 or x.shape[3] % 2:
                raise ValueError(
                    f"{name} halves a map of {x.shape[2]} x {x.shape[3]}, and even sides are expected: "
                    "images of 32 k - 1 to 32 k + 6 pixels a side, such as 224 or 227"
                )
            return torch.cat([three, double, _halved(x)], 1)
        # Places outside the map count as 0 in the average and not at all in the maximum, as in Caffe.
        pool = F.avg_pool2d if block.pool == "avg" else F.max_pool2d
        pooled = self._run(pool(x, 3, stride=1, padding=1), f"{name}_pool_proj")
        return torch.cat([self._run(x, f"{name}_1x1"), three, double, pooled], 1)

    def forward_features(self, images: Tensor) -> Tensor:
        """The last map (B, 1024, H/32, W/32) of normalised RGB images (B, 3, H, W)."""
        x = _halved(self._run(images.flip(1), "conv1_7x7_s2"))
        x = _halved(self._run(x, "conv2_3x3_reduce", "conv2_3x3"))
        for name, block in BLOCKS.items():
            x = self._branches(x, f"inception_{name}", block)
        return x

    def forward_head(self, features: Tensor, pre_logits: bool = True) -> Tensor:
        """The last map averaged over places, (B, 1024); there is no classifier behind it."""
        return features.mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """The averaged features of normalised RGB images (B, 3, H, W)."""
        return self.forward_head(self.forward_features(images))


def _halved(x: Tensor) -> Tensor:
    """The maximum of 3x3 places at every second; Caffe rounds up, so a border that does not fill a window counts."""
    return F.max_pool2d(x, 3, stride=2, ceil_mode=True)
