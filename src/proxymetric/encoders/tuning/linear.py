"""The linear probe: what the pre-trained features are worth as they are."""

from proxymetric.encoders.tuning.base import Tuning


class Linear(Tuning):
    """Nothing but the head is trained (Table 1 of VPTSP, Ren et al. 2024: "Linear Probing").

    The backbone still sees augmented images; `--frozen` computes its features once and is many times faster.
    """

    alone = "the head is trained with all others, too"
