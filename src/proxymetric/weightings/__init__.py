"""Weightings: which pairs count more, from what is remembered of each class."""

from proxymetric.weightings.informative_samples import InformativeSamples

__all__ = ["InformativeSamples"]
