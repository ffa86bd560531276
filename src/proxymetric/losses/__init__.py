"""Losses: pure functions of queries and references. One file each; the body is the equation.

To add a loss, write its file in this folder and add its line below.
"""

from proxymetric.losses.adaface import AdaFace as AdaFace
from proxymetric.losses.circle import Circle as Circle
from proxymetric.losses.contrastive import Contrastive as Contrastive
from proxymetric.losses.contrastive import MarginContrastive as MarginContrastive
from proxymetric.losses.margin_softmax import ArcFace as ArcFace
from proxymetric.losses.margin_softmax import CosFace as CosFace
from proxymetric.losses.margin_softmax import SubCentreArcFace as SubCentreArcFace
from proxymetric.losses.mpa import MPA as MPA
from proxymetric.losses.mpa import MPAAP as MPAAP
from proxymetric.losses.mpa import MPADW as MPADW
from proxymetric.losses.multi_similarity import MultiSimilarity as MultiSimilarity
from proxymetric.losses.nested import Nested as Nested
from proxymetric.losses.proxy_anchor import ProxyAnchor as ProxyAnchor
from proxymetric.losses.proxy_nca import ProxyNCA as ProxyNCA
from proxymetric.losses.proxy_nca import ProxyNCAPlusPlus as ProxyNCAPlusPlus
from proxymetric.losses.soft_triple import SoftTriple as SoftTriple
from proxymetric.losses.spread import Spread as Spread
from proxymetric.losses.supcon import SupCon as SupCon
from proxymetric.losses.triplet import Triplet as Triplet

__all__ = [name for name, value in globals().items() if isinstance(value, type)]
