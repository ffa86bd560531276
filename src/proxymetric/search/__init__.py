"""Search by similarity over embedded images."""

from proxymetric.search.index import Hit, Index, Item
from proxymetric.search.vector_file import VectorFile

__all__ = ["Hit", "Index", "Item", "VectorFile"]
