"""Pairs of classes that are confused, with an image of each."""

from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image

from proxymetric.plots.escaping import escaped
from proxymetric.plots.gallery import data_uri, title_of


class ConfusedPair(NamedTuple):
    """A class and the class whose images its queries find instead."""

    class_name: str
    found_name: str
    share: float
    """the share of `found_name` in the first R results of the queries, where R is their number of relevant items"""
    image: Image.Image
    found_image: Image.Image
    reverse_share: float = 0.0
    """the same share the other way round; 0: the queries of `found_name` do not find this class"""
    file: str = ""
    found_file: str = ""


def confusion_html(pairs: Sequence[ConfusedPair]) -> str:
    """The pairs as figures: the class, the class found instead, and how often."""
    return f'<div class="pairs">{"".join(_pair(pair) for pair in pairs)}</div>'


def _pair(pair: ConfusedPair) -> str:
    name, found_name = escaped(pair.class_name), escaped(pair.found_name)
    share = f"{100 * pair.share:.1f} % of its results"
    if pair.reverse_share:
        share = f"{100 * pair.share:.1f} % of its results, {100 * pair.reverse_share:.1f} % the other way round"
    image, found_image = data_uri(pair.image), data_uri(pair.found_image)
    return (
        f'<figure class="pair"><div class="frame"><img src="{image}" alt="class {name}"{title_of(pair.file)}></div>'
        f'<div class="frame"><img src="{found_image}" alt="class {found_name}"{title_of(pair.found_file)}></div>'
        f'<figcaption><span class="name" title="{name}">{name}</span>'
        f'<span class="name" title="{found_name}">confused with {found_name}</span>'
        f'<span class="score">{share}</span></figcaption></figure>'
    )
