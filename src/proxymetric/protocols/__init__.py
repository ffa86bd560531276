"""Protocols: fair ways to compare methods, as library code."""

from proxymetric.protocols.mlrc import mlrc

__all__ = ["mlrc"]
