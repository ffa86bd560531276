"""A search over an index as a service and a web page (needs the extra `serve`)."""

from proxymetric.serve.settings import Settings

__all__ = ["Settings"]
