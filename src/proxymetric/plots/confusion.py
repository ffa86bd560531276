"""Classes that are taken for each other, with a picture of each."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from proxymetric.plots.gallery import data_uri


class ConfusedPair(NamedTuple):
    """Queries of one class for which images of another were found in the places of their own."""

    class_name: str
    found_name: str
    share: float
    """of the first R results of the class's queries, R what each could have found"""
    image: Image.Image
    found_image: Image.Image


def confusion_html(pairs: Sequence[ConfusedPair]) -> str:
    """The pairs as figures: asked for, found instead, how often."""
    return f'<div class="pairs">{"".join(_pair(pair) for pair in pairs)}</div>'


def _pair(pair: ConfusedPair) -> str:
    asked, found = html.escape(pair.class_name), html.escape(pair.found_name)
    return (
        f'<figure class="pair"><div class="frame"><img src="{data_uri(pair.image)}" alt="class {asked}"></div>'
        f'<div class="frame"><img src="{data_uri(pair.found_image)}" alt="class {found}"></div>'
        f'<figcaption><span class="name" title="{asked}">{asked}</span>'
        f'<span class="name" title="{found}">taken for {found}</span>'
        f'<span class="score">{100 * pair.share:.1f} % of its results</span></figcaption></figure>'
    )
