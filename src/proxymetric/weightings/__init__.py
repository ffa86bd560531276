"""Weightings: they make some pairs count more than others, from what they remember of each class.

To add a weighting, write its file in this folder and add its line below.
"""

from proxymetric.weightings.class_balance import ClassBalance as ClassBalance
from proxymetric.weightings.embedding_lengths import EmbeddingLengths as EmbeddingLengths
from proxymetric.weightings.informative_samples import InformativeSamples as InformativeSamples

__all__ = [name for name, value in globals().items() if isinstance(value, type)]
