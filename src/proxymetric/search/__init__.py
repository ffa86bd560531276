"""Search by similarity over embedded images."""

from proxymetric.search.identify import Answer, Identifier
from proxymetric.search.index import Index
from proxymetric.search.items import Hit, Item
from proxymetric.search.vector_file import VectorFile

__all__ = ["Answer", "Hit", "Identifier", "Index", "Item", "VectorFile"]
