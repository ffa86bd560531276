"""Losses: pure functions of queries and references. One file each; the body is the equation."""

from proxymetric.losses.contrastive import Contrastive, MarginContrastive
from proxymetric.losses.margin_softmax import ArcFace, CosFace
from proxymetric.losses.mpa import MPA, MPAAP, MPADW
from proxymetric.losses.multi_similarity import MultiSimilarity
from proxymetric.losses.proxy_anchor import ProxyAnchor
from proxymetric.losses.proxy_nca import ProxyNCA, ProxyNCAPlusPlus
from proxymetric.losses.soft_triple import SoftTriple
from proxymetric.losses.spread import Spread
from proxymetric.losses.triplet import Triplet

__all__ = [
    "MPA",
    "MPAAP",
    "MPADW",
    "ArcFace",
    "Contrastive",
    "CosFace",
    "MarginContrastive",
    "MultiSimilarity",
    "ProxyAnchor",
    "ProxyNCA",
    "ProxyNCAPlusPlus",
    "SoftTriple",
    "Spread",
    "Triplet",
]
