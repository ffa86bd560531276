"""Full fine-tuning: the baseline for the other tunings."""

from proxymetric.encoders.tuning.base import Tuning


class Full(Tuning):
    """Trains every parameter of the backbone."""

    alone = "it trains every parameter already"

    def trains(self, name: str) -> bool:
        return True
