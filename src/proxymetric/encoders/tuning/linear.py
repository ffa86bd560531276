"""The linear probe: it measures the pre-trained features without changing them."""

from proxymetric.encoders.tuning.base import Tuning


class Linear(Tuning):
    """Trains the head only (Table 1 of VPTSP, Ren et al. 2024: "Linear Probing").

    The backbone runs on augmented images in every step. `--frozen` is many times faster: it computes the features once,
    without augmentation.
    """

    alone = "every tuning trains the head"
