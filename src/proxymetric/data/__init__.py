"""Labelled images: opening them, splitting them by class, making batches and views, feeding them to a network."""

from proxymetric.data.batches import Batches
from proxymetric.data.benchmarks import BENCHMARKS
from proxymetric.data.decoding import BadImage, read_image, upright
from proxymetric.data.digits import digits
from proxymetric.data.feeds import EvalFeed, TrainFeed
from proxymetric.data.glyphs import glyphs
from proxymetric.data.images import ImageSet, singletons
from proxymetric.data.open import open_data
from proxymetric.data.splits import Split, split
from proxymetric.data.views import VIEWS, EvalView, TrainView, named_view

__all__ = [
    "BENCHMARKS",
    "VIEWS",
    "BadImage",
    "Batches",
    "EvalFeed",
    "EvalView",
    "ImageSet",
    "Split",
    "TrainFeed",
    "TrainView",
    "digits",
    "glyphs",
    "named_view",
    "open_data",
    "read_image",
    "singletons",
    "split",
    "upright",
]
