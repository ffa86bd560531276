"""A search over an index as a service and a web page (needs the extra `serve`)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from proxymetric.serve.settings import Settings

__all__ = ["Settings", "check_address", "serve"]


def serve(settings: Settings, announce: Callable[[str], None] = lambda address: None) -> None:
    """Serve an index until the process is told to stop (Ctrl-C or SIGTERM): what `proxymetric serve` does.

    Args:
        settings: the index and how it is served.
        announce: called with the address of the page as soon as the service listens there, such as `print`.

    Raises:
        ValueError: the extra `serve` is not installed, the service cannot listen at its address, or the index or its
            model cannot be opened.

    Example:
        >>> serve(Settings("birds.index", port=0), announce=print)                     # doctest: +SKIP
    """
    _server().serve(settings, announce)


def check_address(settings: Settings) -> None:
    """Refuse an address at which the service cannot listen, before work that takes a while.

    Raises:
        ValueError: the extra `serve` is not installed, or the service cannot listen at its address.
    """
    _server().bind(settings).close()


def _server() -> ModuleType:
    """The module that needs the extra `serve`."""
    try:
        from proxymetric.serve import server
    except ImportError as error:
        raise ValueError(
            f"serve: {error.name} is not installed; expected the extra `serve`: pip install 'proxymetric[serve]'"
        ) from None
    return server
