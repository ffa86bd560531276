"""Search by similarity over embedded images."""

from proxymetric.search.identify import Answer, Identifier
from proxymetric.search.index import Hit, Index, Item
from proxymetric.search.vector_file import VectorFile

__all__ = ["Answer", "Hit", "Identifier", "Index", "Item", "VectorFile"]
