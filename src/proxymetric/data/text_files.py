"""Text files that people write or export: CSV files and lists of images."""

from __future__ import annotations

import codecs
from pathlib import Path

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_text(file: Path) -> str:
    """Read a text file in UTF-8, or in UTF-16 with a byte order mark (Excel's "Unicode text").

    Raises:
        ValueError: the file has another encoding, or is not text; the message names the file and the line.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "a.csv"
        >>> _ = file.write_text("file,class", encoding="utf-16")
        >>> read_text(file)
        'file,class'
    """
    content = file.read_bytes()
    newline = b"\n"
    utf_16 = content.startswith(_UTF_16)
    try:
        text = content.decode("utf-16" if utf_16 else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = "" if utf_16 else f" on line {content.count(newline, 0, error.start) + 1}"
        raise ValueError(
            f"{file}: got bytes that are not {'UTF-16' if utf_16 else 'UTF-8'}{line}, expected a text file in UTF-8, "
            "or in UTF-16 with a byte order mark; in a spreadsheet, save it as 'CSV UTF-8'"
        ) from None
    if "\0" in text:
        raise ValueError(
            f"{file}: got zero bytes, expected a text file in UTF-8, or in UTF-16 with a byte order mark; in a "
            "spreadsheet, save it as 'CSV UTF-8'"
        )
    return text
