"""BitFit (Zaken et al. 2021): train the biases and nothing else."""

from typing import Any

from proxymetric.encoders.tuning.base import Tuning
from proxymetric.encoders.tuning.bias_gradients import sum_biases


class BitFit(Tuning):
    """Trains every bias of the backbone, including those of norms and of the patch embedding.

    These are 0.2 % of a ViT-S/16: 51,456 parameters. Table 1 of VPTSP also counts the 21,843 biases of an unused
    classifier. BitFit improves every other tuning, and all released configurations of VPTSP use it. Gradients flow back
    to the first block.

    Args:
        backbone: any backbone.
    """

    part = "biases"

    def __init__(self, backbone: Any) -> None:
        super().__init__(backbone)
        sum_biases(backbone)

    def trains(self, name: str) -> bool:
        """Whether the name ends with "bias", which the name of a table of relative position biases does not.

        Example:
            >>> from torch.nn import Identity
            >>> names = ("norm.bias", "attn.q_bias", "attn.relative_position_bias_table", "w")
            >>> [BitFit(Identity()).trains(name) for name in names]
            [True, True, False, False]
        """
        return name.rsplit(".", 1)[-1].endswith("bias")
