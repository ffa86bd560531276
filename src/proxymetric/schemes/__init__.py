"""Training schemes: an objective around another one."""

from proxymetric.schemes.k_center import k_center
from proxymetric.schemes.momentum import MomentumQueue
from proxymetric.schemes.projections import AlternatingProjections

__all__ = ["AlternatingProjections", "MomentumQueue", "k_center"]
