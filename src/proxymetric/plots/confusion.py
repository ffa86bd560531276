"""Pairs of classes that are confused, with an image of each."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from proxymetric.plots.gallery import data_uri


class ConfusedPair(NamedTuple):
    """A class and the class whose images its queries find instead."""

    class_name: str
    found_name: str
    share: float
    """the share of `found_name` in the first R results of the queries, where R is their number of relevant items"""
    image: Image.Image
    found_image: Image.Image


def confusion_html(pairs: Sequence[ConfusedPair]) -> str:
    """The pairs as figures: the class, the class found instead, and how often."""
    return f'<div class="pairs">{"".join(_pair(pair) for pair in pairs)}</div>'


def _pair(pair: ConfusedPair) -> str:
    name, found_name = html.escape(pair.class_name), html.escape(pair.found_name)
    return (
        f'<figure class="pair"><div class="frame"><img src="{data_uri(pair.image)}" alt="class {name}"></div>'
        f'<div class="frame"><img src="{data_uri(pair.found_image)}" alt="class {found_name}"></div>'
        f'<figcaption><span class="name" title="{name}">{name}</span>'
        f'<span class="name" title="{found_name}">confused with {found_name}</span>'
        f'<span class="score">{100 * pair.share:.1f} % of its results</span></figcaption></figure>'
    )
