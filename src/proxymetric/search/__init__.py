"""Search by similarity over embedded images."""

from proxymetric.search.index import Index

__all__ = ["Index"]
