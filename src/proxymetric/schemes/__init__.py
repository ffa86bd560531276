"""Training schemes: each is an objective around another objective.

To add a scheme, write its file in this folder and add its line below.
"""

from proxymetric.schemes.alternating_projections import AlternatingProjections as AlternatingProjections
from proxymetric.schemes.momentum_queue import MomentumQueue as MomentumQueue

__all__ = [name for name, value in globals().items() if isinstance(value, type)]
