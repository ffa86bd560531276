"""Training schemes: an objective around another one."""

from proxymetric.schemes.alternating_projections import AlternatingProjections
from proxymetric.schemes.k_center import k_center
from proxymetric.schemes.momentum_queue import MomentumQueue

__all__ = ["AlternatingProjections", "MomentumQueue", "k_center"]
