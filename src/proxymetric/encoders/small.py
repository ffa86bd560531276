"""A small convolutional network for small images: the backbone of the demo, trained from scratch on two CPU cores."""

import torch
from torch import Tensor, nn


class SmallConvNet(nn.Module):
    """Four stages of `conv 3x3 -> BatchNorm -> ReLU`; the first three halve the image.

    The network is designed for 32 x 32 RGB images: the forward pass of one image takes 7.3 M multiplications, and the
    last map is 4 x 4. Images need at least 8 x 8 pixels.

    Args:
        widths: channels after each stage; the last is the number of features.

    Example:
        >>> net = SmallConvNet()
        >>> net.forward_features(torch.rand(2, 3, 32, 32)).shape
        torch.Size([2, 256, 4, 4])
    """

    MEAN = (0.5, 0.5, 0.5)
    STD = (0.5, 0.5, 0.5)

    def __init__(self, widths: tuple[int, int, int, int] = (32, 64, 128, 256)) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for in_channels, out_channels, stride in zip((3, *widths[:-1]), widths, (2, 2, 2, 1)):
            conv = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
            nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
            stages.append(nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)))
        self.stages = nn.Sequential(*stages)
        self.num_features = widths[-1]

    def forward_features(self, images: Tensor) -> Tensor:
        """Return the last map, (B, widths[-1], H/8, W/8)."""
        # Channels last is about 20 % faster on the CPU. Converting the input is enough: convolutions keep the layout.
        return self.stages(images.contiguous(memory_format=torch.channels_last))

    def forward_head(self, features: Tensor, pre_logits: bool = True) -> Tensor:
        """Return the last map averaged over positions, (B, widths[-1]); the network has no classifier."""
        return features.mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        """Return the averaged features of normalised images (B, 3, H, W)."""
        return self.forward_head(self.forward_features(images))
