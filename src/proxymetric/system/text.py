"""Names of files and classes as text that a terminal or a page can show."""

from __future__ import annotations

import unicodedata

DIRECTION_MARKS = frozenset("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""characters that change the direction of the text after them"""
HIDDEN_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}
"""Unicode categories that are escaped: control characters, surrogates, separators of lines and paragraphs"""


def visible(text: object, keep: str = "") -> str:
    r"""Escape the characters of a text that move the cursor, change colours or cannot be encoded.

    A file name may hold any of them. Bytes of a file name that are not UTF-8 are shown as ``\xNN``.

    Args:
        text: usually a name or a path.
        keep: characters that stay as they are, such as the line breaks of a message of several lines.

    Returns:
        The text, which can be encoded as UTF-8.

    Example:
        >>> visible("cat\x1b[31m.png")
        'cat\\x1b[31m.png'
        >>> visible("a\nb"), visible("a\nb", keep="\n")
        ('a\\nb', 'a\nb')
        >>> visible(b"caf\xe9.png".decode("utf-8", "surrogateescape"))
        'caf\\xe9.png'
    """
    return "".join(character if character in keep else _shown(character) for character in str(text))


def _shown(character: str) -> str:
    if unicodedata.category(character) not in HIDDEN_CATEGORIES and character not in DIRECTION_MARKS:
        return character
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"  # a byte of a file name that is not UTF-8
    return character.encode("unicode_escape").decode("ascii")
