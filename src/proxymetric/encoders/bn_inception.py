"""BN-Inception, a backbone that metric-learning papers compare with and that timm does not have.

This is Inception with batch normalisation (Ioffe & Szegedy, "Batch Normalization", 2015, appendix) in the form of the
Caffe model whose weights the papers use: convolutions have a bias, and the two blocks that halve the map have no 1x1
branch. Modules have the names of the usual PyTorch port, so its weights load without renaming.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVERT = (
    "The usual PyTorch port has weights in the file bn_inception-52deb4733.pth. If you trust it, convert it once: "
    "tensors = torch.load('bn_inception-52deb4733.pth', weights_only=True); "
    "safetensors.torch.save_file(tensors, 'bn_inception.safetensors')"
)
"""where to get weights; the model hub of timm has none"""


class InceptionBlock(NamedTuple):
    """Channels of the parallel branches of one Inception block."""

    one: int
    """channels of the 1x1 branch; 0: the block has no such branch and halves the map"""
    three: tuple[int, int]
    """channels of the branch 1x1 -> 3x3"""
    double: tuple[int, int]
    """channels of the branch 1x1 -> 3x3 -> 3x3"""
    pool: str
    """3x3 pooling of the last branch: "avg" or "max" """
    project: int
    """channels of the 1x1 convolution after the pooling; 0: there is none"""


BLOCKS = {
    "3a": InceptionBlock(64, (64, 64), (64, 96), "avg", 32),
    "3b": InceptionBlock(64, (64, 96), (64, 96), "avg", 64),
    "3c": InceptionBlock(0, (128, 160), (64, 96), "max", 0),
    "4a": InceptionBlock(224, (64, 96), (96, 128), "avg", 128),
    "4b": InceptionBlock(192, (96, 128), (96, 128), "avg", 128),
    "4c": InceptionBlock(160, (128, 160), (128, 160), "avg", 128),
    "4d": InceptionBlock(96, (128, 192), (160, 192), "avg", 128),
    "4e": InceptionBlock(0, (128, 192), (192, 256), "max", 0),
    "5a": InceptionBlock(352, (192, 320), (160, 224), "avg", 128),
    "5b": InceptionBlock(352, (192, 320), (192, 224), "max", 128),
}


class BNInception(nn.Module):
    """Maps images (B, 3, S, S) to a map (B, 1024, S/32, S/32), which is averaged to (B, 1024).

    The weights expect BGR in 0..255 minus (104, 117, 128). This class takes RGB, like every other backbone: `MEAN` and
    `STD` are the same numbers for RGB in [0, 1], and `forward_features` reverses the channels.

    Both halving blocks need a map with even sides. Image sizes from 32 k - 1 to 32 k + 6, such as 224, 227, 256
    and 448, meet this condition.

    Example:
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

    def _unit(self, name: str, in_channels: int, out_channels: int, side: int, stride: int = 1) -> None:
        """Add a convolution called `name` and its BatchNorm called `name_bn`."""
        conv = nn.Conv2d(in_channels, out_channels, side, stride, padding=side // 2)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        assert conv.bias is not None
        nn.init.zeros_(conv.bias)
        self.add_module(name, conv)
        self.add_module(f"{name}_bn", nn.BatchNorm2d(out_channels))

    def _block(self, name: str, width: int, block: InceptionBlock) -> int:
        """Add the units of `block` for a map of `width` channels; return the number of output channels."""
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

    def _branches(self, x: Tensor, name: str, block: InceptionBlock) -> Tensor:
        branch_3x3 = self._run(x, f"{name}_3x3_reduce", f"{name}_3x3")
        branch_double_3x3 = self._run(x, *(f"{name}_double_3x3_{part}" for part in ("reduce", "1", "2")))
        if not block.one:
            if x.shape[2] % 2 or x.shape[3] % 2:
                raise ValueError(
                    f"{name}: got a map of {x.shape[2]} x {x.shape[3]} to halve, expected even sides: "
                    "images of 32 k - 1 to 32 k + 6 pixels a side, such as 224 or 227"
                )
            return torch.cat([branch_3x3, branch_double_3x3, _halve(x)], 1)
        # As in Caffe, the average counts positions outside the map as 0, and the maximum ignores them.
        pool = F.avg_pool2d if block.pool == "avg" else F.max_pool2d
        branch_pool = self._run(pool(x, 3, stride=1, padding=1), f"{name}_pool_proj")
        return torch.cat([self._run(x, f"{name}_1x1"), branch_3x3, branch_double_3x3, branch_pool], 1)

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the last map (B, 1024, H/32, W/32) of normalised RGB images (B, 3, H, W)."""
        x = _halve(self._run(images.flip(1), "conv1_7x7_s2"))
        x = _halve(self._run(x, "conv2_3x3_reduce", "conv2_3x3"))
        for name, block in BLOCKS.items():
            x = self._branches(x, f"inception_{name}", block)
        return x

    def forward_head(self, features: Tensor, pre_logits: bool = True) -> Tensor:
        """Return the last map averaged over positions, (B, 1024); the network has no classifier."""
        return features.mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Return the averaged features of normalised RGB images (B, 3, H, W)."""
        return self.forward_head(self.forward_features(images))


def _halve(x: Tensor) -> Tensor:
    """Return the 3x3 maxima at stride 2; as in Caffe, the size is rounded up, so windows may cross the border."""
    return F.max_pool2d(x, 3, stride=2, ceil_mode=True)
