"""Text on a page: escaped for HTML, with control characters shown."""

from __future__ import annotations

import html

from proxymetric.system.text import visible


def escaped(text: object) -> str:
    """Escape a text for HTML, also inside attributes.

    Example:
        >>> escaped("<b>\\x1b")
        '&lt;b&gt;\\\\x1b'
    """
    return html.escape(visible(text))
