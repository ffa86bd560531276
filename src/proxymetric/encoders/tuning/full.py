"""Full fine-tuning: the baseline that the others are compared with."""

from proxymetric.encoders.tuning.base import Tuning


class Full(Tuning):
    """Every parameter of the backbone is trained."""

    alone = "nothing is left to train"

    def trains(self, name: str) -> bool:
        return True
