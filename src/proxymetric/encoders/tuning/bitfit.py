"""BitFit (Zaken et al. 2021): train the biases and nothing else."""

from typing import Any

from proxymetric.encoders.tuning.base import Tuning
from proxymetric.encoders.tuning.bias_gradients import sum_biases


class BitFit(Tuning):
    """Every bias of the backbone is trained, those of norms and of the patch embedding too.

    0.2 % of a ViT-S/16 (51,456 numbers; the paper's Table 1 counts 21,843 of an unused classifier as well), and yet it
    lifts every other tuning: it is on in all released configurations of VPTSP. Gradients flow back to the first block.
    """

    part = "biases"

    def __init__(self, backbone: Any) -> None:
        super().__init__(backbone)
        sum_biases(backbone)

    def trains(self, name: str) -> bool:
        """A tensor that is called a bias; tables of relative positions, which are none, are left out.

        >>> from torch.nn import Identity
        >>> names = ("norm.bias", "attn.q_bias", "attn.relative_position_bias_table", "w")
        >>> [BitFit(Identity()).trains(name) for name in names]
        [True, True, False, False]
        """
        return name.rsplit(".", 1)[-1].endswith("bias")
