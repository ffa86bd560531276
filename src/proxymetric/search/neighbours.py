"""The file or folder that was perhaps meant by a name that does not exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from proxymetric.signatures import did_you_mean


def neighbour(path: Path, suits: Callable[[Path], bool] = Path.is_file) -> str:
    """Suggest what lies next to a missing file or folder and has the most similar name.

    Names are alike if they are so without their ending: two photos are not alike because both end in `.jpg`.

    Args:
        path: what is missing.
        suits: which files or folders may be suggested.

    Returns:
        `"; did you mean 'x'?"` as the end of an error message, or an empty text if nothing is similar.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> (folder / "wren.jpg").touch()
        >>> neighbour(folder / "wern.jpg").endswith("wren.jpg'?"), neighbour(folder / "owl.jpg")
        (True, '')
    """
    try:
        others = [each for each in path.parent.iterdir() if each != path and did_you_mean(path.stem, [each.stem])]
    except OSError:
        return ""
    places = {each.name: str(each) for each in others if suits(each)}
    hint = did_you_mean(path.name, places)
    return next((f"; did you mean {place!r}?" for name, place in places.items() if repr(name) in hint), "")
