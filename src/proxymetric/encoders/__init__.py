"""Encoders: a timm backbone or a small network, a pooling and a head."""

from proxymetric.encoders.encoder import Encoder, build, load_weights, parameter_counts, tuned_parameters
from proxymetric.encoders.head import linear_layer
from proxymetric.encoders.pooling import Pooling
from proxymetric.encoders.small import SmallConvNet
from proxymetric.encoders.tuning import TUNINGS
from proxymetric.encoders.weights import WeightReport, check_weights_file

__all__ = [
    "TUNINGS",
    "Encoder",
    "Pooling",
    "SmallConvNet",
    "WeightReport",
    "build",
    "check_weights_file",
    "linear_layer",
    "load_weights",
    "parameter_counts",
    "tuned_parameters",
]
